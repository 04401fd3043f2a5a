#include "ops/fp6/fp6.h"

#include "torch/binding.h"

namespace ltx {
namespace {

Tensor fp6_pack(const Tensor& x) {
  Fp6PackParams params{.x = view(x), .out = {}};
  fp6_pack_check(params);
  check_backend("fp6_pack", "x", params.x.device, kBuiltCuda);
  Tensor out = empty({params.x.size(0), params.x.size(1) / 4 * 3}, DType::kUint8, params.x.device);
  params.out = mutable_view(out);
  run<fp6_pack_cpu, fp6_pack_cuda>(params, params.x.device);
  return out;
}

Tensor fp6_unpack(const Tensor& x, int64_t original_n) {
  Fp6UnpackParams params{.x = view(x), .original_n = original_n, .out = {}};
  fp6_unpack_check(params);
  check_backend("fp6_unpack", "x", params.x.device, kBuiltCuda);
  Tensor out = empty({params.x.size(0), original_n}, DType::kUint8, params.x.device);
  params.out = mutable_view(out);
  run<fp6_unpack_cpu, fp6_unpack_cuda>(params, params.x.device);
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def("fp6_pack(Tensor x) -> Tensor");
  m.def("fp6_unpack(Tensor x, SymInt original_n) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("fp6_pack", TORCH_BOX(&fp6_pack));
  m.impl("fp6_unpack", TORCH_BOX(&fp6_unpack));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("fp6_pack", TORCH_BOX(&fp6_pack));
  m.impl("fp6_unpack", TORCH_BOX(&fp6_unpack));
}

}  // namespace
}  // namespace ltx
