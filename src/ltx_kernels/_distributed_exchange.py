"""The transport nccl: exchanges through torch.distributed, whatever the group's backend."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def send_recv_heads(
    tensors: Sequence[Tensor], rank: int, rank_tokens: Sequence[int], rank_heads: Sequence[int], group: Group
) -> list[Tensor]:
    """Of each tensor, [batch, local tokens, heads, d]: all tokens with this rank's heads."""
    parts = [tensor.split(list(rank_heads), dim=2) for tensor in tensors]
    sent = [[part[peer] for part in parts] for peer in range(len(rank_heads))]
    batch, _, _, head_dim = tensors[0].shape
    shapes = [(batch, tokens, rank_heads[rank], head_dim) for tokens in rank_tokens]
    received = _all_to_all(sent, shapes, group)
    return [torch.cat([of_peer[index] for of_peer in received], dim=1) for index in range(len(tensors))]


def gather_heads(
    x: Tensor, rank: int, rank_tokens: Sequence[int], rank_heads: Sequence[int], group: Group
) -> list[Tensor]:
    """x, [batch, all tokens, this rank's heads, d]: this rank's tokens with all heads."""
    batch, _, _, head_dim = x.shape
    shapes = [(batch, rank_tokens[rank], heads, head_dim) for heads in rank_heads]
    received = _all_to_all([[part] for part in x.split(list(rank_tokens), dim=1)], shapes, group)
    return [torch.cat([part for (part,) in received], dim=2)]


def allgather(x: Tensor, rank_tokens: Sequence[int], group: Group) -> list[Tensor]:
    """x, [batch, local tokens, heads, d]: all tokens."""
    batch, tokens, heads, head_dim = x.shape
    padded = x.new_zeros((batch, max(rank_tokens), heads, head_dim))  # all_gather takes equal sizes alone
    padded[:, :tokens] = x
    sent = padded.view(torch.uint8)
    received = [torch.empty_like(sent) for _ in rank_tokens]
    if len(rank_tokens) == 1:
        received = [sent]
    else:
        dist.all_gather(received, sent, group=group)
    parts = [part.view(x.dtype)[:, :count] for part, count in zip(received, rank_tokens, strict=True)]
    return [torch.cat(parts, dim=1)]


def _all_to_all(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[tuple[int, ...]], group: Group
) -> list[list[Tensor]]:
    """sent[p]: what peer p receives. From peer p come as many tensors, of shapes[p]. Bytes: any dtype will do."""
    dtype = sent[0][0].dtype
    flat = [torch.cat([tensor.reshape(-1) for tensor in tensors]).view(torch.uint8) for tensors in sent]
    counts = [len(sent[0]) * torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    out = flat[0].new_empty(sum(counts))
    if len(sent) == 1:
        out = flat[0]
    else:
        dist.all_to_all_single(out, torch.cat(flat), counts, [part.numel() for part in flat], group=group)
    received = []
    for part, shape in zip(out.split(counts), shapes, strict=True):
        pieces = part.view(dtype).chunk(len(sent[0])) if part.numel() else [part.view(dtype)] * len(sent[0])
        received.append([piece.view(shape) for piece in pieces])
    return received
