#include "floor.h"
#include "fmoe/policy_factory.h"

namespace fmoe {

namespace {

PolicyParts on_demand(const std::string& own_eviction, const PolicyParams& params) {
    const std::string& name = params.eviction == "policy" ? own_eviction : params.eviction;
    return {nullptr, std::make_unique<OnDemandPolicy>(make_eviction(name, params.geometry.size()))};
}

PolicyParts make_no_offload(const PolicyParams& params) {
    require(params.eviction == "policy",
            "policy no-offload evicts nothing; eviction must stay 'policy', got '" +
                params.eviction + "'");
    return {nullptr, std::make_unique<NoOffloadPolicy>(params)};
}

struct Entry {
    const char* name;
    PolicyParts (*make)(const PolicyParams&);
};

constexpr Entry kPolicies[] = {
    {"lru", [](const PolicyParams& params) { return on_demand("lru", params); }},
    {"lfu", [](const PolicyParams& params) { return on_demand("lfu", params); }},
    {"ema", [](const PolicyParams& params) { return on_demand("ema", params); }},
    {"no-offload", make_no_offload},
};

}  // namespace

void PolicyParams::validate() const {
    geometry.validate();
    require(num_slots > 0, "policy: num_slots must be positive");
    require(prefetch_distance > 0, "policy: prefetch_distance must be positive");
    require(store_capacity > 0, "policy: store_capacity must be positive");
    require(embedding_size >= 0, "policy: embedding_size must not be negative");
    require(num_shards > 0 && shard >= 0 && shard < num_shards,
            "policy: shard must lie between 0 and num_shards - 1");
}

PolicyParts make_policy(const std::string& name, const PolicyParams& params) {
    params.validate();
    for (const Entry& entry : kPolicies)
        if (name == entry.name) return entry.make(params);
    std::string known;
    for (const Entry& entry : kPolicies)
        known += std::string(known.empty() ? "" : ", ") + entry.name;
    throw std::invalid_argument("policy '" + name + "' is unknown; choose one of " + known);
}

std::vector<std::string> list_policies() {
    std::vector<std::string> names;
    for (const Entry& entry : kPolicies) names.emplace_back(entry.name);
    return names;
}

}  // namespace fmoe
