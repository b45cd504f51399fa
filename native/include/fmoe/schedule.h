// fmoe/schedule.h: which tokens of a trace run together. B sequences advance side by side; a row
// whose sequence has ended takes the next one. A sequence's leading prefill tokens are one step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fmoe/trace_view.h"

namespace fmoe {

struct Sequence {
    std::size_t start = 0;
    std::size_t length = 0;
};

// One request's part of an iteration.
struct ScheduledRow {
    std::uint64_t request = 0;
    std::size_t first_token = 0;
    int num_tokens = 1;  // more only for a prefill
    bool is_prefill = false;
    bool is_last = false;  // the request ends with this iteration
};

class Schedule {
public:
    // Requests are numbered from `first_request` in the order of `sequences`; empty ones are left
    // out. Throws std::invalid_argument for a sequence outside the trace or batch < 1.
    Schedule(const TraceView& trace, std::span<const Sequence> sequences, int batch,
             std::uint64_t first_request = 0);

    std::size_t num_iterations() const noexcept { return iteration_begin_.size() - 1; }
    std::span<const ScheduledRow> rows(std::size_t iteration) const noexcept {
        return {rows_.data() + iteration_begin_[iteration],
                iteration_begin_[iteration + 1] - iteration_begin_[iteration]};
    }
    // Rows of all iterations: the tokens that the requests got.
    std::size_t num_rows() const noexcept { return rows_.size(); }

private:
    std::vector<ScheduledRow> rows_;
    std::vector<std::size_t> iteration_begin_{0};
};

// Unions the experts that the rows of an iteration choose in a layer.
class NeededExperts {
public:
    explicit NeededExperts(const TraceView& trace);
    // Expert indices, ascending, each once; valid until the next call.
    std::span<const int> of(std::span<const ScheduledRow> rows, int layer);

private:
    const TraceView& trace_;
    std::vector<std::uint8_t> is_needed_;  // [J], all zero between calls
    std::vector<int> needed_;
};

}  // namespace fmoe
