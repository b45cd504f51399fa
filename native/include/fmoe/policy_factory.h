// fmoe/policy_factory.h: policies by name. A policy that predicts comes with the predictor that it
// listens to; the two meet only through Prediction.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fmoe/policy.h"
#include "fmoe/predictor.h"

namespace fmoe {

struct PolicyParams {
    Geometry geometry;
    int num_slots = 0;
    int prefetch_distance = 3;        // d
    int store_capacity = 1000;        // C, expert maps
    int embedding_size = 0;           // h, 0 where no embeddings are published
    std::string eviction = "policy";  // "policy": the policy's own; otherwise an Eviction's name
    int shard = 0;                    // expert e is hosted by shard e mod num_shards
    int num_shards = 1;

    bool is_hosted(int expert) const noexcept { return expert % num_shards == shard; }
    // Throws invalid_argument.
    void validate() const;
};

struct PolicyParts {
    std::unique_ptr<Predictor> predictor;  // null: the policy needs none
    std::unique_ptr<Policy> policy;
};

// Throws invalid_argument naming all policies for an unknown name, or the parameter that does
// not fit.
PolicyParts make_policy(const std::string& name, const PolicyParams& params);

struct PolicyInfo {
    std::string name;
    std::string description;
    std::string predictor;                // "none" where it predicts nothing
    std::vector<std::string> parameters;  // settings that have an effect on it
};

// One a policy.
std::vector<PolicyInfo> describe_policies();

}  // namespace fmoe
