#include "blockwise/rms_fma_quantize/rms_fma_quantize.h"

#include <tuple>

#include "torch/binding.h"

namespace ltx {
namespace {

Tensor rms_fma(const Tensor& x, const Tensor& y, const Tensor& z) {
  RmsFmaParams params{.x = mutable_view(x), .y = view(y), .z = view(z), .out = {}};
  rms_fma_check(params);
  check_backend("rms_fma", "x", params.x.device, kBuiltCuda);
  Tensor out = empty_like(params.x, DType::kBFloat16);
  params.out = mutable_view(out);
  run<rms_fma_cpu, rms_fma_cuda>(params, params.x.device);
  return out;
}

std::tuple<Tensor, Tensor> rms_fma_quantize(const Tensor& x, const Tensor& y, const Tensor& z) {
  RmsFmaQuantizeParams params{.x = mutable_view(x), .y = view(y), .z = view(z), .q = {}, .scales = {}};
  rms_fma_quantize_check(params);
  check_backend("rms_fma_quantize", "x", params.x.device, kBuiltCuda);
  Tensor q = empty_like(params.x, DType::kFp8);
  Tensor scales = empty_scales(params.x);
  params.q = mutable_view(q);
  params.scales = mutable_view(scales);
  run<rms_fma_quantize_cpu, rms_fma_quantize_cuda>(params, params.x.device);
  return {q, scales};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("rms_fma(Tensor(a!) x, Tensor y, Tensor z) -> Tensor");
  m.def("rms_fma_quantize(Tensor(a!) x, Tensor y, Tensor z) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("rms_fma", TORCH_BOX(&rms_fma));
  m.impl("rms_fma_quantize", TORCH_BOX(&rms_fma_quantize));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("rms_fma", TORCH_BOX(&rms_fma));
  m.impl("rms_fma_quantize", TORCH_BOX(&rms_fma_quantize));
}

}  // namespace
}  // namespace ltx
