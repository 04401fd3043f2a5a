#include "ops/rms_norm_rope/rms_norm_rope.h"

#include "ops/norm_rope_binding.h"

namespace ltx {
namespace {

struct RmsNormRope {
  static constexpr const char* kName = "rms_norm_rope";
  static constexpr const char* kQkName = "rms_norm_rope_qk";
  static constexpr auto kCheck = rms_norm_rope_check;
  static constexpr auto kCpu = rms_norm_rope_cpu;
  static constexpr auto kCuda = rms_norm_rope_cuda;
  static constexpr auto kQkCheck = rms_norm_rope_qk_check;
  static constexpr auto kQkCpu = rms_norm_rope_qk_cpu;
  static constexpr auto kQkCuda = rms_norm_rope_qk_cuda;
};

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "rms_norm_rope(Tensor x, Tensor cos_freqs, Tensor sin_freqs, Tensor? weights, bool out_fp8, float eps) -> "
      "Tensor");
  m.def(
      "rms_norm_rope_qk(Tensor q, Tensor k, Tensor cos_freqs, Tensor sin_freqs, Tensor? q_weights, Tensor? k_weights, "
      "bool out_fp8, Tensor? k_cos_freqs, Tensor? k_sin_freqs, float eps) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("rms_norm_rope", TORCH_BOX(&norm_rope<RmsNormRope>));
  m.impl("rms_norm_rope_qk", TORCH_BOX(&norm_rope_qk<RmsNormRope>));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("rms_norm_rope", TORCH_BOX(&norm_rope<RmsNormRope>));
  m.impl("rms_norm_rope_qk", TORCH_BOX(&norm_rope_qk<RmsNormRope>));
}

}  // namespace
}  // namespace ltx
