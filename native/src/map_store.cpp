#include "fmoe/map_store.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "similarity_kernels.h"

namespace fmoe {
namespace {

constexpr std::size_t kWordBits = 64;

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

// An odd number of blocks: columns a power of two apart would all fall into the same cache sets.
std::size_t padded_stride(int capacity) {
    const std::size_t blocks = round_up(static_cast<std::size_t>(capacity), kColumnBlock);
    return blocks / kColumnBlock % 2 == 0 ? blocks + kColumnBlock : blocks;
}

float inverse_root(double square) {
    return square > 0 ? static_cast<float>(1.0 / std::sqrt(square)) : 0.0f;
}

}  // namespace

bool scale_to_unit(const float* vector, int size, float* unit) {
    double square = 0;
    for (int i = 0; i < size; ++i) square += static_cast<double>(vector[i]) * vector[i];
    const bool has_direction = square > 0 && std::isfinite(square);
    const double scale = has_direction ? 1.0 / std::sqrt(square) : 0.0;
    for (int i = 0; i < size; ++i)
        unit[i] = has_direction ? static_cast<float>(vector[i] * scale) : 0.0f;
    return has_direction;
}

MapStore::MapStore(const StoreShape& shape, int capacity) : shape_(shape), capacity_(capacity) {
    shape_.geometry.validate();
    require(capacity >= 1,
            "map store: capacity must be at least 1, got " + std::to_string(capacity));
    require(shape.embedding_size >= 0, "map store: embedding_size must not be negative");
    require(shape.prefetch_distance >= 0, "map store: prefetch_distance must not be negative");
    const auto entries = static_cast<std::size_t>(capacity);
    const auto experts = static_cast<std::size_t>(geometry().size());
    stride_ = padded_stride(capacity);
    embedding_stride_ = round_up(static_cast<std::size_t>(shape.embedding_size), kColumnBlock);
    chosen_words_ = round_up(experts, kWordBits) / kWordBits;
    columns_.assign(experts * stride_, 0);
    inverse_prefix_norms_.assign(static_cast<std::size_t>(geometry().num_layers) * stride_, 0);
    embeddings_.assign(entries * embedding_stride_, 0);
    inverse_embedding_norms_.assign(entries, 0);
    chosen_.assign(entries * chosen_words_, 0);
    token_ids_.assign(entries, -1);
    generations_.assign(entries, 0);
    predecessors_.assign(entries, {});
    successors_.assign(entries, {});
    semantic_scratch_.assign(entries, 0);
    map_scratch_.assign(stride_, 0);
}

std::vector<EntryRef> MapStore::insert(std::span<const NewMap> batch) {
    for (const NewMap& map : batch) check_finite(map);
    std::vector<EntryRef> refs;
    const int num_known = size_;
    std::vector<int> changed;  // entries of which the batch's own scores do not speak
    for (const NewMap& map : batch) {
        const int entry = choose_entry(map, num_known, changed);
        write(entry, map);
        changed.push_back(entry);
        refs.push_back(ref(entry));
    }
    if (!batch.empty()) ++version_;
    return refs;
}

EntryRef MapStore::put(int entry, const NewMap& map) {
    require(entry >= 0 && entry <= size_ && entry < capacity_,
            "map store: entry " + std::to_string(entry) + " of " + std::to_string(size_) +
                " cannot be written");
    check_finite(map);
    size_ = std::max(size_, entry + 1);
    write(entry, map);
    ++version_;
    return ref(entry);
}

float MapStore::redundancy(float semantic_score, float map_score) const noexcept {
    const auto layers = static_cast<float>(geometry().num_layers);
    const auto distance =
        static_cast<float>(std::min(shape_.prefetch_distance, geometry().num_layers));
    return distance / layers * semantic_score + (layers - distance) / layers * map_score;
}

// Where the map goes: a new entry, or the most redundant one.
int MapStore::choose_entry(const NewMap& map, int num_known, std::span<const int> changed) {
    if (size_ < capacity_) return size_++;
    if (map.semantic_scores != nullptr) {
        std::copy_n(map.semantic_scores, num_known, semantic_scratch_.begin());
        std::vector<float> unit(embedding_stride_, 0);
        if (map.embedding != nullptr)
            scale_to_unit(map.embedding, shape_.embedding_size, unit.data());
        for (int entry : changed) semantic_scratch_[entry] = semantic_score(entry, unit.data());
    } else {
        semantic_scores(map.embedding, semantic_scratch_.data());
    }
    if (map.map_scores != nullptr) {
        std::copy_n(map.map_scores, num_known, map_scratch_.begin());
        double square = 0;
        for (int e = 0; e < geometry().size(); ++e)
            square += static_cast<double>(map.probs[e]) * map.probs[e];
        for (int entry : changed)
            map_scratch_[entry] = map_score(entry, map.probs, inverse_root(square));
    } else {
        map_scores(map.probs, map_scratch_.data());
    }
    int most_redundant = 0;
    float largest = redundancy(semantic_scratch_[0], map_scratch_[0]);
    for (int entry = 1; entry < size_; ++entry) {
        const float rdy = redundancy(semantic_scratch_[entry], map_scratch_[entry]);
        if (rdy > largest) {
            largest = rdy;
            most_redundant = entry;
        }
    }
    return most_redundant;
}

void MapStore::write(int entry, const NewMap& map) {
    ++generations_[entry];
    predecessors_[entry] = {};
    successors_[entry] = {};
    token_ids_[entry] = map.token_id;
    write_probs(entry, map.probs);
    write_embedding(entry, map.embedding, map.is_unit);
    write_chosen(entry, map.chosen);
    link(map.predecessor, ref(entry));
}

void MapStore::write_probs(int entry, const float* probs) {
    double square = 0;
    for (int layer = 0; layer < geometry().num_layers; ++layer) {
        for (int j = 0; j < geometry().num_experts; ++j) {
            const int expert = geometry().index(layer, j);
            const Half half = to_half(probs[expert]);
            columns_[static_cast<std::size_t>(expert) * stride_ + entry] = half;
            // Of what is stored, not of what came in: no map is more similar to itself than 1.
            square += static_cast<double>(to_float(half)) * to_float(half);
        }
        inverse_prefix_norms_[static_cast<std::size_t>(layer) * stride_ + entry] =
            inverse_root(square);
    }
}

void MapStore::write_embedding(int entry, const float* embedding, bool is_unit) {
    Half* stored = embeddings_.data() + static_cast<std::size_t>(entry) * embedding_stride_;
    std::fill_n(stored, embedding_stride_, Half{0});
    inverse_embedding_norms_[entry] = 0;
    if (embedding == nullptr) return;
    std::vector<float> unit(embedding_stride_, 0);
    if (is_unit)
        std::copy_n(embedding, shape_.embedding_size, unit.begin());
    else
        scale_to_unit(embedding, shape_.embedding_size, unit.data());
    double square = 0;
    for (int i = 0; i < shape_.embedding_size; ++i) {
        stored[i] = to_half(unit[i]);
        square += static_cast<double>(to_float(stored[i])) * to_float(stored[i]);
    }
    inverse_embedding_norms_[entry] = inverse_root(square);
}

void MapStore::write_chosen(int entry, const std::uint8_t* chosen) {
    std::uint64_t* words = chosen_.data() + static_cast<std::size_t>(entry) * chosen_words_;
    std::fill_n(words, chosen_words_, 0);
    if (chosen == nullptr) return;
    for (int e = 0; e < geometry().size(); ++e)
        if (chosen[e] != 0) words[e / kWordBits] |= std::uint64_t{1} << (e % kWordBits);
}

void MapStore::link(EntryRef previous, EntryRef next) {
    if (!is_current(previous) || !is_current(next) || previous.index == next.index) return;
    if (const EntryRef old = successor(previous.index)) predecessors_[old.index] = {};
    if (const EntryRef old = predecessor(next.index)) successors_[old.index] = {};
    successors_[previous.index] = next;
    predecessors_[next.index] = previous;
}

bool MapStore::semantic_scores(const float* embedding, float* scores) const {
    std::vector<float> unit(embedding_stride_, 0);
    if (embedding == nullptr || !scale_to_unit(embedding, shape_.embedding_size, unit.data())) {
        std::fill_n(scores, size_, 0.0f);
        return false;
    }
    for (int entry = 0; entry < size_; ++entry) scores[entry] = semantic_score(entry, unit.data());
    return true;
}

void MapStore::map_scores(const float* probs, float* scores) const {
    std::vector<int> all(static_cast<std::size_t>(geometry().size()));
    std::iota(all.begin(), all.end(), 0);
    double square = 0;
    for (int expert : all) square += static_cast<double>(probs[expert]) * probs[expert];
    std::vector<float> dots(static_cast<std::size_t>(padded_size()), 0);
    similarity_kernels().accumulate(columns_.data(), stride_, all.data(), probs, geometry().size(),
                                    padded_size(), dots.data());
    const float inverse_norm = inverse_root(square);
    for (int entry = 0; entry < size_; ++entry)
        scores[entry] = dots[entry] * inverse_norms()[entry] * inverse_norm;
}

float MapStore::semantic_score(int entry, const float* unit_embedding) const {
    const Half* stored = embeddings_.data() + static_cast<std::size_t>(entry) * embedding_stride_;
    return similarity_kernels().dot(stored, unit_embedding, static_cast<int>(embedding_stride_)) *
           inverse_embedding_norms_[entry];
}

float MapStore::map_score(int entry, const float* probs, float inverse_norm) const {
    float dot = 0;
    for (int e = 0; e < geometry().size(); ++e)
        dot += probs[e] * to_float(columns_[static_cast<std::size_t>(e) * stride_ + entry]);
    return dot * inverse_norms()[entry] * inverse_norm;
}

bool MapStore::is_chosen(int entry, int layer, int expert) const noexcept {
    const auto bit = static_cast<std::size_t>(geometry().index(layer, expert));
    const std::uint64_t word =
        chosen_[static_cast<std::size_t>(entry) * chosen_words_ + bit / kWordBits];
    return (word >> (bit % kWordBits) & 1u) != 0;
}

void MapStore::read_probs(int entry, int layer, float* probs) const {
    const Half* column = columns(layer) + entry;
    for (int j = 0; j < geometry().num_experts; ++j)
        probs[j] = to_float(column[static_cast<std::size_t>(j) * stride_]);
}

void MapStore::read_chosen(int entry, int layer, std::uint8_t* chosen) const {
    for (int j = 0; j < geometry().num_experts; ++j) chosen[j] = is_chosen(entry, layer, j);
}

void MapStore::read_embedding(int entry, float* embedding) const {
    const Half* stored = embeddings_.data() + static_cast<std::size_t>(entry) * embedding_stride_;
    for (int i = 0; i < shape_.embedding_size; ++i) embedding[i] = to_float(stored[i]);
}

int MapStore::padded_size() const noexcept {
    return static_cast<int>(round_up(static_cast<std::size_t>(size_), kColumnBlock));
}

std::size_t MapStore::map_bytes() const noexcept { return columns_.size() * sizeof(Half); }

std::size_t MapStore::embedding_bytes() const noexcept { return embeddings_.size() * sizeof(Half); }

void MapStore::check_finite(const NewMap& map) const {
    require(map.probs != nullptr, "map store: a map without probabilities");
    for (int e = 0; e < geometry().size(); ++e) {
        if (std::isfinite(map.probs[e]) && map.probs[e] >= 0) continue;
        throw std::invalid_argument("map store: probability " + std::to_string(map.probs[e]) +
                                    " of layer " + std::to_string(geometry().layer_of(e)) +
                                    ", expert " + std::to_string(geometry().expert_of(e)) +
                                    " is negative or not finite; such a row must not be stored");
    }
}

void MapStore::check_integrity() const {
    FMOE_CHECK(size_ <= capacity_);
    for (std::size_t column = 0; column < static_cast<std::size_t>(geometry().size()); ++column)
        for (std::size_t c = static_cast<std::size_t>(size_); c < stride_; ++c)
            FMOE_CHECK(columns_[column * stride_ + c] == 0);
    for (int entry = 0; entry < size_; ++entry) {
        const EntryRef next = successor(entry);
        if (next) FMOE_CHECK(predecessors_[next.index] == ref(entry));
        const EntryRef previous = predecessor(entry);
        if (previous) FMOE_CHECK(successors_[previous.index] == ref(entry));
    }
}

}  // namespace fmoe
