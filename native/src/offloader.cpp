#include "fmoe/offloader.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "fmoe/errors.h"
#include "fmoe/map_store.h"
#include "fmoe/spin.h"

namespace fmoe {

namespace {

using Clock = Device::Clock;

constexpr auto kLinkWake = std::chrono::seconds(1);

// FNV-1a with words for bytes.
std::uint64_t mix(std::uint64_t checksum, int value) {
    return (checksum ^ static_cast<std::uint64_t>(value)) * 1099511628211U;
}

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

Clock::time_point after(double seconds) {
    return Clock::now() +
           std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

TransferCounters difference(const TransferCounters& now, const TransferCounters& before) {
    return {now.bytes_on_demand - before.bytes_on_demand,
            now.bytes_prefetched - before.bytes_prefetched,
            now.bytes_prefetch_used - before.bytes_prefetch_used,
            now.bytes_prefetch_wasted - before.bytes_prefetch_wasted,
            now.copies - before.copies,
            now.cancelled - before.cancelled,
            now.preemptions - before.preemptions};
}

}  // namespace

Offloader::Offloader(std::shared_ptr<const HostStore> store, std::unique_ptr<Device> device,
                     PolicyParts parts, const OffloaderOptions& options)
    : store_(std::move(store)),
      device_(std::move(device)),
      options_(options),
      planner_(options.geometry, device_->num_slots(), std::move(parts.policy),
               options.prefetch_depth),
      transfers_(*device_, store_->blobs(), options.geometry.size(), options.chunk_bytes),
      is_needed_(static_cast<std::size_t>(options.geometry.num_experts), 0),
      predictor_(std::move(parts.predictor)),
      contexts_(options.geometry, options.queue_capacity) {
    require(store_->is_complete(), "offloader: the host store is not sealed");
    require(store_->num_blobs() == options_.geometry.size(),
            "offloader: the host store holds " + std::to_string(store_->num_blobs()) +
                " blobs, the model has " + std::to_string(options_.geometry.size()) + " experts");
    require(options_.timeout_s > 0, "offloader: timeout_s must be positive");
    require(options_.num_shards > 0 && options_.shard >= 0 && options_.shard < options_.num_shards,
            "offloader: shard must lie between 0 and num_shards - 1");
    is_synchronous_ = predictor_ != nullptr && predictor_->is_synchronous();
    planner_.begin();
    settle();
    link_ = std::thread([this] { guard(&Offloader::link_loop); });
    if (predictor_ != nullptr && !is_synchronous_)
        matcher_ = std::thread([this] { guard(&Offloader::matcher_loop); });
}

Offloader::~Offloader() { close(); }

void Offloader::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closed_ = true;
        wake_waiters();
    }
    contexts_.close();
    device_->interrupt();
    if (link_.joinable()) link_.join();
    if (matcher_.joinable()) matcher_.join();
}

// ---- inference thread ----

void Offloader::begin_iteration(const IterationContext& given) {
    require(given.num_rows > 0, "offloader: an iteration needs at least one row");
    IterationContext context = given;
    {
        const std::lock_guard lock(mutex_);
        check_usable();
        require(!in_iteration_, "offloader: end or abort the iteration in progress first");
        in_iteration_ = true;
        is_queued_ = false;
        gate_ = {};
        stats_ = {};
        stats_.rows.resize(static_cast<std::size_t>(given.num_rows));
        seen_.assign(stats_.rows.size() * is_needed_.size(), 0);
        stamp_ = 0;
        has_prefill_ = std::find(given.phases, given.phases + given.num_rows, Phase::prefill) !=
                       given.phases + given.num_rows;
        context.iteration = ++iteration_;
        planner_.iteration_started({iteration_, given.num_rows, has_prefill_,
                                    (has_prefill_ ? prefill_layer_s_ : decode_layer_s_).value(),
                                    load_time()});
        settle();
    }
    if (predictor_ == nullptr) return;
    contexts_.begin_iteration(context);
    is_queued_ = true;
    if (is_synchronous_) predict_now();
}

