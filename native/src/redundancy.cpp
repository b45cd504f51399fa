#include "redundancy.h"

#include <cmath>
#include <limits>
#include <unordered_map>

#include "unit_vector.h"

namespace fmoe {
namespace {

using Sums = float[Redundancy::kMostMaps * kColumnBlock];

// The cosine of a vector of this length and of a stored one, whose terms lie `stride` apart.
double cosine(const float* vector, double length, int num_terms, const Half* stored,
              std::size_t stride) {
    if (length == 0) return 0;
    double dot = 0;
    double square = 0;
    for (int t = 0; t < num_terms; ++t) {
        const double value = to_float(stored[static_cast<std::size_t>(t) * stride]);
        dot += vector[t] * value;
        square += value * value;
    }
    return square > 0 ? dot / (length * std::sqrt(square)) : 0;
}

float largest_of(const float* scores, int count) {
    constexpr int kLanes = 16;
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane)
            lanes[lane] = scores[i + lane] > lanes[lane] ? scores[i + lane] : lanes[lane];
    for (; i < count; ++i) lanes[0] = scores[i] > lanes[0] ? scores[i] : lanes[0];
    return *std::max_element(lanes, lanes + kLanes);
}

// How far a score may be from the true RDY: what adding up costs, and a few units for scaling,
// norms and shares.
float score_error(const StoreShape& shape) {
    const int per_layer = num_partial_sums(shape.geometry.num_experts);
    const int num_partial =
        std::max({num_partial_sums(shape.embedding_size), num_partial_sums(shape.geometry.size()),
                  shape.geometry.num_layers * per_layer});
    return static_cast<float>(kLongestSum + num_partial + 16) * 0x1p-24f;
}

}  // namespace

Redundancy::Redundancy(const MapStore& store, std::span<const NewMap> batch, bool knows_scores)
    : store_(store),
      batch_(batch),
      stride_(static_cast<std::size_t>(store.padded_size())),
      semantic_share_(static_cast<float>(store.redundancy(1, 0))),
      map_share_(static_cast<float>(store.redundancy(0, 1))),
      embeddings_(num_maps(), store.shape().embedding_size),
      maps_(num_maps(), store.geometry().size()),
      scores_(batch.size() * stride_) {
    for (int map = 0; map < num_maps(); ++map) {
        embeddings_.set(map, batch[static_cast<std::size_t>(map)].embedding);
        maps_.set(map, batch[static_cast<std::size_t>(map)].probs);
    }
    const bool all_know = std::all_of(batch.begin(), batch.end(), [](const NewMap& map) {
        return map.semantic_scores != nullptr && map.map_scores != nullptr;
    });
    if (knows_scores && all_know)
        take_scores();
    else
        score_store();
    if (num_maps() > 1) score_batch();
}

void Redundancy::take_scores() {
    for (int map = 0; map < num_maps(); ++map) {
        const NewMap& given = batch_[static_cast<std::size_t>(map)];
        for (int entry = 0; entry < store_.size(); ++entry)
            scores(map)[entry] = semantic_share_ * given.semantic_scores[entry] +
                                 map_share_ * given.map_scores[entry];
    }
}

void Redundancy::score_store() {
    alignas(64) Sums semantic = {};
    alignas(64) Sums whole = {};
    const std::size_t stride = store_.stride();
    for (int entry = 0; entry < store_.size(); entry += kColumnBlock) {
        const int next = entry + kColumnBlock < store_.size() ? entry + kColumnBlock : entry;
        if (semantic_share_ > 0)
            embeddings_.multiply(store_.embedding(entry), store_.embedding_stride(),
                                 store_.embedding(next), semantic);
        if (map_share_ > 0)
            maps_.multiply(store_.columns(0) + entry, stride, store_.columns(0) + next, whole);
        combine(semantic, store_.inverse_embedding_norms() + entry, whole,
                store_.inverse_norms() + entry, scores_.data() + entry, stride_);
    }
}

