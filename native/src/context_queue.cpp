#include "fmoe/context_queue.h"

#include <utility>

namespace fmoe {

namespace {

template <class T>
std::vector<T> copy_of(const T* data, std::size_t count) {
    return data == nullptr ? std::vector<T>() : std::vector<T>(data, data + count);
}

template <class T>
const T* data_or_null(const std::vector<T>& values) {
    return values.empty() ? nullptr : values.data();
}

}  // namespace

ContextQueue::ContextQueue(const Geometry& geometry, int capacity)
    : geometry_(geometry), capacity_(static_cast<std::size_t>(capacity)) {
    require(capacity >= 2, "context queue: a capacity of at least 2 iterations is needed");
}

void ContextQueue::begin_iteration(const IterationContext& context) {
    auto iteration = std::make_unique<Iteration>();
    const auto num_rows = static_cast<std::size_t>(context.num_rows);
    iteration->number = context.iteration;
    iteration->requests = copy_of(context.requests, num_rows);
    iteration->phases = copy_of(context.phases, num_rows);
    iteration->token_ids = copy_of(context.token_ids, num_rows);
    iteration->embedding_size = context.embedding_size;
    iteration->embeddings =
        copy_of(context.embeddings, num_rows * static_cast<std::size_t>(context.embedding_size));

    const std::lock_guard lock(mutex_);
    iteration->requests_ended_before = std::exchange(requests_ended_, {});
    iterations_.push_back(std::move(iteration));
    if (iterations_.size() > capacity_) {
        const auto oldest = iterations_.begin() + (iterations_.front()->has_begun ? 1 : 0);
        auto& inherited = (*std::next(oldest))->requests_ended_before;
        const auto& ended = (*oldest)->requests_ended_before;
        inherited.insert(inherited.begin(), ended.begin(), ended.end());
        iterations_.erase(oldest);
        ++num_dropped_;
    }
    changed_.notify_all();
}

void ContextQueue::publish_gate(const GateObservation& gate) {
    const auto count =
        static_cast<std::size_t>(gate.num_rows) * static_cast<std::size_t>(geometry_.num_experts);
    Gate copy{gate.layer, copy_of(gate.probs, count), copy_of(gate.chosen, count),
              copy_of(gate.speculative, count)};
    const std::lock_guard lock(mutex_);
    FMOE_CHECK(!iterations_.empty() && !iterations_.back()->is_over);
    iterations_.back()->gates.push_back(std::move(copy));
    changed_.notify_all();
}

void ContextQueue::end_iteration() {
    const std::lock_guard lock(mutex_);
    FMOE_CHECK(!iterations_.empty() && !iterations_.back()->is_over);
    iterations_.back()->is_over = true;
    if (iterations_.back()->gates.size() != static_cast<std::size_t>(geometry_.num_layers))
        iterations_.back()->is_abandoned = true;
    changed_.notify_all();
}

void ContextQueue::abandon_iteration() {
    const std::lock_guard lock(mutex_);
    FMOE_CHECK(!iterations_.empty() && !iterations_.back()->is_over);
    iterations_.back()->is_over = true;
    iterations_.back()->is_abandoned = true;
    changed_.notify_all();
}

void ContextQueue::request_ended(std::uint64_t request) {
    const std::lock_guard lock(mutex_);
    requests_ended_.push_back(request);
    changed_.notify_all();
}

void ContextQueue::close() {
    const std::lock_guard lock(mutex_);
    is_closed_ = true;
    changed_.notify_all();
}

std::uint64_t ContextQueue::num_dropped() const {
    const std::lock_guard lock(mutex_);
    return num_dropped_;
}

bool ContextQueue::pause(std::chrono::steady_clock::time_point deadline) {
    std::unique_lock lock(mutex_);
    FMOE_CHECK(!is_paused_);
    is_paused_ = changed_.wait_until(lock, deadline,
                                     [this] { return !is_handling_ && is_between_iterations(); });
    return is_paused_;
}

void ContextQueue::resume() {
    const std::lock_guard lock(mutex_);
    is_paused_ = false;
    changed_.notify_all();
}

bool ContextQueue::is_between_iterations() const {
    return iterations_.empty() || !iterations_.front()->has_begun;
}

bool ContextQueue::has_event() const {
    if (is_paused_) return false;
    if (iterations_.empty()) return !requests_ended_.empty();
    const Iteration& front = *iterations_.front();
    return !front.has_begun || front.is_over || front.gates_read < front.gates.size();
}

bool ContextQueue::consume(Predictor& predictor, std::vector<Prediction>& out) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_closed_ || has_event(); });
    if (is_closed_) return false;
    handle_event(std::move(lock), predictor, out);
    return true;
}

bool ContextQueue::try_consume(Predictor& predictor, std::vector<Prediction>& out) {
    std::unique_lock lock(mutex_);
    if (is_closed_ || !has_event()) return false;
    handle_event(std::move(lock), predictor, out);
    return true;
}

void ContextQueue::handle_event(std::unique_lock<std::mutex> lock, Predictor& predictor,
                                std::vector<Prediction>& out) {
    is_handling_ = true;
    const auto unlocked = [&](auto call) {
        lock.unlock();
        call();
        lock.lock();
    };
    if (iterations_.empty()) {
        const auto ended = std::exchange(requests_ended_, {});
        unlocked([&] {
            for (std::uint64_t request : ended) predictor.request_ended(request);
        });
    } else if (Iteration& front = *iterations_.front(); !front.has_begun) {
        // The front stays where it is while it has begun: only this thread removes it.
        front.has_begun = true;
        unlocked([&] { begin(front, predictor, out); });
    } else if (front.gates_read < front.gates.size() && !front.is_abandoned) {
        const Gate& gate = front.gates[front.gates_read++];
        unlocked([&] { observe(front, gate, predictor, out); });
    } else {
        const std::unique_ptr<Iteration> over = std::move(iterations_.front());
        iterations_.pop_front();
        unlocked([&] {
            if (!over->is_abandoned) predictor.iteration_ended(out);
        });
    }
    is_handling_ = false;
    changed_.notify_all();
}

void ContextQueue::begin(Iteration& iteration, Predictor& predictor,
                         std::vector<Prediction>& out) const {
    for (std::uint64_t request : iteration.requests_ended_before) predictor.request_ended(request);
    IterationContext context;
    context.iteration = iteration.number;
    context.num_rows = static_cast<int>(iteration.requests.size());
    context.requests = data_or_null(iteration.requests);
    context.phases = data_or_null(iteration.phases);
    context.token_ids = data_or_null(iteration.token_ids);
    context.embeddings = data_or_null(iteration.embeddings);
    context.embedding_size = iteration.embedding_size;
    predictor.iteration_started(context, out);
}

void ContextQueue::observe(const Iteration& iteration, const Gate& gate, Predictor& predictor,
                           std::vector<Prediction>& out) const {
    GateObservation observation;
    observation.layer = gate.layer;
    observation.num_rows = static_cast<int>(iteration.requests.size());
    observation.probs = data_or_null(gate.probs);
    observation.chosen = data_or_null(gate.chosen);
    observation.speculative = data_or_null(gate.speculative);
    predictor.gate_observed(observation, out);
}

}  // namespace fmoe
