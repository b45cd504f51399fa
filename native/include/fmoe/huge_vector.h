// fmoe/huge_vector.h: a vector in huge pages where the system grants them, for arrays that are read
// at strides of many kilobytes: with small pages nearly every such access walks the page tables.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

#include "fmoe/memory.h"

namespace fmoe {

template <class T>
struct HugePageAllocator {
    using value_type = T;
    static constexpr std::size_t kPageBytes = std::size_t{2} << 20;

    HugePageAllocator() = default;
    template <class U>
    HugePageAllocator(const HugePageAllocator<U>&) noexcept {}

    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        if (!is_huge(bytes)) return static_cast<T*>(::operator new(bytes, kSmallAlignment));
        void* memory = ::operator new(round_up(bytes, kPageBytes), kHugeAlignment);
        // Advice: without it, or where it is refused, the pages are small and all else the same.
        (void)madvise(memory, round_up(bytes, kPageBytes), MADV_HUGEPAGE);
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, std::size_t count) noexcept {
        ::operator delete(memory, is_huge(count * sizeof(T)) ? kHugeAlignment : kSmallAlignment);
    }
    friend bool operator==(HugePageAllocator, HugePageAllocator) noexcept { return true; }

private:
    static constexpr std::align_val_t kSmallAlignment{64};
    static constexpr std::align_val_t kHugeAlignment{kPageBytes};
    static bool is_huge(std::size_t bytes) noexcept { return bytes >= kPageBytes; }
};

template <class T>
using HugeVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace fmoe
