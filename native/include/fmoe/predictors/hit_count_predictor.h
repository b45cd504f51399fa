// fmoe/predictors/hit_count_predictor.h: the coarse tracker (MoE-Infinity): one matrix a request of
// how many of its iterations chose each expert; the most similar matrix of an earlier request
// guides layer l + distance after gate l.
//
// Settled here: a matrix's layers are scaled to sum 1, so that a long request resembles a short
// one; the request so far, including gate l, is compared over layers 1..l. A request's matrix is
// stored when it ends, by the same deduplication as maps (whole-matrix cosine).
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "fmoe/iteration_record.h"
#include "fmoe/map_store.h"
#include "fmoe/matcher.h"
#include "fmoe/predictors/popularity.h"

namespace fmoe {

struct HitCountOptions {
    int distance = 3;
    bool is_synchronous = false;
    // Guide the first `distance` layers by global popularity; otherwise they go without.
    bool starts_popular = false;
};

class HitCountPredictor final : public Predictor {
public:
    HitCountPredictor(const Geometry& geometry, int capacity, const HitCountOptions& options);

    void iteration_started(const IterationContext&, std::vector<Prediction>& out) override;
    void gate_observed(const GateObservation&, std::vector<Prediction>& out) override;
    void iteration_ended(std::vector<Prediction>& out) override;
    void request_ended(std::uint64_t request) override;
    bool is_synchronous() const override { return options_.is_synchronous; }
    // Its entries are matrices, not maps of one iteration: not for another predictor.
    const MapStore& matrices() const noexcept { return matrices_; }

private:
    using Counts = std::vector<std::uint32_t>;  // [L * J]

    void store_finished();
    void scale_layer(const Counts& counts, int layer, float* scaled) const;

    HitCountOptions options_;
    MapStore matrices_;
    Matcher matcher_;
    IterationRecord record_;
    Popularity popularity_;
    std::unordered_map<std::uint64_t, Counts> counts_;  // of requests in flight
    std::vector<Counts> finished_;                      // to be stored before the next iteration
    std::vector<float> query_;                          // [R, J]
};

}  // namespace fmoe
