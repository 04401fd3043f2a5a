#include "ops/rms_norm_rope/rms_norm_rope.h"

#include <tuple>

#include "ops/norm_row.h"
#include "torch/binding.h"

namespace ltx {
namespace {

Tensor rms_norm_rope(const Tensor& x, const Tensor& cos_freqs, const Tensor& sin_freqs,
                     const std::optional<Tensor>& weights, bool out_fp8, double eps) {
  RmsNormRopeParams params{.x = view(x),
                           .cos_freqs = view(cos_freqs),
                           .sin_freqs = view(sin_freqs),
                           .weights = view(weights),
                           .eps = eps,
                           .out = {}};
  rms_norm_rope_check(params);
  check_backend("rms_norm_rope", "x", params.x.device, kBuiltCuda);
  Tensor out = empty_like(params.x, rotated_dtype(params.x.dtype, out_fp8));
  params.out = mutable_view(out);
  run<rms_norm_rope_cpu, rms_norm_rope_cuda>(params, params.x.device);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_rope_qk(const Tensor& q, const Tensor& k, const Tensor& cos_freqs,
                                            const Tensor& sin_freqs, const std::optional<Tensor>& q_weights,
                                            const std::optional<Tensor>& k_weights, bool out_fp8,
                                            const std::optional<Tensor>& k_cos_freqs,
                                            const std::optional<Tensor>& k_sin_freqs, double eps) {
  LTX_CHECK(k_cos_freqs.has_value() == k_sin_freqs.has_value(),
            "rms_norm_rope_qk: k_cos_freqs and k_sin_freqs must come together, got one of them");
  const TensorView cos = view(cos_freqs);
  const TensorView sin = view(sin_freqs);
  RmsNormRopeQkParams params{
      .q = {.x = view(q), .cos_freqs = cos, .sin_freqs = sin, .weights = view(q_weights), .eps = eps, .out = {}},
      .k = {.x = view(k),
            .cos_freqs = view(k_cos_freqs).value_or(cos),
            .sin_freqs = view(k_sin_freqs).value_or(sin),
            .weights = view(k_weights),
            .eps = eps,
            .out = {}}};
  rms_norm_rope_qk_check(params);
  check_backend("rms_norm_rope_qk", "q", params.q.x.device, kBuiltCuda);
  Tensor q_out = empty_like(params.q.x, rotated_dtype(params.q.x.dtype, out_fp8));
  Tensor k_out = empty_like(params.k.x, rotated_dtype(params.k.x.dtype, out_fp8));
  params.q.out = mutable_view(q_out);
  params.k.out = mutable_view(k_out);
  run<rms_norm_rope_qk_cpu, rms_norm_rope_qk_cuda>(params, params.q.x.device);
  return {q_out, k_out};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "rms_norm_rope(Tensor x, Tensor cos_freqs, Tensor sin_freqs, Tensor? weights, bool out_fp8, float eps) -> "
      "Tensor");
  m.def(
      "rms_norm_rope_qk(Tensor q, Tensor k, Tensor cos_freqs, Tensor sin_freqs, Tensor? q_weights, Tensor? k_weights, "
      "bool out_fp8, Tensor? k_cos_freqs, Tensor? k_sin_freqs, float eps) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("rms_norm_rope", TORCH_BOX(&rms_norm_rope));
  m.impl("rms_norm_rope_qk", TORCH_BOX(&rms_norm_rope_qk));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("rms_norm_rope", TORCH_BOX(&rms_norm_rope));
  m.impl("rms_norm_rope_qk", TORCH_BOX(&rms_norm_rope_qk));
}

}  // namespace
}  // namespace ltx
