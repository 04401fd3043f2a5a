#include "ops/rms_norm_rope/rms_norm_rope.h"

#include <string>
#include <vector>

#include "common/check.h"
#include "common/float_row.h"
#include "common/norm_row.h"
#include "common/parallel_for.h"
#include "common/rows.h"

namespace ltx {

namespace {

void check_table(const char* op, const char* name, const TensorView& table, const TensorView& x, const char* x_name) {
  check_device(op, name, table, x.device, x_name);
  check_float_dtype(op, name, table);
  check_rank_between(op, name, table, 1);
  const int64_t hidden = x.size(-1);
  LTX_CHECK(table.size(-1) == hidden || table.size(-1) == hidden / 2,
            std::string(op) + ": " + name + " must have a last size of " + std::to_string(hidden) + " or " +
                std::to_string(hidden / 2) + ", got " + shape_of(table));
  LTX_CHECK(rows_broadcast(table, x),
            std::string(op) + ": " + name + " must broadcast to " + shape_of(x) + ", got " + shape_of(table));
  check_last_contiguous(op, name, table);
}

void check(const char* op, const NormRopeNames& names, const NormRopeParams& params) {
  check_norm(op, names.x, params.x, 1, kMaxRank, names.weights, params.weights, params.eps);
  check_table(op, names.cos_freqs, params.cos_freqs, params.x, names.x);
  check_table(op, names.sin_freqs, params.sin_freqs, params.x, names.x);
  LTX_CHECK(params.sin_freqs.size(-1) == params.cos_freqs.size(-1),
            std::string(op) + ": " + names.sin_freqs + " must have the last size of " + names.cos_freqs + ", " +
                std::to_string(params.cos_freqs.size(-1)) + ", got " + shape_of(params.sin_freqs));
}

}  // namespace

void rms_norm_rope_check(const NormRopeParams& params) { check("rms_norm_rope", {}, params); }

void rms_norm_rope_qk_check(const NormRopeQkParams& params) { check_norm_rope_qk("rms_norm_rope_qk", check, params); }

void rms_norm_rope_cpu(const NormRopeParams& params) {
  rms_norm_rope_check(params);
  const int64_t hidden = params.x.size(-1);
  const int64_t table_size = params.cos_freqs.size(-1);
  const int64_t table_step = table_size / (hidden / 2);  // 2: a value an element, 1: a value a pair
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.cos_freqs, &params.sin_freqs});
  const std::vector<float> weights = load_weights(params.weights, hidden);
  parallel_for(rows.count, rows.count * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    std::vector<float> cos(table_size);
    std::vector<float> sin(table_size);
    std::vector<float> y(hidden);
    for (int64_t row = begin; row < end; ++row) {
      load_row(params.x, rows.offset(0, row), hidden, v.data());
      load_row(params.cos_freqs, rows.offset(1, row), table_size, cos.data());
      load_row(params.sin_freqs, rows.offset(2, row), table_size, sin.data());
      normalize_row(v, weights, static_cast<float>(params.eps));
      for (int64_t i = 0; i < hidden / 2; ++i) {
        const int64_t even = table_step * i;
        const int64_t odd = even + table_step - 1;
        y[2 * i] = v[2 * i] * cos[even] - v[2 * i + 1] * sin[even];
        y[2 * i + 1] = v[2 * i + 1] * cos[odd] + v[2 * i] * sin[odd];
      }
      store_row(params.out, row * hidden, hidden, y.data());
    }
  });
}

void rms_norm_rope_qk_cpu(const NormRopeQkParams& params) {
  rms_norm_rope_qk_check(params);
  rms_norm_rope_cpu(params.q);
  rms_norm_rope_cpu(params.k);
}

}  // namespace ltx
