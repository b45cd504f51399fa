// fmoe/policies/prefetch_policy.h: turns predictions into prefetches (paper 4.3) and evicts by a
// named rule (paper 4.5). The paper's policy and its baselines are this class with different
// predictors and rules; without predictions it loads on demand only.
//
// Settled here, where the paper is silent:
// - An expert of probability 0 is never taken into E_prefetch, so a row that matched nothing orders
//   nothing.
// - An order is carried out at most once: what is evicted before its use is not fetched again until
//   a later prediction orders it.
// - A prefetch does not evict an expert that is itself ordered for a layer still to come; an
//   on-demand load may.
// - p of a layer, for eviction, stays that of its latest match until it is matched again, also into
//   the next iteration.
// - A synchronous policy holds a layer until the copies ordered for it are done, also the wrong
//   ones. Orders of a layer outlive its gate then; in an asynchronous policy they lapse with it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fmoe/eviction.h"
#include "fmoe/policy.h"

namespace fmoe {

struct PrefetchRules {
    bool is_synchronous = false;
    // Only experts e with e mod num_shards == shard can be fetched here (paper 5).
    int shard = 0;
    int num_shards = 1;
};

// delta_l = clip(1 - score, 0, 1).
double prefetch_threshold(float score) noexcept;

// E_prefetch: experts by falling p, ties by lower j, until their p reach delta_l and K are taken.
std::vector<int> select_prefetch(std::span<const float> p, float score, int top_k);

class PrefetchPolicy final : public Policy {
public:
    PrefetchPolicy(const Geometry& geometry, std::unique_ptr<Eviction> eviction,
                   const PrefetchRules& rules);

    void iteration_started(const IterationStarted&, const ExpertCache&, Instructions&) override;
    void gate_requested(const GateRequested&, const ExpertCache&, Instructions&) override;
    void predicted(const Prediction&, const ExpertCache&, Instructions&) override;
    void copy_done(int expert, const ExpertCache&, Instructions&) override;
    void iteration_ended(const ExpertCache&, Instructions&) override;
    void link_free(const ExpertCache&, Instructions&) override;
    int victim(const VictimNeeded&, const ExpertCache&) override;

private:
    struct Order {
        int expert;
        float p;
    };

    bool is_over(int layer) const noexcept;
    void forget_layer(int layer);
    void predict_layer(const Prediction&, int layer, const ExpertCache&, Instructions&);
    double priority(const Order& order) const noexcept;

    Geometry geometry_;
    std::unique_ptr<Eviction> eviction_;
    PrefetchRules rules_;
    int layer_ = -1;                     // l_now
    std::vector<Order> orders_;          // not started yet
    std::vector<std::uint8_t> ordered_;  // [L * J] in E_prefetch of a layer still to come
};

}  // namespace fmoe
