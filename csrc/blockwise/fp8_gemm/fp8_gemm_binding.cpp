#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <vector>

#include "torch/binding.h"

namespace ltx {
namespace {

Tensor fp8_gemm(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
                const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, bool use_fast_accum,
                torch::headeronly::ScalarType out_dtype, const std::optional<std::vector<int64_t>>& config) {
  Fp8GemmParams params{.a = view(a),
                       .a_scales = view(a_scales),
                       .b = view(b),
                       .b_scales = view(b_scales),
                       .bias = view(bias),
                       .residual = view(residual),
                       .use_fast_accum = use_fast_accum,
                       .out_dtype = dtype_of(out_dtype),
                       .out = {}};
  fp8_gemm_check(params);
  check_backend("fp8_gemm", "a", params.a.device, false);
  LTX_CHECK(!config, "fp8_gemm: config must be None on a cpu, got " + std::to_string(config->size()) + " values");
  Tensor out = empty({params.a.size(0), params.b.size(0)}, params.out_dtype, params.a.device);
  params.out = mutable_view(out);
  run<fp8_gemm_cpu, nullptr>(params, params.a.device);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "fp8_gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor? bias, Tensor? residual, "
      "bool use_fast_accum, ScalarType out_dtype, int[]? config=None) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) { m.impl("fp8_gemm", TORCH_BOX(&fp8_gemm)); }
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) { m.impl("fp8_gemm", TORCH_BOX(&fp8_gemm)); }

}  // namespace
}  // namespace ltx
