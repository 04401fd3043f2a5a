#include <cmath>
#include <limits>
#include <string>

#include "common/check.h"
#include "common/float_row.h"
#include "common/norm_row.h"

namespace ltx {

void check_norm(const char* op, const char* x_name, const TensorView& x, int low_rank, int high_rank,
                const char* weights_name, const std::optional<TensorView>& weights, double eps) {
  check_device(op, x_name, x, x.device, x_name);
  check_float_dtype(op, x_name, x);
  if (low_rank == high_rank) {
    check_rank(op, x_name, x, low_rank);
  } else {
    check_rank_between(op, x_name, x, low_rank, high_rank);
  }
  const int64_t hidden = x.size(-1);
  LTX_CHECK(hidden > 0 && hidden % 2 == 0,
            std::string(op) + ": " + x_name + " must have a last size that is even and > 0, got " + shape_of(x));
  check_last_contiguous(op, x_name, x);
  if (weights) {
    check_device(op, weights_name, *weights, x.device, x_name);
    check_float_dtype(op, weights_name, *weights);
    check_shape(op, weights_name, *weights, {hidden});
    check_last_contiguous(op, weights_name, *weights);
  }
  check_positive(op, "eps", eps);
}

std::vector<float> load_weights(const std::optional<TensorView>& weights, int64_t hidden) {
  std::vector<float> loaded(hidden, 1.0f);
  if (weights) load_row(*weights, 0, hidden, loaded.data());
  return loaded;
}

void normalize_row(std::vector<float>& row, const std::vector<float>& weights, float eps) {
  double sum = 0;
  for (const float value : row) sum += static_cast<double>(value) * value;
  const float rounded_sum = static_cast<float>(sum);
  const float mean = rounded_sum / static_cast<float>(row.size());
  const float rstd =
      std::isfinite(rounded_sum) ? 1.0f / std::sqrt(mean + eps) : std::numeric_limits<float>::quiet_NaN();
  for (size_t i = 0; i < row.size(); ++i) row[i] = row[i] * rstd * weights[i];
}

}  // namespace ltx
