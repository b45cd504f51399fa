// fmoe/policies/prefetch_economy.h: which prefetch pays most, if any does.
//
// In layer times: R is what a load takes, d how many layers ahead the expert's layer comes, room
// the link time until then (d less what of the layer in progress has passed). A prefetch that will
// be needed saves the stall that it hides, min(R, room); what is worth holding beyond that use
// counts a little; it costs the victim's value, R each time that is needed again, and link time
// where wrong:
//     gain = p min(R, room) + 0.3 beyond R
//     net  = gain - value(victim) R - 0.01 min(R, room) (1 - p)
//     rank = net / min(R, room) * d^-impatience
// The best rank goes first, nothing whose net is not positive, nor what is worth no more than the
// victim: an idle link would swap such a pair to and fro. The busier the link, the less it
// pays to look at near layers only: impatience falls and tau of NextUseEstimate grows with load.
#pragma once

#include <vector>

#include "fmoe/expert_cache.h"
#include "fmoe/policies/next_use_estimate.h"

namespace fmoe {

// Useful loads times R, as a part of the time that layers compute: a slow average over iterations.
class LinkLoad {
public:
    explicit LinkLoad(int num_layers) : num_layers_(num_layers) {}
    void loaded(int num_experts) noexcept { num_loaded_ += num_experts; }
    void wasted() noexcept { --num_loaded_; }
    void iteration_ended(double load_time) noexcept;
    double impatience() const noexcept;
    double horizon() const noexcept;  // tau

private:
    int num_layers_;
    int num_loaded_ = 0;
    double load_ = 1;
};

struct PrefetchOffer {
    int layer = -1;        // in progress
    double passed = 0;     // of it, in layer times
    double load_time = 1;  // R, positive
    int victim = -1;       // -1: a slot is free
    int shard = 0;
    int num_shards = 1;
};

class PrefetchEconomy {
public:
    static constexpr int kLookahead = 23;  // layers

    explicit PrefetchEconomy(const Geometry& geometry);
    void set_impatience(double impatience);
    // An absent expert that this shard hosts, or -1.
    int choose(const PrefetchOffer& offer, const NextUseEstimate& estimate,
               const ExpertCache& cache) const;

private:
    Geometry geometry_;
    std::vector<double> urgencies_;  // d^-impatience
};

}  // namespace fmoe
