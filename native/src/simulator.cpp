#include "fmoe/simulator.h"

#include <algorithm>
#include <string>
#include <utility>

namespace fmoe {

namespace {

// What is due this close to a moment happens at it: sums of load times are not exact.
constexpr double kTolerance = 1e-9;
constexpr double kLayerTime = 1.0;

}  // namespace

Simulator::Simulator(const TraceView& trace, const SimulatorOptions& options,
                     std::unique_ptr<Policy> policy, std::unique_ptr<Predictor> predictor)
    : trace_(trace),
      options_(options),
      planner_(trace.geometry, options.num_slots, std::move(policy), options.prefetch_depth),
      predictor_(std::move(predictor)),
      link_(options.load_time),
      needed_(trace_),
      feed_(trace_),
      recall_(trace.geometry) {
    require(options.batch >= 1,
            "simulator: batch must be at least 1, got " + std::to_string(options.batch));
    require(options.prediction_delay >= 0, "simulator: prediction_delay must be 0 or more, got " +
                                               std::to_string(options.prediction_delay));
}

void Simulator::warm_up(std::span<const Sequence> sequences) {
    if (predictor_ == nullptr) return;
    const Schedule schedule(trace_, sequences, 1, num_requests_);
    num_requests_ += sequences.size();
    for (std::size_t i = 0; i < schedule.num_iterations(); ++i) {
        const auto rows = schedule.rows(i);
        made_.clear();
        predictor_->iteration_started(feed_.context(++iteration_, rows), made_);
        for (int layer = 0; layer < trace_.geometry.num_layers; ++layer) {
            made_.clear();
            predictor_->gate_observed(feed_.gate(rows, layer), made_);
        }
        predictor_->iteration_ended(made_);
        for (const ScheduledRow& row : rows)
            if (row.is_last) predictor_->request_ended(row.request);
    }
    made_.clear();
}

void Simulator::run(std::span<const Sequence> sequences) {
    const Schedule schedule(trace_, sequences, options_.batch, num_requests_);
    num_requests_ += sequences.size();
    for (std::size_t i = 0; i < schedule.num_iterations(); ++i) run_iteration(schedule.rows(i));
    num_steps_ += schedule.num_iterations();
    num_tokens_ += schedule.num_rows();
}

void Simulator::run_iteration(std::span<const ScheduledRow> rows) {
    const bool has_prefill =
        std::any_of(rows.begin(), rows.end(), [](const ScheduledRow& r) { return r.is_prefill; });
    const double begin = now_;
    in_flight_.clear();  // the planner would drop what was made for an iteration that is over
    recall_.iteration_started(rows);
    planner_.iteration_started(
        {++iteration_, static_cast<int>(rows.size()), has_prefill, kLayerTime, options_.load_time});
    pump_commands();
    if (predictor_ != nullptr) {
        predictor_->iteration_started(feed_.context(iteration_, rows), made_);
        publish_predictions();
    }
    for (int layer = 0; layer < trace_.geometry.num_layers; ++layer) run_layer(rows, layer);
    if (!has_prefill) {
        decode_tokens_ += rows.size();
        decode_time_ += now_ - begin;
    }
    planner_.iteration_ended();
    pump_commands();
    if (predictor_ != nullptr) {
        predictor_->iteration_ended(made_);
        publish_predictions();
    }
    end_requests(rows);
}

void Simulator::run_layer(std::span<const ScheduledRow> rows, int layer) {
    const std::span<const int> needed = needed_.of(rows, layer);
    planner_.gate_requested({layer, needed, link_.backlog()});
    pump_commands();
    if (predictor_ != nullptr) {
        const GateObservation gate = feed_.gate(rows, layer);
        recall_.gate_observed(rows, gate);
        predictor_->gate_observed(gate, made_);
        publish_predictions();
    }
    wait_for_layer(needed);
    compute_layer();
}

void Simulator::end_requests(std::span<const ScheduledRow> rows) {
    for (const ScheduledRow& row : rows) {
        if (!row.is_last) continue;
        if (predictor_ != nullptr) predictor_->request_ended(row.request);
        planner_.request_ended(row.request);
        pump_commands();
    }
}

void Simulator::wait_for_layer(std::span<const int> needed) {
    const double begin = now_;
    while (!is_layer_ready()) {
        if (planner_.num_waiting() > 0 && planner_.num_on_demand_in_flight() == 0) {
            release_loaded(needed);
        } else {
            FMOE_CHECK(next_event() < SimulatedLink::kNever);  // else the layer waits for ever
            step_to(next_event());
        }
    }
    stall_ += now_ - begin;
}

void Simulator::compute_layer() {
    const double end = now_ + kLayerTime;
    while (next_event() <= end + kTolerance) step_to(std::min(next_event(), end));
    pass_time(end);
    compute_ += kLayerTime;
}

bool Simulator::is_layer_ready() const noexcept {
    const bool waits_for_prediction =
        predictor_ != nullptr && predictor_->is_synchronous() && !in_flight_.empty();
    return planner_.num_waiting() == 0 && planner_.num_on_demand_in_flight() == 0 &&
           !planner_.is_held() && !waits_for_prediction;
}

// The next wave: what is loaded has been computed and gives its slots to what waits.
void Simulator::release_loaded(std::span<const int> needed) {
    for (int expert : needed) {
        const ExpertCache& cache = planner_.cache();
        if (cache.is_ready(expert) && cache.is_pinned(expert)) planner_.release(expert);
    }
    pump_commands();
}

double Simulator::next_event() const noexcept {
    const double completion = now_ + link_.time_to_completion();
    return in_flight_.empty() ? completion : std::min(completion, in_flight_.front().due);
}

// `time` is that of the next event, or within the tolerance of it.
void Simulator::step_to(double time) {
    pass_time(time);
    if (!in_flight_.empty() && in_flight_.front().due <= now_ + kTolerance) {
        const Prediction& prediction = *in_flight_.front().prediction;
        in_flight_.pop_front();
        deliver(prediction);
    } else {
        planner_.copy_done(link_.take_completed());
        pump_commands();
    }
}

void Simulator::pass_time(double until) {
    if (until <= now_) return;
    link_.advance(until - now_);
    now_ = until;
}

void Simulator::publish_predictions() {
    for (Prediction& made : made_) {
        const Prediction& prediction = recall_.add(std::move(made));
        if (options_.prediction_delay == 0)
            deliver(prediction);
        else
            in_flight_.push_back({now_ + options_.prediction_delay, &prediction});
    }
    made_.clear();
}

void Simulator::deliver(const Prediction& prediction) {
    planner_.predicted(prediction);
    pump_commands();
}

void Simulator::pump_commands() {
    for (const LinkCommand& command : planner_.take_commands()) link_.carry_out(command);
}

SimulationResult Simulator::result() const {
    return {num_steps_,      num_tokens_,    now_,         compute_,
            stall_,          decode_tokens_, decode_time_, planner_.counters(),
            recall_.counts()};
}

}  // namespace fmoe
