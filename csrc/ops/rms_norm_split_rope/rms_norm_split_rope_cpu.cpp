#include "ops/rms_norm_split_rope/rms_norm_split_rope.h"

#include <string>
#include <vector>

#include "common/check.h"
#include "common/float_row.h"
#include "common/norm_row.h"
#include "common/parallel_for.h"

namespace ltx {

namespace {

// [batch or 1, heads, tokens, head_dim / 2] with heads * head_dim equal to x's last size.
void check_table(const char* op, const char* name, const TensorView& table, const TensorView& x, const char* x_name) {
  check_device(op, name, table, x.device, x_name);
  check_float_dtype(op, name, table);
  check_rank(op, name, table, 4);
  const int64_t batch = x.size(0);
  const int64_t tokens = x.size(1);
  LTX_CHECK((table.size(0) == batch || table.size(0) == 1) && table.size(2) == tokens &&
                table.size(1) * table.size(3) * 2 == x.size(2),
            std::string(op) + ": " + name + " must have shape [" + std::to_string(batch) + " or 1, heads, " +
                std::to_string(tokens) + ", head_dim / 2] with heads * head_dim = " + std::to_string(x.size(2)) +
                ", got " + shape_of(table));
  check_last_contiguous(op, name, table);
}

void check(const char* op, const NormRopeNames& names, const NormRopeParams& params) {
  check_norm(op, names.x, params.x, 3, 3, names.weights, params.weights, params.eps);
  check_table(op, names.cos_freqs, params.cos_freqs, params.x, names.x);
  check_table(op, names.sin_freqs, params.sin_freqs, params.x, names.x);
  LTX_CHECK(params.sin_freqs.size(1) == params.cos_freqs.size(1),
            std::string(op) + ": " + names.sin_freqs + " must have the heads of " + names.cos_freqs + ", " +
                std::to_string(params.cos_freqs.size(1)) + ", got " + shape_of(params.sin_freqs));
}

// Where a token's first head begins.
int64_t table_offset(const TensorView& table, int64_t batch, int64_t token) {
  return (table.size(0) == 1 ? 0 : batch * table.stride(0)) + token * table.stride(2);
}

}  // namespace

void rms_norm_split_rope_check(const NormRopeParams& params) { check("rms_norm_split_rope", {}, params); }

void rms_norm_split_rope_qk_check(const NormRopeQkParams& params) {
  check_norm_rope_qk("rms_norm_split_rope_qk", check, params);
}

void rms_norm_split_rope_cpu(const NormRopeParams& params) {
  rms_norm_split_rope_check(params);
  const int64_t tokens = params.x.size(1);
  const int64_t hidden = params.x.size(2);
  const int64_t heads = params.cos_freqs.size(1);
  const int64_t half = params.cos_freqs.size(3);
  const int64_t num_rows = params.x.num_rows();
  const std::vector<float> weights = load_weights(params.weights, hidden);
  parallel_for(num_rows, num_rows * hidden, [&](int64_t begin, int64_t end) {
    std::vector<float> v(hidden);
    std::vector<float> cos(half);
    std::vector<float> sin(half);
    std::vector<float> y(hidden);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / tokens;
      const int64_t token = row % tokens;
      load_row(params.x, batch * params.x.stride(0) + token * params.x.stride(1), hidden, v.data());
      normalize_row(v, weights, static_cast<float>(params.eps));
      for (int64_t head = 0; head < heads; ++head) {
        load_row(params.cos_freqs, table_offset(params.cos_freqs, batch, token) + head * params.cos_freqs.stride(1),
                 half, cos.data());
        load_row(params.sin_freqs, table_offset(params.sin_freqs, batch, token) + head * params.sin_freqs.stride(1),
                 half, sin.data());
        const float* v1 = v.data() + head * 2 * half;
        const float* v2 = v1 + half;
        float* y1 = y.data() + head * 2 * half;
        float* y2 = y1 + half;
        for (int64_t i = 0; i < half; ++i) {
          y1[i] = v1[i] * cos[i] - v2[i] * sin[i];
          y2[i] = v2[i] * cos[i] + v1[i] * sin[i];
        }
      }
      store_row(params.out, row * hidden, hidden, y.data());
    }
  });
}

void rms_norm_split_rope_qk_cpu(const NormRopeQkParams& params) {
  rms_norm_split_rope_qk_check(params);
  rms_norm_split_rope_cpu(params.q);
  rms_norm_split_rope_cpu(params.k);
}

}  // namespace ltx
