#include "fmoe/transfer_engine.h"

#include <algorithm>
#include <string>
#include <utility>

#include "fmoe/check.h"

namespace fmoe {

namespace {
// Weight of the newest chunk in the measured rate: about the last 20 count.
constexpr double kRateWeight = 0.1;
}  // namespace

TransferEngine::TransferEngine(Device& device, const Blobs& blobs, int num_experts,
                               std::size_t chunk_bytes, int max_in_flight)
    : device_(device),
      blobs_(blobs),
      chunk_bytes_(chunk_bytes),
      max_in_flight_(static_cast<std::size_t>(max_in_flight)),
      chunks_to_slot_(static_cast<std::size_t>(device.num_slots()), 0),
      slot_to_expert_(static_cast<std::size_t>(device.num_slots()), -1),
      unused_bytes_(static_cast<std::size_t>(num_experts), 0) {
    require(chunk_bytes > 0, "transfers: chunk_bytes must be positive");
    require(max_in_flight > 0, "transfers: max_in_flight must be positive");
    FMOE_CHECK(device.slot_stride_bytes() >= blobs.blob_bytes);
}

void TransferEngine::execute(const LinkCommand& command) {
    switch (command.kind) {
        case LinkCommand::Kind::start:
            return start(command);
        case LinkCommand::Kind::promote:
            return promote(command.expert);
        case LinkCommand::Kind::cancel:
            return cancel(command.expert);
    }
}

void TransferEngine::start(const LinkCommand& command) {
    int& occupant = slot_to_expert_[command.slot];
    if (occupant >= 0) waste(occupant);  // evicted: what was prefetched of it and never asked for
    occupant = command.expert;
    copies(command.cause).push_back({command.expert, command.slot, command.cause});
    bytes_outstanding_ += blobs_.blob_bytes;
}

void TransferEngine::promote(int expert) {
    const auto copy = find_prefetch(expert);
    copy->cause = Cause::on_demand;
    on_demand_.splice(on_demand_.end(), prefetch_, copy);
}

void TransferEngine::cancel(int expert) {
    const auto copy = find_prefetch(expert);
    for (InFlight& chunk : in_flight_)
        if (!chunk.is_orphan && chunk.copy == copy) chunk.is_orphan = true;
    // What is in flight stays outstanding until it lands.
    bytes_outstanding_ -= blobs_.blob_bytes - copy->issued;
    waste(expert);
    slot_to_expert_[copy->slot] = -1;
    ++counters_.cancelled;
    prefetch_.erase(copy);
}

void TransferEngine::gate_asked(int expert) {
    counters_.bytes_prefetch_used += std::exchange(unused_bytes_[expert], 0);
}

void TransferEngine::waste(int expert) {
    counters_.bytes_prefetch_wasted += std::exchange(unused_bytes_[expert], 0);
}

void TransferEngine::feed(double now) {
    Copies::iterator next;
    while (in_flight_.size() < max_in_flight_ && next_to_issue(next)) issue(next, now);
}

bool TransferEngine::next_to_issue(Copies::iterator& next) {
    for (Copies* queue : {&on_demand_, &prefetch_}) {
        for (next = queue->begin(); next != queue->end(); ++next)
            if (can_issue(*next)) return true;
    }
    return false;
}

bool TransferEngine::can_issue(const Copy& copy) const {
    const bool is_slot_ours = chunks_to_slot_[copy.slot] == copy.num_in_flight;
    return copy.issued < blobs_.blob_bytes && is_slot_ours;
}

bool TransferEngine::has_begun_prefetch() const {
    return std::any_of(prefetch_.begin(), prefetch_.end(), [this](const Copy& copy) {
        return copy.issued > 0 && copy.issued < blobs_.blob_bytes;
    });
}

void TransferEngine::issue(Copies::iterator copy, double now) {
    const bool is_urgent = copy->cause == Cause::on_demand;
    if (is_urgent && copy->issued == 0 && has_begun_prefetch()) ++counters_.preemptions;
    const std::size_t bytes = std::min(chunk_bytes_, blobs_.blob_bytes - copy->issued);
    const std::uint64_t ticket = ++last_ticket_;
    in_flight_.push_back({ticket, copy, false, copy->slot, bytes, copy->cause, now});
    ++chunks_to_slot_[copy->slot];
    ++copy->num_in_flight;
    device_.start({ticket, copy->slot, copy->issued, blobs_.at(copy->expert) + copy->issued, bytes,
                   is_urgent});
    copy->issued += bytes;
}

void TransferEngine::chunk_done(std::uint64_t ticket, double now, std::vector<int>& finished) {
    const auto it =
        std::find_if(in_flight_.begin(), in_flight_.end(),
                     [ticket](const InFlight& chunk) { return chunk.ticket == ticket; });
    FMOE_CHECK(it != in_flight_.end());
    const InFlight chunk = *it;
    in_flight_.erase(it);
    measure(chunk, now);
    --chunks_to_slot_[chunk.slot];
    bytes_outstanding_ -= chunk.bytes;
    if (chunk.cause == Cause::on_demand)
        counters_.bytes_on_demand += chunk.bytes;
    else
        counters_.bytes_prefetched += chunk.bytes;
    if (chunk.is_orphan) {
        counters_.bytes_prefetch_wasted += chunk.bytes;
        return;
    }
    Copy& copy = *chunk.copy;
    --copy.num_in_flight;
    copy.done += chunk.bytes;
    if (chunk.cause == Cause::prefetch) {
        // Promoted while the chunk was in flight: a gate has asked for it already.
        if (copy.cause == Cause::on_demand)
            counters_.bytes_prefetch_used += chunk.bytes;
        else
            unused_bytes_[copy.expert] += chunk.bytes;
    }
    if (copy.done < blobs_.blob_bytes) return;
    finished.push_back(copy.expert);
    ++counters_.copies;
    copies(copy.cause).erase(chunk.copy);
}

void TransferEngine::measure(const InFlight& chunk, double now) {
    const double began = std::max(chunk.since, last_done_);
    last_done_ = now;
    const double sample = std::max(0.0, now - began) / static_cast<double>(chunk.bytes);
    seconds_per_byte_ = seconds_per_byte_ == 0
                            ? sample
                            : seconds_per_byte_ + kRateWeight * (sample - seconds_per_byte_);
}

TransferEngine::Copies::iterator TransferEngine::find_prefetch(int expert) {
    const auto copy = std::find_if(prefetch_.begin(), prefetch_.end(),
                                   [expert](const Copy& copy) { return copy.expert == expert; });
    FMOE_CHECK(copy != prefetch_.end());
    return copy;
}

void TransferEngine::check_integrity() const {
    std::vector<int> chunks(chunks_to_slot_.size(), 0);
    std::size_t outstanding = 0;
    for (const InFlight& chunk : in_flight_) {
        ++chunks[chunk.slot];
        if (chunk.is_orphan) outstanding += chunk.bytes;
    }
    FMOE_CHECK(chunks == chunks_to_slot_);
    FMOE_CHECK(in_flight_.size() <= max_in_flight_);
    for (const Copies* queue : {&on_demand_, &prefetch_}) {
        for (const Copy& copy : *queue) {
            outstanding += blobs_.blob_bytes - copy.done;
            FMOE_CHECK(copy.done <= copy.issued && copy.issued <= blobs_.blob_bytes);
            FMOE_CHECK(slot_to_expert_[copy.slot] == copy.expert);
            FMOE_CHECK((copy.cause == Cause::on_demand) == (queue == &on_demand_));
        }
    }
    FMOE_CHECK(outstanding == bytes_outstanding_);
    std::size_t unused = 0;
    for (std::size_t bytes : unused_bytes_) unused += bytes;
    FMOE_CHECK(counters_.bytes_prefetched ==
               counters_.bytes_prefetch_used + counters_.bytes_prefetch_wasted + unused);
}

}  // namespace fmoe
