#include "blockwise/gated_attention/gated_attention.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

void gated_attention_check(const GatedAttentionParams& params) {
  constexpr const char* kOp = "gated_attention";
  const TensorView& x = params.x;
  const TensorView& logits = params.gate_logits;
  check_device(kOp, "x", x, x.device, "x");
  check_device(kOp, "gate_logits", logits, x.device, "x");
  check_float_dtype(kOp, "x", x);
  check_float_dtype(kOp, "gate_logits", logits);
  check_rank_between(kOp, "x", x, 1);
  LTX_CHECK(
      logits.rank == x.rank && std::equal(x.sizes.begin(), x.sizes.begin() + x.rank - 1, logits.sizes.begin()),
      std::string(kOp) + ": gate_logits must have the leading sizes of x " + shape_of(x) + ", got " + shape_of(logits));
  LTX_CHECK(logits.size(-1) > 0 && x.size(-1) % logits.size(-1) == 0,
            std::string(kOp) + ": gate_logits must have a last size that divides x's, " + std::to_string(x.size(-1)) +
                ", got " + std::to_string(logits.size(-1)));
  check_last_contiguous(kOp, "x", x);
  check_last_contiguous(kOp, "gate_logits", logits);
}

void gated_attention_cpu(const GatedAttentionParams& params) {
  gated_attention_check(params);
  const int64_t hidden = params.x.size(-1);
  const int64_t heads = params.gate_logits.size(-1);
  const int64_t head_dim = hidden / heads;
  const Rows<2> rows = make_rows<2>(params.x, {&params.x, &params.gate_logits});
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    std::vector<float> logits(heads);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.x, rows.offset(0, row), hidden, v.data());
      load_row(params.gate_logits, rows.offset(1, row), heads, logits.data());
      for (int64_t head = 0; head < heads; ++head) {
        const float gate = 2.0f * (1.0f / (1.0f + std::exp(-logits[head])));
        for (int64_t i = 0; i < head_dim; ++i) v[head * head_dim + i] *= gate;
      }
      if (params.scales) {
        quantize_row(v.data(), row, params.out, *params.scales);
      } else {
        store_row(params.out, row * hidden, hidden, v.data());
      }
    }
  });
  if (params.scales) clear_padding(*params.scales);
}

}  // namespace ltx
