#include "blockwise/quantize/quantize.h"

#include <cmath>
#include <vector>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

namespace {

float sigmoid(float t) { return 1.0f / (1.0f + std::exp(-t)); }

void apply_gelu(Gelu gelu, std::vector<float>& row) {
  if (gelu == Gelu::kTanh) {
    for (float& x : row) {
      const float u = 0.7978845608f * (x + 0.044715f * x * x * x);
      x = x * sigmoid(2.0f * u);
    }
  } else if (gelu == Gelu::kSigmoid) {
    for (float& x : row) x = x * sigmoid(1.702f * x);
  }
}

}  // namespace

void quantize_check(const QuantizeParams& params) {
  constexpr const char* kOp = "quantize";
  check_device(kOp, "x", params.x, params.x.device, "x");
  check_float_dtype(kOp, "x", params.x);
  check_rank_between(kOp, "x", params.x, 1);
  check_last_contiguous(kOp, "x", params.x);
}

void quantize_cpu(const QuantizeParams& params) {
  quantize_check(params);
  const int64_t hidden = params.x.size(-1);
  const Rows<1> rows = make_rows<1>(params.x, {&params.x});
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.x, rows.offset(0, row), hidden, v.data());
      apply_gelu(params.gelu, v);
      quantize_row(v.data(), row, params.q, params.scales);
    }
  });
  clear_padding(params.scales);
}

}  // namespace ltx
