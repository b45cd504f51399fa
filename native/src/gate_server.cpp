#include "fmoe/gate_server.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "fmoe/check.h"
#include "fmoe/errors.h"
#include "fmoe/spin.h"

namespace fmoe {

GateServer::GateServer(Offloader& offloader, const GateMailbox& layout, std::byte* mailbox,
                       std::unique_ptr<GateAnswers> answers, double timeout_s)
    : offloader_(offloader),
      layout_(layout),
      mailbox_(mailbox),
      answers_(std::move(answers)),
      timeout_s_(timeout_s),
      rows_(static_cast<std::size_t>(layout.max_rows)),
      placed_(static_cast<std::size_t>(layout.geometry.size()), -1) {
    require(layout.max_rows > 0, "gates: max_rows must be positive");
    std::iota(rows_.begin(), rows_.end(), 0);
    thread_ = std::thread([this] { serve_loop(); });
}

GateServer::~GateServer() { close(); }

void GateServer::begin_step(int num_rows) {
    require(num_rows > 0 && num_rows <= layout_.max_rows, "gates: " + std::to_string(num_rows) +
                                                              " rows of at most " +
                                                              std::to_string(layout_.max_rows));
    const std::lock_guard lock(mutex_);
    require(!is_serving_, "gates: end the step in progress first");
    if (is_closing_) throw EngineError("gates: used after close()");
    num_rows_ = num_rows;
    failure_.clear();
    is_over_ = false;
    is_serving_ = true;
    changed_.notify_all();
}

void GateServer::end_step() {
    std::unique_lock lock(mutex_);
    is_over_ = true;
    changed_.wait(lock, [this] { return !is_serving_; });
    if (!failure_.empty()) throw EngineError(std::exchange(failure_, {}));
}

void GateServer::close() {
    {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
        is_closing_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
}

void GateServer::serve_loop() {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return is_serving_ || is_closing_; });
        if (!is_serving_) return;
        lock.unlock();
        serve_step();
        lock.lock();
        is_serving_ = false;
        changed_.notify_all();
    }
}

void GateServer::serve_step() {
    try {
        answers_->begin_thread();
    } catch (const std::exception& error) {
        fail(error.what());
    }
    for (int layer = 0; layer < layout_.geometry.num_layers; ++layer) {
        if (!await_request(layer)) return;
        flag(layout_.request(layer)).store(0, std::memory_order_relaxed);
        if (!failure_.empty()) {
            answer(layer);
            continue;
        }
        try {
            serve(layer);
        } catch (const std::exception& error) {
            fail(error.what());
            // What the table holds now is unknown: name every slot anew.
            std::fill(placed_.begin(), placed_.end(), -1);
            answer(layer);
        }
    }
}

bool GateServer::await_request(int layer) {
    const auto request = flag(layout_.request(layer));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(timeout_s_));
    bool has_failed = !failure_.empty();
    while (request.load(std::memory_order_acquire) == 0) {
        if (is_over_) {
            // The graph may have asked just before it ended.
            if (request.load(std::memory_order_acquire) != 0) break;
            fail("the step ended before its layer " + std::to_string(layer) + " asked");
            return false;
        }
        if (!has_failed && Clock::now() >= deadline) {
            fail("layer " + std::to_string(layer) + " has not asked for " +
                 std::to_string(timeout_s_) + " s");
            has_failed = true;
        }
        relax();
    }
    return true;
}

