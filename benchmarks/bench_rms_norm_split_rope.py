"""rms_norm_split_rope and its _qk form against a copy of as many bytes and torch.compile."""

import torch
from harness import main
from norm_rope import Op, run
from torch import Tensor

from ltx_kernels.blockwise import rms_norm_split_rope, rms_norm_split_rope_qk


def tables(rows: int, hidden: int, head_dim: int, half: bool) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, rows, hidden // head_dim, head_dim // 2, device="cuda") * 6.3
    return angles.cos().bfloat16().swapaxes(1, 2), angles.sin().bfloat16().swapaxes(1, 2)


def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    v1, v2 = v.unflatten(-1, (cos.shape[1], 2, cos.shape[3])).unbind(-2)
    cos, sin = cos.swapaxes(1, 2), sin.swapaxes(1, 2)
    return torch.stack([v1 * cos - v2 * sin, v2 * cos + v1 * sin], dim=-2).flatten(-3)


if __name__ == "__main__":
    op = Op("rms_norm_split_rope", rms_norm_split_rope, rms_norm_split_rope_qk, tables, rotate, half_tables=(True,))
    main(lambda: run(op), __doc__)
