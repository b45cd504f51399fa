#include "fmoe/expert_cache.h"

#include <stdexcept>

#include "check.h"

using namespace fmoe;

namespace {

const Geometry kGeometry{2, 4, 2};

void a_slot_belongs_to_one_expert_from_reserve_until_evict() {
    ExpertCache cache(kGeometry, 2);
    const int slot = cache.reserve(3, Cause::on_demand);
    CHECK(cache.expert_in(slot) == 3 && cache.slot(3) == slot && cache.is_loading(3));
    const int other = cache.reserve(5, Cause::prefetch);
    CHECK(other != slot && cache.num_free() == 0);
    CHECK_THROWS(std::logic_error, cache.reserve(6, Cause::on_demand));
    CHECK_THROWS(std::logic_error, cache.evict(3));  // still loading
    cache.complete(3);
    CHECK(cache.is_ready(3));
    cache.evict(3);
    CHECK(cache.is_absent(3) && cache.slot(3) == -1 && cache.num_free() == 1);
    CHECK(cache.reserve(6, Cause::on_demand) == slot);
    cache.check_integrity();
}

void a_pinned_expert_is_neither_evicted_nor_cancelled() {
    ExpertCache cache(kGeometry, 2);
    cache.reserve(0, Cause::prefetch);
    cache.pin(0);
    CHECK_THROWS(std::logic_error, cache.cancel(0));
    cache.complete(0);
    CHECK(!cache.can_evict(0));
    CHECK_THROWS(std::logic_error, cache.evict(0));
    cache.unpin(0);
    cache.evict(0);
    CHECK_THROWS(std::logic_error, cache.unpin(0));
    cache.check_integrity();
}

void frequency_survives_eviction_and_use_settles_a_prefetch() {
    ExpertCache cache(kGeometry, 1);
    cache.reserve(2, Cause::prefetch);
    cache.complete(2);
    CHECK(cache.is_unused_prefetch(2));
    cache.touch(2);
    CHECK(!cache.is_unused_prefetch(2));
    cache.evict(2);
    CHECK(cache.frequency(2) == 1 && cache.last_use(2) == 1 && cache.last_use(3) == 0);
}

void sizes_that_cannot_be_are_refused() {
    CHECK_THROWS(std::invalid_argument, ExpertCache(kGeometry, 0));
    CHECK_THROWS(std::invalid_argument, ExpertCache(kGeometry, 9));
    CHECK_THROWS(std::invalid_argument, ExpertCache({2, 4, 5}, 2));
}

}  // namespace

int main() {
    a_slot_belongs_to_one_expert_from_reserve_until_evict();
    a_pinned_expert_is_neither_evicted_nor_cancelled();
    frequency_survives_eviction_and_use_settles_a_prefetch();
    sizes_that_cannot_be_are_refused();
}
