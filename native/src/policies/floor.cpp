#include "floor.h"

namespace fmoe {

NoOffloadPolicy::NoOffloadPolicy(const PolicyParams& params) {
    for (int expert = params.geometry.size() - 1; expert >= 0; --expert)
        if (params.is_hosted(expert)) to_load_.push_back(expert);
    const auto num_hosted = static_cast<int>(to_load_.size());
    require(params.num_slots >= num_hosted,
            "policy no-offload keeps all " + std::to_string(num_hosted) + " experts, got " +
                std::to_string(params.num_slots) + " slots; give a budget of 100% or offload");
}

void NoOffloadPolicy::link_free(const ExpertCache& cache, Instructions& out) {
    while (!to_load_.empty() && !cache.is_absent(to_load_.back())) to_load_.pop_back();
    if (!to_load_.empty()) out.push_back(Instruction::start_copy(to_load_.back(), -1));
}

}  // namespace fmoe
