#include "fmoe/predictors/recent_maps.h"

#include <algorithm>

namespace fmoe {

RecentMaps::RecentMaps(const StoreShape& shape, int capacity)
    : store_(shape, capacity),
      version_(store_.version()),
      generations_(static_cast<std::size_t>(capacity), 0) {}

EntryRef RecentMaps::add(const NewMap& map) {
    const bool is_full = store_.size() == store_.capacity();
    const int entry = is_full ? next_ : store_.size();
    const EntryRef added = store_.put(entry, map);
    next_ = (entry + 1) % store_.capacity();
    generations_[static_cast<std::size_t>(entry)] = added.generation;
    version_ = store_.version();
    return added;
}

std::vector<RecentMaps::Chain> RecentMaps::take_foreign() {
    std::vector<Chain> chains;
    if (store_.version() == version_) return chains;
    version_ = store_.version();
    for (int head = 0; head < store_.size(); ++head) {
        const EntryRef before = store_.predecessor(head);
        if (!is_foreign(head) || (before && is_foreign(before.index))) continue;
        Chain chain;
        for (int entry = head; is_foreign(entry);) {
            chain.push_back(entry);
            const EntryRef next = store_.successor(entry);
            if (!next || static_cast<int>(chain.size()) > store_.size()) break;
            entry = next.index;
        }
        chains.push_back(std::move(chain));
    }
    for (int entry = 0; entry < store_.size(); ++entry)
        generations_[static_cast<std::size_t>(entry)] = store_.ref(entry).generation;
    return chains;
}

}  // namespace fmoe
