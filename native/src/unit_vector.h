// unit_vector.h: lengths and directions, in double precision.
#pragma once

#include <cmath>

namespace fmoe {

// 1 / sqrt(square), 0 for 0.
inline float inverse_root(double square) {
    return square > 0 ? static_cast<float>(1.0 / std::sqrt(square)) : 0.0f;
}

// Writes `vector`, scaled to length 1, into `unit` and returns its length; zeros and 0 where it has
// no direction (null, zero, or not finite).
inline double scale_to_unit(const float* vector, int size, float* unit) {
    double square = 0;
    for (int i = 0; vector != nullptr && i < size; ++i)
        square += static_cast<double>(vector[i]) * vector[i];
    const bool has_direction = square > 0 && std::isfinite(square);
    const double length = has_direction ? std::sqrt(square) : 0.0;
    const double scale = has_direction ? 1.0 / length : 0.0;
    for (int i = 0; i < size; ++i)
        unit[i] = has_direction ? static_cast<float>(vector[i] * scale) : 0.0f;
    return length;
}

}  // namespace fmoe