void Offloader::request(int layer, std::span<const std::int32_t> chosen,
                        std::span<const std::int32_t> row_of_token) {
    const std::lock_guard lock(mutex_);
    check_in_iteration();
    require(layer >= 0 && layer < options_.geometry.num_layers,
            "offloader: layer " + std::to_string(layer) + " of " +
                std::to_string(options_.geometry.num_layers));
    require(gate_.undelivered.empty(), "offloader: layer " + std::to_string(layer) +
                                           " asks while experts of layer " +
                                           std::to_string(gate_.layer) + " were not waited for");
    collect_needed(layer, chosen, row_of_token);
    const double now = now_s();
    measure_layer(layer, now);
    gate_.layer = layer;
    gate_.undelivered = needed_;
    gate_.delivered.clear();
    gate_.has_begun = false;
    gate_.asked_at = now;
    gate_.stall_s = 0;
    for (int expert : needed_) {
        count(stats_.total, expert);
        transfers_.gate_asked(expert);
    }
    const double backlog =
        static_cast<double>(transfers_.bytes_outstanding()) * transfers_.seconds_per_byte();
    planner_.gate_requested({layer, needed_, backlog});
    settle();
}

void Offloader::collect_needed(int layer, std::span<const std::int32_t> chosen,
                               std::span<const std::int32_t> row_of_token) {
    const Geometry& geometry = options_.geometry;
    const std::size_t num_tokens = row_of_token.size();
    require(num_tokens > 0 && chosen.size() % num_tokens == 0,
            "offloader: chosen must be [T, K] and row_of_token [T]");
    const std::size_t num_chosen = chosen.size() / num_tokens;
    ++stamp_;
    std::fill(is_needed_.begin(), is_needed_.end(), 0);
    for (std::size_t token = 0; token < num_tokens; ++token) {
        const std::int32_t row = row_of_token[token];
        require(
            row >= 0 && row < static_cast<std::int32_t>(stats_.rows.size()),
            "offloader: row " + std::to_string(row) + " of " + std::to_string(stats_.rows.size()));
        for (std::size_t k = 0; k < num_chosen; ++k) {
            const std::int32_t expert = chosen[token * num_chosen + k];
            if (expert < 0 || expert >= geometry.num_experts) continue;
            const int index = geometry.index(layer, expert);
            stats_.routing_checksum = mix(stats_.routing_checksum, index);
            if (index % options_.num_shards != options_.shard) continue;
            is_needed_[expert] = 1;
            std::uint32_t& seen = seen_[static_cast<std::size_t>(row) * is_needed_.size() +
                                        static_cast<std::size_t>(expert)];
            if (std::exchange(seen, stamp_) != stamp_) count(stats_.rows[row], index);
        }
    }
    needed_.clear();
    for (int expert = 0; expert < geometry.num_experts; ++expert)
        if (is_needed_[expert]) needed_.push_back(geometry.index(layer, expert));
}

void Offloader::count(GateOutcome& outcome, int expert) const {
    switch (planner_.cache().residency(expert)) {
        case Residency::ready:
            ++outcome.hits;
            break;
        case Residency::loading:
            ++outcome.late;
            break;
        case Residency::absent:
            ++outcome.misses;
            break;
    }
}

void Offloader::measure_layer(int layer, double now) {
    if (gate_.layer < 0 || layer != gate_.layer + 1) return;
    RunningMedian& median = has_prefill_ ? prefill_layer_s_ : decode_layer_s_;
    median.add(now - gate_.asked_at - gate_.stall_s);
}

bool Offloader::try_wait(std::vector<Delivery>& out) {
    const std::lock_guard lock(mutex_);
    check_in_iteration();
    deliver(out);
    return !out.empty() || gate_.undelivered.empty();
}

void Offloader::wait(std::vector<Delivery>& out) {
    std::unique_lock lock(mutex_);
    const double began = now_s();
    const auto deadline = after(options_.timeout_s);
    while (!is_served(out, deadline)) progress_.wait_until(lock, deadline);
    count_stall(now_s() - began);
}

// Between looks it spins on a counter, not on the mutex, which the link thread needs.
void Offloader::poll(std::vector<Delivery>& out) {
    const auto deadline = after(options_.timeout_s);
    double began = 0;
    while (true) {
        const std::uint64_t seen = num_wakes_.load(std::memory_order_acquire);
        {
            const std::lock_guard lock(mutex_);
            const bool is_over = is_served(out, deadline);
            if (began == 0 && is_over) return;
            if (is_over) return count_stall(now_s() - began);
            if (began == 0) began = now_s();
        }
        while (num_wakes_.load(std::memory_order_acquire) == seen && Clock::now() < deadline)
            relax();
    }
}

