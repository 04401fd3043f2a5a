#pragma once

#include <string>
#include <tuple>

#include "ops/norm_rope.h"
#include "torch/binding.h"

// The bindings of the ops that normalize a row and then rotate it. Op has the names kName and kQkName, and a room's
// functions as kCheck, kCpu, kCuda, kQkCheck, kQkCpu and kQkCuda.
namespace ltx {

template <class Op>
Tensor norm_rope(const Tensor& x, const Tensor& cos_freqs, const Tensor& sin_freqs,
                 const std::optional<Tensor>& weights, bool out_fp8, double eps) {
  NormRopeParams params{.x = view(x),
                        .cos_freqs = view(cos_freqs),
                        .sin_freqs = view(sin_freqs),
                        .weights = view(weights),
                        .eps = eps,
                        .out = {}};
  Op::kCheck(params);
  check_backend(Op::kName, "x", params.x.device, kBuiltCuda);
  Tensor out = empty_like(params.x, rotated_dtype(params.x.dtype, out_fp8));
  params.out = mutable_view(out);
  run<Op::kCpu, Op::kCuda>(params, params.x.device);
  return out;
}

template <class Op>
std::tuple<Tensor, Tensor> norm_rope_qk(const Tensor& q, const Tensor& k, const Tensor& cos_freqs,
                                        const Tensor& sin_freqs, const std::optional<Tensor>& q_weights,
                                        const std::optional<Tensor>& k_weights, bool out_fp8,
                                        const std::optional<Tensor>& k_cos_freqs,
                                        const std::optional<Tensor>& k_sin_freqs, double eps) {
  LTX_CHECK(k_cos_freqs.has_value() == k_sin_freqs.has_value(),
            std::string(Op::kQkName) + ": k_cos_freqs and k_sin_freqs must come together, got one of them");
  const TensorView cos = view(cos_freqs);
  const TensorView sin = view(sin_freqs);
  NormRopeQkParams params{
      .q = {.x = view(q), .cos_freqs = cos, .sin_freqs = sin, .weights = view(q_weights), .eps = eps, .out = {}},
      .k = {.x = view(k),
            .cos_freqs = view(k_cos_freqs).value_or(cos),
            .sin_freqs = view(k_sin_freqs).value_or(sin),
            .weights = view(k_weights),
            .eps = eps,
            .out = {}}};
  Op::kQkCheck(params);
  check_backend(Op::kQkName, "q", params.q.x.device, kBuiltCuda);
  Tensor q_out = empty_like(params.q.x, rotated_dtype(params.q.x.dtype, out_fp8));
  Tensor k_out = empty_like(params.k.x, rotated_dtype(params.k.x.dtype, out_fp8));
  params.q.out = mutable_view(q_out);
  params.k.out = mutable_view(k_out);
  run<Op::kQkCpu, Op::kQkCuda>(params, params.q.x.device);
  return {q_out, k_out};
}

}  // namespace ltx
