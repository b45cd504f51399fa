#include "fmoe/context_queue.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{2, 3, 1};

// Writes down what it is told.
struct Recorder final : Predictor {
    std::string heard;

    void iteration_started(const IterationContext& context, std::vector<Prediction>&) override {
        heard += "s" + std::to_string(context.iteration);
    }
    void gate_observed(const GateObservation& gate, std::vector<Prediction>&) override {
        CHECK(gate.probs != nullptr && gate.speculative == nullptr);
        heard += "g" + std::to_string(gate.layer);
    }
    void iteration_ended(std::vector<Prediction>&) override { heard += "e "; }
    void request_ended(std::uint64_t request) override { heard += "r" + std::to_string(request); }
};

void begin(ContextQueue& queue, std::uint64_t iteration) {
    const std::uint64_t request = 1;
    const Phase phase = Phase::decode;
    const std::int32_t token = 2;
    IterationContext context;
    context.iteration = iteration;
    context.num_rows = 1;
    context.requests = &request;
    context.phases = &phase;
    context.token_ids = &token;
    queue.begin_iteration(context);
}

void gate(ContextQueue& queue, int layer) {
    const float probs[3] = {0.5F, 0.25F, 0.25F};
    queue.publish_gate({layer, 1, probs, nullptr, nullptr});
}

void iterate(ContextQueue& queue, std::uint64_t iteration) {
    begin(queue, iteration);
    gate(queue, 0);
    gate(queue, 1);
    queue.end_iteration();
}

std::string drain(ContextQueue& queue, Recorder& recorder) {
    std::vector<Prediction> predictions;
    while (queue.try_consume(recorder, predictions)) {
    }
    return std::exchange(recorder.heard, {});
}

void events_arrive_in_order() {
    ContextQueue queue(kGeometry, 4);
    Recorder recorder;
    iterate(queue, 1);
    queue.request_ended(7);
    iterate(queue, 2);
    queue.request_ended(8);
    CHECK(drain(queue, recorder) == "s1g0g1e r7s2g0g1e r8");
}

void whole_iterations_are_dropped_oldest_first_but_never_one_begun() {
    ContextQueue queue(kGeometry, 2);
    Recorder recorder;
    std::vector<Prediction> predictions;
    begin(queue, 1);
    CHECK(queue.try_consume(recorder, predictions));  // the matcher has begun it
    gate(queue, 0);
    gate(queue, 1);
    queue.end_iteration();
    for (std::uint64_t iteration = 2; iteration < 6; ++iteration) iterate(queue, iteration);
    CHECK(queue.num_dropped() == 3);
    CHECK(drain(queue, recorder) == "s1g0g1e s5g0g1e ");
}

void an_ended_request_outlives_the_iteration_dropped_before_it() {
    ContextQueue queue(kGeometry, 2);
    Recorder recorder;
    queue.request_ended(7);
    iterate(queue, 1);
    queue.request_ended(8);
    iterate(queue, 2);
    iterate(queue, 3);
    CHECK(drain(queue, recorder) == "r7r8s2g0g1e s3g0g1e ");
}

void an_abandoned_or_incomplete_iteration_is_not_learnt_from() {
    ContextQueue queue(kGeometry, 4);
    Recorder recorder;
    begin(queue, 1);
    gate(queue, 0);
    queue.end_iteration();
    begin(queue, 2);
    gate(queue, 0);
    gate(queue, 1);
    queue.abandon_iteration();
    iterate(queue, 3);
    CHECK(drain(queue, recorder) == "s1s2s3g0g1e ");
}

void close_wakes_the_consumer() {
    ContextQueue queue(kGeometry, 4);
    Recorder recorder;
    std::thread consumer([&] {
        std::vector<Prediction> predictions;
        while (queue.consume(recorder, predictions)) {
        }
    });
    iterate(queue, 1);
    queue.close();
    consumer.join();
}

void a_paused_queue_hands_out_nothing_and_takes_everything() {
    ContextQueue queue(kGeometry, 4);
    Recorder recorder;
    const auto now = [] { return std::chrono::steady_clock::now(); };
    begin(queue, 1);
    CHECK(queue.pause(now()));  // nothing has begun on the read side
    gate(queue, 0);
    CHECK(drain(queue, recorder).empty());
    queue.resume();
    CHECK(drain(queue, recorder) == "s1g0");
    CHECK(!queue.pause(now()));  // in the middle of an iteration
    gate(queue, 1);
    queue.end_iteration();
    CHECK(drain(queue, recorder) == "g1e ");
    CHECK(queue.pause(now()));
    queue.request_ended(3);
    iterate(queue, 2);
    CHECK(drain(queue, recorder).empty());
    queue.resume();
    CHECK(drain(queue, recorder) == "r3s2g0g1e ");
}

void a_borrower_never_meets_the_consumer() {
    ContextQueue queue(kGeometry, 4);
    Recorder recorder;
    std::thread consumer([&] {
        std::vector<Prediction> predictions;
        while (queue.consume(recorder, predictions)) {
        }
    });
    for (std::uint64_t iteration = 1; iteration <= 500; ++iteration) {
        iterate(queue, iteration);
        CHECK(queue.pause(std::chrono::steady_clock::now() + std::chrono::seconds(10)));
        recorder.heard.clear();  // a race here is seen by the thread sanitizer
        queue.resume();
    }
    queue.close();
    consumer.join();
}

}  // namespace

int main() {
    events_arrive_in_order();
    whole_iterations_are_dropped_oldest_first_but_never_one_begun();
    an_ended_request_outlives_the_iteration_dropped_before_it();
    an_abandoned_or_incomplete_iteration_is_not_learnt_from();
    close_wakes_the_consumer();
    a_paused_queue_hands_out_nothing_and_takes_everything();
    a_borrower_never_meets_the_consumer();
}
