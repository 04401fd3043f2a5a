"""Shapes of the ops of all2all_cpp, which imports this module when it is imported itself."""

from torch import SymInt, Tensor

from ltx_kernels._fakes import register_fake


def _result(x: Tensor, out_tokens: int | SymInt, out_heads: int | SymInt) -> Tensor:
    return x.new_empty((x.shape[0], out_tokens, out_heads, x.shape[3]))


@register_fake("ltx_kernels::send_recv_heads")
@register_fake("ltx_kernels::gather_heads")
@register_fake("ltx_kernels::allgather")
def _exchange(x: Tensor, state: Tensor, communicator: int, out_tokens: int, out_heads: int, copy_out: bool) -> Tensor:
    return _result(x, out_tokens, out_heads)


@register_fake("ltx_kernels::send_recv_qkv")
def _send_recv_qkv(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, communicator: int, out_tokens: int, out_heads: int, copy_out: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _result(q, out_tokens, out_heads), _result(k, out_tokens, out_heads), _result(v, out_tokens, out_heads)
