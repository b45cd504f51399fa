#include "fmoe/cpu_device.h"

#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "fmoe/check.h"
#include "fmoe/memory.h"

namespace fmoe {

CpuDevice::CpuDevice(int num_slots, std::size_t slot_bytes, std::optional<double> link_gbps)
    : num_slots_(num_slots), slot_stride_bytes_(round_up(slot_bytes, 64)) {
    require(num_slots > 0 && slot_bytes > 0, "device: slots and their bytes must be positive");
    require(!link_gbps || *link_gbps > 0, "device: link_gbps must be positive");
    if (link_gbps) seconds_per_byte_ = 1e-9 / *link_gbps;
    const std::size_t bytes = slot_stride_bytes_ * static_cast<std::size_t>(num_slots);
    require_capacity("expert slots", bytes, available_memory_bytes(), "give a smaller budget");
    void* arena =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(), "mmap of the expert slots");
    arena_ = static_cast<std::byte*>(arena);
    thread_ = std::thread([this] { copy_loop(); });
}

CpuDevice::~CpuDevice() {
    interrupt();
    ::munmap(arena_, slot_stride_bytes_ * static_cast<std::size_t>(num_slots_));
}

void CpuDevice::start(const Chunk& chunk) {
    const std::lock_guard lock(mutex_);
    (chunk.is_urgent ? urgent_ : ordinary_).push_back({chunk, Clock::now()});
    work_.notify_one();
}

void CpuDevice::wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    done_changed_.wait_until(lock, deadline, [this] { return !done_.empty() || is_interrupted_; });
    done.insert(done.end(), done_.begin(), done_.end());
    done_.clear();
}

void CpuDevice::interrupt() {
    {
        const std::lock_guard lock(mutex_);
        is_interrupted_ = true;
        urgent_.clear();
        ordinary_.clear();
        work_.notify_all();
        done_changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

void CpuDevice::copy_loop() {
    // The default slack of 50 us would be a tenth of a small chunk's time.
    ::prctl(PR_SET_TIMERSLACK, 1UL);
    std::unique_lock lock(mutex_);
    while (true) {
        work_.wait(lock,
                   [this] { return is_interrupted_ || !urgent_.empty() || !ordinary_.empty(); });
        if (is_interrupted_) return;
        const Queued queued = take_next();
        lock.unlock();
        const Chunk& chunk = queued.chunk;
        std::memcpy(
            arena_ + static_cast<std::size_t>(chunk.slot) * slot_stride_bytes_ + chunk.offset,
            chunk.source, chunk.bytes);
        lock.lock();
        occupy_link(lock, queued);
        done_.push_back(chunk.ticket);
        done_changed_.notify_one();
    }
}

CpuDevice::Queued CpuDevice::take_next() {
    auto& queue = urgent_.empty() ? ordinary_ : urgent_;
    const Queued next = queue.front();
    queue.pop_front();
    return next;
}

void CpuDevice::occupy_link(std::unique_lock<std::mutex>& lock, const Queued& queued) {
    if (!seconds_per_byte_) return;
    // From the absolute time at which the link was free, so that late wake-ups do not add up.
    const std::chrono::duration<double> busy(*seconds_per_byte_ *
                                             static_cast<double>(queued.chunk.bytes));
    link_free_at_ =
        std::max(link_free_at_, queued.since) + std::chrono::duration_cast<Clock::duration>(busy);
    work_.wait_until(lock, link_free_at_, [this] { return is_interrupted_; });
}

}  // namespace fmoe
