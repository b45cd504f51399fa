#include "fmoe/offloader.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <future>
#include <latch>
#include <random>
#include <string>
#include <thread>

#include "check.h"
#include "fmoe/cpu_device.h"
#include "fmoe/errors.h"
#include "scripted_policy.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{3, 6, 2};
constexpr std::size_t kBlobBytes = 3000;

// Instances alive, of everything that an Offloader owns here.
std::atomic<int> alive = 0;
struct Counted {
    Counted() { ++alive; }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    ~Counted() { --alive; }
};

std::shared_ptr<HostStore> make_store(std::size_t blob_bytes = kBlobBytes) {
    auto store = HostStore::create("", "test", kGeometry.size(), blob_bytes, 0);
    for (int expert = 0; expert < kGeometry.size(); ++expert)
        std::memset(store->writable_blob(expert), expert + 1, blob_bytes);
    store->seal();
    return store;
}

OffloaderOptions options(double timeout_s = 30) {
    OffloaderOptions options;
    options.geometry = kGeometry;
    options.chunk_bytes = 1000;
    options.timeout_s = timeout_s;
    return options;
}

PolicyParts lru(int num_slots) {
    PolicyParams params;
    params.geometry = kGeometry;
    params.num_slots = num_slots;
    return make_policy("lru", params);
}

struct CountedDevice final : Device, Counted {
    CpuDevice device;
    CountedDevice(int slots, std::size_t bytes) : device(slots, bytes) {}
    std::byte* arena() noexcept override { return device.arena(); }
    int num_slots() const noexcept override { return device.num_slots(); }
    std::size_t slot_stride_bytes() const noexcept override { return device.slot_stride_bytes(); }
    void start(const Chunk& chunk) override { device.start(chunk); }
    void wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) override {
        device.wait_done(done, deadline);
    }
    void interrupt() override { device.interrupt(); }
};

// Copies `num_allowed` chunks at once and keeps the rest until let_go().
class StuckDevice final : public Device {
public:
    explicit StuckDevice(int num_slots, int num_allowed = 0)
        : num_allowed_(num_allowed), arena_(static_cast<std::size_t>(num_slots) * kBlobBytes) {}
    std::byte* arena() noexcept override { return arena_.data(); }
    int num_slots() const noexcept override { return static_cast<int>(arena_.size() / kBlobBytes); }
    std::size_t slot_stride_bytes() const noexcept override { return kBlobBytes; }
    void start(const Chunk& chunk) override {
        const std::lock_guard lock(mutex_);
        kept_.push_back(chunk);
        copy_allowed();
    }
    void wait_done(std::vector<std::uint64_t>& done, Clock::time_point deadline) override {
        std::unique_lock lock(mutex_);
        woken_.wait_until(lock, deadline, [this] { return is_interrupted_ || !done_.empty(); });
        done.swap(done_);
    }
    void interrupt() override {
        const std::lock_guard lock(mutex_);
        is_interrupted_ = true;
        woken_.notify_all();
    }
    void let_go() {
        const std::lock_guard lock(mutex_);
        num_allowed_ = 1000;
        copy_allowed();
    }

private:
    void copy_allowed() {
        for (; num_allowed_ > 0 && !kept_.empty(); kept_.pop_front(), --num_allowed_) {
            const Chunk& chunk = kept_.front();
            std::memcpy(
                arena_.data() + static_cast<std::size_t>(chunk.slot) * kBlobBytes + chunk.offset,
                chunk.source, chunk.bytes);
            done_.push_back(chunk.ticket);
            woken_.notify_all();
        }
    }

    int num_allowed_;
    std::vector<std::byte> arena_;
    std::deque<Chunk> kept_;
    std::vector<std::uint64_t> done_;
    std::mutex mutex_;
    std::condition_variable woken_;
    bool is_interrupted_ = false;
};

// Predicts for every gate that the next layer chooses the same experts.
struct SameAgain : Predictor, Counted {
    explicit SameAgain(bool is_synchronous = false) : is_synchronous_(is_synchronous) {}
    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        iteration = context.iteration;
    }
    void gate_observed(const GateObservation& gate, std::vector<Prediction>& out) override {
        if (gate.layer + 1 == kGeometry.num_layers) return;
        Prediction prediction;
        prediction.iteration = iteration;
        prediction.observed_layer = gate.layer;
        prediction.first_layer = gate.layer + 1;
        prediction.num_layers = 1;
        prediction.num_rows = gate.num_rows;
        prediction.p.assign(gate.probs, gate.probs + gate.num_rows * kGeometry.num_experts);
        prediction.score.assign(static_cast<std::size_t>(gate.num_rows), 1.0F);
        out.push_back(std::move(prediction));
    }
    void iteration_ended(std::vector<Prediction>&) override {}
    void request_ended(std::uint64_t) override {}
    bool is_synchronous() const override { return is_synchronous_; }

    std::uint64_t iteration = 0;
    bool is_synchronous_;
};

