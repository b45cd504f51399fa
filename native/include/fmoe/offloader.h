// fmoe/offloader.h: the monitor that joins planner, transfers and predictor for an engine. One
// mutex guards planner and transfers; three kinds of thread enter it:
//   inference   one thread, all public calls; only wait() and wait_until_idle() block;
//   link        waits for the device's chunks, tells the planner, feeds the device;
//   matcher     owns the predictor, reads what was published, posts predictions.
// A failure on the link or matcher thread reaches the next caller, and every later one, as
// EngineError.
//
// Order of calls in an iteration:
//   begin_iteration, then per layer: request, publish_gate, (wait, release)*; then end_iteration.
// A gate published after its layer was computed is as good, but what it leads to starts later.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "fmoe/context_queue.h"
#include "fmoe/device.h"
#include "fmoe/host_store.h"
#include "fmoe/planner.h"
#include "fmoe/policy_factory.h"
#include "fmoe/running_median.h"
#include "fmoe/transfer_engine.h"

namespace fmoe {

struct OffloaderOptions {
    Geometry geometry;
    std::size_t chunk_bytes = 4 << 20;
    int prefetch_depth = 2;
    double timeout_s = 60;
    int queue_capacity = 4;  // iterations that the matcher may be behind
    int shard = 0;           // only experts e with e mod num_shards == shard are served
    int num_shards = 1;
};

// Expert j of the gate's layer can be computed from `slot` until it is released.
struct Delivery {
    int expert;
    int slot;
};

// Similarities of what predictions were made from, a row and layer each.
struct PredictionScore {
    std::uint64_t count = 0;
    double sum = 0;
};

struct IterationStats {
    double stall_s = 0;          // that wait() blocked
    TransferCounters transfers;  // since the iteration before ended
    PredictionScore score;       // of predictions posted since then
    int num_maps = 0;            // that the predictor keeps
    GateOutcome total;
    std::vector<GateOutcome> rows;  // an expert counts once for each row that chose it
    // Of what the gates chose, experts of other shards included: equal on all shards of a step.
    std::uint64_t routing_checksum = 0;
};

struct OffloaderCounters {
    PlannerCounters planner;
    TransferCounters transfers;
    double stall_s = 0;
    std::uint64_t iterations = 0;
    std::uint64_t iterations_dropped = 0;  // by the matcher's queue
    PredictionScore score;
};

class Offloader {
public:
    // The store must be complete and hold geometry.size() blobs. Throws invalid_argument.
    Offloader(std::shared_ptr<const HostStore> store, std::unique_ptr<Device> device,
              PolicyParts parts, const OffloaderOptions& options);
    ~Offloader();
    Offloader(const Offloader&) = delete;
    Offloader& operator=(const Offloader&) = delete;

    Device& device() noexcept { return *device_; }
    const HostStore& store() const noexcept { return *store_; }
    // False: publish_gate() has no effect and need not be called.
    bool wants_gates() const noexcept { return predictor_ != nullptr; }
    bool wants_speculative() const {
        return predictor_ != nullptr && predictor_->wants_speculative();
    }
    // True: the predictor says nothing without it.
    bool needs_speculative() const {
        return predictor_ != nullptr && predictor_->needs_speculative();
    }

    // What the predictor learns into, or null. Only before the first iteration and after close():
    // in between it is the matcher's, and others borrow it.
    MapStore* map_store() { return predictor_ == nullptr ? nullptr : predictor_->store(); }
    // Keeps the matcher between two iterations until return_maps(), so that one other thread may
    // read and change map_store(), which must not be null. Inference goes on; what it publishes
    // waits, and beyond the queue's capacity is not learnt. Throws TimeoutError.
    void borrow_maps(double timeout_s);
    void return_maps();

