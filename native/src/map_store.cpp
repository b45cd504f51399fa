#include "fmoe/map_store.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "packed_queries.h"
#include "redundancy.h"
#include "similarity_kernels.h"
#include "unit_vector.h"

namespace fmoe {
namespace {

constexpr std::size_t kWordBits = 64;
constexpr std::uint64_t kNoContent = 0xcbf29ce484222325;

// One step of the hash FNV-1a.
std::uint64_t mixed(std::uint64_t content, Half half) { return (content ^ half) * 0x100000001b3; }

// An odd number of blocks: columns a power of two apart would all fall into the same cache sets.
std::size_t padded_stride(int capacity) {
    const std::size_t blocks = round_up(static_cast<std::size_t>(capacity), kColumnBlock);
    return blocks / kColumnBlock % 2 == 0 ? blocks + kColumnBlock : blocks;
}

}  // namespace

MapStore::MapStore(const StoreShape& shape, int capacity) : shape_(shape), capacity_(capacity) {
    shape_.geometry.validate();
    require(capacity >= 1,
            "map store: capacity must be at least 1, got " + std::to_string(capacity));
    require(shape.embedding_size >= 0, "map store: embedding_size must not be negative");
    require(shape.prefetch_distance >= 0, "map store: prefetch_distance must not be negative");
    const auto entries = static_cast<std::size_t>(capacity);
    const auto experts = static_cast<std::size_t>(geometry().size());
    stride_ = padded_stride(capacity);
    chosen_words_ = round_up(experts, kWordBits) / kWordBits;
    columns_.assign(experts * stride_, 0);
    inverse_prefix_norms_.assign(static_cast<std::size_t>(geometry().num_layers) * stride_, 0);
    const std::size_t padded_entries = round_up(entries, kColumnBlock);
    embeddings_.assign(padded_entries * static_cast<std::size_t>(shape.embedding_size), 0);
    inverse_embedding_norms_.assign(padded_entries, 0);
    contents_.assign(entries, kNoContent);
    chosen_.assign(entries * chosen_words_, 0);
    token_ids_.assign(entries, -1);
    generations_.assign(entries, 0);
    predecessors_.assign(entries, {});
    successors_.assign(entries, {});
}

std::vector<EntryRef> MapStore::insert(std::span<const NewMap> batch) {
    for (const NewMap& map : batch) check_finite(map);
    std::vector<EntryRef> refs;
    refs.reserve(batch.size());
    bool knows_scores = size_ == capacity_;
    while (refs.size() < batch.size()) {
        const std::span<const NewMap> rest = batch.subspan(refs.size());
        if (size_ < capacity_) {
            refs.push_back(write(size_++, rest.front()));
            continue;
        }
        const auto part = rest.first(std::min<std::size_t>(rest.size(), Redundancy::kMostMaps));
        Redundancy redundancy(*this, part, knows_scores);
        for (int map = 0; map < static_cast<int>(part.size()); ++map) {
            const int entry = redundancy.most_redundant(map);
            refs.push_back(write(entry, part[static_cast<std::size_t>(map)]));
            redundancy.replaced(entry, map);
        }
        knows_scores = false;  // they spoke of the store before this part
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
    ++version_;
    return write(entry, map);
}

double MapStore::redundancy(double semantic_score, double map_score) const noexcept {
    const double layers = geometry().num_layers;
    const double distance = std::min(shape_.prefetch_distance, geometry().num_layers);
    return distance / layers * semantic_score + (layers - distance) / layers * map_score;
}

EntryRef MapStore::write(int entry, const NewMap& map) {
    ++generations_[entry];
    predecessors_[entry] = {};
    successors_[entry] = {};
    token_ids_[entry] = map.token_id;
    contents_[entry] = kNoContent;
    write_probs(entry, map.probs);
    write_embedding(entry, map.embedding, map.is_unit);
    write_chosen(entry, map.chosen);
    link(map.predecessor, ref(entry));
    return ref(entry);
}

void MapStore::write_probs(int entry, const float* probs) {
    double square = 0;
    for (int layer = 0; layer < geometry().num_layers; ++layer) {
        for (int j = 0; j < geometry().num_experts; ++j) {
            const int expert = geometry().index(layer, j);
            const Half half = to_half(probs[expert]);
            columns_[static_cast<std::size_t>(expert) * stride_ + entry] = half;
            contents_[entry] = mixed(contents_[entry], half);
            // Of what is stored, not of what came in: no map is more similar to itself than 1.
            square += static_cast<double>(to_float(half)) * to_float(half);
        }
        inverse_prefix_norms_[static_cast<std::size_t>(layer) * stride_ + entry] =
            inverse_root(square);
    }
}

void MapStore::write_embedding(int entry, const float* embedding, bool is_unit) {
    std::vector<float> unit(static_cast<std::size_t>(shape_.embedding_size));
    if (is_unit && embedding != nullptr)
        std::copy_n(embedding, shape_.embedding_size, unit.begin());
    else
        scale_to_unit(embedding, shape_.embedding_size, unit.data());
    Half* stored = embeddings_.data() + embedding_offset(entry);
    double square = 0;
    for (float value : unit) {
        const Half half = to_half(value);
        *stored = half;
        stored += embedding_stride();
        contents_[entry] = mixed(contents_[entry], half);
        square += static_cast<double>(to_float(half)) * to_float(half);
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

std::vector<bool> MapStore::semantic_scores(const float* embeddings, int num_rows,
                                            float* scores) const {
    std::vector<bool> has_direction;
    alignas(64) float dots[kMostQueries * kColumnBlock];
    for (int first = 0; first < num_rows; first += kMostQueries) {
        PackedQueries queries(std::min(kMostQueries, num_rows - first), shape_.embedding_size);
        for (int q = 0; q < queries.num_queries(); ++q) {
            const std::ptrdiff_t row = first + q;
            queries.set(q,
                        embeddings == nullptr ? nullptr : embeddings + row * shape_.embedding_size);
            has_direction.push_back(queries.length(q) > 0);
        }
        for (int entry = 0; entry < size_; entry += kColumnBlock) {
            const int count = std::min(kColumnBlock, size_ - entry);
            const int next = entry + count < size_ ? entry + count : entry;
            queries.multiply(embedding(entry), embedding_stride(), embedding(next), dots);
            for (int q = 0; q < queries.num_queries(); ++q)
                for (int c = 0; c < count; ++c)
                    scores[static_cast<std::ptrdiff_t>(first + q) * size_ + entry + c] =
                        dots[q * kColumnBlock + c] * inverse_embedding_norms_[entry + c];
        }
    }
    return has_direction;
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
    const Half* stored = this->embedding(entry);
    for (int i = 0; i < shape_.embedding_size; ++i)
        embedding[i] = to_float(stored[static_cast<std::size_t>(i) * embedding_stride()]);
}

const Half* MapStore::embedding(int entry) const noexcept {
    return embeddings_.data() + embedding_offset(entry);
}

std::size_t MapStore::embedding_stride() noexcept { return kColumnBlock; }

std::size_t MapStore::embedding_offset(int entry) const noexcept {
    const auto block = static_cast<std::size_t>(entry / kColumnBlock);
    const auto within = static_cast<std::size_t>(entry % kColumnBlock);
    return block * kColumnBlock * static_cast<std::size_t>(shape_.embedding_size) + within;
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
