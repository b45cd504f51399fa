#include "fmoe/matcher.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "similarity_kernels.h"

namespace fmoe {
namespace {

bool is_better(const Match& a, const Match& b) {
    return a.score > b.score || (a.score == b.score && a.entry < b.entry);
}

// The n best of scores, best first. Most entries fail one comparison with the worst kept.
std::vector<Match> nearest(std::span<const float> scores, int n) {
    require(n >= 1, "matcher: at least 1 neighbour must be asked for, got " + std::to_string(n));
    std::vector<Match> kept;
    kept.reserve(static_cast<std::size_t>(n));
    for (int entry = 0; entry < static_cast<int>(scores.size()); ++entry) {
        const Match match{entry, scores[static_cast<std::size_t>(entry)]};
        if (std::isnan(match.score)) continue;
        if (static_cast<int>(kept.size()) == n) {
            if (!is_better(match, kept.front())) continue;
            std::pop_heap(kept.begin(), kept.end(), is_better);
            kept.pop_back();
        }
        kept.push_back(match);
        std::push_heap(kept.begin(), kept.end(), is_better);
    }
    std::sort_heap(kept.begin(), kept.end(), is_better);
    return kept;
}

}  // namespace

Matcher::Matcher(const MapStore& store, int num_columns)
    : store_(store), num_columns_(num_columns) {
    require(num_columns >= 0 && num_columns <= store.geometry().num_experts,
            "matcher: num_columns must lie between 0 (all) and the number of experts, got " +
                std::to_string(num_columns));
}

void Matcher::start(int num_rows, const float* embeddings) {
    require(num_rows >= 0, "matcher: num_rows must not be negative");
    version_ = store_.version();
    num_rows_ = num_rows;
    num_observed_ = 0;
    if (static_cast<int>(rows_.size()) < num_rows) rows_.resize(static_cast<std::size_t>(num_rows));
    const auto num_stored = static_cast<std::size_t>(store_.size());
    semantic_.resize(static_cast<std::size_t>(num_rows) * num_stored);
    has_embedding_ = store_.semantic_scores(embeddings, num_rows, semantic_.data());
    for (int r = 0; r < num_rows; ++r) {
        Row& row = rows_[static_cast<std::size_t>(r)];
        row.square = 0;
        row.dots.assign(static_cast<std::size_t>(store_.padded_size()), 0);
    }
}

void Matcher::observe(int layer, const float* probs) {
    FMOE_CHECK(layer == num_observed_ && layer < store_.geometry().num_layers);
    FMOE_CHECK(version_ == store_.version());
    const int experts = store_.geometry().num_experts;
    for (int r = 0; r < num_rows_; ++r)
        accumulate(rows_[static_cast<std::size_t>(r)], layer,
                   probs + static_cast<std::ptrdiff_t>(r) * experts);
    ++num_observed_;
}

void Matcher::accumulate(Row& row, int layer, const float* probs) {
    for (int j = 0; j < store_.geometry().num_experts; ++j)
        row.square += static_cast<double>(probs[j]) * probs[j];
    select_columns(probs);
    similarity_kernels().accumulate(store_.columns(layer), store_.stride(), columns_.data(),
                                    weights_.data(), static_cast<int>(columns_.size()),
                                    store_.padded_size(), row.dots.data());
}

// Experts of probability 0 add nothing, so skipping them is exact.
void Matcher::select_columns(const float* probs) {
    columns_.clear();
    for (int j = 0; j < store_.geometry().num_experts; ++j)
        if (probs[j] != 0) columns_.push_back(j);
    if (num_columns_ > 0 && num_columns_ < static_cast<int>(columns_.size())) {
        std::nth_element(columns_.begin(), columns_.begin() + num_columns_, columns_.end(),
                         [probs](int a, int b) {
                             return probs[a] > probs[b] || (probs[a] == probs[b] && a < b);
                         });
        columns_.resize(static_cast<std::size_t>(num_columns_));
        std::sort(columns_.begin(), columns_.end());
    }
    weights_.clear();
    for (int j : columns_) weights_.push_back(probs[j]);
}

void Matcher::check_current(int row) const {
    FMOE_CHECK(row >= 0 && row < num_rows_);
    FMOE_CHECK(version_ == store_.version());
}

Match Matcher::best_semantic(int row) const {
    const std::span<const float> scores = semantic_scores(row);
    if (!has_embedding_[static_cast<std::size_t>(row)]) return {};
    const auto best = std::max_element(scores.begin(), scores.end());
    if (best == scores.end()) return {};
    return {static_cast<int>(best - scores.begin()), *best};
}

Match Matcher::best_trajectory(int row) const {
    check_current(row);
    const Row& state = rows_[static_cast<std::size_t>(row)];
    if (!(state.square > 0)) return {};
    const BestScore best = similarity_kernels().best(
        state.dots.data(), store_.inverse_prefix_norms(num_observed_ - 1), store_.size());
    if (best.index < 0) return {};
    return {best.index, best.score * static_cast<float>(1.0 / std::sqrt(state.square))};
}

std::vector<Match> Matcher::nearest_semantic(int row, int n) const {
    const std::span<const float> scores = semantic_scores(row);
    return has_embedding_[static_cast<std::size_t>(row)] ? nearest(scores, n)
                                                         : std::vector<Match>{};
}

std::vector<Match> Matcher::nearest_trajectory(int row, int n) const {
    if (!(rows_.at(static_cast<std::size_t>(row)).square > 0)) return {};
    return nearest(trajectory_scores(row), n);
}

std::span<const float> Matcher::semantic_scores(int row) const {
    check_current(row);
    const auto num_stored = static_cast<std::size_t>(store_.size());
    return {semantic_.data() + static_cast<std::size_t>(row) * num_stored, num_stored};
}

std::span<const float> Matcher::trajectory_scores(int row) const {
    check_current(row);
    const Row& state = rows_[static_cast<std::size_t>(row)];
    scores_.assign(static_cast<std::size_t>(store_.size()), 0);
    if (!(state.square > 0)) return scores_;
    const float* norms = store_.inverse_prefix_norms(num_observed_ - 1);
    const auto scale = static_cast<float>(1.0 / std::sqrt(state.square));
    for (std::size_t c = 0; c < scores_.size(); ++c) scores_[c] = state.dots[c] * norms[c] * scale;
    return scores_;
}

void vote(const MapStore& store, std::span<const Match> neighbours, float sharpness, Ballot ballot,
          int first_layer, int num_layers, float* p) {
    const int experts = store.geometry().num_experts;
    std::fill_n(p, static_cast<std::size_t>(num_layers) * experts, 0.0f);
    float best = 0;
    for (const Match& match : neighbours) best = std::max(best, match.score);
    float total = 0;
    for (const Match& match : neighbours) total += std::exp(sharpness * (match.score - best));
    std::vector<float> probs(static_cast<std::size_t>(experts));
    for (const Match& match : neighbours) {
        const float weight = std::exp(sharpness * (match.score - best)) / total;
        for (int layer = 0; layer < num_layers; ++layer) {
            if (ballot == Ballot::probs)
                store.read_probs(match.entry, first_layer + layer, probs.data());
            for (int j = 0; j < experts; ++j) {
                const float vote = ballot == Ballot::probs
                                       ? probs[static_cast<std::size_t>(j)]
                                       : store.is_chosen(match.entry, first_layer + layer, j);
                p[layer * experts + j] += weight * vote;
            }
        }
    }
}

}  // namespace fmoe
