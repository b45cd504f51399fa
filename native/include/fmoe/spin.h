// fmoe/spin.h: one breath of a thread that polls memory.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fmoe {

inline void relax() noexcept {
#if defined(__x86_64__)
    for (int i = 0; i < 8; ++i) _mm_pause();
#endif
}

}  // namespace fmoe
