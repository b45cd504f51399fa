// fmoe/predictors/token_votes.h: what the past uses of a token say of its next one.
//
// Of the token's newest N <= 32 uses u, with c_u(e) = 1 where use u chose expert e:
//     by token          p(e) = (sum_u c_u(e) + 3 pop(e)) / (N + 3)
//     by token and map  q(e) = (sum_u v_u c_u(e) + p(e)) / (sum_u v_u + 1)
//                       v_u = exp(12 (s_u - max s)), s_u = experts that the map before u shares
//                       with the map before ours, as a part of L K, + 1/8 where the token before is
//                       ours
// and the features are log(p / pop), log(q / pop). A token without a use says nothing: zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/predictors/decode_step.h"
#include "fmoe/predictors/routing_log.h"

namespace fmoe {

class TokenVotes {
public:
    static constexpr int kMostUses = 32;

    explicit TokenVotes(const Geometry& geometry);

    // Fills the two features of `step` by its token. previous: the request's iteration before, or
    // kNowhere. popularity [L, stride], positive.
    void write_features(const RoutingLog& log, std::uint64_t previous,
                        const std::vector<float>& popularity, DecodeStep& step);

private:
    struct Use {
        std::uint64_t position;
        float similarity;
    };
    void find_uses(const RoutingLog& log, std::int32_t token_id, std::uint64_t previous);
    void mark(const std::uint16_t* chosen, std::uint8_t value);
    float similarity(const RoutingLog& log, std::uint64_t use, std::uint64_t previous) const;

    Geometry geometry_;
    int stride_;
    std::vector<Use> uses_;
    std::vector<std::uint8_t> is_in_previous_;  // [L * J], all 0 between calls
    std::vector<float> counts_;                 // [L, stride]
    std::vector<float> votes_;                  // [L, stride]
};

}  // namespace fmoe
