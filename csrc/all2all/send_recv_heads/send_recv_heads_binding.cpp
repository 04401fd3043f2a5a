#include "all2all/send_recv_heads/send_recv_heads.h"

#include <tuple>

#include "all2all/exchange_binding.h"

namespace ltx {
namespace {

Tensor send_recv_heads(const Tensor& x, const Tensor& state, int64_t communicator, int64_t out_tokens,
                       int64_t out_heads, bool copy_out) {
  return exchange(ExchangeOp::kSendRecvHeads, {x}, state, communicator, out_tokens, out_heads, copy_out)[0];
}

std::tuple<Tensor, Tensor, Tensor> send_recv_qkv(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& state,
                                                 int64_t communicator, int64_t out_tokens, int64_t out_heads,
                                                 bool copy_out) {
  const std::vector<Tensor> results =
      exchange(ExchangeOp::kSendRecvQkv, {q, k, v}, state, communicator, out_tokens, out_heads, copy_out);
  return {results[0], results[1], results[2]};
}

STABLE_TORCH_LIBRARY_FRAGMENT(ltx_kernels, m) {
  m.def(
      "send_recv_heads(Tensor x, Tensor(a!) state, int communicator, SymInt out_tokens, SymInt out_heads, "
      "bool copy_out) -> Tensor");
  m.def(
      "send_recv_qkv(Tensor q, Tensor k, Tensor v, Tensor(a!) state, int communicator, SymInt out_tokens, "
      "SymInt out_heads, bool copy_out) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CPU, m) {
  m.impl("send_recv_heads", TORCH_BOX(&send_recv_heads));
  m.impl("send_recv_qkv", TORCH_BOX(&send_recv_qkv));
}
STABLE_TORCH_LIBRARY_IMPL(ltx_kernels, CUDA, m) {
  m.impl("send_recv_heads", TORCH_BOX(&send_recv_heads));
  m.impl("send_recv_qkv", TORCH_BOX(&send_recv_qkv));
}

}  // namespace
}  // namespace ltx
