#include "fmoe/iteration_record.h"

#include <algorithm>
#include <cmath>

namespace fmoe {

void IterationRecord::start(const IterationContext& context) {
    const auto rows = static_cast<std::size_t>(context.num_rows);
    const auto size = static_cast<std::size_t>(geometry_.size());
    iteration_ = context.iteration;
    num_observed_ = 0;
    requests_.assign(context.requests, context.requests + rows);
    if (context.token_ids != nullptr)
        token_ids_.assign(context.token_ids, context.token_ids + rows);
    else
        token_ids_.assign(rows, -1);
    embedding_size_ = context.embeddings == nullptr ? 0 : context.embedding_size;
    embeddings_.assign(context.embeddings,
                       context.embeddings + rows * static_cast<std::size_t>(embedding_size_));
    probs_.assign(rows * size, 0);
    chosen_.assign(rows * size, 0);
}

void IterationRecord::observe(const GateObservation& gate) {
    FMOE_CHECK(gate.num_rows == num_rows());
    FMOE_CHECK(gate.layer == num_observed_ && gate.layer < geometry_.num_layers);
    const int experts = geometry_.num_experts;
    for (int row = 0; row < num_rows(); ++row) {
        const std::size_t from = static_cast<std::size_t>(row) * experts;
        const std::size_t to = static_cast<std::size_t>(row) * geometry_.size() +
                               static_cast<std::size_t>(gate.layer) * experts;
        std::copy_n(gate.probs + from, experts, probs_.begin() + static_cast<std::ptrdiff_t>(to));
        if (gate.chosen != nullptr)
            std::copy_n(gate.chosen + from, experts,
                        chosen_.begin() + static_cast<std::ptrdiff_t>(to));
    }
    ++num_observed_;
}

const float* IterationRecord::embeddings() const noexcept {
    return embedding_size_ == 0 ? nullptr : embeddings_.data();
}

const float* IterationRecord::embedding(int row) const noexcept {
    return embedding_size_ == 0
               ? nullptr
               : embeddings_.data() + static_cast<std::size_t>(row) * embedding_size_;
}

const float* IterationRecord::probs(int row) const noexcept {
    return probs_.data() + static_cast<std::size_t>(row) * geometry_.size();
}

const std::uint8_t* IterationRecord::chosen(int row) const noexcept {
    return chosen_.data() + static_cast<std::size_t>(row) * geometry_.size();
}

bool IterationRecord::is_sound(int row) const noexcept {
    return std::all_of(probs(row), probs(row) + geometry_.size(),
                       [](float p) { return std::isfinite(p) && p >= 0; });
}

}  // namespace fmoe
