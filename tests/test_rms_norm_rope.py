"""rms_norm_rope and its _qk form, on every device, against float64."""

import pytest
import torch
from cases.norm_rope import CASES, NormRopeCase, lay_out
from reference import assert_rounded_once
from torch import Tensor

from ltx_kernels.blockwise import rms_norm_rope

op = torch.ops.ltx_kernels.rms_norm_rope.default
qk_op = torch.ops.ltx_kernels.rms_norm_rope_qk.default


def make_inputs(case: NormRopeCase, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x = torch.randn(case.batch, case.tokens, case.hidden, dtype=torch.float32).to(case.dtype)
    width = case.hidden // 2 if case.half_table else case.hidden
    angles = torch.rand(case.table_batch, case.tokens, width) * 6.3
    weights = None if case.weight_dtype is None else (1 + torch.randn(case.hidden) / 4).to(case.weight_dtype).to(device)
    tables = (angles.cos().to(case.table_dtype).to(device), angles.sin().to(case.table_dtype).to(device))
    return lay_out(x.to(device), case.layout), *tables, weights


def exact(x: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The result and the largest product in each of its sums, in float64 on the CPU."""
    x, cos, sin = (t.detach().cpu().double() for t in (x, cos, sin))
    v = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    if weights is not None:
        v = v * weights.cpu().double()
    if cos.shape[-1] != x.shape[-1]:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    straight = v * cos
    crossed = torch.stack([-v[..., 1::2], v[..., ::2]], dim=-1).flatten(-2) * sin
    return straight + crossed, torch.maximum(straight.abs(), crossed.abs())


@pytest.mark.parametrize("out_fp8", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: NormRopeCase, out_fp8: bool, device: str) -> None:
    inputs = make_inputs(case, device)
    out = rms_norm_rope(*inputs, out_fp8, eps=case.eps)
    assert out.dtype == (
        torch.float8_e4m3fn if out_fp8 else torch.float16 if case.dtype == torch.float16 else torch.bfloat16
    )
    assert out.is_contiguous()
    assert_rounded_once(out, *exact(*inputs, case.eps))
