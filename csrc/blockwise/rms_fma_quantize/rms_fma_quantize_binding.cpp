#include "blockwise/rms_fma_quantize/rms_fma_quantize.h"

#include <tuple>

#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
Tensor rms_fma(const Tensor& x, const Tensor& y, const Tensor& z) {
  RmsFmaParams params{.x = mutable_view(x), .y = view(y), .z = view(z), .out = {}};
  rms_fma_check(params);
  if constexpr (kFills) check_backend("rms_fma", "x", params.x.device, kBuiltCuda);
  Tensor out = empty_like(params.x, DType::kBFloat16);
  params.out = mutable_view(out);
  if constexpr (kFills) run<rms_fma_cpu, rms_fma_cuda>(params, params.x.device);
  return out;
}

template <bool kFills>
std::tuple<Tensor, Tensor> rms_fma_quantize(const Tensor& x, const Tensor& y, const Tensor& z) {
  RmsFmaQuantizeParams params{.x = mutable_view(x), .y = view(y), .z = view(z), .q = {}, .scales = {}};
  rms_fma_quantize_check(params);
  if constexpr (kFills) check_backend("rms_fma_quantize", "x", params.x.device, kBuiltCuda);
  Tensor q = empty_like(params.x, DType::kFp8);
  Tensor scales = empty_scales(params.x);
  params.q = mutable_view(q);
  params.scales = mutable_view(scales);
  if constexpr (kFills) run<rms_fma_quantize_cpu, rms_fma_quantize_cuda>(params, params.x.device);
  return {q, scales};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("rms_fma(Tensor(a!) x, Tensor y, Tensor z) -> Tensor");
  m.def("rms_fma_outputs(Tensor x, Tensor y, Tensor z) -> Tensor");
  m.def("rms_fma_quantize(Tensor(a!) x, Tensor y, Tensor z) -> (Tensor, Tensor)");
  m.def("rms_fma_quantize_outputs(Tensor x, Tensor y, Tensor z) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("rms_fma", TORCH_BOX(&rms_fma<true>));
  m.impl("rms_fma_outputs", TORCH_BOX(&rms_fma<false>));
  m.impl("rms_fma_quantize", TORCH_BOX(&rms_fma_quantize<true>));
  m.impl("rms_fma_quantize_outputs", TORCH_BOX(&rms_fma_quantize<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("rms_fma", TORCH_BOX(&rms_fma<true>));
  m.impl("rms_fma_outputs", TORCH_BOX(&rms_fma<false>));
  m.impl("rms_fma_quantize", TORCH_BOX(&rms_fma_quantize<true>));
  m.impl("rms_fma_quantize_outputs", TORCH_BOX(&rms_fma_quantize<false>));
}

}  // namespace
}  // namespace ltx
