// fmoe/transfer_engine.h: carries out the planner's link commands on a device. On-demand copies go
// ahead of prefetches; copies are cut into chunks, and a prefetch gives way between two of them and
// later continues where it was. Knows no clock (the caller says what time it is) and no thread.
//
// A slot may be handed to another expert while a chunk of a cancelled copy is still in flight to
// it: the new copy does not begin before that chunk has landed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "fmoe/device.h"
#include "fmoe/host_store.h"
#include "fmoe/planner.h"

namespace fmoe {

struct TransferCounters {
    std::uint64_t bytes_on_demand = 0;        // moved while a gate waited, also for late experts
    std::uint64_t bytes_prefetched = 0;       // moved before a gate asked
    std::uint64_t bytes_prefetch_used = 0;    // of those, for an expert that a gate then asked for
    std::uint64_t bytes_prefetch_wasted = 0;  // of those, evicted or cancelled before
    std::uint64_t copies = 0;                 // completed
    std::uint64_t cancelled = 0;
    std::uint64_t preemptions = 0;  // an on-demand copy overtook a prefetch that had begun
};

// Not thread-safe: one owner. Times are seconds on any clock.
class TransferEngine {
public:
    // max_in_flight: chunks that the device is given at once; 2 keep a link busy.
    TransferEngine(Device& device, const Blobs& blobs, int num_experts, std::size_t chunk_bytes,
                   int max_in_flight = 2);

    void execute(const LinkCommand& command);
    // Gives the device chunks up to the bound. Called after execute() and chunk_done().
    void feed(double now);
    // Appends the expert to `finished` if that was its last chunk.
    void chunk_done(std::uint64_t ticket, double now, std::vector<int>& finished);
    // A gate asks for the expert: what was prefetched of it has been of use.
    void gate_asked(int expert);

    const TransferCounters& counters() const noexcept { return counters_; }
    bool is_idle() const noexcept {
        return in_flight_.empty() && on_demand_.empty() && prefetch_.empty();
    }
    std::size_t bytes_outstanding() const noexcept { return bytes_outstanding_; }
    // Measured: moving average over chunks, queueing left out; 0 before the first.
    double seconds_per_byte() const noexcept { return seconds_per_byte_; }

    void check_integrity() const;

private:
    struct Copy {
        int expert;
        int slot;
        Cause cause;
        std::size_t issued = 0;
        std::size_t done = 0;
        int num_in_flight = 0;
    };
    using Copies = std::list<Copy>;
    struct InFlight {
        std::uint64_t ticket;
        Copies::iterator copy;
        bool is_orphan;  // its copy was cancelled
        int slot;
        std::size_t bytes;
        Cause cause;
        double since;
    };

    Copies& copies(Cause cause) { return cause == Cause::on_demand ? on_demand_ : prefetch_; }
    Copies::iterator find_prefetch(int expert);
    // False: nothing can be issued now.
    bool next_to_issue(Copies::iterator& next);
    bool can_issue(const Copy& copy) const;
    bool has_begun_prefetch() const;
    void issue(Copies::iterator copy, double now);
    void start(const LinkCommand& command);
    void promote(int expert);
    void cancel(int expert);
    void waste(int expert);
    void measure(const InFlight& chunk, double now);

    Device& device_;
    Blobs blobs_;
    std::size_t chunk_bytes_;
    std::size_t max_in_flight_;
    Copies on_demand_;
    Copies prefetch_;
    std::vector<InFlight> in_flight_;
    std::vector<int> chunks_to_slot_;        // chunks in flight into each slot
    std::vector<int> slot_to_expert_;        // last one copied there, -1 before the first
    std::vector<std::size_t> unused_bytes_;  // prefetched of each expert, not asked for since
    std::size_t bytes_outstanding_ = 0;
    std::uint64_t last_ticket_ = 0;
    double last_done_ = 0;
    double seconds_per_byte_ = 0;
    TransferCounters counters_;
};

}  // namespace fmoe
