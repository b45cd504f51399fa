#include "fmoe/transfer_engine.h"

#include <cstring>
#include <vector>

#include "check.h"
#include "manual_device.h"

using namespace fmoe;
using Kind = LinkCommand::Kind;

namespace {

constexpr int kExperts = 4;
constexpr std::size_t kBlobBytes = 8;
constexpr std::size_t kChunkBytes = 2;

// Four experts of four chunks each; expert e's blob is filled with e + 1.
struct Fixture {
    explicit Fixture(int max_in_flight)
        : blobs(make_blobs()),
          device(2, kBlobBytes),
          transfers(device, {blobs.data(), kBlobBytes, kBlobBytes}, kExperts, kChunkBytes,
                    max_in_flight) {}

    static std::vector<std::byte> make_blobs() {
        std::vector<std::byte> bytes;
        for (int expert = 0; expert < kExperts; ++expert)
            bytes.insert(bytes.end(), kBlobBytes, static_cast<std::byte>(expert + 1));
        return bytes;
    }

    void order(Kind kind, int expert, int slot, Cause cause) {
        transfers.execute({kind, expert, slot, cause});
        transfers.feed(now);
        transfers.check_integrity();
    }
    // Experts that finished with the next chunk.
    std::vector<int> copy_chunk() {
        std::vector<int> finished;
        transfers.chunk_done(device.copy_next(), ++now, finished);
        transfers.feed(now);
        transfers.check_integrity();
        return finished;
    }
    bool holds(int slot, int expert) const {
        return std::memcmp(device.slot(slot),
                           blobs.data() + static_cast<std::size_t>(expert) * kBlobBytes,
                           kBlobBytes) == 0;
    }

    std::vector<std::byte> blobs;
    ManualDevice device;
    TransferEngine transfers;
    double now = 0;
};

void chunks_in_flight_are_bounded() {
    Fixture f(2);
    f.order(Kind::start, 0, 0, Cause::on_demand);
    f.order(Kind::start, 1, 1, Cause::on_demand);
    CHECK(f.device.queue().size() == 2);
    f.copy_chunk();
    CHECK(f.device.queue().size() == 2);
}

void an_on_demand_copy_overtakes_a_prefetch_which_keeps_its_progress() {
    Fixture f(1);
    f.order(Kind::start, 0, 0, Cause::prefetch);
    f.copy_chunk();  // a quarter of the prefetch
    f.order(Kind::start, 1, 1, Cause::on_demand);
    f.copy_chunk();  // the chunk that was in flight already
    for (int chunk = 0; chunk < 3; ++chunk) CHECK(f.copy_chunk().empty());
    CHECK(f.copy_chunk() == std::vector<int>{1});
    CHECK(f.holds(1, 1));
    CHECK(f.transfers.counters().preemptions == 1);
    f.copy_chunk();
    CHECK(f.copy_chunk() == std::vector<int>{0});  // two chunks were left
    CHECK(f.holds(0, 0));
    CHECK(f.transfers.counters().bytes_on_demand == kBlobBytes);
    CHECK(f.transfers.counters().bytes_prefetched == kBlobBytes);
    CHECK(f.transfers.is_idle());
}

void a_promoted_prefetch_goes_on_as_on_demand() {
    Fixture f(1);
    f.order(Kind::start, 0, 0, Cause::prefetch);
    f.order(Kind::start, 1, 1, Cause::prefetch);
    f.copy_chunk();
    f.transfers.gate_asked(1);
    f.order(Kind::promote, 1, 1, Cause::on_demand);
    f.copy_chunk();  // of expert 0, in flight before
    for (int chunk = 0; chunk < 3; ++chunk) CHECK(f.copy_chunk().empty());
    CHECK(f.copy_chunk() == std::vector<int>{1});
    CHECK(f.transfers.counters().bytes_on_demand == kBlobBytes);
}

void a_cancelled_chunk_in_flight_never_writes_into_the_next_owners_slot() {
    Fixture f(2);
    f.order(Kind::start, 0, 0, Cause::prefetch);  // two chunks in flight
    f.order(Kind::cancel, 0, 0, Cause::prefetch);
    f.order(Kind::start, 1, 0, Cause::on_demand);
    for (const Chunk& chunk : f.device.queue()) CHECK(!chunk.is_urgent);
    CHECK(f.copy_chunk().empty());
    for (const Chunk& chunk : f.device.queue()) CHECK(!chunk.is_urgent);  // one is still flying
    CHECK(f.copy_chunk().empty());
    for (int chunk = 0; chunk < 3; ++chunk) CHECK(f.copy_chunk().empty());
    CHECK(f.copy_chunk() == std::vector<int>{1});
    CHECK(f.holds(0, 1));
    CHECK(f.transfers.counters().bytes_prefetch_wasted == 2 * kChunkBytes);
    CHECK(f.transfers.bytes_outstanding() == 0);
}

void an_expert_can_be_cancelled_and_started_again() {
    Fixture f(2);
    f.order(Kind::start, 0, 0, Cause::prefetch);
    f.order(Kind::cancel, 0, 0, Cause::prefetch);
    f.order(Kind::start, 0, 1, Cause::prefetch);
    std::vector<int> finished;
    for (int chunk = 0; chunk < 6; ++chunk) finished = f.copy_chunk();
    CHECK(finished == std::vector<int>{0});
    CHECK(f.holds(1, 0) && f.transfers.is_idle());
}

void prefetched_bytes_are_used_when_a_gate_asks_and_wasted_when_evicted() {
    Fixture f(2);
    for (int expert : {0, 1}) {
        f.order(Kind::start, expert, expert, Cause::prefetch);
        while (!f.transfers.is_idle()) f.copy_chunk();
    }
    f.transfers.gate_asked(0);
    f.transfers.gate_asked(0);
    CHECK(f.transfers.counters().bytes_prefetch_used == kBlobBytes);
    f.order(Kind::start, 2, 0, Cause::on_demand);  // over a used one
    CHECK(f.transfers.counters().bytes_prefetch_wasted == 0);
    f.order(Kind::start, 3, 1, Cause::on_demand);  // over one never asked for
    CHECK(f.transfers.counters().bytes_prefetch_wasted == kBlobBytes);
}

void the_rate_is_measured_without_queueing() {
    Fixture f(2);
    f.order(Kind::start, 0, 0, Cause::on_demand);
    CHECK(f.transfers.seconds_per_byte() == 0);
    // Two chunks queued at once, one done each second: the second did not take two.
    while (!f.transfers.is_idle()) f.copy_chunk();
    CHECK(f.transfers.seconds_per_byte() == 1.0 / kChunkBytes);
}

}  // namespace

int main() {
    chunks_in_flight_are_bounded();
    an_on_demand_copy_overtakes_a_prefetch_which_keeps_its_progress();
    a_promoted_prefetch_goes_on_as_on_demand();
    a_cancelled_chunk_in_flight_never_writes_into_the_next_owners_slot();
    an_expert_can_be_cancelled_and_started_again();
    prefetched_bytes_are_used_when_a_gate_asks_and_wasted_when_evicted();
    the_rate_is_measured_without_queueing();
}