// Of the maps and of what write() will make of them.
void Redundancy::score_batch() {
    alignas(64) Sums semantic = {};
    alignas(64) Sums whole = {};
    double squares[2][kColumnBlock] = {};
    const auto stored_as = [&](int first, int count, float* panel, double* square, auto value_of) {
        std::fill_n(panel, static_cast<std::size_t>(count) * kColumnBlock, 0.0f);
        for (int map = 0; map < num_maps(); ++map) {
            for (int t = 0; t < count; ++t) {
                const float value = to_float(to_half(value_of(map, first + t)));
                panel[t * kColumnBlock + map] = value;
                square[map] += static_cast<double>(value) * value;
            }
        }
    };
    embeddings_.multiply_panels(
        [&](int first, int count, float* panel) {
            stored_as(first, count, panel, squares[0], [&](int map, int term) {
                const NewMap& given = batch_[static_cast<std::size_t>(map)];
                return given.is_unit && given.embedding != nullptr ? given.embedding[term]
                                                                   : embeddings_.value(map, term);
            });
        },
        semantic);
    maps_.multiply_panels(
        [&](int first, int count, float* panel) {
            stored_as(first, count, panel, squares[1], [&](int map, int term) {
                return batch_[static_cast<std::size_t>(map)].probs[term];
            });
        },
        whole);
    float inverse_norms[2][kColumnBlock];
    for (int which = 0; which < 2; ++which)
        for (int map = 0; map < kColumnBlock; ++map)
            inverse_norms[which][map] = inverse_root(squares[which][map]);
    pairs_.resize(batch_.size() * kColumnBlock);
    combine(semantic, inverse_norms[0], whole, inverse_norms[1], pairs_.data(), kColumnBlock);
}

void Redundancy::combine(const float* semantic, const float* inverse_embedding_norms,
                         const float* whole, const float* inverse_map_norms, float* scores,
                         std::size_t stride) const {
    for (int map = 0; map < num_maps(); ++map) {
        for (int c = 0; c < kColumnBlock; ++c)
            scores[c] = semantic_share_ * (semantic[c] * inverse_embedding_norms[c]) +
                        map_share_ * (whole[c] * inverse_map_norms[c]);
        semantic += kColumnBlock;
        whole += kColumnBlock;
        scores += stride;
    }
}

int Redundancy::most_redundant(int map) const {
    const float* scored = scores(map);
    const float least =
        largest_of(scored, store_.size()) - 2 * score_error(store_.shape()) - 0x1p-24f;
    std::vector<int> candidates;
    for (int entry = 0; entry < store_.size(); ++entry)
        if (scored[entry] >= least) candidates.push_back(entry);
    if (candidates.empty()) return 0;  // no entry has a score that is a number
    if (candidates.size() == 1) return candidates.front();
    // A store may hold the same map many times.
    std::unordered_map<std::uint64_t, double> of_content;
    double largest = -std::numeric_limits<double>::infinity();
    for (int entry : candidates) {
        const auto [found, is_new] = of_content.try_emplace(store_.content(entry), 0.0);
        if (is_new) found->second = exact(map, entry);
        largest = std::max(largest, found->second);
    }
    for (int entry : candidates)
        if (of_content[store_.content(entry)] >= largest - kTie) return entry;
    return candidates.front();
}

double Redundancy::exact(int map, int entry) const {
    const NewMap& given = batch_[static_cast<std::size_t>(map)];
    const double semantic =
        cosine(given.embedding, embeddings_.length(map), embeddings_.num_terms(),
               store_.embedding(entry), store_.embedding_stride());
    const double whole = cosine(given.probs, maps_.length(map), maps_.num_terms(),
                                store_.columns(0) + entry, store_.stride());
    return store_.redundancy(semantic, whole);
}

void Redundancy::replaced(int entry, int map) {
    for (int later = map + 1; later < num_maps(); ++later)
        scores(later)[entry] =
            pairs_[static_cast<std::size_t>(later) * kColumnBlock + static_cast<std::size_t>(map)];
}

}  // namespace fmoe
