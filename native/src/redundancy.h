// redundancy.h: RDY of new maps with every entry of a full store (paper 4.4), and so which entry
// each of them replaces when they are stored one after the other. Reads the store once, as one
// matrix product, however many maps there are; what the maps are to each other is a small product
// beside it.
//
// Scores are sums in single precision, wrong by less than some 1e-5 (see kLongestSum). Entries
// within twice that of the largest are compared in double precision, so that the choice depends
// neither on the instruction set nor on how many maps come at once. RDYs that differ by less than
// kTie count as equal.
#pragma once

#include <span>
#include <vector>

#include "fmoe/map_store.h"
#include "packed_queries.h"

namespace fmoe {

class Redundancy {
public:
    static constexpr int kMostMaps = kMostQueries;
    static constexpr double kTie = 1e-9;

    // 1 to kMostMaps maps, found proper. Store and maps outlive this. With `knows_scores` the
    // store is not read where the maps bring their scores along.
    Redundancy(const MapStore& store, std::span<const NewMap> batch, bool knows_scores);

    // The entry of the largest RDY with batch[map], the lowest of equals.
    int most_redundant(int map) const;
    // batch[map] was stored as `entry`: later maps are compared with that.
    void replaced(int entry, int map);

private:
    int num_maps() const noexcept { return static_cast<int>(batch_.size()); }
    float* scores(int map) noexcept {
        return scores_.data() + static_cast<std::size_t>(map) * stride_;
    }
    const float* scores(int map) const noexcept {
        return scores_.data() + static_cast<std::size_t>(map) * stride_;
    }
    void take_scores();
    void score_store();
    void score_batch();
    void combine(const float* semantic, const float* inverse_embedding_norms, const float* whole,
                 const float* inverse_map_norms, float* scores, std::size_t stride) const;
    double exact(int map, int entry) const;

    const MapStore& store_;
    std::span<const NewMap> batch_;
    std::size_t stride_;
    float semantic_share_;
    float map_share_;
    PackedQueries embeddings_;
    PackedQueries maps_;
    std::vector<float> scores_;  // [B, stride_]
    std::vector<float> pairs_;   // [B, kColumnBlock]: of a map and another as it will be stored
};

}  // namespace fmoe
