// fmoe/check.h: the two tiers of failure. A caller's mistake throws std::invalid_argument; a broken
// invariant of our own stops the process's work with std::logic_error that says where.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace fmoe {

[[noreturn]] inline void fail_invariant(const char* what,
                                        std::source_location at = std::source_location::current()) {
    throw std::logic_error(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " +
                           what);
}

inline void require(bool condition, const std::string& message) {
    if (!condition) throw std::invalid_argument(message);
}

}  // namespace fmoe

#define FMOE_CHECK(condition)                                 \
    do {                                                      \
        if (!(condition)) ::fmoe::fail_invariant(#condition); \
    } while (0)
