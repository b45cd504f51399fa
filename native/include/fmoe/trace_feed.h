// fmoe/trace_feed.h: turns rows of a trace into what inference would publish to a predictor.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fmoe/predictor.h"
#include "fmoe/schedule.h"
#include "fmoe/trace_view.h"

namespace fmoe {

// A trace without full distributions gives the chosen experts' weights, scaled to a sum of 1, and 0
// for the others. A trace without embeddings gives each token id its own fixed vector of random
// signs: equal ids are equal, different ids nearly orthogonal. A prefill row is the mean over its
// tokens (paper, "Batches and prefill").
class TraceFeed {
public:
    explicit TraceFeed(const TraceView& trace);

    // h of the embeddings it publishes; 0 where the trace tells nothing of its tokens.
    static int embedding_size(const TraceView& trace);

    // Pointers in the results are valid until the next call of the same function.
    IterationContext context(std::uint64_t iteration, std::span<const ScheduledRow> rows);
    GateObservation gate(std::span<const ScheduledRow> rows, int layer);

private:
    void add_embedding(std::size_t token, float scale, float* out) const;
    void add_gate(std::size_t token, int layer, float scale, float* out) const;
    void add_speculative(std::size_t token, int layer, float scale, float* out) const;

    const TraceView& trace_;
    int embedding_size_;
    std::vector<std::uint64_t> requests_;
    std::vector<Phase> phases_;
    std::vector<std::int32_t> token_ids_;
    std::vector<float> embeddings_;
    std::vector<float> probs_;
    std::vector<std::uint8_t> chosen_;
    std::vector<float> speculative_;
};

}  // namespace fmoe
