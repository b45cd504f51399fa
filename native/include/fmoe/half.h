// fmoe/half.h: IEEE 754 half precision as bits. Plain integer code, right on every machine; the
// hot loops of the matcher convert with vector instructions instead.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace fmoe {

using Half = std::uint16_t;

inline constexpr float kMaxHalf = 65504.0f;

// Rounds to nearest, ties to even. Finite values beyond the range become the largest half.
inline Half to_half(float value) noexcept {
    const auto sign = static_cast<Half>((std::bit_cast<std::uint32_t>(value) >> 16) & 0x8000u);
    if (std::isnan(value)) return sign | 0x7e00u;
    if (std::isinf(value)) return sign | 0x7c00u;
    const float magnitude = std::fabs(value);
    if (magnitude >= kMaxHalf) return sign | 0x7bffu;
    if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
        const float units = magnitude * 0x1p24f;
        return sign | static_cast<Half>(std::nearbyint(units));
    }
    const auto bits = std::bit_cast<std::uint32_t>(magnitude);
    const std::uint32_t rounded = bits + 0x0fffu + ((bits >> 13) & 1u);
    const std::uint32_t half = (rounded >> 13) - ((127u - 15u) << 10);
    return sign | static_cast<Half>(half > 0x7bffu ? 0x7bffu : half);
}

inline float to_float(Half half) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1fu;
    const std::uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const std::uint32_t biased = exponent == 31 ? 255u : exponent + (127u - 15u);
    return std::bit_cast<float>(sign | (biased << 23) | (mantissa << 13));
}

}  // namespace fmoe
