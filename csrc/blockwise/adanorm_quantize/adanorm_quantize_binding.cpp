#include "blockwise/adanorm_quantize/adanorm_quantize.h"

#include <tuple>

#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
std::tuple<Tensor, Tensor> adanorm_quantize(const Tensor& x, const std::optional<Tensor>& w, const Tensor& norm_scale,
                                            const Tensor& norm_shift) {
  AdanormQuantizeParams params{.x = view(x),
                               .w = view(w),
                               .norm_scale = view(norm_scale),
                               .norm_shift = view(norm_shift),
                               .q = {},
                               .scales = {}};
  adanorm_quantize_check(params);
  if constexpr (kFills) check_backend("adanorm_quantize", "x", params.x.device, kBuiltCuda);
  Tensor q = empty_like(params.x, DType::kFp8);
  Tensor scales = empty_scales(params.x);
  params.q = mutable_view(q);
  params.scales = mutable_view(scales);
  if constexpr (kFills) run<adanorm_quantize_cpu, adanorm_quantize_cuda>(params, params.x.device);
  return {q, scales};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("adanorm_quantize(Tensor x, Tensor? w, Tensor norm_scale, Tensor norm_shift) -> (Tensor, Tensor)");
  m.def("adanorm_quantize_outputs(Tensor x, Tensor? w, Tensor norm_scale, Tensor norm_shift) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("adanorm_quantize", TORCH_BOX(&adanorm_quantize<true>));
  m.impl("adanorm_quantize_outputs", TORCH_BOX(&adanorm_quantize<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("adanorm_quantize", TORCH_BOX(&adanorm_quantize<true>));
  m.impl("adanorm_quantize_outputs", TORCH_BOX(&adanorm_quantize<false>));
}

}  // namespace
}  // namespace ltx
