// fmoe/errors.h: failures that have a name of their own in fmoe_ray.errors; bindings.cpp maps each
// once. A caller's mistake stays std::invalid_argument (check.h).
#pragma once

#include <stdexcept>

namespace fmoe {

// Something does not fit; the message names needed and available bytes.
struct CapacityError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A host store of another model.
struct FingerprintError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// No progress in time.
struct TimeoutError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The runtime cannot go on: closed, or a thread of it failed.
struct EngineError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace fmoe
