// fmoe/simulated_link.h: the link to the host as the simulator sees it. One copy moves at a time;
// an on-demand load goes before every prefetch; a prefetch that was overtaken keeps its progress.
#pragma once

#include <deque>
#include <limits>

#include "fmoe/planner.h"

namespace fmoe {

class SimulatedLink {
public:
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    // load_time: of one expert; 0 is a link without cost.
    explicit SimulatedLink(double load_time);

    void carry_out(const LinkCommand& command);
    // Time until the copy that moves now is done, kNever on an idle link.
    double time_to_completion() const noexcept;
    // Lets `duration` pass, at most time_to_completion().
    void advance(double duration);
    // Removes and returns the copy in front, which has no time left.
    int take_completed();
    // Time that all copies on the link still need.
    double backlog() const noexcept;

private:
    struct Copy {
        int expert;
        double remaining;
    };

    static Copy take(std::deque<Copy>& queue, int expert);
    std::deque<Copy>& moving() noexcept { return on_demand_.empty() ? prefetches_ : on_demand_; }

    double load_time_;
    std::deque<Copy> on_demand_;  // oldest first
    std::deque<Copy> prefetches_;
};

}  // namespace fmoe
