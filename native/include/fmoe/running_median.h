// fmoe/running_median.h: the median of the last samples; one slow step does not move it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace fmoe {

class RunningMedian {
public:
    void add(double sample) {
        if (samples_.size() < kWindow) {
            samples_.push_back(sample);
            return;
        }
        samples_[next_] = sample;
        next_ = (next_ + 1) % kWindow;
    }
    // 0 before the first sample.
    double value() const {
        if (samples_.empty()) return 0;
        std::vector<double> sorted = samples_;
        const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
        std::nth_element(sorted.begin(), middle, sorted.end());
        return *middle;
    }

private:
    static constexpr std::size_t kWindow = 64;
    std::vector<double> samples_;
    std::size_t next_ = 0;
};

}  // namespace fmoe
