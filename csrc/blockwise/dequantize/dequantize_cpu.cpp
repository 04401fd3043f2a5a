#include "blockwise/dequantize/dequantize.h"

#include <algorithm>
#include <string>
#include <vector>

#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

namespace {

void check_values(const char* op, const TensorView& q, const TensorView& scales) {
  check_device(op, "q", q, q.device, "q");
  check_device(op, "scales", scales, q.device, "q");
  check_dtype(op, "q", q, {DType::kFp8});
  check_float_dtype(op, "scales", scales);
}

// row = row * its scales, which start at `offset`.
void scale_row(const TensorView& scales, int64_t offset, std::vector<float>& row) {
  const auto hidden = static_cast<int64_t>(row.size());
  for (int64_t block = 0; block < num_blocks(hidden); ++block) {
    float scale = 0;
    load_row(scales, offset + block * scales.stride(-1), 1, &scale);
    const int64_t end = std::min((block + 1) * kBlockSize, hidden);
    for (int64_t i = block * kBlockSize; i < end; ++i) row[i] *= scale;
  }
}

}  // namespace

void dequantize_check(const DequantizeParams& params) {
  constexpr const char* kOp = "dequantize";
  const TensorView& q = params.q;
  const TensorView& scales = params.scales;
  check_values(kOp, q, scales);
  check_rank_between(kOp, "q", q, 1);
  const std::array<int64_t, 2> by_row = {q.num_rows(), num_blocks(q.size(-1))};
  std::array<int64_t, kMaxRank> by_q = q.sizes;
  by_q[q.rank - 1] = by_row[1];
  LTX_CHECK((scales.rank == 2 && std::equal(by_row.begin(), by_row.end(), scales.sizes.begin())) ||
                (scales.rank == q.rank && std::equal(by_q.begin(), by_q.begin() + q.rank, scales.sizes.begin())),
            std::string(kOp) + ": scales must have shape " + to_string(by_row.data(), 2) +
                (q.rank == 2 ? "" : " or " + to_string(by_q.data(), q.rank)) + ", got " + shape_of(scales));
  check_last_contiguous(kOp, "q", q);
}

void dequantize_weights_check(const DequantizeWeightsParams& params) {
  constexpr const char* kOp = "dequantize_weights";
  check_values(kOp, params.q, params.scales);
  check_rank(kOp, "q", params.q, 2);
  check_shape(kOp, "scales", params.scales, {num_blocks(params.q.size(0)), num_blocks(params.q.size(1))});
  check_last_contiguous(kOp, "q", params.q);
}

void dequantize_cpu(const DequantizeParams& params) {
  dequantize_check(params);
  const int64_t hidden = params.q.size(-1);
  const Rows<1> rows = make_rows<1>(params.q, {&params.q});
  const Rows<1> scale_rows = make_rows<1>(params.scales, {&params.scales});
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> values(hidden);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.q, rows.offset(0, row), hidden, values.data());
      scale_row(params.scales, scale_rows.offset(0, row), values);
      store_row(params.out, row * hidden, hidden, values.data());
    }
  });
}

void dequantize_weights_cpu(const DequantizeWeightsParams& params) {
  dequantize_weights_check(params);
  const int64_t out = params.q.size(0);
  const int64_t in = params.q.size(1);
  parallel_for(out, out * in, [&](int64_t begin, int64_t end) {
    std::vector<float> values(in);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.q, row * params.q.stride(0), in, values.data());
      scale_row(params.scales, row / kBlockSize * params.scales.stride(0), values);
      store_row(params.out, row * in, in, values.data());
    }
  });
}

}  // namespace ltx
