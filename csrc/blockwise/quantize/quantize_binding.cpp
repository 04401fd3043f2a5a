#include "blockwise/quantize/quantize.h"

#include <tuple>

#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
std::tuple<Tensor, Tensor> quantize(const Tensor& x, std::optional<int64_t> gelu) {
  const int64_t form = gelu.value_or(0);
  LTX_CHECK(form >= 0 && form <= 2,
            "quantize: gelu must be None, 1 (tanh) or 2 (sigmoid), got " + std::to_string(form));
  QuantizeParams params{.x = view(x), .gelu = static_cast<Gelu>(form), .q = {}, .scales = {}};
  quantize_check(params);
  if constexpr (kFills) check_backend("quantize", "x", params.x.device, kBuiltCuda);
  Tensor q = empty_like(params.x, DType::kFp8);
  Tensor scales = empty_scales(params.x);
  params.q = mutable_view(q);
  params.scales = mutable_view(scales);
  if constexpr (kFills) run<quantize_cpu, quantize_cuda>(params, params.x.device);
  return {q, scales};
}

// gelu is a number: a str argument leaks 32 bytes a call up to torch 2.13 (pytorch issue 191340).
STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("quantize(Tensor x, int? gelu) -> (Tensor, Tensor)");
  m.def("quantize_outputs(Tensor x, int? gelu) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("quantize", TORCH_BOX(&quantize<true>));
  m.impl("quantize_outputs", TORCH_BOX(&quantize<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&quantize<true>));
  m.impl("quantize_outputs", TORCH_BOX(&quantize<false>));
}

}  // namespace
}  // namespace ltx
