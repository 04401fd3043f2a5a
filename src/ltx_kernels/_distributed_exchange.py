"""The transport nccl: exchanges through torch.distributed, whatever the group's backend.

Tensors travel as bytes: any dtype will do, and a contiguous last dimension is all that an input needs.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class CollectiveError(RuntimeError):
    """What torch.distributed has raised."""


def send_recv_heads(
    tensors: Sequence[Tensor], rank: int, rank_tokens: Sequence[int], rank_heads: Sequence[int], group: Group
) -> list[Tensor]:
    """Of each tensor, [batch, local tokens, heads, d]: all tokens with this rank's heads."""
    parts = [_bytes(tensor).split(list(rank_heads), dim=2) for tensor in tensors]
    sent = [[part[peer] for part in parts] for peer in range(len(rank_heads))]
    batch, _, _, head_bytes = parts[0][0].shape
    shapes = [(batch, tokens, rank_heads[rank], head_bytes) for tokens in rank_tokens]
    received = _all_to_all(sent, shapes, group)
    results = [torch.cat([of_peer[index] for of_peer in received], dim=1) for index in range(len(tensors))]
    return [result.view(tensors[0].dtype) for result in results]


def gather_heads(
    x: Tensor, rank: int, rank_tokens: Sequence[int], rank_heads: Sequence[int], group: Group
) -> list[Tensor]:
    """x, [batch, all tokens, this rank's heads, d]: this rank's tokens with all heads."""
    parts = _bytes(x).split(list(rank_tokens), dim=1)
    batch, _, _, head_bytes = parts[0].shape
    shapes = [(batch, rank_tokens[rank], heads, head_bytes) for heads in rank_heads]
    received = _all_to_all([[part] for part in parts], shapes, group)
    return [torch.cat([part for (part,) in received], dim=2).view(x.dtype)]


def allgather(x: Tensor, rank_tokens: Sequence[int], group: Group) -> list[Tensor]:
    """x, [batch, local tokens, heads, d]: all tokens."""
    local = _bytes(x)
    batch, tokens, heads, head_bytes = local.shape
    padded = local.new_zeros((batch, max(rank_tokens), heads, head_bytes))  # all_gather takes equal sizes alone
    padded[:, :tokens] = local
    received = [torch.empty_like(padded) for _ in rank_tokens]
    if len(rank_tokens) == 1:
        received = [padded]
    else:
        _collective(lambda: dist.all_gather(received, padded, group=group))
    parts = [part[:, :count] for part, count in zip(received, rank_tokens, strict=True)]
    return [torch.cat(parts, dim=1).view(x.dtype)]


def _bytes(x: Tensor) -> Tensor:
    if x.stride(-1) != 1:  # a last dimension of one element
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def _all_to_all(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], group: Group
) -> list[list[Tensor]]:
    """sent[p]: what peer p receives. From peer p come as many tensors, of shapes[p]."""
    flat = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in sent]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    counts = [len(sent[0]) * size for size in sizes]
    out = flat[0].new_empty(sum(counts))
    if len(sent) == 1:
        out = flat[0]
    else:
        splits = [part.numel() for part in flat]
        _collective(lambda: dist.all_to_all_single(out, torch.cat(flat), counts, splits, group=group))
    return [
        [piece.view(shape) for piece in part.split([size] * len(sent[0]))]
        for part, shape, size in zip(out.split(counts), shapes, sizes, strict=True)
    ]


def _collective(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise CollectiveError(str(error)) from error
