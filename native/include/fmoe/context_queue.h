// fmoe/context_queue.h: what inference publishes for the matcher. Publishing never waits: when more
// than `capacity` iterations are queued, the oldest that the matcher has not begun is dropped
// whole, so the predictor sees either all of an iteration or nothing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "fmoe/predictor.h"

namespace fmoe {

// Thread-safe: one publisher, one consumer.
class ContextQueue {
public:
    // At least 2: one being read and one being written.
    ContextQueue(const Geometry& geometry, int capacity);

    // Copies everything that the arguments point to.
    void begin_iteration(const IterationContext& context);
    void publish_gate(const GateObservation& gate);
    // Learnt from only if every layer's gate was published.
    void end_iteration();
    // The step failed: the predictor hears nothing more of the iteration.
    void abandon_iteration();
    void request_ended(std::uint64_t request);
    void close();

    // Keeps the consumer between two iterations until resume(), publishing goes on. Waits for the
    // iteration that it has begun; false if that takes longer than the deadline.
    bool pause(std::chrono::steady_clock::time_point deadline);
    void resume();

    // Hands the next event to `predictor` outside the lock; waits for one. False once closed. What
    // it predicted is appended to `out`.
    bool consume(Predictor& predictor, std::vector<Prediction>& out);
    // As consume(), for a predictor in line: false where there is no event now.
    bool try_consume(Predictor& predictor, std::vector<Prediction>& out);

    // Iterations dropped because the matcher was behind.
    std::uint64_t num_dropped() const;

private:
    struct Gate {
        int layer;
        std::vector<float> probs;
        std::vector<std::uint8_t> chosen;
        std::vector<float> speculative;
    };
    struct Iteration {
        std::uint64_t number = 0;
        std::vector<std::uint64_t> requests;
        std::vector<Phase> phases;
        std::vector<std::int32_t> token_ids;
        std::vector<float> embeddings;
        int embedding_size = 0;
        std::deque<Gate> gates;  // appending moves no element
        std::vector<std::uint64_t> requests_ended_before;
        bool is_over = false;
        bool is_abandoned = false;
        bool has_begun = false;      // read side
        std::size_t gates_read = 0;  // read side
    };

    bool has_event() const;
    bool is_between_iterations() const;
    void handle_event(std::unique_lock<std::mutex> lock, Predictor& predictor,
                      std::vector<Prediction>& out);
    void begin(Iteration& iteration, Predictor& predictor, std::vector<Prediction>& out) const;
    void observe(const Iteration& iteration, const Gate& gate, Predictor& predictor,
                 std::vector<Prediction>& out) const;

    Geometry geometry_;
    std::size_t capacity_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::unique_ptr<Iteration>> iterations_;  // only the front may have begun
    std::vector<std::uint64_t> requests_ended_;          // after the last iteration queued
    std::uint64_t num_dropped_ = 0;
    bool is_closed_ = false;
    bool is_handling_ = false;  // the consumer is outside the lock
    bool is_paused_ = false;
};

}  // namespace fmoe
