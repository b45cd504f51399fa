#include "fmoe/policies/floor_guard.h"

#include <algorithm>

namespace fmoe {
namespace {

constexpr double kRecentDecay = 0.99;

}  // namespace

FloorShadow::FloorShadow(const char* eviction, const Geometry& geometry, int num_slots)
    : cache_(geometry, num_slots), eviction_(make_eviction(eviction, geometry)) {}

int FloorShadow::gate(std::span<const int> needed) {
    for (int expert : needed) cache_.pin(expert);
    eviction_->used(needed);
    int num_misses = 0;
    for (int expert : needed) {
        if (!cache_.is_absent(expert)) continue;
        ++num_misses;
        if (cache_.num_free() == 0) {
            const int victim = eviction_->victim(cache_);
            if (victim < 0) continue;  // the layer needs more than fits: it is loaded and dropped
            cache_.evict(victim);
        }
        cache_.reserve(expert, Cause::on_demand);
        cache_.complete(expert);
    }
    for (int expert : needed) cache_.unpin(expert);
    return num_misses;
}

FloorGuard::FloorGuard(const Geometry& geometry, int num_slots)
    : num_layers_(geometry.num_layers),
      floors_{Floor{FloorShadow("lru", geometry, num_slots)},
              Floor{FloorShadow("ema", geometry, num_slots)}} {}

void FloorGuard::gate(std::span<const int> needed, double load_time, double stall) {
    for (Floor& floor : floors_) floor.cost += 1 + load_time * floor.shadow.gate(needed);
    own_cost_ += 1 + stall;
}

void FloorGuard::iteration_ended() {
    bool is_used_up = false;
    bool is_saved_up = true;
    for (Floor& floor : floors_) {
        floor.shadow.iteration_ended();
        if (!has_begun_) {
            floor.recent = floor.cost;
            floor.allowance = kFirstSaved * floor.cost;
        }
        floor.recent = kRecentDecay * floor.recent + (1 - kRecentDecay) * floor.cost;
        floor.allowance += (1 + kMargin) * floor.cost - own_cost_;
        floor.allowance = std::min(floor.allowance, kMostSaved * floor.recent);
        is_used_up = is_used_up || floor.allowance <= 0;
        is_saved_up = is_saved_up && floor.allowance >= kTrialSaved * floor.recent;
        floor.cost = 0;
    }
    own_cost_ = 0;
    has_begun_ = true;
    is_on_ = is_on_ ? !is_saved_up : is_used_up;
}

}  // namespace fmoe
