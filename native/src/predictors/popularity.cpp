#include "fmoe/predictors/popularity.h"

#include <algorithm>
#include <utility>

namespace fmoe {

void Popularity::add(const IterationRecord& record) {
    if (!record.is_complete()) return;
    for (int row = 0; row < record.num_rows(); ++row) {
        const std::uint8_t* chosen = record.chosen(row);
        for (std::size_t expert = 0; expert < counts_.size(); ++expert)
            counts_[expert] += chosen[expert] != 0;
        ++num_rows_;
    }
}

void Popularity::publish(std::uint64_t iteration, int num_layers, int num_rows,
                         std::vector<Prediction>& out) const {
    const int layers = std::min(num_layers, geometry_.num_layers);
    if (num_rows_ == 0 || layers == 0 || num_rows == 0) return;
    Prediction prediction =
        Prediction::blank(iteration, -1, 0, layers, num_rows, geometry_.num_experts);
    const std::size_t block = static_cast<std::size_t>(layers) * geometry_.num_experts;
    for (std::size_t i = 0; i < prediction.p.size(); ++i)
        prediction.p[i] = static_cast<float>(counts_[i % block]) / static_cast<float>(num_rows_);
    std::fill(prediction.score.begin(), prediction.score.end(), 1.0F);
    out.push_back(std::move(prediction));
}

}  // namespace fmoe
