#include "blockwise/dequantize/dequantize.h"

#include "torch/binding.h"

namespace ltx {
namespace {

Tensor dequantize(const Tensor& q, const Tensor& scales) {
  DequantizeParams params{.q = view(q), .scales = view(scales), .out = {}};
  dequantize_check(params);
  check_backend("dequantize", "q", params.q.device, kBuiltCuda);
  Tensor out = empty_like(params.q, DType::kBFloat16);
  params.out = mutable_view(out);
  run<dequantize_cpu, dequantize_cuda>(params, params.q.device);
  return out;
}

Tensor dequantize_weights(const Tensor& q, const Tensor& scales) {
  DequantizeWeightsParams params{.q = view(q), .scales = view(scales), .out = {}};
  dequantize_weights_check(params);
  check_backend("dequantize_weights", "q", params.q.device, kBuiltCuda);
  Tensor out = empty_like(params.q, DType::kBFloat16);
  params.out = mutable_view(out);
  run<dequantize_weights_cpu, dequantize_weights_cuda>(params, params.q.device);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("dequantize(Tensor q, Tensor scales) -> Tensor");
  m.def("dequantize_weights(Tensor q, Tensor scales) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("dequantize_weights", TORCH_BOX(&dequantize_weights));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("dequantize_weights", TORCH_BOX(&dequantize_weights));
}

}  // namespace
}  // namespace ltx