// Prefetches what the last prediction names; holds the layer for it if it is to wait.
struct Follower final : Policy, Counted {
    explicit Follower(bool waits = false) : waits_(waits) {}
    void predicted(const Prediction& prediction, const ExpertCache& cache,
                   Instructions& out) override {
        wanted_.clear();
        for (int expert = 0; expert < kGeometry.num_experts; ++expert) {
            if (prediction.probs(0, prediction.first_layer, kGeometry.num_experts)[expert] < 0.5F)
                continue;
            const int index = kGeometry.index(prediction.first_layer, expert);
            if (!cache.is_absent(index)) continue;
            wanted_.push_back(index);
            if (waits_) out.push_back(Instruction::hold(prediction.first_layer, index));
        }
    }
    void link_free(const ExpertCache& cache, Instructions& out) override {
        while (!wanted_.empty() && !cache.is_absent(wanted_.back())) wanted_.pop_back();
        if (wanted_.empty()) return;
        const int victim = cache.num_free() > 0 ? -1 : this->victim({}, cache);
        if (cache.num_free() > 0 || victim >= 0)
            out.push_back(Instruction::start_copy(wanted_.back(), victim));
    }
    int victim(const VictimNeeded&, const ExpertCache& cache) override {
        for (int expert : cache.residents())
            if (cache.can_evict(expert)) return expert;
        return -1;
    }

private:
    bool waits_;
    std::vector<int> wanted_;
};

void begin(Offloader& offloader) {
    const std::uint64_t request = 7;
    const Phase phase = Phase::decode;
    const std::int32_t token = 1;
    IterationContext context;
    context.num_rows = 1;
    context.requests = &request;
    context.phases = &phase;
    context.token_ids = &token;
    offloader.begin_iteration(context);
}

void request(Offloader& offloader, int layer, const std::vector<std::int32_t>& chosen) {
    const std::vector<std::int32_t> row_of_token{0};
    offloader.request(layer, chosen, row_of_token);
}

void check_content(Offloader& offloader, int layer, const Delivery& delivery) {
    const std::byte* slot = offloader.device().arena() + static_cast<std::size_t>(delivery.slot) *
                                                             offloader.device().slot_stride_bytes();
    const int expert = kGeometry.index(layer, delivery.expert);
    CHECK(std::memcmp(slot, offloader.store().blob(expert), offloader.store().blob_bytes()) == 0);
}

void run_layer(Offloader& offloader, int layer, const std::vector<std::int32_t>& chosen) {
    request(offloader, layer, chosen);
    std::size_t num_computed = 0;
    for (std::vector<Delivery> ready; offloader.wait(ready), !ready.empty();) {
        std::vector<int> experts;
        for (const Delivery& delivery : ready) {
            check_content(offloader, layer, delivery);
            experts.push_back(delivery.expert);
        }
        num_computed += ready.size();
        offloader.release(experts);
    }
    CHECK(num_computed == chosen.size());
    std::vector<float> probs(static_cast<std::size_t>(kGeometry.num_experts), 0.0F);
    for (std::int32_t expert : chosen) probs[static_cast<std::size_t>(expert)] = 1.0F;
    offloader.publish_gate({layer, 1, probs.data(), nullptr, nullptr});
}

void run_iteration(Offloader& offloader, std::mt19937& random) {
    begin(offloader);
    for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
        std::vector<std::int32_t> chosen;
        for (std::int32_t expert = 0; expert < kGeometry.num_experts; ++expert)
            if (random() % 2 == 0) chosen.push_back(expert);
        if (chosen.empty()) chosen.push_back(0);
        run_layer(offloader, layer, chosen);
    }
    offloader.end_iteration();
}

