#include "fmoe/expert_cache.h"

#include <string>

namespace fmoe {

ExpertCache::ExpertCache(const Geometry& geometry, int num_slots) : geometry_(geometry) {
    geometry_.validate();
    require(num_slots >= 1,
            "expert cache: at least 1 slot is needed, got " + std::to_string(num_slots));
    require(num_slots <= geometry_.size(), "expert cache: " + std::to_string(num_slots) +
                                               " slots for " + std::to_string(geometry_.size()) +
                                               " experts");
    const auto size = static_cast<std::size_t>(geometry_.size());
    residency_.assign(size, Residency::absent);
    cause_.assign(size, Cause::on_demand);
    pins_.assign(size, 0);
    expert_to_slot_.assign(size, -1);
    resident_position_.assign(size, -1);
    frequency_.assign(size, 0);
    last_use_.assign(size, 0);
    slot_to_expert_.assign(static_cast<std::size_t>(num_slots), -1);
    residents_.reserve(static_cast<std::size_t>(num_slots));
    free_slots_.reserve(static_cast<std::size_t>(num_slots));
    for (int slot = num_slots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

int ExpertCache::reserve(int expert, Cause cause) {
    FMOE_CHECK(is_absent(expert));
    FMOE_CHECK(!free_slots_.empty());
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    slot_to_expert_[slot] = expert;
    expert_to_slot_[expert] = slot;
    resident_position_[expert] = static_cast<int>(residents_.size());
    residents_.push_back(expert);
    residency_[expert] = Residency::loading;
    cause_[expert] = cause;
    return slot;
}

void ExpertCache::promote(int expert) {
    FMOE_CHECK(is_loading(expert));
    cause_[expert] = Cause::on_demand;
}

void ExpertCache::complete(int expert) {
    FMOE_CHECK(is_loading(expert));
    residency_[expert] = Residency::ready;
}

void ExpertCache::cancel(int expert) {
    FMOE_CHECK(is_loading(expert) && !is_pinned(expert));
    release_slot(expert);
}

void ExpertCache::evict(int expert) {
    FMOE_CHECK(can_evict(expert));
    release_slot(expert);
}

void ExpertCache::pin(int expert) { ++pins_[expert]; }

void ExpertCache::unpin(int expert) {
    FMOE_CHECK(is_pinned(expert));
    --pins_[expert];
}

void ExpertCache::touch(int expert) {
    ++frequency_[expert];
    last_use_[expert] = ++clock_;
    cause_[expert] = Cause::on_demand;
}

void ExpertCache::release_slot(int expert) {
    const int slot = expert_to_slot_[expert];
    slot_to_expert_[slot] = -1;
    expert_to_slot_[expert] = -1;
    free_slots_.push_back(slot);
    const int hole = resident_position_[expert];
    const int moved = residents_.back();
    residents_[hole] = moved;
    resident_position_[moved] = hole;
    residents_.pop_back();
    resident_position_[expert] = -1;
    residency_[expert] = Residency::absent;
}

void ExpertCache::check_integrity() const {
    int occupied = 0;
    for (int slot = 0; slot < num_slots(); ++slot) {
        const int expert = slot_to_expert_[slot];
        if (expert < 0) continue;
        ++occupied;
        FMOE_CHECK(expert_to_slot_[expert] == slot);
    }
    FMOE_CHECK(occupied + num_free() == num_slots());
    FMOE_CHECK(occupied == static_cast<int>(residents_.size()));
    for (int slot : free_slots_) FMOE_CHECK(slot_to_expert_[slot] == -1);
    for (int expert = 0; expert < geometry_.size(); ++expert) {
        FMOE_CHECK(is_absent(expert) == (expert_to_slot_[expert] < 0));
        FMOE_CHECK(is_absent(expert) == (resident_position_[expert] < 0));
        if (!is_absent(expert)) FMOE_CHECK(residents_[resident_position_[expert]] == expert);
    }
}

}  // namespace fmoe
