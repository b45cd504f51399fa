// fmoe/expert_cache.h: which expert lies in which slot. Bookkeeping only: it moves no byte, decides
// nothing and knows no clock.
//
//     absent --reserve--> loading --complete--> ready --evict--> absent
//                            \------cancel (prefetch, not pinned)------/
//
// A slot belongs to exactly one expert from reserve() until evict() or cancel(). A pinned expert is
// being waited for or read by a layer and is never evicted.
#pragma once

#include <cstdint>
#include <vector>

#include "fmoe/geometry.h"

namespace fmoe {

enum class Residency : std::uint8_t { absent, loading, ready };
enum class Cause : std::uint8_t { on_demand, prefetch };

// Not thread-safe: one owner.
class ExpertCache {
public:
    // num_slots counts experts that fit at once; more than geometry.size() is refused.
    ExpertCache(const Geometry& geometry, int num_slots);

    const Geometry& geometry() const noexcept { return geometry_; }
    int num_slots() const noexcept { return static_cast<int>(slot_to_expert_.size()); }
    int num_free() const noexcept { return static_cast<int>(free_slots_.size()); }

    Residency residency(int expert) const noexcept { return residency_[expert]; }
    bool is_absent(int expert) const noexcept { return residency_[expert] == Residency::absent; }
    bool is_ready(int expert) const noexcept { return residency_[expert] == Residency::ready; }
    bool is_loading(int expert) const noexcept { return residency_[expert] == Residency::loading; }
    bool is_pinned(int expert) const noexcept { return pins_[expert] != 0; }
    bool can_evict(int expert) const noexcept { return is_ready(expert) && !is_pinned(expert); }
    // Why the expert was last brought in; meaningful while it is not absent.
    Cause cause(int expert) const noexcept { return cause_[expert]; }
    // Brought in by a prefetch and not asked for by a gate since.
    bool is_unused_prefetch(int expert) const noexcept {
        return !is_absent(expert) && cause_[expert] == Cause::prefetch;
    }
    // -1 while absent.
    int slot(int expert) const noexcept { return expert_to_slot_[expert]; }
    // -1 while free.
    int expert_in(int slot) const noexcept { return slot_to_expert_[slot]; }
    // Times a gate asked for the expert; survives eviction (paper 4.5).
    std::uint64_t frequency(int expert) const noexcept { return frequency_[expert]; }
    // Number of the touch() that last asked for the expert; 0 is never.
    std::uint64_t last_use(int expert) const noexcept { return last_use_[expert]; }
    // Experts not absent, in no particular order; valid until the next change.
    const std::vector<int>& residents() const noexcept { return residents_; }

    // Takes a free slot for an absent expert. Requires num_free() > 0.
    int reserve(int expert, Cause cause);
    // A gate now waits for what was a prefetch.
    void promote(int expert);
    void complete(int expert);
    void cancel(int expert);
    void evict(int expert);
    void pin(int expert);
    void unpin(int expert);
    // Counts one access by a gate; an unused prefetch becomes used.
    void touch(int expert);

    // Throws std::logic_error where a law above is broken.
    void check_integrity() const;

private:
    void release_slot(int expert);

    Geometry geometry_;
    std::vector<Residency> residency_;
    std::vector<Cause> cause_;
    std::vector<std::uint16_t> pins_;
    std::vector<int> expert_to_slot_;
    std::vector<int> slot_to_expert_;
    std::vector<int> free_slots_;
    std::vector<int> residents_;
    std::vector<int> resident_position_;  // index into residents_, -1 while absent
    std::vector<std::uint64_t> frequency_;
    std::vector<std::uint64_t> last_use_;
    std::uint64_t clock_ = 0;
};

}  // namespace fmoe