void slots_hold_their_blobs_with_prediction_on_its_own_thread_and_a_watcher() {
    const auto store = make_store();
    for (int num_slots : {1, 2, 5, kGeometry.size()}) {
        Offloader offloader(store, std::make_unique<CountedDevice>(num_slots, kBlobBytes),
                            {std::make_unique<SameAgain>(), std::make_unique<Follower>()},
                            options());
        std::atomic<bool> is_over = false;
        std::thread watcher([&] {
            while (!is_over) {
                offloader.check_integrity();
                CHECK(offloader.counters().stall_s >= 0);
            }
        });
        std::mt19937 random(3);
        for (int iteration = 0; iteration < 30; ++iteration) run_iteration(offloader, random);
        offloader.request_ended(7);
        is_over = true;
        watcher.join();
        offloader.wait_until_idle();
        offloader.check_integrity();
        const TransferCounters bytes = offloader.counters().transfers;
        CHECK(bytes.bytes_prefetched >= bytes.bytes_prefetch_used + bytes.bytes_prefetch_wasted);
    }
    CHECK(alive == 0);
}

void a_synchronous_policy_is_waited_for() {
    Offloader offloader(make_store(), std::make_unique<CpuDevice>(6, kBlobBytes),
                        {std::make_unique<SameAgain>(true), std::make_unique<Follower>(true)},
                        options());
    begin(offloader);
    run_layer(offloader, 0, {2, 3});
    request(offloader, 1, {2, 5});  // held for 2 and 3, both prefetched
    std::vector<Delivery> ready;
    offloader.wait(ready);
    CHECK(offloader.counters().planner.prefetch_loads == 2);
    CHECK(ready.front().expert == 2);
    offloader.abort_iteration();
    offloader.check_integrity();
}

void a_held_layer_gets_nothing_before_the_held_copy_is_done() {
    const int needed = kGeometry.index(1, 2);
    const int held = kGeometry.index(1, 5);
    auto policy = std::make_unique<ScriptedPolicy>();
    policy->on_gate = [held](const GateRequested& event, const ExpertCache&, Instructions& out) {
        out.push_back(Instruction::hold(event.layer, held));
    };
    policy->on_link_free = [needed, held](const ExpertCache& cache, Instructions& out) {
        if (cache.is_ready(needed) && cache.is_absent(held))
            out.push_back(Instruction::start_copy(held, -1));
    };
    auto owned = std::make_unique<StuckDevice>(4, 3);  // the three chunks of `needed`
    StuckDevice& device = *owned;
    Offloader offloader(make_store(), std::move(owned), {nullptr, std::move(policy)}, options());
    begin(offloader);
    request(offloader, 1, {2});
    while (offloader.counters().transfers.copies == 0) std::this_thread::yield();
    std::vector<Delivery> ready;
    CHECK(!offloader.try_wait(ready));
    device.let_go();
    offloader.wait(ready);
    CHECK(ready.size() == 1 && ready[0].expert == 2);
    CHECK(offloader.counters().transfers.copies == 2);
}

// Blocks in its first iteration until it is let go.
struct StalledPredictor final : SameAgain {
    std::latch& gate;
    std::string& heard;
    StalledPredictor(std::latch& gate, std::string& heard) : gate(gate), heard(heard) {}
    void iteration_started(const IterationContext& context, std::vector<Prediction>& out) override {
        gate.wait();
        heard += "s" + std::to_string(context.iteration);
        SameAgain::iteration_started(context, out);
    }
    void gate_observed(const GateObservation&, std::vector<Prediction>&) override { heard += "g"; }
    void iteration_ended(std::vector<Prediction>&) override { heard += "e "; }
    void request_ended(std::uint64_t) override { heard += "r"; }
};

void a_stalled_predictor_never_blocks_inference_and_sees_whole_iterations() {
    std::latch gate(1);
    std::string heard;
    Offloader offloader(
        make_store(), std::make_unique<CpuDevice>(6, kBlobBytes),
        {std::make_unique<StalledPredictor>(gate, heard), std::make_unique<Follower>()}, options());
    std::mt19937 random(3);
    for (int iteration = 0; iteration < 20; ++iteration) run_iteration(offloader, random);
    // 4 may wait; the first may have begun or not.
    CHECK(offloader.counters().iterations_dropped == 16);
    gate.count_down();
    offloader.request_ended(7);
    offloader.close();
    for (std::size_t at = heard.find('s'); at != std::string::npos; at = heard.find('s', at + 1)) {
        const std::size_t end = std::min(heard.find('e', at), heard.size());
        const auto gates = std::count(heard.begin() + static_cast<std::ptrdiff_t>(at),
                                      heard.begin() + static_cast<std::ptrdiff_t>(end), 'g');
        CHECK(gates == kGeometry.num_layers || end == heard.size());
    }
}

