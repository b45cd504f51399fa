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

FmoeEviction::FmoeEviction(const Geometry& geometry)
    : p_(static_cast<std::size_t>(geometry.size()),
         1.0F / static_cast<float>(geometry.num_experts)),
      uses_(p_.size(), 0),
      value_(p_.begin(), p_.end()) {}

void FmoeEviction::used(std::span<const int> experts) {
    for (int expert : experts) {
        ++uses_[expert];
        update(expert);
    }
}

void FmoeEviction::matched(int first_expert, std::span<const float> p) {
    for (std::size_t j = 0; j < p.size(); ++j) {
        p_[static_cast<std::size_t>(first_expert) + j] = p[j];
        update(first_expert + static_cast<int>(j));
    }
}

void FmoeEviction::update(int expert) {
    constexpr double kLeastP = 1e-6;
    value_[expert] =
        std::max<double>(p_[expert], kLeastP) * std::max<std::uint32_t>(uses_[expert], 1);
}

std::unique_ptr<Eviction> make_eviction(const std::string& name, const Geometry& geometry) {
    if (name == "lru") return std::make_unique<LruEviction>(geometry.size());
    if (name == "lfu") return std::make_unique<LfuEviction>(geometry.size());
    if (name == "ema") return std::make_unique<EmaEviction>(geometry.size());
    if (name == "fmoe") return std::make_unique<FmoeEviction>(geometry);
    throw std::invalid_argument("eviction '" + name + "' is unknown; choose lru, lfu, ema or fmoe");
}

}  // namespace fmoe
