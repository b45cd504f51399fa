// fmoe/gate_server.h: answers the gates of a decode step that runs as one GPU graph. Per layer the
// graph writes what the gate chose into the mailbox, raises the layer's request flag and waits for
// its answer flag; a thread here asks the offloader, waits for what is missing and answers.
//
//     GPU stream   chosen, probs -> request = 1 -> wait answer == 1 -> answer = 0 -> experts ...
//     server                        request = 0 -> offloader -> slot table entries -> answer = 1
//
// A request of layer l + 1 comes after layer l in stream order, so layer l has been computed by
// then and the offloader may evict its experts. The GPU's wait has no time-out of its own: after a
// failure every flag is answered at once, so that the graph ends, and the step reports it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "fmoe/cuda_driver.h"
#include "fmoe/offloader.h"

namespace fmoe {

// Memory that GPU and server share. All offsets are bytes from its start.
struct GateMailbox {
    Geometry geometry;
    int max_rows = 0;

    std::size_t request(int layer) const noexcept { return line(layer); }
    std::size_t answer(int layer) const noexcept { return line(geometry.num_layers + layer); }
    // int32 [max_rows, K]
    std::size_t chosen(int layer) const noexcept {
        return line(2 * geometry.num_layers) + static_cast<std::size_t>(layer) * chosen_stride();
    }
    // float [max_rows, J]
    std::size_t probs(int layer) const noexcept {
        return chosen(geometry.num_layers) + static_cast<std::size_t>(layer) * probs_stride();
    }
    std::size_t bytes() const noexcept { return probs(geometry.num_layers); }
    std::size_t chosen_stride() const noexcept {
        return rows(static_cast<std::size_t>(geometry.top_k));
    }
    std::size_t probs_stride() const noexcept {
        return rows(static_cast<std::size_t>(geometry.num_experts));
    }

private:
    static std::size_t line(int number) noexcept { return static_cast<std::size_t>(number) * 64; }
    std::size_t rows(std::size_t width) const noexcept {
        return (static_cast<std::size_t>(max_rows) * width * 4 + 63) / 64 * 64;
    }
};

// How an answer reaches the waiting graph.
class GateAnswers {
public:
    virtual ~GateAnswers() = default;
    virtual void begin_thread() {}
    // The graph finds expert index `expert` in `slot` from the next answer on.
    virtual void place(int expert, int slot) = 0;
    // Raises the flag after everything placed before.
    virtual void answer_after_places(int layer) = 0;
};

class GateServer {
public:
    // `mailbox` is zeroed memory of GateMailbox::bytes(); offloader and mailbox outlive the server.
    GateServer(Offloader& offloader, const GateMailbox& layout, std::byte* mailbox,
               std::unique_ptr<GateAnswers> answers, double timeout_s);
    ~GateServer();
    GateServer(const GateServer&) = delete;
    GateServer& operator=(const GateServer&) = delete;

    // Before the graph is launched and after Offloader::begin_iteration(); one token a row.
    void begin_step(int num_rows);
    // After the graph has ended, or will never run. Throws EngineError if the step failed.
    void end_step();
    // Ends the thread; a graph that still waits is answered first.
    void close();

private:
    using Clock = Device::Clock;

    void serve_loop();
    void serve_step();
    // False once the step is over although the layer never asked.
    bool await_request(int layer);
    void serve(int layer);
    void publish(int layer);
    void fail(const std::string& reason);
    void answer(int layer);
    std::atomic_ref<std::uint32_t> flag(std::size_t offset) const {
        return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(mailbox_ + offset));
    }

    Offloader& offloader_;
    GateMailbox layout_;
    std::byte* mailbox_;
    std::unique_ptr<GateAnswers> answers_;
    double timeout_s_;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_serving_ = false;
    bool is_closing_ = false;
    std::atomic<bool> is_over_ = true;  // the runner no longer waits for requests
    std::string failure_;

    // Of the serving thread.
    int num_rows_ = 0;
    std::vector<std::int32_t> rows_;  // 0, 1, ...
    std::vector<int> placed_;         // slot that the graph's table names, by expert index
    std::vector<Delivery> delivered_;
    std::vector<std::uint8_t> chosen_;
    std::thread thread_;
};

// Mailbox, table and stream of a GPU.
class CudaGates final : public GateAnswers {
public:
    // table: int32 [L, J] in device memory.
    CudaGates(int device, const GateMailbox& layout, CudaAddress table);
    ~CudaGates() override;

    std::byte* mailbox() const noexcept { return mailbox_.data(); }
    // As the GPU sees it.
    CudaAddress mailbox_address() const noexcept { return mailbox_.address(); }
    // Enqueues request and wait of a layer; also while the stream is being captured.
    void enqueue(int layer, CudaStream stream) const;

    void begin_thread() override { context_.enter(); }
    void place(int expert, int slot) override;
    void answer_after_places(int layer) override;

private:
    CudaContextHold context_;
    GateMailbox layout_;
    CudaMailbox mailbox_;
    CudaAddress table_;
    CudaStream stream_ = nullptr;
};

}  // namespace fmoe
