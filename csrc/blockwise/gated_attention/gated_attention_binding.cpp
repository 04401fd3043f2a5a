#include "blockwise/gated_attention/gated_attention.h"

#include <tuple>

#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
std::tuple<Tensor, Tensor> gated_attention(const Tensor& x, const Tensor& gate_logits, bool quantize) {
  GatedAttentionParams params{.x = view(x), .gate_logits = view(gate_logits), .out = {}, .scales = {}};
  gated_attention_check(params);
  if constexpr (kFills) check_backend("gated_attention", "x", params.x.device, kBuiltCuda);
  Tensor out = empty_like(params.x, quantize ? DType::kFp8 : DType::kBFloat16);
  Tensor scales = quantize ? empty_scales(params.x) : empty({0}, DType::kFloat32, params.x.device);
  params.out = mutable_view(out);
  if (quantize) params.scales = mutable_view(scales);
  if constexpr (kFills) run<gated_attention_cpu, gated_attention_cuda>(params, params.x.device);
  return {out, scales};
}

// Without quantize the scales are of shape [0]: a schema has no optional result.
STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("gated_attention(Tensor x, Tensor gate_logits, bool quantize) -> (Tensor, Tensor)");
  m.def("gated_attention_outputs(Tensor x, Tensor gate_logits, bool quantize) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("gated_attention", TORCH_BOX(&gated_attention<true>));
  m.impl("gated_attention_outputs", TORCH_BOX(&gated_attention<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("gated_attention", TORCH_BOX(&gated_attention<true>));
  m.impl("gated_attention_outputs", TORCH_BOX(&gated_attention<false>));
}

}  // namespace
}  // namespace ltx
