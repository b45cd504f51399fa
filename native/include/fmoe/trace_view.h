// fmoe/trace_view.h: a routing trace as it lies in someone else's arrays. Copies nothing, checks
// nothing: shapes and ranges were checked by whoever made the arrays.
//
// Shapes: T tokens, L layers, J experts, K chosen experts, h embedding size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fmoe/geometry.h"
#include "fmoe/half.h"

namespace fmoe {

// An array of half or single precision, or none.
class FloatArray {
public:
    FloatArray() = default;
    explicit FloatArray(const float* data) : single_(data) {}
    explicit FloatArray(const Half* data) : half_(data) {}

    explicit operator bool() const noexcept { return single_ != nullptr || half_ != nullptr; }
    float operator[](std::size_t i) const noexcept {
        return single_ != nullptr ? single_[i] : to_float(half_[i]);
    }

private:
    const float* single_ = nullptr;
    const Half* half_ = nullptr;
};

class IdArray {
public:
    IdArray() = default;
    explicit IdArray(const std::uint8_t* data) : narrow_(data) {}
    explicit IdArray(const std::uint16_t* data) : wide_(data) {}

    explicit operator bool() const noexcept { return narrow_ != nullptr || wide_ != nullptr; }
    int operator[](std::size_t i) const noexcept {
        return narrow_ != nullptr ? narrow_[i] : wide_[i];
    }

private:
    const std::uint8_t* narrow_ = nullptr;
    const std::uint16_t* wide_ = nullptr;
};

struct TraceView {
    Geometry geometry;
    std::size_t num_tokens = 0;
    IdArray expert_ids;                       // [T, L, K]
    FloatArray weights;                       // [T, L, K], need not sum to 1
    FloatArray probs;                         // [T, L, J], or none
    FloatArray spec_probs;                    // [T, L, J] gate l on layer l-1's state, or none
    FloatArray embeddings;                    // [T, h], or none
    int embedding_size = 0;                   // h
    const std::int32_t* token_ids = nullptr;  // [T], or null
    const std::uint8_t* phase = nullptr;      // [T] 0 prefill, 1 decode, or null: all decode

    bool is_prefill(std::size_t token) const noexcept {
        return phase != nullptr && phase[token] == 0;
    }
    std::size_t choice(std::size_t token, int layer) const noexcept {
        return (token * geometry.num_layers + layer) * geometry.top_k;
    }
    std::size_t distribution(std::size_t token, int layer) const noexcept {
        return (token * geometry.num_layers + layer) * geometry.num_experts;
    }
};

}  // namespace fmoe
