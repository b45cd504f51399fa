// fmoe/policies/floor_guard.h: keeps a policy from losing to lru and ema, whatever it believes.
//
// Both floors run in the shadow: their own caches, on the gates that really come. An iteration
// costs L + R * misses layer times there, and L + its stall here. For each floor an allowance is
// kept:
//     allowance += 1.004 * floor's cost - own cost, at most kMostSaved of the floor's iterations
// While it is positive the policy is free; when one is used up, the better floor decides until both
// allow a new trial. So over any stretch, with F the better floor's time and i its dearest
// iteration,
//     own time <= 1.004 F + (kMostSaved + 1) i
// and over a whole run from an empty cache kFirstSaved in place of kMostSaved, apart from what it
// takes to bring the floor's experts back after a switch.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "fmoe/eviction.h"
#include "fmoe/expert_cache.h"

namespace fmoe {

// One floor: on demand, evicting by its rule.
class FloorShadow {
public:
    FloorShadow(const char* eviction, const Geometry& geometry, int num_slots);

    // Returns how many of the needed experts it would have had to load.
    int gate(std::span<const int> needed);
    void iteration_ended() { eviction_->iteration_ended(); }
    // The victim that the rule names in another cache.
    int victim(const ExpertCache& cache) const { return eviction_->victim(cache); }

private:
    ExpertCache cache_;
    std::unique_ptr<Eviction> eviction_;
};

class FloorGuard {
public:
    static constexpr double kFirstSaved = 5;  // iterations of the floor
    static constexpr double kMostSaved = 24;
    static constexpr double kTrialSaved = 8;  // that a new trial needs
    static constexpr double kMargin = 0.004;

    FloorGuard(const Geometry& geometry, int num_slots);

    // load_time in layer times; stall: how long the gate's layer waits for its experts.
    void gate(std::span<const int> needed, double load_time, double stall);
    void iteration_ended();
    // True: the floors decide now.
    bool is_on() const noexcept { return is_on_; }
    // The better floor's.
    int victim(const ExpertCache& cache) const { return better().shadow.victim(cache); }

private:
    struct Floor {
        FloorShadow shadow;
        double cost = 0;    // of the iteration in progress
        double recent = 0;  // decayed mean of its iterations
        double allowance = 0;
    };
    const Floor& better() const noexcept {
        return floors_[1].recent < floors_[0].recent ? floors_[1] : floors_[0];
    }

    int num_layers_;
    std::array<Floor, 2> floors_;
    double own_cost_ = 0;
    bool has_begun_ = false;
    bool is_on_ = false;
};

}  // namespace fmoe
