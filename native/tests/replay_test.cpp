// 10,000 random event orders through planner and transfers, with a policy that orders at random
// whatever it may: the books agree after each event, and what the planner calls ready has the
// bytes of its blob.
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "fmoe/planner.h"
#include "fmoe/transfer_engine.h"
#include "manual_device.h"

using namespace fmoe;

namespace {

class RandomPolicy final : public Policy {
public:
    explicit RandomPolicy(std::mt19937& random) : random_(random) {}

    void gate_requested(const GateRequested& event, const ExpertCache& cache,
                        Instructions& out) override {
        order(cache, event.layer, out);
    }
    void copy_done(int, const ExpertCache& cache, Instructions& out) override {
        order(cache, 0, out);
    }
    void link_free(const ExpertCache& cache, Instructions& out) override {
        const int expert = any(cache);
        if (random_() % 4 == 0 || !cache.is_absent(expert)) return;
        const int victim = cache.num_free() > 0 ? -1 : this->victim({}, cache);
        if (cache.num_free() > 0 || victim >= 0)
            out.push_back(Instruction::start_copy(expert, victim));
    }
    int victim(const VictimNeeded&, const ExpertCache& cache) override {
        std::vector<int> candidates;
        for (int expert : cache.residents())
            if (cache.can_evict(expert)) candidates.push_back(expert);
        return candidates.empty() ? -1 : candidates[random_() % candidates.size()];
    }

private:
    int any(const ExpertCache& cache) {
        return static_cast<int>(random_() % static_cast<unsigned>(cache.geometry().size()));
    }
    void order(const ExpertCache& cache, int layer, Instructions& out) {
        if (random_() % 3 == 0) out.push_back(Instruction::cancel(any(cache)));
        if (random_() % 3 == 0)
            out.push_back(Instruction::hold(layer + static_cast<int>(random_() % 2), any(cache)));
    }

    std::mt19937& random_;
};

constexpr std::size_t kBlobBytes = 10;

class Replay {
public:
    explicit Replay(unsigned seed)
        : random_(seed),
          geometry_{1 + below(3), 2 + below(4), 1},
          blob_bytes_(static_cast<std::size_t>(geometry_.size()) * kBlobBytes),
          device_(1 + below(geometry_.size()), kBlobBytes),
          planner_(geometry_, device_.num_slots(), std::make_unique<RandomPolicy>(random_),
                   1 + below(3)),
          transfers_(device_, {blob_bytes_.data(), kBlobBytes, kBlobBytes}, geometry_.size(),
                     1 + static_cast<std::size_t>(below(12)), 1 + below(3)) {
        for (std::size_t i = 0; i < blob_bytes_.size(); ++i)
            blob_bytes_[i] = static_cast<std::byte>(random_());
        planner_.begin();
        settle();
    }

    void run(int num_events) {
        for (int event = 0; event < num_events; ++event) {
            step();
            settle();
            check();
        }
        // Drains: whatever the policy did, the gate gets all that it asked for.
        while (!wanted_.empty()) {
            if (!release_one()) copy_one();
            settle();
            check();
        }
    }

private:
    int below(int bound) { return static_cast<int>(random_() % static_cast<unsigned>(bound)); }

    void step() {
        switch (below(6)) {
            case 0:
                if (wanted_.empty()) planner_.iteration_started({++iteration_, 1, false, 0, 0});
                return;
            case 1:
                if (wanted_.empty()) gate();
                return;
            case 2:
                release_one();
                return;
            case 3:
                if (below(8) == 0) {  // a failed step
                    planner_.release_all();
                    wanted_.clear();
                }
                return;
            default:
                if (!device_.queue().empty()) copy_one();
        }
    }

    void gate() {
        const int layer = below(geometry_.num_layers);
        std::vector<int> needed;
        for (int expert = 0; expert < geometry_.num_experts; ++expert)
            if (below(2) == 0) needed.push_back(geometry_.index(layer, expert));
        for (int expert : needed) transfers_.gate_asked(expert);
        const GateOutcome outcome = planner_.gate_requested({layer, needed, 0});
        CHECK(outcome.hits + outcome.late + outcome.misses == static_cast<int>(needed.size()));
        wanted_.insert(needed.begin(), needed.end());
    }

    bool release_one() {
        for (int expert : wanted_) {
            if (!planner_.cache().is_ready(expert)) continue;
            planner_.release(expert);
            wanted_.erase(expert);
            return true;
        }
        return false;
    }

    void copy_one() {
        std::vector<int> finished;
        transfers_.chunk_done(device_.copy_next(), ++now_, finished);
        for (int expert : finished) planner_.copy_done(expert);
    }

    void settle() {
        for (const LinkCommand& command : planner_.take_commands()) transfers_.execute(command);
        transfers_.feed(now_);
    }

    void check() {
        planner_.check_integrity();
        transfers_.check_integrity();
        const ExpertCache& cache = planner_.cache();
        for (int expert : cache.residents())
            if (cache.is_ready(expert))
                CHECK(
                    std::memcmp(device_.slot(cache.slot(expert)),
                                blob_bytes_.data() + static_cast<std::size_t>(expert) * kBlobBytes,
                                kBlobBytes) == 0);
        const bool is_link_used = !device_.queue().empty();
        CHECK(is_link_used == !transfers_.is_idle());
    }

    std::mt19937 random_;
    Geometry geometry_;
    std::vector<std::byte> blob_bytes_;
    ManualDevice device_;
    Planner planner_;
    TransferEngine transfers_;
    std::set<int> wanted_;
    std::uint64_t iteration_ = 0;
    double now_ = 0;
};

}  // namespace

int main() {
    for (unsigned seed = 0; seed < 10000; ++seed) Replay(seed).run(40);
}
