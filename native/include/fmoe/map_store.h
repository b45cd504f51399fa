// fmoe/map_store.h: the expert maps of past iterations (paper 4.1, 4.4), laid out so that a search
// reads contiguous columns. Knows no request, no clock and no file.
//
// Shapes: L layers, J experts, C capacity, N entries so far, h embedding size.
//
//     columns    half  [L, J, C]      entry c of expert (l, j) lies beside entry c + 1
//     norms      float [L, C]         1 / |P_1 .. P_l| of every entry's prefix, 0 for a zero prefix
//     embeddings half  [C/64, h, 64]  the same in blocks of entries; scaled to length 1 (cosines do
//                                     not change; halves do not overflow)
//
// Entries of one request are linked to the request's next iteration. A link names a generation:
// when an entry is replaced its generation moves on and every link to it is void.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fmoe/geometry.h"
#include "fmoe/half.h"
#include "fmoe/huge_vector.h"

namespace fmoe {

// An entry at a moment in time; see MapStore::is_current().
struct EntryRef {
    int index = -1;
    std::uint32_t generation = 0;

    explicit operator bool() const noexcept { return index >= 0; }
    friend bool operator==(const EntryRef&, const EntryRef&) = default;
};

// One row's iteration, to be stored. Pointers live until insert() returns.
struct NewMap {
    const float* probs = nullptr;          // [L, J], finite and not negative
    const float* embedding = nullptr;      // [h], or null: its semantic score is 0 with every entry
    bool is_unit = false;                  // the embedding was read from a store: kept bit for bit
    const std::uint8_t* chosen = nullptr;  // [L, J], or null
    std::int32_t token_id = -1;            // input token; -1 where there is none or many
    EntryRef predecessor = {};             // the request's iteration before this one, if stored
    // Similarities to all entries of a full store as they are before the batch, where a matcher
    // that compares all columns has them already; null: computed here.
    const float* semantic_scores = nullptr;
    const float* map_scores = nullptr;
};

// What may not differ between two stores that are merged.
struct StoreShape {
    Geometry geometry;
    int embedding_size = 0;     // h; 0 stores none, and every semantic score is 0
    int prefetch_distance = 3;  // d of RDY, clipped to L
};

// Not thread-safe: one owner, which changes it between iterations only.
class MapStore {
public:
    MapStore(const StoreShape& shape, int capacity);

    const StoreShape& shape() const noexcept { return shape_; }
    const Geometry& geometry() const noexcept { return shape_.geometry; }
    int capacity() const noexcept { return capacity_; }
    int size() const noexcept { return size_; }
    // Moves on with every change, so that a search can tell that it is stale.
    std::uint64_t version() const noexcept { return version_; }

    // Stores the batch in order. While there is room a map takes a new entry; afterwards it
    // replaces the most redundant one (paper 4.4: largest RDY, the lowest index of equals, which
    // are those less than 1e-9 apart), which may be an earlier one of the same batch. A batch is
    // stored as its maps one by one would be, but the store is read once for up to 64 of them.
    // Returns where each went; an earlier ref of the batch is stale if a later one replaced it.
    // Throws std::invalid_argument for a probability that is negative or not finite, before
    // anything changes.
    std::vector<EntryRef> insert(std::span<const NewMap> batch);
    // Stores the map as `entry`, over what is there; entry size() adds one while there is room. For
    // owners that choose what to replace themselves. Throws as insert().
    EntryRef put(int entry, const NewMap& map);
    // RDY = d/L * semantic + (L-d)/L * map, d clipped to L (paper 4.4).
    double redundancy(double semantic_score, double map_score) const noexcept;
    // Makes `next` the iteration after `previous`; does nothing where either is stale.
    void link(EntryRef previous, EntryRef next);

    // Cosines of R embeddings [R, h] with every stored one, [R, N]; returns which of the R have a
    // direction. Zeros and false for null, for a vector that is zero or not finite, or where h is
    // 0.
    std::vector<bool> semantic_scores(const float* embeddings, int num_rows, float* scores) const;
    // Cosine of whole maps, [N].
    void map_scores(const float* probs, float* scores) const;

    EntryRef ref(int entry) const noexcept { return {entry, generations_[entry]}; }
    bool is_current(EntryRef ref) const noexcept {
        return ref.index >= 0 && ref.index < size_ && generations_[ref.index] == ref.generation;
    }
    // The request's iteration before or after this one; empty where it is unknown or replaced.
    EntryRef predecessor(int entry) const noexcept { return valid(predecessors_[entry]); }
    EntryRef successor(int entry) const noexcept { return valid(successors_[entry]); }
    std::int32_t token_id(int entry) const noexcept { return token_ids_[entry]; }
    bool is_chosen(int entry, int layer, int expert) const noexcept;
    void read_probs(int entry, int layer, float* probs) const;           // [J]
    void read_chosen(int entry, int layer, std::uint8_t* chosen) const;  // [J]
    void read_embedding(int entry, float* embedding) const;              // [h], length 1 or 0

    // For searches. Column j of a layer starts at columns(layer) + j * stride(); norms and columns
    // are readable up to padded_size(), with zeros after size().
    const Half* columns(int layer) const noexcept {
        return columns_.data() + static_cast<std::size_t>(layer) * geometry().num_experts * stride_;
    }
    std::size_t stride() const noexcept { return stride_; }
    int padded_size() const noexcept;
    const float* inverse_prefix_norms(int layer) const noexcept {
        return inverse_prefix_norms_.data() + static_cast<std::size_t>(layer) * stride_;
    }
    // 1 / |map|, [N].
    const float* inverse_norms() const noexcept {
        return inverse_prefix_norms(geometry().num_layers - 1);
    }

    // Term i of an entry's embedding lies at embedding(entry)[i * embedding_stride()], beside those
    // of the other entries of its block.
    const Half* embedding(int entry) const noexcept;
    static std::size_t embedding_stride() noexcept;
    // 1 / |embedding|, readable up to padded_size().
    const float* inverse_embedding_norms() const noexcept {
        return inverse_embedding_norms_.data();
    }
    // Equal for entries of equal probabilities and embedding.
    std::uint64_t content(int entry) const noexcept { return contents_[entry]; }

    // Bytes of the maps themselves, and of their embeddings, at full capacity.
    std::size_t map_bytes() const noexcept;
    std::size_t embedding_bytes() const noexcept;

    // Throws std::logic_error where a law above is broken.
    void check_integrity() const;

private:
    EntryRef valid(EntryRef ref) const noexcept { return is_current(ref) ? ref : EntryRef{}; }
    EntryRef write(int entry, const NewMap& map);
    void write_probs(int entry, const float* probs);
    std::size_t embedding_offset(int entry) const noexcept;
    void write_embedding(int entry, const float* embedding, bool is_unit);
    void write_chosen(int entry, const std::uint8_t* chosen);
    void check_finite(const NewMap& map) const;

    StoreShape shape_;
    int capacity_;
    int size_ = 0;
    std::uint64_t version_ = 0;
    std::size_t stride_;
    std::size_t chosen_words_;
    HugeVector<Half> columns_;
    std::vector<float> inverse_prefix_norms_;
    HugeVector<Half> embeddings_;
    std::vector<float> inverse_embedding_norms_;
    std::vector<std::uint64_t> contents_;
    std::vector<std::uint64_t> chosen_;
    std::vector<std::int32_t> token_ids_;
    std::vector<std::uint32_t> generations_;
    std::vector<EntryRef> predecessors_;
    std::vector<EntryRef> successors_;
};

}  // namespace fmoe
