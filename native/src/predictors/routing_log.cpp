#include "fmoe/predictors/routing_log.h"

#include <algorithm>

namespace fmoe {

int RoutingLog::capacity_within(const Geometry& geometry, std::size_t bytes, int most) {
    const std::size_t entry_bytes = sizeof(Entry) + static_cast<std::size_t>(geometry.num_layers) *
                                                        geometry.top_k * sizeof(std::uint16_t);
    return static_cast<int>(
        std::clamp<std::size_t>(bytes / entry_bytes, 1, static_cast<std::size_t>(most)));
}

RoutingLog::RoutingLog(const Geometry& geometry, int capacity)
    : map_size_(static_cast<std::size_t>(geometry.num_layers) * geometry.top_k),
      entries_(static_cast<std::size_t>(capacity)),
      chosen_(entries_.size() * map_size_, 0) {
    require(capacity >= 1, "routing log: capacity must be at least 1");
}

std::uint64_t RoutingLog::append(std::int32_t token_id, const std::uint16_t* chosen,
                                 std::uint64_t predecessor) {
    const std::uint64_t position = num_appended_++;
    const std::size_t slot = position % entries_.size();
    if (position >= entries_.size()) {
        const auto old = last_uses_.find(entries_[slot].token_id);
        if (old != last_uses_.end() && old->second == position - entries_.size())
            last_uses_.erase(old);
    }
    entries_[slot] = {token_id, last_use(token_id), predecessor};
    std::copy_n(chosen, map_size_, chosen_.begin() + static_cast<std::ptrdiff_t>(slot * map_size_));
    if (token_id >= 0) last_uses_[token_id] = position;
    return position;
}

std::uint64_t RoutingLog::last_use(std::int32_t token_id) const noexcept {
    const auto found = last_uses_.find(token_id);
    return found == last_uses_.end() ? kNowhere : found->second;
}

}  // namespace fmoe
