#include "all2all/allgather/allgather.h"

#include "all2all/exchange_binding.h"

namespace ltx {
namespace {

Tensor allgather(const Tensor& x, const Tensor& state, int64_t communicator, int64_t out_tokens, int64_t out_heads,
                 bool copy_out) {
  return exchange(ExchangeOp::kAllgather, {x}, state, communicator, out_tokens, out_heads, copy_out)[0];
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "allgather(Tensor x, Tensor(a!) state, int communicator, SymInt out_tokens, SymInt out_heads, bool copy_out) "
      "-> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) { m.impl("allgather", TORCH_BOX(&allgather)); }
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) { m.impl("allgather", TORCH_BOX(&allgather)); }

}  // namespace
}  // namespace ltx
