#include "fmoe/eviction.h"

#include "fmoe/check.h"

namespace fmoe {

void LruEviction::used(std::span<const int> experts) {
    for (int expert : experts) last_use_[expert] = ++clock_;
}

void LfuEviction::used(std::span<const int> experts) {
    for (int expert : experts) ++uses_[expert];
}

void EmaEviction::used(std::span<const int> experts) {
    for (int expert : experts) frequency_[expert] += 1.0F;
}

void EmaEviction::iteration_ended() {
    for (float& frequency : frequency_) frequency *= decay_;
}

std::unique_ptr<Eviction> make_eviction(const std::string& name, int num_experts) {
    if (name == "lru") return std::make_unique<LruEviction>(num_experts);
    if (name == "lfu") return std::make_unique<LfuEviction>(num_experts);
    if (name == "ema") return std::make_unique<EmaEviction>(num_experts);
    throw std::invalid_argument("eviction '" + name + "' is unknown; choose lru, lfu or ema");
}

}  // namespace fmoe
