// fmoe/device.h: where experts are computed. A device owns the slot arena and carries out chunk
// copies into it; it knows no expert and decides nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fmoe {

struct Chunk {
    std::uint64_t ticket = 0;  // comes back when the bytes are in the slot
    int slot = 0;
    std::size_t offset = 0;
    const std::byte* source = nullptr;
    std::size_t bytes = 0;
    bool is_urgent = false;  // goes ahead of every chunk that is not, once the one in copy is done
};

class Device {
public:
    using Clock = std::chrono::steady_clock;

    virtual ~Device() = default;

    // [num_slots, slot_stride_bytes], at least 64-byte aligned; the address never changes.
    virtual std::byte* arena() noexcept = 0;
    virtual int num_slots() const noexcept = 0;
    virtual std::size_t slot_stride_bytes() const noexcept = 0;

    // Never blocks. Source and slot must stay as they are until the ticket comes back.
    virtual void start(const Chunk& chunk) = 0;
    // Appends the tickets that are done since the last call, in order of completion; waits for one
    // until the deadline or interrupt(). One caller.
    virtual void wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) = 0;
    // Drops chunks that have not begun, waits for the one in copy, and wakes wait_done() for good.
    virtual void interrupt() = 0;
};

}  // namespace fmoe
