#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "fmoe/eviction.h"
#include "fmoe/planner.h"
#include "fmoe/policy_factory.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{4, 8, 2};
constexpr int kSlots = 6;

PolicyParams params(int num_slots) {
    PolicyParams params;
    params.geometry = kGeometry;
    params.num_slots = num_slots;
    return params;
}

// The plain rule, computed from the whole history of gates.
class Reference {
public:
    explicit Reference(std::string name) : name_(std::move(name)) {}
    void used(std::vector<int> experts, int iteration) {
        for (int expert : experts) history_.push_back({expert, iteration});
    }
    double score(int expert, int iteration) const {
        double lru = 0;
        double lfu = 0;
        double ema = 0;
        for (std::size_t i = 0; i < history_.size(); ++i) {
            if (history_[i].expert != expert) continue;
            lru = static_cast<double>(i + 1);
            lfu += 1;
            double weight = 1;
            for (int age = history_[i].iteration; age < iteration; ++age) weight *= 0.93;
            ema += weight;
        }
        return name_ == "lru" ? lru : name_ == "lfu" ? lfu : ema;
    }

private:
    struct Use {
        int expert;
        int iteration;
    };
    std::string name_;
    std::vector<Use> history_;
};

// Every on-demand victim has the lowest score of all that could be evicted.
void victims_have_the_lowest_score(const std::string& name) {
    std::mt19937 random(1);
    Reference reference(name);
    Planner planner(kGeometry, kSlots, make_policy(name, params(kSlots)).policy);
    for (int iteration = 0; iteration < 60; ++iteration) {
        planner.iteration_started({static_cast<std::uint64_t>(iteration), 1, false, 0, 0});
        for (int layer = 0; layer < kGeometry.num_layers; ++layer) {
            const int first = static_cast<int>(random() % 7);
            const std::vector<int> needed{kGeometry.index(layer, first),
                                          kGeometry.index(layer, first + 1)};
            std::vector<int> before = planner.cache().residents();
            reference.used(needed, iteration);
            planner.gate_requested({layer, needed, 0});
            double worst_evicted = 0;
            double best_kept = std::numeric_limits<double>::max();
            for (int expert : before) {
                const double score = reference.score(expert, iteration);
                if (planner.cache().is_absent(expert))
                    worst_evicted = std::max(worst_evicted, score);
                else if (expert != needed[0] && expert != needed[1])
                    best_kept = std::min(best_kept, score);
            }
            CHECK(worst_evicted <= best_kept + 1e-4);
            for (const LinkCommand& command : planner.take_commands())
                planner.copy_done(command.expert);
            planner.check_integrity();
        }
        planner.iteration_ended();
    }
    CHECK(planner.counters().evictions > 100);
}

void ties_go_to_the_lower_index_and_pinned_experts_stay() {
    ExpertCache cache(kGeometry, 3);
    for (int expert : {9, 4, 6}) {
        cache.reserve(expert, Cause::on_demand);
        cache.complete(expert);
    }
    const auto eviction = make_eviction("lfu", kGeometry);
    CHECK(eviction->victim(cache) == 4);
    cache.pin(4);
    CHECK(eviction->victim(cache) == 6);
    cache.pin(6);
    cache.pin(9);
    CHECK(eviction->victim(cache) == -1);
}

void a_prefetch_counts_as_recent_for_lru() {
    ExpertCache cache(kGeometry, 2);
    const auto eviction = make_eviction("lru", kGeometry);
    for (int expert : {9, 4}) {
        cache.reserve(expert, Cause::prefetch);
        cache.complete(expert);
        eviction->loaded(expert);
    }
    CHECK(eviction->victim(cache) == 9);
}

void no_offload_loads_every_hosted_expert_and_nothing_else() {
    PolicyParams half = params(16);
    half.shard = 1;
    half.num_shards = 2;
    Planner planner(kGeometry, 16, make_policy("no-offload", half).policy);
    planner.begin();
    for (auto commands = planner.take_commands(); !commands.empty();
         commands = planner.take_commands())
        for (const LinkCommand& command : commands) planner.copy_done(command.expert);
    for (int expert = 0; expert < kGeometry.size(); ++expert)
        CHECK(planner.cache().is_ready(expert) == (expert % 2 == 1));
}

void what_does_not_fit_is_refused() {
    CHECK_THROWS(std::invalid_argument, make_policy("best", params(kSlots)));
    CHECK_THROWS(std::invalid_argument, make_policy("no-offload", params(kSlots)));
    PolicyParams wrong = params(kSlots);
    wrong.eviction = "fifo";
    CHECK_THROWS(std::invalid_argument, make_policy("lru", wrong));
    CHECK(describe_policies().size() >= 4);
}

}  // namespace

int main() {
    for (const char* name : {"lru", "lfu", "ema"}) victims_have_the_lowest_score(name);
    ties_go_to_the_lower_index_and_pinned_experts_stay();
    a_prefetch_counts_as_recent_for_lru();
    no_offload_loads_every_hosted_expert_and_nothing_else();
    what_does_not_fit_is_refused();
}
