// fmoe/predictors/recent_maps.h: the newest C expert maps, kept so that the next start can learn
// from them, in the store that every predictor of maps uses. When it is full the oldest goes: what
// models learn from are runs of consecutive iterations, which replacing the most redundant map
// (paper 4.4) would tear apart.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "fmoe/map_store.h"

namespace fmoe {

class RecentMaps {
public:
    // The iterations of one request, oldest first.
    using Chain = std::vector<int>;

    RecentMaps(const StoreShape& shape, int capacity);

    MapStore& store() noexcept { return store_; }
    const MapStore& store() const noexcept { return store_; }

    EntryRef add(const NewMap& map);
    // Chains of entries that something else put into the store since the last call.
    std::vector<Chain> take_foreign();

private:
    bool is_foreign(int entry) const noexcept {
        return generations_[static_cast<std::size_t>(entry)] != store_.ref(entry).generation;
    }

    MapStore store_;
    int next_ = 0;  // the entry to be replaced once the store is full
    std::uint64_t version_ = 0;
    std::vector<std::uint32_t> generations_;  // [C] of what is known
};

}  // namespace fmoe
