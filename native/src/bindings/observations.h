// What inference publishes, in arrays that Python may keep: the core's structs only point.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/predictor.h"

namespace fmoe::bindings {

struct OwnContext {
    std::uint64_t iteration = 0;
    std::vector<std::uint64_t> requests;
    std::vector<Phase> phases;
    std::vector<std::int32_t> token_ids;
    std::vector<float> embeddings;  // empty: none
    int embedding_size = 0;

    static OwnContext copy_of(const IterationContext& context) {
        const auto rows = static_cast<std::size_t>(context.num_rows);
        OwnContext own;
        own.iteration = context.iteration;
        own.requests.assign(context.requests, context.requests + rows);
        own.phases.assign(rows, Phase::decode);
        if (context.phases != nullptr) own.phases.assign(context.phases, context.phases + rows);
        own.token_ids.assign(rows, -1);
        if (context.token_ids != nullptr)
            own.token_ids.assign(context.token_ids, context.token_ids + rows);
        if (context.embeddings != nullptr) {
            own.embedding_size = context.embedding_size;
            own.embeddings.assign(
                context.embeddings,
                context.embeddings + rows * static_cast<std::size_t>(context.embedding_size));
        }
        return own;
    }

    IterationContext view() const {
        return {iteration,        static_cast<int>(requests.size()),
                requests.data(),  phases.data(),
                token_ids.data(), embeddings.empty() ? nullptr : embeddings.data(),
                embedding_size};
    }
};

struct OwnGate {
    int layer = 0;
    int num_rows = 0;
    int num_experts = 0;
    std::vector<float> probs;
    std::vector<std::uint8_t> chosen;  // empty: none
    std::vector<float> speculative;    // empty: none

    static OwnGate copy_of(const GateObservation& gate, int num_experts) {
        const std::size_t size = static_cast<std::size_t>(gate.num_rows) * num_experts;
        OwnGate own{gate.layer, gate.num_rows, num_experts, {gate.probs, gate.probs + size}, {},
                    {}};
        if (gate.chosen != nullptr) own.chosen.assign(gate.chosen, gate.chosen + size);
        if (gate.speculative != nullptr)
            own.speculative.assign(gate.speculative, gate.speculative + size);
        return own;
    }

    GateObservation view() const {
        return {layer, num_rows, probs.data(), chosen.empty() ? nullptr : chosen.data(),
                speculative.empty() ? nullptr : speculative.data()};
    }
};

}  // namespace fmoe::bindings
