#include "blockwise/dequantize/dequantize.h"

#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
Tensor dequantize(const Tensor& q, const Tensor& scales) {
  DequantizeParams params{.q = view(q), .scales = view(scales), .out = {}};
  dequantize_check(params);
  if constexpr (kFills) check_backend("dequantize", "q", params.q.device, kBuiltCuda);
  Tensor out = empty_like(params.q, DType::kBFloat16);
  params.out = mutable_view(out);
  if constexpr (kFills) run<dequantize_cpu, dequantize_cuda>(params, params.q.device);
  return out;
}

template <bool kFills>
Tensor dequantize_weights(const Tensor& q, const Tensor& scales) {
  DequantizeWeightsParams params{.q = view(q), .scales = view(scales), .out = {}};
  dequantize_weights_check(params);
  if constexpr (kFills) check_backend("dequantize_weights", "q", params.q.device, kBuiltCuda);
  Tensor out = empty_like(params.q, DType::kBFloat16);
  params.out = mutable_view(out);
  if constexpr (kFills) run<dequantize_weights_cpu, dequantize_weights_cuda>(params, params.q.device);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("dequantize(Tensor q, Tensor scales) -> Tensor");
  m.def("dequantize_outputs(Tensor q, Tensor scales) -> Tensor");
  m.def("dequantize_weights(Tensor q, Tensor scales) -> Tensor");
  m.def("dequantize_weights_outputs(Tensor q, Tensor scales) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize<true>));
  m.impl("dequantize_outputs", TORCH_BOX(&dequantize<false>));
  m.impl("dequantize_weights", TORCH_BOX(&dequantize_weights<true>));
  m.impl("dequantize_weights_outputs", TORCH_BOX(&dequantize_weights<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize<true>));
  m.impl("dequantize_outputs", TORCH_BOX(&dequantize<false>));
  m.impl("dequantize_weights", TORCH_BOX(&dequantize_weights<true>));
  m.impl("dequantize_weights_outputs", TORCH_BOX(&dequantize_weights<false>));
}

}  // namespace
}  // namespace ltx
