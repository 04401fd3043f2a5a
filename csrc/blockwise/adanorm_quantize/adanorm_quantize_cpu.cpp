#include "blockwise/adanorm_quantize/adanorm_quantize.h"

#include <vector>

#include "blockwise/modulation.h"
#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/norm_row.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

void adanorm_quantize_check(const AdanormQuantizeParams& params) {
  constexpr const char* kOp = "adanorm_quantize";
  check_device(kOp, "x", params.x, params.x.device, "x");
  check_float_dtype(kOp, "x", params.x);
  check_rank_between(kOp, "x", params.x, 1);
  check_last_contiguous(kOp, "x", params.x);
  if (params.w) {
    check_device(kOp, "w", *params.w, params.x.device, "x");
    check_float_dtype(kOp, "w", *params.w);
    check_shape(kOp, "w", *params.w, {params.x.size(-1)});
    check_last_contiguous(kOp, "w", *params.w);
  }
  check_modulation(kOp, "norm_scale", params.norm_scale, params.x);
  check_modulation(kOp, "norm_shift", params.norm_shift, params.x);
}

void adanorm_quantize_cpu(const AdanormQuantizeParams& params) {
  adanorm_quantize_check(params);
  const int64_t hidden = params.x.size(-1);
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.norm_scale, &params.norm_shift});
  const std::vector<float> w = load_weights(params.w, hidden);
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    std::vector<float> scale(hidden);
    std::vector<float> shift(hidden);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.x, rows.offset(0, row), hidden, v.data());
      load_row(params.norm_scale, rows.offset(1, row), hidden, scale.data());
      load_row(params.norm_shift, rows.offset(2, row), hidden, shift.data());
      normalize_row(v, w, kAdanormEps);
      for (int64_t i = 0; i < hidden; ++i) v[i] = v[i] * (1.0f + scale[i]) + shift[i];
      quantize_row(v.data(), row, params.q, params.scales);
    }
  });
  clear_padding(params.scales);
}

}  // namespace ltx
