#include "floor.h"
#include "fmoe/policies/plus_policy.h"
#include "fmoe/policies/prefetch_policy.h"
#include "fmoe/policy_factory.h"
#include "fmoe/predictors/hit_count_predictor.h"
#include "fmoe/predictors/map_predictor.h"
#include "fmoe/predictors/online_predictor.h"
#include "fmoe/predictors/speculative_predictor.h"
#include "fmoe/predictors/stride_predictor.h"

namespace fmoe {

namespace {

PolicyParts on_demand(const std::string& own_eviction, const PolicyParams& params) {
    const std::string& name = params.eviction == "policy" ? own_eviction : params.eviction;
    return {nullptr, std::make_unique<OnDemandPolicy>(make_eviction(name, params.geometry))};
}

PolicyParts make_no_offload(const PolicyParams& params) {
    require(params.eviction == "policy",
            "policy no-offload evicts nothing; eviction must stay 'policy', got '" +
                params.eviction + "'");
    return {nullptr, std::make_unique<NoOffloadPolicy>(params)};
}

std::unique_ptr<Policy> prefetching(const std::string& own_eviction, bool is_synchronous,
                                    const PolicyParams& params) {
    const std::string& name = params.eviction == "policy" ? own_eviction : params.eviction;
    return std::make_unique<PrefetchPolicy>(
        params.geometry, make_eviction(name, params.geometry),
        PrefetchRules{is_synchronous, params.shard, params.num_shards});
}

PolicyParts by_maps(const MapSearch& search, const PolicyParams& params) {
    const StoreShape shape{params.geometry, params.embedding_size, params.prefetch_distance};
    return {std::make_unique<MapPredictor>(shape, params.store_capacity, search),
            prefetching("fmoe", false, params)};
}

PolicyParts make_hit_count(const HitCountOptions& options, const std::string& own_eviction,
                           const PolicyParams& params) {
    return {std::make_unique<HitCountPredictor>(params.geometry, params.store_capacity, options),
            prefetching(own_eviction, options.is_synchronous, params)};
}

PolicyParts make_speculative(bool is_synchronous, const std::string& own_eviction,
                             const PolicyParams& params) {
    return {std::make_unique<SpeculativePredictor>(params.geometry, is_synchronous),
            prefetching(own_eviction, is_synchronous, params)};
}

PolicyParts make_promoe(const PolicyParams& params) {
    return {std::make_unique<StridePredictor>(params.geometry, params.prefetch_distance),
            prefetching("lru", false, params)};
}

PolicyParts make_plus(const PolicyParams& params) {
    // Models learn from every d at once; d is kept for the store's redundancy alone.
    const StoreShape shape{params.geometry, params.embedding_size, params.prefetch_distance};
    std::unique_ptr<Eviction> eviction;
    if (params.eviction != "policy") eviction = make_eviction(params.eviction, params.geometry);
    return {std::make_unique<OnlinePredictor>(shape, params.store_capacity),
            std::make_unique<PlusPolicy>(params, std::move(eviction))};
}

// Settings that not every policy uses: one given to a policy that does not would be ignored.
enum Parameter : unsigned {
    kEviction = 1,
    kDistance = 2,
    kDepth = 4,
    kCapacity = 8,
    kPooling = 16,
    kLearned = 32,  // it learns expert maps, which can be saved and shared
};

constexpr std::pair<Parameter, const char*> kParameterNames[] = {
    {kEviction, "eviction"},    {kDistance, "prefetch_distance"},
    {kDepth, "prefetch_depth"}, {kCapacity, "store_capacity"},
    {kPooling, "pooling"},      {kLearned, "store_path"},
    {kLearned, "share_maps"},
};

constexpr unsigned kMaps = kEviction | kDistance | kDepth | kCapacity | kPooling | kLearned;

struct Entry {
    const char* name;
    const char* predictor;
    const char* description;
    unsigned parameters;
    PolicyParts (*make)(const PolicyParams&);
};

constexpr Entry kPolicies[] = {
    {"lru", "none", "on demand; evicts the least recently used expert", kEviction,
     [](const PolicyParams& params) { return on_demand("lru", params); }},
    {"lfu", "none", "on demand; evicts the least frequently used expert", kEviction,
     [](const PolicyParams& params) { return on_demand("lfu", params); }},
    {"ema", "none", "on demand; evicts the expert of the lowest decayed frequency", kEviction,
     [](const PolicyParams& params) { return on_demand("ema", params); }},
    {"no-offload", "none", "everything resident: the latency floor", 0, make_no_offload},
    {"fmoe+", "online",
     "learns online; holds what is worth most, prefetches what pays, never loses to lru or ema",
     kMaps, make_plus},
    {"fmoe", "map", "the paper: expert maps, semantic and trajectory search, delta, 1/(p*freq)",
     kMaps, [](const PolicyParams& params) { return by_maps({true, true}, params); }},
    {"deepspeed", "none", "DeepSpeed-Inference: on demand, expert-agnostic; decides as lru",
     kEviction, [](const PolicyParams& params) { return on_demand("lru", params); }},
    {"mixtral-offloading", "speculative",
     "Mixtral-Offloading: layer l+1's gate on layer l's hidden state, synchronous, LRU",
     kEviction | kDepth,
     [](const PolicyParams& params) { return make_speculative(true, "lru", params); }},
    {"promoe", "stride", "ProMoE: a small learned predictor per layer, d layers ahead, LRU",
     kEviction | kDistance | kDepth, make_promoe},
    {"moe-infinity", "hit-count",
     "MoE-Infinity: request-level hit counts, one layer ahead, synchronous, LFU",
     kEviction | kDepth | kCapacity,
     [](const PolicyParams& params) { return make_hit_count({1, true, true}, "lfu", params); }},
    {"speculate", "speculative", "ablation: speculative gate, one layer ahead, the paper's cache",
     kEviction | kDepth,
     [](const PolicyParams& params) { return make_speculative(false, "fmoe", params); }},
    {"hit-count", "hit-count", "ablation: request-level hit counts, d ahead, the paper's cache",
     kEviction | kDistance | kDepth | kCapacity,
     [](const PolicyParams& params) {
         return make_hit_count({params.prefetch_distance, false, false}, "fmoe", params);
     }},
    {"map-t", "map", "ablation: trajectory search alone, K experts a layer", kMaps,
     [](const PolicyParams& params) { return by_maps({false, false}, params); }},
    {"map-ts", "map", "ablation: trajectory and semantic search, K experts a layer", kMaps,
     [](const PolicyParams& params) { return by_maps({true, false}, params); }},
    {"map-tsd", "map", "ablation: both searches and delta; decides as fmoe", kMaps,
     [](const PolicyParams& params) { return by_maps({true, true}, params); }},
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

std::vector<PolicyInfo> describe_policies() {
    std::vector<PolicyInfo> infos;
    for (const Entry& entry : kPolicies) {
        std::vector<std::string> parameters;
        for (const auto& [parameter, name] : kParameterNames)
            if (entry.parameters & parameter) parameters.emplace_back(name);
        infos.push_back({entry.name, entry.description, entry.predictor, std::move(parameters)});
    }
    return infos;
}

}  // namespace fmoe
