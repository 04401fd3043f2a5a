"""Cases of the ops that normalize a row and rotate it, shared by all backends. `path` says what a case exercises."""

from dataclasses import dataclass

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class NormRopeCase:
    path: str
    batch: int = 2
    tokens: int = 5
    heads: int = 4
    head_dim: int = 64
    dtype: torch.dtype = BF16
    table_dtype: torch.dtype = BF16
    weight_dtype: torch.dtype | None = BF16
    table_batch: int = 1
    half_table: bool = False  # interleaved only: the split form has no other
    eps: float = 1e-6
    layout: str = (
        "contiguous"  # of x: contiguous, chunk (of a fused qkv), every_second (token), swapped (axes 0 and 1), offset
    )

    def __str__(self) -> str:
        return self.path.replace(" ", "_")

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


CASES = [
    NormRopeCase("LTX-2 video", heads=32, head_dim=128),
    NormRopeCase("LTX-2 audio", heads=32, head_dim=64),
    NormRopeCase("half table", half_table=True),
    *(NormRopeCase(f"head size {d}", head_dim=d) for d in (32, 48, 64, 80, 96, 128, 256)),
    *(NormRopeCase(f"head size {d}", head_dim=d, heads=3) for d in (2, 6, 10, 34, 72)),
    NormRopeCase("hidden 96", heads=1, head_dim=96),
    NormRopeCase("hidden 6144", heads=48, head_dim=128),
    NormRopeCase("hidden 11008", heads=86, head_dim=128),
    NormRopeCase("hidden beyond one block's registers", heads=300, head_dim=128),
    NormRopeCase("hidden 40002, beyond them and odd", heads=1, head_dim=40002),
    NormRopeCase("fp16", dtype=FP16, table_dtype=FP16, weight_dtype=FP16),
    NormRopeCase("fp32", dtype=FP32, table_dtype=FP32, weight_dtype=FP32),
    NormRopeCase("fp32 tables and weights with bf16 x", table_dtype=FP32, weight_dtype=FP32),
    NormRopeCase("fp32 tables with fp16 x, half table", dtype=FP16, table_dtype=FP32, half_table=True),
    NormRopeCase("bf16 tables with fp32 x", dtype=FP32),
    NormRopeCase("fp16 tables with bf16 x", table_dtype=FP16, weight_dtype=FP16),
    NormRopeCase("no weights", weight_dtype=None),
    NormRopeCase("table per batch", table_batch=2),
    NormRopeCase("table per batch, half", table_batch=2, half_table=True),
    NormRopeCase("eps 1e-5", eps=1e-5),
    NormRopeCase("chunk of a fused qkv", layout="chunk"),
    NormRopeCase("chunk, fp32", layout="chunk", dtype=FP32, table_dtype=FP32),
    NormRopeCase("every second token", layout="every_second"),
    NormRopeCase("batch and tokens swapped", layout="swapped"),
    NormRopeCase("x not aligned to 16 bytes", layout="offset"),
    NormRopeCase("one token", batch=1, tokens=1),
    NormRopeCase("many tokens", batch=1, tokens=3000, heads=2, head_dim=32),
    NormRopeCase("no tokens", tokens=0),
    NormRopeCase("no batch", batch=0, table_batch=1),
]


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x's values in another memory layout."""
    batch, tokens, hidden = x.shape
    if layout == "chunk":
        return torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], dim=-1).chunk(3, dim=-1)[1]
    if layout == "every_second":
        wide = torch.full((batch, 2 * tokens, hidden), torch.nan, dtype=x.dtype, device=x.device)
        wide[:, ::2] = x
        return wide[:, ::2]
    if layout == "swapped":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "offset":
        wide = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
        wide[1:] = x.flatten()
        return wide[1:].view(x.shape)
    return x
