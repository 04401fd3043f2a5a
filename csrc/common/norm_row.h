#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/tensor.h"

// What the ops that normalize a row share on a CPU.
namespace ltx {

// x of a float dtype and low_rank to high_rank, its last size even and > 0; weights of that size; eps > 0.
void check_norm(const char* op, const char* x_name, const TensorView& x, int low_rank, int high_rank,
                const char* weights_name, const std::optional<TensorView>& weights, double eps);

std::vector<float> load_weights(const std::optional<TensorView>& weights, int64_t hidden);  // ones if there are none

// row = row * rstd * weights, or NaN where the sum of squares, rounded to fp32, is not finite.
void normalize_row(std::vector<float>& row, const std::vector<float>& weights, float eps);

}  // namespace ltx
