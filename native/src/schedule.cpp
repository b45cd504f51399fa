#include "fmoe/schedule.h"

#include <algorithm>
#include <string>

namespace fmoe {

namespace {

struct Cursor {
    std::uint64_t request;
    std::size_t next_token;
    std::size_t end;
};

ScheduledRow advance(const TraceView& trace, Cursor& cursor) {
    ScheduledRow row{cursor.request, cursor.next_token, 1, trace.is_prefill(cursor.next_token),
                     false};
    ++cursor.next_token;
    while (row.is_prefill && cursor.next_token < cursor.end &&
           trace.is_prefill(cursor.next_token)) {
        ++cursor.next_token;
        ++row.num_tokens;
    }
    row.is_last = cursor.next_token == cursor.end;
    return row;
}

}  // namespace

Schedule::Schedule(const TraceView& trace, std::span<const Sequence> sequences, int batch,
                   std::uint64_t first_request) {
    require(batch >= 1, "schedule: batch must be at least 1, got " + std::to_string(batch));
    std::vector<Cursor> waiting;
    for (const Sequence& sequence : sequences) {
        require(sequence.start <= trace.num_tokens &&
                    sequence.length <= trace.num_tokens - sequence.start,
                "schedule: a sequence lies outside the trace");
        if (sequence.length > 0)
            waiting.push_back({first_request++, sequence.start, sequence.start + sequence.length});
    }
    std::reverse(waiting.begin(), waiting.end());
    std::vector<Cursor> running;
    while (!running.empty() || !waiting.empty()) {
        while (static_cast<int>(running.size()) < batch && !waiting.empty()) {
            running.push_back(waiting.back());
            waiting.pop_back();
        }
        for (Cursor& cursor : running) {
            rows_.push_back(advance(trace, cursor));
            if (rows_.back().is_last && !waiting.empty()) {
                cursor = waiting.back();  // takes over the row from the next iteration on
                waiting.pop_back();
            }
        }
        std::erase_if(running, [](const Cursor& c) { return c.next_token == c.end; });
        iteration_begin_.push_back(rows_.size());
    }
}

NeededExperts::NeededExperts(const TraceView& trace)
    : trace_(trace), is_needed_(static_cast<std::size_t>(trace.geometry.num_experts), 0) {}

std::span<const int> NeededExperts::of(std::span<const ScheduledRow> rows, int layer) {
    const Geometry& geometry = trace_.geometry;
    needed_.clear();
    for (const ScheduledRow& row : rows) {
        for (int i = 0; i < row.num_tokens; ++i) {
            const std::size_t begin = trace_.choice(row.first_token + i, layer);
            for (int k = 0; k < geometry.top_k; ++k) {
                const int expert = trace_.expert_ids[begin + k];
                if (is_needed_[expert] == 0) needed_.push_back(geometry.index(layer, expert));
                is_needed_[expert] = 1;
            }
        }
    }
    for (int index : needed_) is_needed_[geometry.expert_of(index)] = 0;
    std::sort(needed_.begin(), needed_.end());
    return needed_;
}

}  // namespace fmoe