bool Offloader::is_served(std::vector<Delivery>& out, Clock::time_point deadline) {
    check_in_iteration();
    deliver(out);
    if (!out.empty() || gate_.undelivered.empty()) return true;
    check_progress(deadline);
    return false;
}

void Offloader::wake_waiters() {
    num_wakes_.fetch_add(1, std::memory_order_release);
    progress_.notify_all();
}

void Offloader::count_stall(double seconds) {
    gate_.stall_s += seconds;
    stats_.stall_s += seconds;
    stall_s_ += seconds;
}

void Offloader::deliver(std::vector<Delivery>& out) {
    out.clear();
    if (!gate_.has_begun && planner_.is_held()) return;
    const ExpertCache& cache = planner_.cache();
    std::erase_if(gate_.undelivered, [&](int expert) {
        if (!cache.is_ready(expert)) return false;
        out.push_back({options_.geometry.expert_of(expert), cache.slot(expert)});
        gate_.delivered.push_back(expert);
        return true;
    });
    if (!out.empty()) gate_.has_begun = true;
}

bool Offloader::needs_release() const {
    return planner_.num_waiting() > 0 && planner_.num_on_demand_in_flight() == 0 &&
           !gate_.delivered.empty();
}

void Offloader::check_progress(Clock::time_point deadline) const {
    require(!needs_release(),
            "offloader: every slot is taken by this layer; release what was computed before "
            "waiting for the next wave");
    if (Clock::now() >= deadline) throw TimeoutError(describe_wait());
}

std::string Offloader::describe_wait() const {
    std::string experts;
    for (int expert : gate_.undelivered)
        experts +=
            (experts.empty() ? "" : ", ") + std::to_string(options_.geometry.expert_of(expert));
    return "layer " + std::to_string(gate_.layer) + " waited " +
           std::to_string(options_.timeout_s) + " s for experts " + experts + "; " +
           std::to_string(transfers_.bytes_outstanding()) +
           " bytes are outstanding on the link; raise transfer_timeout_s if the link is slow";
}

void Offloader::release(std::span<const int> experts) {
    const std::lock_guard lock(mutex_);
    check_in_iteration();
    for (int expert : experts) {
        const int index = options_.geometry.index(std::max(gate_.layer, 0), expert);
        const auto it = std::find(gate_.delivered.begin(), gate_.delivered.end(), index);
        require(it != gate_.delivered.end(), "offloader: expert " + std::to_string(expert) +
                                                 " of layer " + std::to_string(gate_.layer) +
                                                 " is not delivered, or released already");
        gate_.delivered.erase(it);
        planner_.release(index);
    }
    settle();
}

void Offloader::publish_gate(const GateObservation& gate) {
    {
        const std::lock_guard lock(mutex_);
        check_in_iteration();
        require(gate.num_rows == static_cast<int>(stats_.rows.size()),
                "offloader: a gate of " + std::to_string(gate.num_rows) +
                    " rows in an iteration of " + std::to_string(stats_.rows.size()));
    }
    if (predictor_ == nullptr) return;
    contexts_.publish_gate(gate);
    if (is_synchronous_) predict_now();
}

IterationStats Offloader::end_iteration() {
    {
        const std::lock_guard lock(mutex_);
        check_in_iteration();
        require(gate_.undelivered.empty(), "offloader: experts of layer " +
                                               std::to_string(gate_.layer) +
                                               " were not waited for; abort the iteration instead");
        in_iteration_ = false;
        planner_.iteration_ended();
        settle();
        stats_.transfers = difference(transfers_.counters(), transfers_before_);
        stats_.score = {score_.count - score_before_.count, score_.sum - score_before_.sum};
        transfers_before_ = transfers_.counters();
        score_before_ = score_;
        stats_.num_maps = num_maps_;
    }
    if (predictor_ != nullptr) {
        contexts_.end_iteration();
        if (is_synchronous_) predict_now();
    }
    return std::move(stats_);
}

void Offloader::abort_iteration() {
    {
        const std::lock_guard lock(mutex_);
        check_usable();
        if (!in_iteration_) return;
        in_iteration_ = false;
        gate_ = {};
        planner_.release_all();
        settle();
    }
    if (!is_queued_) return;
    contexts_.abandon_iteration();
    if (is_synchronous_) predict_now();
}

void Offloader::request_ended(std::uint64_t request) {
    {
        const std::lock_guard lock(mutex_);
        check_usable();
        planner_.request_ended(request);
        settle();
    }
    if (predictor_ == nullptr) return;
    contexts_.request_ended(request);
    if (is_synchronous_) predict_now();
}

