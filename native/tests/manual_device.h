// A device that copies a chunk when the test says so: time stands still in between.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "check.h"
#include "fmoe/device.h"

namespace fmoe {

class ManualDevice final : public Device {
public:
    ManualDevice(int num_slots, std::size_t slot_bytes)
        : num_slots_(num_slots),
          slot_bytes_(slot_bytes),
          arena_(static_cast<std::size_t>(num_slots) * slot_bytes) {}

    std::byte* arena() noexcept override { return arena_.data(); }
    int num_slots() const noexcept override { return num_slots_; }
    std::size_t slot_stride_bytes() const noexcept override { return slot_bytes_; }
    void start(const Chunk& chunk) override { queue_.push_back(chunk); }
    void wait_done(std::vector<std::uint64_t>& done, Clock::time_point) override {
        while (!queue_.empty()) done.push_back(copy_next());
    }
    void interrupt() override { queue_.clear(); }

    const std::byte* slot(int index) const {
        return arena_.data() + static_cast<std::size_t>(index) * slot_bytes_;
    }
    const std::deque<Chunk>& queue() const { return queue_; }
    // Urgent chunks first, as every device; its ticket.
    std::uint64_t copy_next() {
        CHECK(!queue_.empty());
        auto next = std::find_if(queue_.begin(), queue_.end(),
                                 [](const Chunk& chunk) { return chunk.is_urgent; });
        if (next == queue_.end()) next = queue_.begin();
        const Chunk chunk = *next;
        queue_.erase(next);
        std::memcpy(
            arena_.data() + static_cast<std::size_t>(chunk.slot) * slot_bytes_ + chunk.offset,
            chunk.source, chunk.bytes);
        return chunk.ticket;
    }

private:
    int num_slots_;
    std::size_t slot_bytes_;
    std::vector<std::byte> arena_;
    std::deque<Chunk> queue_;
};

}  // namespace fmoe
