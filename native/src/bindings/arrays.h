// Numpy arrays in and out. What goes out is a copy that Python owns.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fmoe/check.h"

namespace fmoe::bindings {

template <class T>
using In = nanobind::ndarray<const T, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Out = nanobind::ndarray<nanobind::numpy, T>;

// Throws std::invalid_argument unless the array has this shape.
template <class T>
const T* checked(const In<T>& array, std::initializer_list<int> shape, const char* name) {
    bool fits = array.ndim() == shape.size();
    std::string wanted;
    std::string got;
    for (int size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    for (std::size_t i = 0; i < array.ndim(); ++i) {
        got += (got.empty() ? "" : ", ") + std::to_string(array.shape(i));
        fits = fits && array.shape(i) == static_cast<std::size_t>(shape.begin()[i]);
    }
    require(fits, std::string(name) + " must be [" + wanted + "], got [" + got + "]");
    return array.data();
}

template <class T>
const T* checked(const std::optional<In<T>>& array, std::initializer_list<int> shape,
                 const char* name) {
    return array ? checked(*array, shape, name) : nullptr;
}

template <class T>
Out<T> to_numpy(std::vector<T> values, std::initializer_list<std::size_t> shape) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    T* data = owned->data();
    nanobind::capsule owner(owned.release(),
                            [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Out<T>(data, shape, owner);
}

}  // namespace fmoe::bindings