void Offloader::wait_until_idle() {
    std::unique_lock lock(mutex_);
    const auto deadline = after(options_.timeout_s);
    while (true) {
        check_usable();
        if (transfers_.is_idle()) return;
        if (Clock::now() >= deadline) throw TimeoutError(describe_wait());
        progress_.wait_until(lock, deadline);
    }
}

void Offloader::borrow_maps(double timeout_s) {
    {
        const std::lock_guard lock(mutex_);
        check_usable();
    }
    require(map_store() != nullptr, "offloader: the policy learns no expert maps");
    if (!contexts_.pause(after(timeout_s)))
        throw TimeoutError("the iteration in progress did not end within " +
                           std::to_string(timeout_s) + " s; its maps cannot be borrowed now");
}

void Offloader::return_maps() {
    count_maps();
    contexts_.resume();
}

OffloaderCounters Offloader::counters() {
    const std::lock_guard lock(mutex_);
    check_usable();
    return {planner_.counters(), transfers_.counters(),   stall_s_,
            iteration_,          contexts_.num_dropped(), score_};
}

std::vector<std::uint8_t> Offloader::resident() {
    const std::lock_guard lock(mutex_);
    check_usable();
    std::vector<std::uint8_t> found;
    for (int expert = 0; expert < options_.geometry.size(); ++expert)
        found.push_back(planner_.cache().is_ready(expert) ? 1 : 0);
    return found;
}

void Offloader::check_integrity() {
    const std::lock_guard lock(mutex_);
    check_usable();
    planner_.check_integrity();
    transfers_.check_integrity();
    const bool is_planner_idle =
        planner_.num_on_demand_in_flight() + planner_.num_prefetches_in_flight() == 0;
    FMOE_CHECK(is_planner_idle || !transfers_.is_idle());
}

// ---- under the mutex ----

void Offloader::check_usable() const {
    if (!failure_.empty()) throw EngineError(failure_);
    if (is_closed_) throw EngineError("offloader: used after close()");
}

void Offloader::check_in_iteration() const {
    check_usable();
    require(in_iteration_, "offloader: no iteration is in progress; begin one first");
}

void Offloader::settle() {
    for (const LinkCommand& command : planner_.take_commands()) transfers_.execute(command);
    transfers_.feed(now_s());
}

double Offloader::load_time() const {
    return transfers_.seconds_per_byte() * static_cast<double>(store_->blob_bytes());
}

// ---- other threads ----

void Offloader::guard(void (Offloader::*loop)()) {
    try {
        (this->*loop)();
    } catch (const std::exception& error) {
        const std::string message = std::string("offloader: a thread failed: ") + error.what();
        const std::lock_guard lock(mutex_);
        if (failure_.empty()) failure_ = message;
        wake_waiters();
    }
}

void Offloader::link_loop() {
    std::vector<std::uint64_t> done;
    while (true) {
        done.clear();
        device_->wait_done(done, Clock::now() + kLinkWake);
        const std::lock_guard lock(mutex_);
        if (is_closed_) return;
        for (std::uint64_t ticket : done) {
            finished_.clear();
            transfers_.chunk_done(ticket, now_s(), finished_);
            // One at a time: the policy may answer a finished copy by cancelling another.
            for (int expert : finished_) planner_.copy_done(expert);
            settle();
        }
        if (!done.empty()) wake_waiters();
    }
}

void Offloader::matcher_loop() {
    std::vector<Prediction> predictions;
    while (contexts_.consume(*predictor_, predictions)) {
        count_maps();
        post(predictions);
    }
}

void Offloader::predict_now() {
    while (contexts_.try_consume(*predictor_, predictions_)) {
        count_maps();
        post(predictions_);
    }
}

void Offloader::count_maps() {
    if (const MapStore* maps = predictor_->store()) num_maps_ = maps->size();
}

void Offloader::post(std::vector<Prediction>& predictions) {
    if (predictions.empty()) return;
    const std::lock_guard lock(mutex_);
    for (const Prediction& prediction : predictions) {
        score_.count += prediction.score.size();
        score_.sum += std::accumulate(prediction.score.begin(), prediction.score.end(), 0.0);
        planner_.predicted(prediction);
    }
    predictions.clear();
    settle();
    wake_waiters();  // a hold may have lapsed
}

}  // namespace fmoe
