#include "fmoe/policies/prefetch_policy.h"

#include <algorithm>
#include <numeric>

namespace fmoe {

double prefetch_threshold(float score) noexcept {
    return std::clamp(1.0 - static_cast<double>(score), 0.0, 1.0);
}

std::vector<int> select_prefetch(std::span<const float> p, float score, int top_k) {
    std::vector<int> experts(p.size());
    std::iota(experts.begin(), experts.end(), 0);
    std::stable_sort(experts.begin(), experts.end(), [p](int a, int b) {
        return p[static_cast<std::size_t>(a)] > p[static_cast<std::size_t>(b)];
    });
    const double threshold = prefetch_threshold(score);
    double sum = 0;
    std::size_t taken = 0;
    while (taken < experts.size() && (static_cast<int>(taken) < top_k || sum < threshold)) {
        const float next = p[static_cast<std::size_t>(experts[taken])];
        if (!(next > 0)) break;
        sum += next;
        ++taken;
    }
    experts.resize(taken);
    return experts;
}

PrefetchPolicy::PrefetchPolicy(const Geometry& geometry, std::unique_ptr<Eviction> eviction,
                               const PrefetchRules& rules)
    : geometry_(geometry),
      eviction_(std::move(eviction)),
      rules_(rules),
      ordered_(static_cast<std::size_t>(geometry.size()), 0) {}

void PrefetchPolicy::iteration_started(const IterationStarted&, const ExpertCache&, Instructions&) {
    layer_ = -1;
    orders_.clear();
    std::fill(ordered_.begin(), ordered_.end(), std::uint8_t{0});
}

void PrefetchPolicy::gate_requested(const GateRequested& event, const ExpertCache&, Instructions&) {
    layer_ = event.layer;
    eviction_->used(event.needed);
    for (int layer = 0; layer < geometry_.num_layers && is_over(layer); ++layer)
        forget_layer(layer);
}

// No order of the layer is of use any more.
bool PrefetchPolicy::is_over(int layer) const noexcept {
    return rules_.is_synchronous ? layer < layer_ : layer <= layer_;
}

void PrefetchPolicy::forget_layer(int layer) {
    std::erase_if(orders_, [this, layer](const Order& order) {
        return geometry_.layer_of(order.expert) == layer;
    });
    std::fill_n(ordered_.begin() + geometry_.index(layer, 0), geometry_.num_experts,
                std::uint8_t{0});
}

void PrefetchPolicy::predicted(const Prediction& prediction, const ExpertCache& cache,
                               Instructions& out) {
    for (int l = 0; l < prediction.num_layers; ++l)
        predict_layer(prediction, prediction.first_layer + l, cache, out);
}

void PrefetchPolicy::predict_layer(const Prediction& prediction, int layer,
                                   const ExpertCache& cache, Instructions& out) {
    const auto experts = static_cast<std::size_t>(geometry_.num_experts);
    std::vector<float> largest(experts, 0.0f);
    std::vector<std::uint8_t> is_taken(experts, 0);
    for (int row = 0; row < prediction.num_rows; ++row) {
        const std::span<const float> p(prediction.probs(row, layer, geometry_.num_experts),
                                       experts);
        for (std::size_t j = 0; j < experts; ++j) largest[j] = std::max(largest[j], p[j]);
        for (int j : select_prefetch(p, prediction.score_of(row, layer), geometry_.top_k))
            is_taken[static_cast<std::size_t>(j)] = 1;
    }
    if (std::all_of(largest.begin(), largest.end(), [](float p) { return p == 0; })) return;
    eviction_->matched(geometry_.index(layer, 0), largest);
    if (is_over(layer)) return;
    forget_layer(layer);
    for (int j = 0; j < geometry_.num_experts; ++j) {
        const int expert = geometry_.index(layer, j);
        if (!is_taken[static_cast<std::size_t>(j)] || expert % rules_.num_shards != rules_.shard)
            continue;
        ordered_[static_cast<std::size_t>(expert)] = 1;
        if (cache.is_absent(expert))
            orders_.push_back({expert, largest[static_cast<std::size_t>(j)]});
        if (rules_.is_synchronous && !cache.is_ready(expert))
            out.push_back(Instruction::hold(layer, expert));
    }
}

// What a gate asked for was counted as used then.
void PrefetchPolicy::copy_done(int expert, const ExpertCache& cache, Instructions&) {
    if (cache.is_unused_prefetch(expert)) eviction_->loaded(expert);
}

void PrefetchPolicy::iteration_ended(const ExpertCache&, Instructions&) {
    eviction_->iteration_ended();
}

// p / (l - l_now); a synchronous order whose layer has begun comes first.
double PrefetchPolicy::priority(const Order& order) const noexcept {
    const int distance = geometry_.layer_of(order.expert) - layer_;
    return static_cast<double>(order.p) / std::max(distance, 1);
}

void PrefetchPolicy::link_free(const ExpertCache& cache, Instructions& out) {
    std::erase_if(orders_, [&cache](const Order& order) { return !cache.is_absent(order.expert); });
    const auto next =
        std::max_element(orders_.begin(), orders_.end(), [this](const Order& a, const Order& b) {
            const double first = priority(a);
            const double second = priority(b);
            return first < second || (first == second && a.expert > b.expert);
        });
    if (next == orders_.end()) return;
    int victim = -1;
    if (cache.num_free() == 0) {
        victim = eviction_->victim(cache, ordered_);
        if (victim < 0) return;
    }
    out.push_back(Instruction::start_copy(next->expert, victim));
    orders_.erase(next);
}

int PrefetchPolicy::victim(const VictimNeeded& needed, const ExpertCache& cache) {
    if (needed.cause == Cause::prefetch) return eviction_->victim(cache, ordered_);
    return eviction_->victim(cache);
}

}  // namespace fmoe
