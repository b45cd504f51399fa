// fmoe/matcher.h: finds the stored iterations that resemble the one in progress (paper 4.2): the
// semantic search before the first layer, the trajectory search after every gate.
//
// The trajectory search is incremental: one running dot product per row and stored map, to which
// layer l's products are added when gate l is seen; stored prefix norms turn it into a cosine. That
// costs C * J per layer instead of C * J * l.
//
// Shapes: R rows (requests of the iteration), N stored maps, J experts, h embedding size.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fmoe/map_store.h"

namespace fmoe {

// A stored map and its similarity; entry -1 (score 0) where nothing resembles: the store is empty
// or the query is a zero vector.
struct Match {
    int entry = -1;
    float score = 0;

    friend bool operator==(const Match&, const Match&) = default;
};

// Not thread-safe. Borrows the store, which must outlive it and must not change between start() and
// the last question about that iteration (std::logic_error if it did).
class Matcher {
public:
    // num_columns: 0 compares all J experts of a layer (exact); otherwise only the row's so many
    // most probable ones, and a score is then a lower bound of the cosine.
    explicit Matcher(const MapStore& store, int num_columns = 0);

    const MapStore& store() const noexcept { return store_; }
    int num_rows() const noexcept { return num_rows_; }
    int num_observed() const noexcept { return num_observed_; }

    // Forgets the iteration before; scores the embeddings [R, h], or null where there are none.
    void start(int num_rows, const float* embeddings);
    // Layers come in order, each once. probs [R, J], not negative.
    void observe(int layer, const float* probs);

    // The most similar entry, the lowest index of equals.
    Match best_semantic(int row) const;
    Match best_trajectory(int row) const;
    // The n most similar, best first, the lower index first among equals; fewer if N < n.
    std::vector<Match> nearest_semantic(int row, int n) const;
    std::vector<Match> nearest_trajectory(int row, int n) const;

    // score_sem of every entry, [N]; zeros without an embedding. Valid until start().
    std::span<const float> semantic_scores(int row) const;
    // score_map of every entry for the layers seen so far, [N]. Valid until the next call.
    std::span<const float> trajectory_scores(int row) const;

private:
    struct Row {
        double square = 0;        // of the prefix seen so far
        std::vector<float> dots;  // [stride]
    };

    void check_current(int row) const;
    void accumulate(Row& row, int layer, const float* probs);
    void select_columns(const float* probs);

    const MapStore& store_;
    int num_columns_;
    int num_rows_ = 0;
    int num_observed_ = 0;
    std::uint64_t version_ = 0;
    std::vector<Row> rows_;
    std::vector<float> semantic_;      // [R, N]
    std::vector<bool> has_embedding_;  // [R]
    std::vector<int> columns_;
    std::vector<float> weights_;
    mutable std::vector<float> scores_;
};

// What a vote is taken on: the neighbours' distributions, or which experts they chose.
enum class Ballot : std::uint8_t { probs, chosen };

// Soft vote: the neighbours' layers [first_layer, first_layer + num_layers), weighted by
// softmax(sharpness * score), into p [num_layers, J]; zeros where there is no neighbour.
void vote(const MapStore& store, std::span<const Match> neighbours, float sharpness, Ballot ballot,
          int first_layer, int num_layers, float* p);

}  // namespace fmoe
