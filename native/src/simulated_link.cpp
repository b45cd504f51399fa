#include "fmoe/simulated_link.h"

#include <algorithm>
#include <string>

namespace fmoe {

SimulatedLink::SimulatedLink(double load_time) : load_time_(load_time) {
    require(
        load_time >= 0 && load_time < kNever,
        "simulated link: load time must be 0 or more and finite, got " + std::to_string(load_time));
}

void SimulatedLink::carry_out(const LinkCommand& command) {
    switch (command.kind) {
        case LinkCommand::Kind::start:
            (command.cause == Cause::on_demand ? on_demand_ : prefetches_)
                .push_back({command.expert, load_time_});
            break;
        case LinkCommand::Kind::promote:
            on_demand_.push_back(take(prefetches_, command.expert));
            break;
        case LinkCommand::Kind::cancel:
            take(prefetches_, command.expert);
            break;
    }
}

double SimulatedLink::time_to_completion() const noexcept {
    if (!on_demand_.empty()) return on_demand_.front().remaining;
    return prefetches_.empty() ? kNever : prefetches_.front().remaining;
}

void SimulatedLink::advance(double duration) {
    if (duration <= 0 || moving().empty()) return;
    Copy& copy = moving().front();
    copy.remaining = std::max(0.0, copy.remaining - duration);
}

int SimulatedLink::take_completed() {
    std::deque<Copy>& queue = moving();
    FMOE_CHECK(!queue.empty());
    const int expert = queue.front().expert;
    queue.pop_front();
    return expert;
}

double SimulatedLink::backlog() const noexcept {
    double sum = 0;
    for (const Copy& copy : on_demand_) sum += copy.remaining;
    for (const Copy& copy : prefetches_) sum += copy.remaining;
    return sum;
}

SimulatedLink::Copy SimulatedLink::take(std::deque<Copy>& queue, int expert) {
    const auto it = std::find_if(queue.begin(), queue.end(),
                                 [expert](const Copy& copy) { return copy.expert == expert; });
    FMOE_CHECK(it != queue.end());
    const Copy copy = *it;
    queue.erase(it);
    return copy;
}

}  // namespace fmoe
