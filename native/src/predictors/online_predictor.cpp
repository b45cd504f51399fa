#include "fmoe/predictors/online_predictor.h"

#include <algorithm>
#include <utility>

#include "../model_kernels.h"

namespace fmoe {
namespace {

constexpr float kRecentDecay = 0.75F;
constexpr float kLongRecentDecay = 0.95F;
constexpr float kLeastRatio = 0.02F;
constexpr float kPrefillPrior = 0.75F;  // before any prompt was seen: nearly every expert
constexpr float kPrefillRate = 0.1F;
constexpr auto kMostSteps =
    static_cast<std::size_t>(RoutingModels::kStepsBehind + 1 + RoutingModels::kStepsAfter);

}  // namespace

OnlinePredictor::OnlinePredictor(const StoreShape& shape, int store_capacity)
    : geometry_(shape.geometry),
      stride_(to_lanes(shape.geometry.num_experts)),
      models_(shape.geometry, kModelBytes),
      log_(shape.geometry, RoutingLog::capacity_within(shape.geometry, kLogBytes, kMostLogged)),
      votes_(shape.geometry),
      frequency_(shape.geometry),
      maps_(shape, store_capacity),
      record_(shape.geometry),
      prefill_(static_cast<std::size_t>(shape.geometry.size()), kPrefillPrior) {}

void OnlinePredictor::iteration_started(const IterationContext& context,
                                        std::vector<Prediction>& out) {
    require(context.embeddings == nullptr ||
                context.embedding_size == maps_.store().shape().embedding_size,
            "fmoe+: embeddings have another size than the store");
    drop_unfinished_steps();
    learn_foreign_maps();
    record_.start(context);
    is_in_iteration_ = true;
    is_decode_.assign(static_cast<std::size_t>(record_.num_rows()), 1);
    Prediction prediction = blank(-1, 0, geometry_.num_layers, false);
    for (int row = 0; row < record_.num_rows(); ++row) {
        float* p = prediction.probs(row, 0, geometry_.num_experts);
        is_decode_[row] = context.phases == nullptr || context.phases[row] == Phase::decode;
        if (is_decode(row)) {
            Request& request = request_of(row);
            begin_step(request, record_.token_id(row));
            models_.predict_start(request.steps, p);
        } else {
            std::copy(prefill_.begin(), prefill_.end(), p);
        }
    }
    std::fill(prediction.score.begin(), prediction.score.end(), 1.0F);
    out.push_back(std::move(prediction));
}

void OnlinePredictor::begin_step(Request& request, std::int32_t token_id) {
    StepHistory& steps = request.steps;
    if (request.recent.empty()) request.recent = request.long_recent = frequency_.p();
    if (steps.size() == kMostSteps) {
        steps.push_back(std::move(steps.front()));
        steps.pop_front();
    } else {
        steps.emplace_back(geometry_);
    }
    DecodeStep& step = steps.back();
    step.start(token_id);
    votes_.write_features(log_, request.logged, frequency_.p(), step);
    write_recent(request.recent, step.feature(kRecent, 0));
    write_recent(request.long_recent, step.feature(kLongRecent, 0));
}

void OnlinePredictor::write_recent(const std::vector<float>& frequency, float* feature) const {
    const std::vector<float>& p = frequency_.p();
    for (std::size_t i = 0; i < p.size(); ++i) feature[i] = frequency[i] / p[i] + kLeastRatio;
    model_kernels().log(feature, static_cast<int>(p.size()));
}

void OnlinePredictor::gate_observed(const GateObservation& gate, std::vector<Prediction>& out) {
    record_.observe(gate);
    for (int row = 0; row < record_.num_rows(); ++row) {
        if (!is_decode(row)) continue;
        DecodeStep& step = request_of(row).steps.back();
        const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(row) * geometry_.num_experts;
        step.observe(gate.layer, gate.probs + begin,
                     gate.chosen == nullptr ? nullptr : gate.chosen + begin);
        if (gate.speculative != nullptr && gate.layer + 1 < geometry_.num_layers)
            step.speculate(gate.layer + 1, gate.speculative + begin);
    }
    publish_gate(gate.layer, out);
}

// What the next iteration will use is published first: the policy weighs what to load when it hears
// of this iteration.
void OnlinePredictor::publish_gate(int layer, std::vector<Prediction>& out) {
    if (std::none_of(is_decode_.begin(), is_decode_.end(), [](auto is) { return is != 0; })) return;
    const bool is_last = layer == geometry_.num_layers - 1;
    const int ahead = std::min(models_.windows().ahead, geometry_.num_layers - 1 - layer);
    const int first_refined = std::max(layer - 2, 0);
    const int num_refined = is_last ? layer - first_refined : layer >= 2 ? 1 : 0;
    Prediction refined = blank(layer, first_refined, num_refined, true);
    Prediction done = blank(layer, layer, 1, true);
    done.later.assign(done.p.size(), 0.0F);
    Prediction next = blank(layer, layer + 1, ahead, false);
    for (int row = 0; row < record_.num_rows(); ++row) {
        if (!is_decode(row)) continue;
        models_.predict(request_of(row).steps, layer, answers_);
        const std::vector<Block>& blocks = models_.blocks_after(layer);
        for (std::size_t b = 0; b < blocks.size(); ++b) {
            const auto [question, target] = blocks[b];
            Prediction& about = question == Question::this_iteration ? next
                                : target == layer                    ? done
                                                                     : refined;
            float* p = about.probs(row, target, geometry_.num_experts);
            if (question == Question::later) p = about.later.data() + (p - about.p.data());
            std::copy_n(answers_[b], geometry_.num_experts, p);
            about.score_of(row, target) = 1;
        }
    }
    for (Prediction* made : {&refined, &done, &next})
        if (made->num_layers > 0) out.push_back(std::move(*made));
}

Prediction OnlinePredictor::blank(int observed_layer, int first_layer, int num_layers,
                                  bool is_next) const {
    Prediction prediction =
        Prediction::blank(record_.iteration(), observed_layer, first_layer, num_layers,
                          record_.num_rows(), geometry_.num_experts);
    prediction.is_next_iteration = is_next;
    return prediction;
}

void OnlinePredictor::iteration_ended(std::vector<Prediction>&) {
    if (!record_.is_complete()) return;
    is_in_iteration_ = false;
    const int num_rows = record_.num_rows();
    const int turns = (num_rows + kMostTaught - 1) / kMostTaught;
    for (int row = 0; row < num_rows; ++row) {
        if (is_decode(row))
            end_step(request_of(row), num_decodes_++ % static_cast<std::uint64_t>(turns) == 0);
        else
            learn_prefill(record_.chosen(row));
        keep_map(row);
    }
}

void OnlinePredictor::end_step(Request& request, bool is_taught) {
    const DecodeStep& step = request.steps.back();
    request.logged = log_.append(step.token_id(), step.chosen(0), request.logged);
    frequency_.add(step);
    decay_towards(geometry_, step, kRecentDecay, request.recent);
    decay_towards(geometry_, step, kLongRecentDecay, request.long_recent);
    const std::size_t size = request.steps.size();
    if (is_taught && size > RoutingModels::kStepsAfter)
        models_.learn(request.steps, size - 1 - RoutingModels::kStepsAfter);
}

// The last steps of a request, whose labels will not come any more.
void OnlinePredictor::learn_rest(Request& request) {
    const std::size_t size = request.steps.size();
    const std::size_t first =
        size > RoutingModels::kStepsAfter ? size - RoutingModels::kStepsAfter : 0;
    for (std::size_t index = first; index < size; ++index) models_.learn(request.steps, index);
}

// After a step that failed: its gates were not all seen.
void OnlinePredictor::drop_unfinished_steps() {
    if (!std::exchange(is_in_iteration_, false)) return;
    for (int row = 0; row < record_.num_rows(); ++row) {
        const auto found = requests_.find(record_.request(row));
        if (!is_decode(row) || found == requests_.end()) continue;
        found->second.steps.pop_back();
    }
}

void OnlinePredictor::learn_prefill(const std::uint8_t* chosen) {
    for (std::size_t expert = 0; expert < prefill_.size(); ++expert)
        prefill_[expert] += kPrefillRate * ((chosen[expert] != 0 ? 1.0F : 0.0F) - prefill_[expert]);
}

void OnlinePredictor::keep_map(int row) {
    if (!record_.is_sound(row)) return;
    Request& request = request_of(row);
    NewMap map;
    map.probs = record_.probs(row);
    map.embedding = record_.embedding(row);
    map.chosen = record_.chosen(row);
    map.token_id = record_.token_id(row);
    map.predecessor = request.map;
    request.map = maps_.add(map);
}

void OnlinePredictor::request_ended(std::uint64_t request) {
    drop_unfinished_steps();
    const auto found = requests_.find(request);
    if (found == requests_.end()) return;
    learn_rest(found->second);
    requests_.erase(found);
}

void OnlinePredictor::learn_foreign_maps() {
    for (const RecentMaps::Chain& chain : maps_.take_foreign()) replay(chain);
}

void OnlinePredictor::replay(const RecentMaps::Chain& chain) {
    const MapStore& store = maps_.store();
    const auto experts = static_cast<std::size_t>(geometry_.num_experts);
    std::vector<float> probs(experts);
    std::vector<std::uint8_t> chosen(static_cast<std::size_t>(geometry_.size()));
    Request request;
    for (int entry : chain) {
        for (int layer = 0; layer < geometry_.num_layers; ++layer)
            store.read_chosen(entry, layer, chosen.data() + geometry_.index(layer, 0));
        const auto num_chosen = std::count(chosen.begin(), chosen.end(), std::uint8_t{1});
        if (num_chosen > geometry_.num_layers * geometry_.top_k) {
            learn_prefill(chosen.data());
            continue;
        }
        begin_step(request, store.token_id(entry));
        for (int layer = 0; layer < geometry_.num_layers; ++layer) {
            store.read_probs(entry, layer, probs.data());
            request.steps.back().observe(
                layer, probs.data(),
                num_chosen > 0 ? chosen.data() + geometry_.index(layer, 0) : nullptr);
        }
        end_step(request, true);
    }
    learn_rest(request);
}

}  // namespace fmoe
