// fmoe/predictors/online_predictor.h: predicts with models that learn from every decode iteration
// (policy fmoe+): all layers when the token is known, the next layers after each gate, and what the
// next iteration will use of the layers that are done.
//
// A sample is learnt kHorizon iterations after its own, when all its labels are known: nothing that
// is predicted depends on what comes later. A prefill row is predicted by how often prompts used
// each expert and teaches the models nothing: it chooses nearly everything.
//
// It keeps its newest maps in a MapStore. Maps that something else puts there, such as a saved
// store, are learnt from before the next iteration.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "fmoe/iteration_record.h"
#include "fmoe/predictor.h"
#include "fmoe/predictors/expert_frequency.h"
#include "fmoe/predictors/recent_maps.h"
#include "fmoe/predictors/routing_log.h"
#include "fmoe/predictors/routing_models.h"
#include "fmoe/predictors/token_votes.h"

namespace fmoe {

class OnlinePredictor final : public Predictor {
public:
    // Bounds of what it keeps, whatever the model: models, and past iterations by token.
    static constexpr std::size_t kModelBytes = std::size_t{256} << 20;
    static constexpr std::size_t kLogBytes = std::size_t{32} << 20;
    static constexpr int kMostLogged = 65536;
    // Decode rows of an iteration that are learnt from; of more, each takes its turn.
    static constexpr int kMostTaught = 4;

    OnlinePredictor(const StoreShape& shape, int store_capacity);

    void iteration_started(const IterationContext&, std::vector<Prediction>& out) override;
    void gate_observed(const GateObservation&, std::vector<Prediction>& out) override;
    void iteration_ended(std::vector<Prediction>& out) override;
    void request_ended(std::uint64_t request) override;
    MapStore* store() override { return &maps_.store(); }
    bool wants_speculative() const override { return true; }
    bool needs_speculative() const override { return false; }
    std::unique_ptr<Predictor> clone() const override {
        return std::make_unique<OnlinePredictor>(*this);
    }
    bool can_clone() const override { return true; }

private:
    // What is kept of a request in flight.
    struct Request {
        StepHistory steps;
        std::uint64_t logged = RoutingLog::kNowhere;  // its newest iteration
        std::vector<float> recent;                    // decayed frequency [L, stride]
        std::vector<float> long_recent;
        EntryRef map;
    };

    Request& request_of(int row) { return requests_[record_.request(row)]; }
    bool is_decode(int row) const noexcept {
        return is_decode_[static_cast<std::size_t>(row)] != 0;
    }
    void begin_step(Request& request, std::int32_t token_id);
    void write_recent(const std::vector<float>& frequency, float* feature) const;
    void end_step(Request& request, bool is_taught);
    void learn_rest(Request& request);
    void drop_unfinished_steps();
    void learn_prefill(const std::uint8_t* chosen);
    void keep_map(int row);
    void learn_foreign_maps();
    void replay(const RecentMaps::Chain& chain);

    Prediction blank(int observed_layer, int first_layer, int num_layers, bool is_next) const;
    void publish_gate(int layer, std::vector<Prediction>& out);

    Geometry geometry_;
    int stride_;
    RoutingModels models_;
    RoutingLog log_;
    TokenVotes votes_;
    ExpertFrequency frequency_;
    RecentMaps maps_;
    IterationRecord record_;
    std::vector<std::uint8_t> is_decode_;  // by row of the iteration in progress
    bool is_in_iteration_ = false;
    std::unordered_map<std::uint64_t, Request> requests_;
    std::vector<float> prefill_;  // [L * J] part of the prompts that used the expert
    std::uint64_t num_decodes_ = 0;
    std::vector<const float*> answers_;
};

}  // namespace fmoe