void a_wait_without_progress_ends_and_says_what_was_missing() {
    Offloader offloader(make_store(), std::make_unique<StuckDevice>(4), lru(4), options(0.02));
    begin(offloader);
    request(offloader, 2, {1, 4});
    std::vector<Delivery> ready;
    std::string message;
    try {
        offloader.wait(ready);
    } catch (const TimeoutError& error) {
        message = error.what();
    }
    CHECK(message.find("layer 2") != std::string::npos);
    CHECK(message.find("experts 1, 4") != std::string::npos);
    CHECK(message.find("6000 bytes") != std::string::npos);
    CHECK_THROWS(TimeoutError, offloader.wait_until_idle());
    offloader.abort_iteration();
    begin(offloader);  // the next step may be tried
}

void close_ends_copies_in_flight_and_wakes_a_waiter() {
    constexpr std::size_t kBigBlob = 1 << 20;
    Offloader offloader(make_store(kBigBlob), std::make_unique<CpuDevice>(4, kBigBlob, 0.0001),
                        lru(4), options());
    begin(offloader);
    request(offloader, 0, {1, 4});
    auto waiter = std::async(std::launch::async, [&] {
        std::vector<Delivery> ready;
        CHECK_THROWS(EngineError, offloader.wait(ready));
    });
    offloader.close();
    waiter.get();
    CHECK_THROWS(EngineError, offloader.end_iteration());
    offloader.close();
}

struct FailingPredictor final : SameAgain {
    void gate_observed(const GateObservation&, std::vector<Prediction>&) override {
        throw std::runtime_error("no such map");
    }
};

void a_failure_of_a_thread_reaches_the_next_caller() {
    Offloader offloader(make_store(), std::make_unique<CpuDevice>(6, kBlobBytes),
                        {std::make_unique<FailingPredictor>(), std::make_unique<Follower>()},
                        options());
    std::mt19937 random(3);
    std::string message;
    try {
        while (true) run_iteration(offloader, random);
    } catch (const EngineError& error) {
        message = error.what();
    }
    CHECK(message.find("no such map") != std::string::npos);
    CHECK_THROWS(EngineError, offloader.counters());
}

void the_next_wave_needs_a_release() {
    Offloader offloader(make_store(), std::make_unique<CpuDevice>(1, kBlobBytes), lru(1),
                        options());
    begin(offloader);
    request(offloader, 0, {1, 4});
    std::vector<Delivery> ready;
    offloader.wait(ready);
    CHECK(ready.size() == 1 && ready[0].expert == 1);
    CHECK_THROWS(std::invalid_argument, offloader.wait(ready));
    const std::vector<int> first{1};
    offloader.release(first);
    CHECK_THROWS(std::invalid_argument, offloader.release(first));
    offloader.wait(ready);
    CHECK(ready.size() == 1 && ready[0].expert == 4);
}

void only_experts_of_this_shard_are_served() {
    OffloaderOptions half = options();
    half.shard = 1;
    half.num_shards = 2;
    Offloader offloader(make_store(), std::make_unique<CpuDevice>(6, kBlobBytes), lru(6), half);
    begin(offloader);
    request(offloader, 1, {-1, 6, 2, 3});  // e = 6 + j: 3 is odd, 2 is not
    std::vector<Delivery> ready;
    offloader.wait(ready);
    CHECK(ready.size() == 1 && ready[0].expert == 3);
    offloader.wait(ready);
    CHECK(ready.empty());
    const IterationStats stats = offloader.end_iteration();
    CHECK(stats.total.misses == 1 && stats.rows.at(0).misses == 1);
}

}  // namespace

int main() {
    slots_hold_their_blobs_with_prediction_on_its_own_thread_and_a_watcher();
    a_synchronous_policy_is_waited_for();
    a_held_layer_gets_nothing_before_the_held_copy_is_done();
    a_stalled_predictor_never_blocks_inference_and_sees_whole_iterations();
    a_wait_without_progress_ends_and_says_what_was_missing();
    close_ends_copies_in_flight_and_wakes_a_waiter();
    a_failure_of_a_thread_reaches_the_next_caller();
    the_next_wave_needs_a_release();
    only_experts_of_this_shard_are_served();
    CHECK(alive == 0);
}