    // `context.iteration` is ignored: the offloader counts.
    void begin_iteration(const IterationContext& context);
    // chosen: [T, K] expert numbers within the layer, those outside 0..J-1 or of another shard are
    // ignored; row_of_token: [T]. Starts loading what is missing.
    void request(int layer, std::span<const std::int32_t> chosen,
                 std::span<const std::int32_t> row_of_token);
    // `out` becomes the chosen experts that are computable since the last call. False if there is
    // none yet though some are still to come.
    bool try_wait(std::vector<Delivery>& out);
    // As try_wait, but blocks until one is computable; empty when all were delivered.
    // Throws TimeoutError, or invalid_argument where only release() could make progress.
    void wait(std::vector<Delivery>& out);
    // As wait(), but polls: for a thread that has a core to itself and answers a GPU.
    void poll(std::vector<Delivery>& out);
    // Experts within the layer, delivered and computed.
    void release(std::span<const int> experts);
    // [num_rows, J] each. Never waits, except for a predictor that is_synchronous().
    void publish_gate(const GateObservation& gate);
    IterationStats end_iteration();
    // After a failed step: gives up what it waited for; nothing is learnt from it.
    void abort_iteration();
    void request_ended(std::uint64_t request);

    // Blocks until no copy is queued or in flight. Throws TimeoutError.
    void wait_until_idle();
    OffloaderCounters counters();
    // [L * J]: 1 where the expert lies ready in a slot.
    std::vector<std::uint8_t> resident();
    void check_integrity();
    // Ends the threads, also with copies in flight; every later call throws EngineError.
    void close();

private:
    using Clock = Device::Clock;

    // The gate in progress.
    struct Gate {
        int layer = -1;
        std::vector<int> undelivered;  // expert indices, ascending
        std::vector<int> delivered;    // not yet released
        bool has_begun = false;        // something was delivered: holds no longer matter
        double asked_at = 0;
        double stall_s = 0;
    };

    void link_loop();
    void matcher_loop();
    // In line, for a predictor that is_synchronous().
    void predict_now();
    void count_maps();
    // Runs a thread's loop; what it throws goes to the next caller.
    void guard(void (Offloader::*loop)());

    void check_usable() const;
    void check_in_iteration() const;
    void settle();
    void deliver(std::vector<Delivery>& out);
    // Nothing is on its way and every slot is pinned: only release() makes progress.
    bool needs_release() const;
    // Under the mutex. True once wait() can return.
    bool is_served(std::vector<Delivery>& out, Clock::time_point deadline);
    void count_stall(double seconds);
    void wake_waiters();
    void post(std::vector<Prediction>& predictions);
    void check_progress(Clock::time_point deadline) const;
    void collect_needed(int layer, std::span<const std::int32_t> chosen,
                        std::span<const std::int32_t> row_of_token);
    void count(GateOutcome& outcome, int expert) const;
    void measure_layer(int layer, double now);
    std::string describe_wait() const;
    double load_time() const;

    std::shared_ptr<const HostStore> store_;
    std::unique_ptr<Device> device_;
    OffloaderOptions options_;

    mutable std::mutex mutex_;
    std::condition_variable progress_;
    std::atomic<std::uint64_t> num_wakes_ = 0;  // of progress_, for poll()
    Planner planner_;
    TransferEngine transfers_;
    std::string failure_;  // of a thread, empty while there is none
    bool is_closed_ = false;
    std::vector<int> finished_;  // scratch of the link thread

    // Written by the inference thread, under the mutex.
    Gate gate_;
    bool in_iteration_ = false;
    bool is_queued_ = false;  // the iteration in progress reached the matcher's queue
    bool has_prefill_ = false;
    IterationStats stats_;
    TransferCounters transfers_before_;
    PredictionScore score_;
    PredictionScore score_before_;
    double stall_s_ = 0;
    std::uint64_t iteration_ = 0;
    RunningMedian decode_layer_s_;   // from one gate to the next, stall left out
    RunningMedian prefill_layer_s_;  // of iterations with a prefill row
    std::vector<int> needed_;
    std::vector<std::uint32_t> seen_;  // [R, J] stamp of the request() that saw the pair
    std::uint32_t stamp_ = 0;
    std::vector<char> is_needed_;  // [J]

    std::unique_ptr<Predictor> predictor_;
    bool is_synchronous_ = false;
    std::atomic<int> num_maps_ = 0;  // of the predictor's store, as the matcher left it
    ContextQueue contexts_;
    std::vector<Prediction> predictions_;  // of a synchronous predictor
    std::thread link_;
    std::thread matcher_;
};

}  // namespace fmoe
