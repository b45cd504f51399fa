#include "fmoe/cuda_device.h"

#include <utility>

#include "fmoe/check.h"
#include "fmoe/memory.h"
#include "fmoe/spin.h"

namespace fmoe {

namespace {

constexpr std::size_t kSlotAlignment = 256;
constexpr std::size_t kCacheLine = 64;
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kPortable = 1;
constexpr unsigned kReadOnly = 8;

void* page_lock(const Blobs& blobs, int num_blobs) {
    const CudaDriver& driver = CudaDriver::get();
    void* base = const_cast<std::byte*>(blobs.base);
    const std::size_t bytes = blobs.stride_bytes * static_cast<std::size_t>(num_blobs);
    // Not every system can register a read-only mapping as such; some refuse anything else.
    int result = driver.host_register(base, bytes, kPortable | kReadOnly);
    if (result != 0) result = driver.host_register(base, bytes, kPortable);
    driver.check(result, "cuMemHostRegister of the host store");
    return base;
}

}  // namespace

CudaDevice::CudaDevice(int device, int num_slots, const Blobs& blobs, int num_blobs)
    : context_(device),
      num_slots_(num_slots),
      slot_stride_bytes_(round_up(blobs.blob_bytes, kSlotAlignment)),
      counters_(2 * kCacheLine) {
    require(num_slots > 0, "device: the number of slots must be positive");
    const CudaDriver& driver = CudaDriver::get();
    const std::size_t bytes = slot_stride_bytes_ * static_cast<std::size_t>(num_slots);
    std::size_t free = 0, total = 0;
    driver.check(driver.memory_info(&free, &total), "cuMemGetInfo");
    require_capacity("expert slots", bytes, free, "give a smaller budget");
    try {
        driver.check(driver.allocate(&arena_, bytes), "cuMemAlloc of the expert slots");
        registered_ = page_lock(blobs, num_blobs);
        int least = 0, greatest = 0;
        driver.check(driver.stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
        open(urgent_, 0, greatest);
        open(ordinary_, 1, least);
    } catch (...) {
        release();
        throw;
    }
}

CudaDevice::~CudaDevice() { interrupt(); }

void CudaDevice::open(Queue& queue, int number, int priority) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.stream_create(&queue.stream, kNonBlocking, priority), "cuStreamCreate");
    const std::size_t offset = static_cast<std::size_t>(number) * kCacheLine;
    queue.counter = reinterpret_cast<std::uint32_t*>(counters_.data() + offset);
    queue.counter_address = counters_.address() + offset;
}

void CudaDevice::release() noexcept {
    const CudaDriver& driver = CudaDriver::get();
    context_.enter();
    for (Queue* queue : {&urgent_, &ordinary_})
        if (queue->stream != nullptr) driver.stream_destroy(std::exchange(queue->stream, nullptr));
    if (registered_ != nullptr) driver.host_unregister(std::exchange(registered_, nullptr));
    if (arena_ != 0) driver.free(std::exchange(arena_, 0));
}

void CudaDevice::start(const Chunk& chunk) {
    const CudaDriver& driver = CudaDriver::get();
    const std::lock_guard lock(mutex_);
    if (is_interrupted_) return;
    Queue& queue = chunk.is_urgent ? urgent_ : ordinary_;
    const CudaAddress to =
        arena_ + static_cast<CudaAddress>(chunk.slot) * slot_stride_bytes_ + chunk.offset;
    context_.enter();
    driver.check(driver.copy_to_device(to, chunk.source, chunk.bytes, queue.stream),
                 "cuMemcpyHtoDAsync of an expert");
    driver.check(driver.stream_write(queue.stream, queue.counter_address, ++queue.num_started, 0),
                 "cuStreamWriteValue32 after an expert");
    queue.tickets.push_back(chunk.ticket);
    work_.notify_one();
}

bool CudaDevice::collect(std::vector<std::uint64_t>& done) {
    const std::size_t before = done.size();
    for (Queue* queue : {&urgent_, &ordinary_}) {
        for (const std::uint32_t now = counted(*queue); queue->num_done != now; ++queue->num_done) {
            done.push_back(queue->tickets.front());
            queue->tickets.pop_front();
        }
    }
    return done.size() != before;
}

// Spins while something is in flight: a sleeping thread would notice a finished copy too late for
// the layer that waits for it. It spins on the counters, not on the mutex, which start() needs.
void CudaDevice::wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    while (!is_interrupted_ && !collect(done) && Clock::now() < deadline) {
        if (is_idle()) {
            work_.wait_until(lock, deadline);
            continue;
        }
        const std::uint32_t urgent = urgent_.num_done, ordinary = ordinary_.num_done;
        lock.unlock();
        while (counted(urgent_) == urgent && counted(ordinary_) == ordinary && !is_interrupted_ &&
               Clock::now() < deadline)
            relax();
        lock.lock();
    }
}

void CudaDevice::interrupt() {
    const std::lock_guard lock(mutex_);
    if (is_interrupted_) return;
    is_interrupted_ = true;
    const CudaDriver& driver = CudaDriver::get();
    context_.enter();
    for (Queue* queue : {&urgent_, &ordinary_}) driver.stream_synchronize(queue->stream);
    release();
    work_.notify_all();
}

}  // namespace fmoe
