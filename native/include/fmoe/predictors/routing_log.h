// fmoe/predictors/routing_log.h: the experts that past decode iterations chose, newest `capacity`
// of them, each linked to the last use of its token and to its request's iteration before.
//
// A position counts from 0 for ever; what was overwritten is no longer kept.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "fmoe/geometry.h"

namespace fmoe {

class RoutingLog {
public:
    static constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

    // The most iterations that fit into `bytes`, at least 1 and at most `most`.
    static int capacity_within(const Geometry& geometry, std::size_t bytes, int most);

    RoutingLog(const Geometry& geometry, int capacity);

    // chosen [L, K] as DecodeStep's; predecessor: the request's iteration before, or kNowhere.
    // Returns its position. A token_id below 0 is found by no token.
    std::uint64_t append(std::int32_t token_id, const std::uint16_t* chosen,
                         std::uint64_t predecessor);

    bool is_kept(std::uint64_t position) const noexcept {
        return position < num_appended_ && num_appended_ - position <= entries_.size();
    }
    // Newest iteration of the token, or kNowhere.
    std::uint64_t last_use(std::int32_t token_id) const noexcept;
    // Of kept positions; what they return may be kept no more.
    std::uint64_t use_before(std::uint64_t position) const noexcept {
        return entry(position).use_before;
    }
    std::uint64_t predecessor(std::uint64_t position) const noexcept {
        return entry(position).predecessor;
    }
    std::int32_t token_id(std::uint64_t position) const noexcept {
        return entry(position).token_id;
    }
    const std::uint16_t* chosen(std::uint64_t position) const noexcept {
        return chosen_.data() + (position % entries_.size()) * map_size_;  // [L, K]
    }
    std::size_t num_tokens() const noexcept { return last_uses_.size(); }

private:
    struct Entry {
        std::int32_t token_id = -1;
        std::uint64_t use_before = kNowhere;
        std::uint64_t predecessor = kNowhere;
    };
    const Entry& entry(std::uint64_t position) const noexcept {
        return entries_[position % entries_.size()];
    }

    std::size_t map_size_;  // L * K
    std::uint64_t num_appended_ = 0;
    std::vector<Entry> entries_;
    std::vector<std::uint16_t> chosen_;
    std::unordered_map<std::int32_t, std::uint64_t> last_uses_;  // of tokens with a kept use
};

}  // namespace fmoe