void GateServer::serve(int layer) {
    const auto* chosen = reinterpret_cast<const std::int32_t*>(mailbox_ + layout_.chosen(layer));
    const auto num_rows = static_cast<std::size_t>(num_rows_);
    offloader_.request(layer, {chosen, num_rows * static_cast<std::size_t>(layout_.geometry.top_k)},
                       {rows_.data(), num_rows});
    bool has_placed = false;
    bool has_published = false;
    while (true) {
        if (!offloader_.try_wait(delivered_)) {
            // While the graph waits anyway: prefetches that this leads to move behind the misses.
            if (!std::exchange(has_published, true)) publish(layer);
            offloader_.poll(delivered_);
        }
        if (delivered_.empty()) break;
        for (const Delivery& delivery : delivered_) {
            const int expert = layout_.geometry.index(layer, delivery.expert);
            if (std::exchange(placed_[expert], delivery.slot) == delivery.slot) continue;
            answers_->place(expert, delivery.slot);
            has_placed = true;
        }
    }
    if (has_placed)
        answers_->answer_after_places(layer);
    else
        answer(layer);
    if (!has_published) publish(layer);
}

void GateServer::publish(int layer) {
    if (!offloader_.wants_gates()) return;
    const Geometry& geometry = layout_.geometry;
    const auto* chosen = reinterpret_cast<const std::int32_t*>(mailbox_ + layout_.chosen(layer));
    chosen_.assign(
        static_cast<std::size_t>(num_rows_) * static_cast<std::size_t>(geometry.num_experts), 0);
    for (int row = 0; row < num_rows_; ++row)
        for (int k = 0; k < geometry.top_k; ++k) {
            const int expert = chosen[row * geometry.top_k + k];
            if (expert >= 0 && expert < geometry.num_experts)
                chosen_[static_cast<std::size_t>(row * geometry.num_experts + expert)] = 1;
        }
    GateObservation gate;
    gate.layer = layer;
    gate.num_rows = num_rows_;
    gate.probs = reinterpret_cast<const float*>(mailbox_ + layout_.probs(layer));
    gate.chosen = chosen_.data();
    offloader_.publish_gate(gate);
}

// Only the serving thread writes it while a step is served; end_step() reads it afterwards.
void GateServer::fail(const std::string& reason) {
    if (failure_.empty()) failure_ = "decode step: " + reason;
}

void GateServer::answer(int layer) {
    flag(layout_.answer(layer)).store(1, std::memory_order_release);
}

// ---- CudaGates ----

namespace {
constexpr unsigned kNonBlocking = 1;
constexpr unsigned kWaitEqual = 1;
}  // namespace

CudaGates::CudaGates(int device, const GateMailbox& layout, CudaAddress table)
    : context_(device), layout_(layout), mailbox_(layout.bytes()), table_(table) {
    if (!context_.can_wait_on_memory())
        throw EngineError("this GPU's streams cannot wait on memory: decode steps run eagerly");
    const CudaDriver& driver = CudaDriver::get();
    int least = 0, greatest = 0;
    driver.check(driver.stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
    driver.check(driver.stream_create(&stream_, kNonBlocking, greatest), "cuStreamCreate");
}

CudaGates::~CudaGates() { CudaDriver::get().stream_destroy(stream_); }

void CudaGates::enqueue(int layer, CudaStream stream) const {
    const CudaDriver& driver = CudaDriver::get();
    const CudaAddress request = mailbox_.address() + layout_.request(layer);
    const CudaAddress answer = mailbox_.address() + layout_.answer(layer);
    driver.check(driver.stream_write(stream, request, 1, 0), "cuStreamWriteValue32 of a request");
    driver.check(driver.stream_wait(stream, answer, 1, kWaitEqual),
                 "cuStreamWaitValue32 for an answer");
    driver.check(driver.stream_write(stream, answer, 0, 0), "cuStreamWriteValue32 of an answer");
}

void CudaGates::place(int expert, int slot) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.stream_write(stream_, table_ + 4ULL * static_cast<unsigned>(expert),
                                     static_cast<std::uint32_t>(slot), 0),
                 "cuStreamWriteValue32 of a slot");
}

void CudaGates::answer_after_places(int layer) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.stream_write(stream_, mailbox_.address() + layout_.answer(layer), 1, 0),
                 "cuStreamWriteValue32 of an answer");
}

}  // namespace fmoe
