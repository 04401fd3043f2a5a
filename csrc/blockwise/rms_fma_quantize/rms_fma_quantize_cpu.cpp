#include "blockwise/rms_fma_quantize/rms_fma_quantize.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "blockwise/modulation.h"
#include "blockwise/quantize_block.h"
#include "common/check.h"
#include "common/float_row.h"
#include "common/norm_row.h"
#include "common/overlap.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

namespace {

void check(const char* op, const TensorView& x, const TensorView& y, const TensorView& z) {
  check_device(op, "x", x, x.device, "x");
  check_float_dtype(op, "x", x);
  check_rank_between(op, "x", x, 1);
  check_last_contiguous(op, "x", x);
  check_device(op, "y", y, x.device, "x");
  check_float_dtype(op, "y", y);
  LTX_CHECK(y.rank == x.rank && std::equal(x.sizes.begin(), x.sizes.begin() + x.rank, y.sizes.begin()),
            std::string(op) + ": y must have shape " + shape_of(x) + " like x, got " + shape_of(y));
  check_last_contiguous(op, "y", y);
  check_modulation(op, "z", z, x);
  LTX_CHECK(!overlaps_itself(x), std::string(op) + ": x must not overlap itself, got sizes " + shape_of(x) +
                                     " with strides " + to_string(x.strides.data(), x.rank));
  LTX_CHECK(!overlap(x, y), std::string(op) + ": y must not overlap x, got one that shares memory with it");
  LTX_CHECK(!overlap(x, z), std::string(op) + ": z must not overlap x, got one that shares memory with it");
}

// Calls finish(row, v) with the norm of each row of the new x.
template <class Finish>
void for_each_norm(const TensorView& x, const TensorView& y, const TensorView& z, const Finish& finish) {
  const int64_t hidden = x.size(-1);
  const Rows<3> rows = make_rows<3>(x, {&x, &y, &z});
  const std::vector<float> ones = load_weights(std::nullopt, hidden);
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    std::vector<float> y_row(hidden);
    std::vector<float> z_row(hidden);
    for (int64_t row = begin; row < end; ++row) {
      load_row(x, rows.offset(0, row), hidden, v.data());
      load_row(y, rows.offset(1, row), hidden, y_row.data());
      load_row(z, rows.offset(2, row), hidden, z_row.data());
      for (int64_t i = 0; i < hidden; ++i) v[i] = std::fma(y_row[i], z_row[i], v[i]);
      store_row(x, rows.offset(0, row), hidden, v.data());
      load_row(x, rows.offset(0, row), hidden, v.data());  // rounded to x's dtype
      normalize_row(v, ones, kRmsFmaEps);
      finish(row, v);
    }
  });
}

}  // namespace

void rms_fma_check(const RmsFmaParams& params) { check("rms_fma", params.x, params.y, params.z); }

void rms_fma_quantize_check(const RmsFmaQuantizeParams& params) {
  check("rms_fma_quantize", params.x, params.y, params.z);
}

void rms_fma_cpu(const RmsFmaParams& params) {
  rms_fma_check(params);
  const int64_t hidden = params.x.size(-1);
  for_each_norm(params.x, params.y, params.z, [&](int64_t row, const std::vector<float>& v) {
    store_row(params.out, row * hidden, hidden, v.data());
  });
}

void rms_fma_quantize_cpu(const RmsFmaQuantizeParams& params) {
  rms_fma_quantize_check(params);
  for_each_norm(params.x, params.y, params.z, [&](int64_t row, const std::vector<float>& v) {
    quantize_row(v.data(), row, params.q, params.scales);
  });
  clear_padding(params.scales);
}

}  // namespace ltx
