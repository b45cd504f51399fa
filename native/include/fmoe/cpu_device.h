// fmoe/cpu_device.h: a device in host memory with one copy thread. A link rate makes it behave
// like a slower link: a chunk is done bytes / rate after the link was free for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "fmoe/device.h"

namespace fmoe {

class CpuDevice final : public Device {
public:
    // link_gbps: 10^9 bytes a second; none copies as fast as memory allows. Throws CapacityError.
    CpuDevice(int num_slots, std::size_t slot_bytes, std::optional<double> link_gbps = {});
    ~CpuDevice() override;
    CpuDevice(const CpuDevice&) = delete;
    CpuDevice& operator=(const CpuDevice&) = delete;

    std::byte* arena() noexcept override { return arena_; }
    int num_slots() const noexcept override { return num_slots_; }
    std::size_t slot_stride_bytes() const noexcept override { return slot_stride_bytes_; }
    void start(const Chunk& chunk) override;
    void wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) override;
    void interrupt() override;

private:
    struct Queued {
        Chunk chunk;
        Clock::time_point since;
    };

    void copy_loop();
    Queued take_next();
    // Holds the link for as long as the modelled one would; the lock is free meanwhile.
    void occupy_link(std::unique_lock<std::mutex>& lock, const Queued& queued);

    int num_slots_;
    std::size_t slot_stride_bytes_;
    std::optional<double> seconds_per_byte_;
    std::byte* arena_ = nullptr;

    std::mutex mutex_;
    std::condition_variable work_;
    std::condition_variable done_changed_;
    std::deque<Queued> urgent_;
    std::deque<Queued> ordinary_;
    std::vector<std::uint64_t> done_;
    Clock::time_point link_free_at_{};
    bool is_interrupted_ = false;
    std::thread thread_;
};

}  // namespace fmoe
