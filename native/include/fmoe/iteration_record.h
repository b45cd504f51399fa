// fmoe/iteration_record.h: what inference published in the iteration in progress, kept until its
// maps are stored. R rows, L layers, J experts, h embedding size.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/predictor.h"

namespace fmoe {

class IterationRecord {
public:
    explicit IterationRecord(const Geometry& geometry) : geometry_(geometry) {}

    void start(const IterationContext& context);
    void observe(const GateObservation& gate);

    std::uint64_t iteration() const noexcept { return iteration_; }
    int num_rows() const noexcept { return static_cast<int>(requests_.size()); }
    std::uint64_t request(int row) const noexcept { return requests_[row]; }
    std::int32_t token_id(int row) const noexcept { return token_ids_[row]; }
    const float* embedding(int row) const noexcept;      // [h], or null
    const float* embeddings() const noexcept;            // [R, h], or null
    const float* probs(int row) const noexcept;          // [L, J], layers not seen are 0
    const std::uint8_t* chosen(int row) const noexcept;  // [L, J]
    // Every gate was seen; a step that failed halfway leaves an incomplete record.
    bool is_complete() const noexcept { return num_observed_ == geometry_.num_layers; }
    // No probability of the row is negative or not finite.
    bool is_sound(int row) const noexcept;

private:
    Geometry geometry_;
    std::uint64_t iteration_ = 0;
    int num_observed_ = 0;
    int embedding_size_ = 0;
    std::vector<std::uint64_t> requests_;
    std::vector<std::int32_t> token_ids_;
    std::vector<float> embeddings_;
    std::vector<float> probs_;
    std::vector<std::uint8_t> chosen_;
};

}  // namespace fmoe
