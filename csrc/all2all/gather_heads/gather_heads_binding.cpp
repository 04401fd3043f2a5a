#include "all2all/gather_heads/gather_heads.h"

#include "all2all/exchange_binding.h"

namespace ltx {
namespace {

Tensor gather_heads(const Tensor& x, const Tensor& state, int64_t communicator, int64_t out_tokens, int64_t out_heads,
                    bool copy_out) {
  return exchange(ExchangeOp::kGatherHeads, {x}, state, communicator, out_tokens, out_heads, copy_out)[0];
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "gather_heads(Tensor x, Tensor(a!) state, int communicator, SymInt out_tokens, SymInt out_heads, bool copy_out) "
      "-> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) { m.impl("gather_heads", TORCH_BOX(&gather_heads)); }
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) { m.impl("gather_heads", TORCH_BOX(&gather_heads)); }

}  // namespace
}  // namespace ltx
