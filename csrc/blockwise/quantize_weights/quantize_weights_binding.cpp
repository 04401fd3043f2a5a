#include "blockwise/quantize_weights/quantize_weights.h"

#include <tuple>

#include "blockwise/quantize_block.h"
#include "torch/binding.h"

namespace ltx {
namespace {

template <bool kFills>
std::tuple<Tensor, Tensor> quantize_weights(const Tensor& w, int64_t block_size, double scale_max) {
  QuantizeWeightsParams params{.w = view(w), .block_size = block_size, .scale_max = scale_max, .q = {}, .scales = {}};
  quantize_weights_check(params);
  if constexpr (kFills) check_backend("quantize_weights", "w", params.w.device, kBuiltCuda);
  Tensor q = empty_like(params.w, DType::kFp8);
  Tensor scales = empty({num_blocks(params.w.size(0)), num_blocks(params.w.size(1))}, DType::kFloat32, params.w.device);
  params.q = mutable_view(q);
  params.scales = mutable_view(scales);
  if constexpr (kFills) run<quantize_weights_cpu, quantize_weights_cuda>(params, params.w.device);
  return {q, scales};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("quantize_weights(Tensor w, int block_size, float scale_max) -> (Tensor, Tensor)");
  m.def("quantize_weights_outputs(Tensor w, int block_size, float scale_max) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("quantize_weights", TORCH_BOX(&quantize_weights<true>));
  m.impl("quantize_weights_outputs", TORCH_BOX(&quantize_weights<false>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("quantize_weights", TORCH_BOX(&quantize_weights<true>));
  m.impl("quantize_weights_outputs", TORCH_BOX(&quantize_weights<false>));
}

}  // namespace
}  // namespace ltx
