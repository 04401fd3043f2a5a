"""rms_norm_rope and its _qk form against a copy of as many bytes and torch.compile."""

import torch
from harness import main
from norm_rope import Op, run
from torch import Tensor

from ltx_kernels.blockwise import rms_norm_rope, rms_norm_rope_qk


def tables(rows: int, hidden: int, head_dim: int, half: bool) -> tuple[Tensor, Tensor]:
    angles = torch.rand(1, rows, hidden // 2 if half else hidden, device="cuda") * 6.3
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cos.shape[-1] != v.shape[-1]:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    crossed = torch.stack([-v[..., 1::2], v[..., ::2]], dim=-1).flatten(-2)
    return v * cos + crossed * sin


if __name__ == "__main__":
    op = Op("rms_norm_rope", rms_norm_rope, rms_norm_rope_qk, tables, rotate, half_tables=(False, True))
    main(lambda: run(op), __doc__)
