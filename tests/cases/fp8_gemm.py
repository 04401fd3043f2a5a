"""Cases of the blockwise FP8 product, shared by all backends. `path` says what a case exercises."""

from dataclasses import dataclass

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
POISON = 0x7F  # NaN, in the bytes around a matrix


@dataclass(frozen=True)
class GemmCase:
    path: str
    m: int = 65
    n: int = 136
    k: int = 400
    out_dtype: torch.dtype = BF16
    bias: bool = False
    residual: bool = False
    fp6: bool = False
    scale_dtype: torch.dtype = FP32
    scale_layout: str = "padded"  # of a: padded (as quantize returns them), cloned, row-major, broadcast
    a_gap: int = 0  # elements between the rows of a
    b_gap: int = 0
    one_sign: bool = False

    def __str__(self) -> str:
        return self.path.replace(" ", "_")


CASES = [
    *(GemmCase(f"m {m}", m=m) for m in (0, 1, 2, 7, 63, 65, 129, 1000)),
    *(GemmCase(f"n {n}", n=n) for n in (8, 64, 120, 128, 136, 640, 2568)),
    *(GemmCase(f"k {k}", k=k) for k in (16, 80, 128, 144, 192, 640, 4096)),
    *(GemmCase(f"{m} x {n} x {k}", m, n, k) for m, n, k in ((1, 8, 16), (3, 24, 1040), (33, 32, 272), (128, 128, 128))),
    GemmCase("LTX-2 audio", m=126, n=2048, k=2048, bias=True),
    GemmCase("out of 10944 features", m=5, n=10944, k=80),
    *(GemmCase(f"out {dtype}", out_dtype=dtype, bias=True, residual=True) for dtype in (BF16, FP16, FP32)),
    GemmCase("bias", bias=True, out_dtype=FP32),
    GemmCase("residual", residual=True, out_dtype=FP32),
    *(GemmCase(f"fp6, k {k}", k=k, fp6=True, out_dtype=FP32) for k in (16, 128, 144, 1040)),
    GemmCase("fp6, rows of b apart", fp6=True, b_gap=16),
    GemmCase("fp6, one row", m=1, fp6=True, bias=True),
    GemmCase("cloned scales", scale_layout="cloned"),
    GemmCase("row-major scales", scale_layout="row-major"),
    GemmCase("one row of scales for all", scale_layout="broadcast"),
    GemmCase("bf16 scales", scale_dtype=BF16),
    GemmCase("fp16 scales, row-major", scale_dtype=FP16, scale_layout="row-major"),
    GemmCase("rows of a apart", a_gap=16),
    GemmCase("rows of a far apart", a_gap=800),
    GemmCase("rows of b apart", b_gap=48),
    GemmCase("one sign", out_dtype=FP32, one_sign=True, k=4096),
]


def lay_out(matrix: Tensor, gap: int) -> Tensor:
    """matrix with its rows `gap` elements apart, and poison between and after them."""
    rows, width = matrix.shape
    buffer = torch.full((rows + 2, width + gap), POISON, dtype=torch.uint8, device=matrix.device)
    buffer[:rows, :width] = matrix.view(torch.uint8)
    return buffer.view(matrix.dtype)[:rows, :width]


def lay_out_scales(scales: Tensor, layout: str) -> Tensor:
    """scales' values in another memory layout, with NaN past the last row."""
    rows, blocks = scales.shape
    if layout == "padded":
        buffer = torch.full((blocks, -(-rows // 4) * 4), torch.nan, dtype=scales.dtype, device=scales.device)
        padded = buffer.t()[:rows]
        padded.copy_(scales)
        return padded
    if layout == "cloned":
        return scales.t().contiguous().t()
    if layout == "broadcast":
        return scales[:1].expand(rows, blocks)
    return scales.contiguous()
