// fmoe/eviction.h: orders the residents of a cache by how little they are worth. One rule a class;
// policies are composed with it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fmoe/expert_cache.h"

namespace fmoe {

class Eviction {
public:
    virtual ~Eviction() = default;
    // A gate asks for these.
    virtual void used(std::span<const int> /*experts*/) {}
    // A copy is done.
    virtual void loaded(int /*expert*/) {}
    virtual void iteration_ended() {}
    // p of the experts first_expert, first_expert + 1, .. by their layer's latest match.
    virtual void matched(int /*first_expert*/, std::span<const float> /*p*/) {}
    // The expert to give up, or -1 where none can be evicted. `spared` [L * J] marks experts that
    // must stay; empty: none.
    virtual int victim(const ExpertCache& cache,
                       std::span<const std::uint8_t> spared = {}) const = 0;
};

// The evictable resident of the lowest score, ties by lower index, or -1. `score` is a contiguous
// array over all experts: the scan costs about a nanosecond a resident.
template <class Score>
int lowest(const ExpertCache& cache, const std::vector<Score>& score,
           std::span<const std::uint8_t> spared) {
    int best = -1;
    for (int expert : cache.residents()) {
        if (best >= 0 &&
            (score[expert] > score[best] || (score[expert] == score[best] && expert > best)))
            continue;
        if (!spared.empty() && spared[expert] != 0) continue;
        if (cache.can_evict(expert)) best = expert;
    }
    return best;
}

// Least recently used; being loaded counts as a use, so that a prefetch outlives older experts.
class LruEviction final : public Eviction {
public:
    explicit LruEviction(int num_experts) : last_use_(static_cast<std::size_t>(num_experts), 0) {}
    void used(std::span<const int> experts) override;
    void loaded(int expert) override { last_use_[expert] = ++clock_; }
    int victim(const ExpertCache& cache, std::span<const std::uint8_t> spared) const override {
        return lowest(cache, last_use_, spared);
    }

private:
    std::vector<std::uint64_t> last_use_;
    std::uint64_t clock_ = 0;
};

// Least frequently used; the count survives eviction (paper 4.5) and has a floor of 1.
class LfuEviction final : public Eviction {
public:
    explicit LfuEviction(int num_experts) : uses_(static_cast<std::size_t>(num_experts), 0) {}
    void used(std::span<const int> experts) override;
    void loaded(int expert) override { uses_[expert] = std::max<std::uint32_t>(uses_[expert], 1); }
    int victim(const ExpertCache& cache, std::span<const std::uint8_t> spared) const override {
        return lowest(cache, uses_, spared);
    }

private:
    std::vector<std::uint32_t> uses_;
};

// Lowest decayed frequency: every use adds 1, every iteration multiplies all by `decay`.
class EmaEviction final : public Eviction {
public:
    static constexpr float kDecay = 0.93F;

    explicit EmaEviction(int num_experts, float decay = kDecay)
        : decay_(decay), frequency_(static_cast<std::size_t>(num_experts), 0.0F) {}
    void used(std::span<const int> experts) override;
    void iteration_ended() override;
    int victim(const ExpertCache& cache, std::span<const std::uint8_t> spared) const override {
        return lowest(cache, frequency_, spared);
    }

private:
    float decay_;
    std::vector<float> frequency_;
};

// The paper's (4.5): the largest 1 / (p * freq) goes first. p is at least 1e-6, freq, the times a
// gate asked (it survives eviction), at least 1, so that neither makes it infinite. p of a layer is
// that of its latest match, 1/J before any.
class FmoeEviction final : public Eviction {
public:
    explicit FmoeEviction(const Geometry& geometry);
    void used(std::span<const int> experts) override;
    void matched(int first_expert, std::span<const float> p) override;
    int victim(const ExpertCache& cache, std::span<const std::uint8_t> spared) const override {
        return lowest(cache, value_, spared);
    }

private:
    void update(int expert);

    std::vector<float> p_;
    std::vector<std::uint32_t> uses_;
    std::vector<double> value_;  // p * freq with their floors
};

// "lru", "lfu", "ema" or "fmoe"; throws invalid_argument naming them for any other.
std::unique_ptr<Eviction> make_eviction(const std::string& name, const Geometry& geometry);

}  // namespace fmoe
