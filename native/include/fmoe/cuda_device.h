// fmoe/cuda_device.h: slots in GPU memory, filled by two streams: urgent chunks on one of high
// priority, the others on one of low priority. After each chunk its stream writes the number of
// chunks done into host memory, so that waiting costs no driver call. interrupt() gives slots and
// page locks back, so that another device can take over store and memory at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "fmoe/cuda_driver.h"
#include "fmoe/device.h"
#include "fmoe/host_store.h"

namespace fmoe {

class CudaDevice final : public Device {
public:
    // Page-locks the store for this process, whose mapping must outlive the device. Throws
    // CapacityError, EngineError.
    CudaDevice(int device, int num_slots, const Blobs& blobs, int num_blobs);
    ~CudaDevice() override;

    std::byte* arena() noexcept override { return reinterpret_cast<std::byte*>(arena_); }
    int num_slots() const noexcept override { return num_slots_; }
    std::size_t slot_stride_bytes() const noexcept override { return slot_stride_bytes_; }
    void start(const Chunk& chunk) override;
    void wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) override;
    void interrupt() override;

private:
    struct Queue {
        CudaStream stream = nullptr;
        std::deque<std::uint64_t> tickets;  // in flight, oldest first
        std::uint32_t num_started = 0;
        std::uint32_t num_done = 0;
        std::uint32_t* counter = nullptr;  // written by the stream
        CudaAddress counter_address = 0;
    };

    void open(Queue& queue, int number, int priority);
    void release() noexcept;
    // Under the mutex.
    bool collect(std::vector<std::uint64_t>& done);
    static std::uint32_t counted(const Queue& queue) {
        return std::atomic_ref<std::uint32_t>(*queue.counter).load(std::memory_order_acquire);
    }
    bool is_idle() const { return urgent_.tickets.empty() && ordinary_.tickets.empty(); }

    CudaContextHold context_;
    int num_slots_;
    std::size_t slot_stride_bytes_;
    void* registered_ = nullptr;
    CudaAddress arena_ = 0;
    CudaMailbox counters_;

    std::mutex mutex_;
    std::condition_variable work_;
    Queue urgent_;
    Queue ordinary_;
    std::atomic<bool> is_interrupted_ = false;
};

}  // namespace fmoe
