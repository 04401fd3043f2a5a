#include "blockwise/fp8_gemm/fp8_gemm.h"

#include <vector>

#include "torch/binding.h"

namespace ltx {
namespace {

// The fields of an Fp8GemmConfig in their order.
std::vector<int64_t> to_list(const Fp8GemmConfig& config) {
  return {config.arch, config.tile_m, config.tile_n, config.stages, config.cluster_m, config.split_k, config.band};
}

std::optional<Fp8GemmConfig> config_of(const std::optional<std::vector<int64_t>>& list, const Device& device) {
  if (!list) return std::nullopt;
  const std::string count = std::to_string(list->size()) + " values";
  LTX_CHECK(device.kind == Device::Kind::kCuda, "fp8_gemm: config must be None on a cpu, got " + count);
  const size_t expected = to_list({}).size();
  LTX_CHECK(list->size() == expected,
            "fp8_gemm: config must have " + std::to_string(expected) + " values, got " + count);
  const auto at = [&](size_t i) { return static_cast<int>((*list)[i]); };
  return Fp8GemmConfig{at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

std::vector<int64_t> config(int64_t m, int64_t n, int64_t k, int64_t num_sms, int64_t capability) {
  const auto config = fp8_gemm_config(m, n, k, static_cast<int>(num_sms), static_cast<int>(capability));
  return config ? to_list(*config) : std::vector<int64_t>();
}

std::string kernel_lacks(int device, int arch) {
  if constexpr (kBuiltCuda) {
    return fp8_gemm_device_lacks(device, arch);
  } else {
    return "this build has no CUDA code";
  }
}

std::string device_lacks(int64_t device) { return kernel_lacks(static_cast<int>(device), kFp8GemmPublicArch); }

Tensor fp8_gemm(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
                const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, bool use_fast_accum,
                torch::headeronly::ScalarType out_dtype, const std::optional<std::vector<int64_t>>& config_list) {
  Fp8GemmParams params{.a = view(a),
                       .a_scales = view(a_scales),
                       .b = view(b),
                       .b_scales = view(b_scales),
                       .bias = view(bias),
                       .residual = view(residual),
                       .use_fast_accum = use_fast_accum,
                       .out_dtype = dtype_of(out_dtype),
                       .config = {},
                       .out = {}};
  const Device device = params.a.device;
  params.config = config_of(config_list, device);
  fp8_gemm_check(params);
  check_backend("fp8_gemm", "a", device, kBuiltCuda);
  if (device.kind == Device::Kind::kCuda) {
    const std::string lacking = kernel_lacks(device.index, params.config ? params.config->arch : kFp8GemmPublicArch);
    LTX_CHECK(lacking.empty(), "fp8_gemm: a must be on cpu (" + lacking + "), got " + to_string(device));
  }
  Tensor out = empty({params.a.size(0), params.b.size(0)}, params.out_dtype, device);
  params.out = mutable_view(out);
  std::optional<Tensor> workspace;  // torch may give it to what follows on the stream as soon as this returns
  if (const int64_t bytes = fp8_gemm_workspace_bytes(params)) {
    workspace = empty({bytes}, DType::kUint8, device);
    params.workspace = workspace->mutable_data_ptr();
  }
  run<fp8_gemm_cpu, fp8_gemm_cuda>(params, device);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "fp8_gemm(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor? bias, Tensor? residual, "
      "bool use_fast_accum, ScalarType out_dtype, int[]? config=None) -> Tensor");
  m.def("fp8_gemm_config(int m, int n, int k, int num_sms, int capability) -> int[]");
  m.def("fp8_gemm_device_lacks(int device) -> str");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CompositeExplicitAutograd, m) {
  m.impl("fp8_gemm_config", TORCH_BOX(&config));
  m.impl("fp8_gemm_device_lacks", TORCH_BOX(&device_lacks));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) { m.impl("fp8_gemm", TORCH_BOX(&fp8_gemm)); }
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) { m.impl("fp8_gemm", TORCH_BOX(&fp8_gemm)); }

}  // namespace
}  // namespace ltx
