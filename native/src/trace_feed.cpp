#include "fmoe/trace_feed.h"

namespace fmoe {

namespace {

constexpr int kStandInSize = 128;

std::uint64_t split_mix(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

TraceFeed::TraceFeed(const TraceView& trace)
    : trace_(trace), embedding_size_(embedding_size(trace)) {}

int TraceFeed::embedding_size(const TraceView& trace) {
    if (trace.embeddings) return trace.embedding_size;
    return trace.token_ids != nullptr ? kStandInSize : 0;
}

IterationContext TraceFeed::context(std::uint64_t iteration, std::span<const ScheduledRow> rows) {
    requests_.clear();
    phases_.clear();
    token_ids_.clear();
    embeddings_.assign(rows.size() * embedding_size_, 0.0f);
    for (std::size_t r = 0; r < rows.size(); ++r) {
        const ScheduledRow& row = rows[r];
        const bool has_id = trace_.token_ids != nullptr && row.num_tokens == 1;
        requests_.push_back(row.request);
        phases_.push_back(row.is_prefill ? Phase::prefill : Phase::decode);
        token_ids_.push_back(has_id ? trace_.token_ids[row.first_token] : -1);
        for (int i = 0; i < row.num_tokens && embedding_size_ > 0; ++i)
            add_embedding(row.first_token + i, 1.0f / static_cast<float>(row.num_tokens),
                          embeddings_.data() + r * embedding_size_);
    }
    return {iteration,         static_cast<int>(rows.size()),
            requests_.data(),  phases_.data(),
            token_ids_.data(), embedding_size_ > 0 ? embeddings_.data() : nullptr,
            embedding_size_};
}

GateObservation TraceFeed::gate(std::span<const ScheduledRow> rows, int layer) {
    const int J = trace_.geometry.num_experts;
    // The last layer has no next gate to speculate on.
    const bool has_speculative = trace_.spec_probs && layer + 1 < trace_.geometry.num_layers;
    probs_.assign(rows.size() * J, 0.0f);
    chosen_.assign(rows.size() * J, 0);
    if (has_speculative) speculative_.assign(rows.size() * J, 0.0f);
    for (std::size_t r = 0; r < rows.size(); ++r) {
        const float scale = 1.0f / static_cast<float>(rows[r].num_tokens);
        for (int i = 0; i < rows[r].num_tokens; ++i) {
            const std::size_t token = rows[r].first_token + i;
            add_gate(token, layer, scale, probs_.data() + r * J);
            const std::size_t begin = trace_.choice(token, layer);
            for (int k = 0; k < trace_.geometry.top_k; ++k)
                chosen_[r * J + trace_.expert_ids[begin + k]] = 1;
            if (has_speculative)
                add_speculative(token, layer + 1, scale, speculative_.data() + r * J);
        }
    }
    return {layer, static_cast<int>(rows.size()), probs_.data(), chosen_.data(),
            has_speculative ? speculative_.data() : nullptr};
}

void TraceFeed::add_embedding(std::size_t token, float scale, float* out) const {
    if (trace_.embeddings) {
        for (int i = 0; i < embedding_size_; ++i)
            out[i] += scale * trace_.embeddings[token * embedding_size_ + i];
        return;
    }
    std::uint64_t signs = 0;
    for (int i = 0; i < embedding_size_; ++i) {
        if (i % 64 == 0)
            signs = split_mix(static_cast<std::uint64_t>(trace_.token_ids[token]) * 2 + i / 64);
        out[i] += (signs >> (i % 64) & 1) != 0 ? scale : -scale;
    }
}

void TraceFeed::add_gate(std::size_t token, int layer, float scale, float* out) const {
    if (trace_.probs) {
        const std::size_t begin = trace_.distribution(token, layer);
        for (int j = 0; j < trace_.geometry.num_experts; ++j)
            out[j] += scale * trace_.probs[begin + j];
        return;
    }
    const std::size_t begin = trace_.choice(token, layer);
    float sum = 0;
    for (int k = 0; k < trace_.geometry.top_k; ++k) sum += trace_.weights[begin + k];
    if (sum <= 0) return;  // all weights 0: the gate says nothing
    for (int k = 0; k < trace_.geometry.top_k; ++k)
        out[trace_.expert_ids[begin + k]] += scale * trace_.weights[begin + k] / sum;
}

void TraceFeed::add_speculative(std::size_t token, int layer, float scale, float* out) const {
    const std::size_t begin = trace_.distribution(token, layer);
    for (int j = 0; j < trace_.geometry.num_experts; ++j)
        out[j] += scale * trace_.spec_probs[begin + j];
}

}  // namespace fmoe
