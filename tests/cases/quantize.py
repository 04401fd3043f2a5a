"""Cases of the quantizing ops, shared by all backends. `path` says what a case exercises."""

from dataclasses import dataclass

import torch
from cases.norm_rope import BF16, FP16, FP32, lay_out
from torch import Tensor


@dataclass(frozen=True)
class Case:
    path: str
    batch: int = 2
    tokens: int = 5
    hidden: int = 256
    heads: int = 4  # gated attention alone
    dtype: torch.dtype = BF16
    other_dtype: torch.dtype = BF16  # of the other arguments
    other_tokens: int = 1  # of a modulation; tokens where it is 0
    layout: str = "contiguous"  # of x: as cases.norm_rope.lay_out has them
    other_layout: str = "contiguous"

    def __str__(self) -> str:
        return self.path.replace(" ", "_")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.tokens, self.hidden

    def make_x(self, device: str) -> Tensor:
        x = torch.randn(self.shape) * torch.logspace(-3, 3, max(self.tokens, 1))[: self.tokens, None]
        return lay_out(x.to(self.dtype).to(device), self.layout)

    def make_other(self, device: str) -> Tensor:
        """y, of x's shape."""
        return lay_out(torch.randn(self.shape).to(self.other_dtype).to(device), self.other_layout)

    def make_modulation(self, device: str) -> Tensor:
        tokens = self.other_tokens or self.tokens
        values = torch.randn(self.batch, tokens, self.hidden).to(self.other_dtype).to(device)
        if self.other_layout == "unbind":
            return torch.stack([values * torch.nan, values, values * torch.nan], dim=2).unbind(2)[1]
        return lay_out(values, self.other_layout)


# Of all quantizing ops.
CASES = [
    Case("LTX-2 video", hidden=4096, heads=32),
    Case("LTX-2 audio", hidden=2048, heads=32),
    Case("heads of 64 in blocks of 128", hidden=512, heads=8),
    *(Case(f"hidden {h}", hidden=h) for h in (4, 64, 128, 132, 192, 200, 384, 5120)),
    Case("hidden 1", hidden=1, heads=1),
    Case("hidden 127", hidden=127, heads=1),
    Case("hidden 129", hidden=129, heads=3),
    *(Case(f"{rows} rows, padded to a multiple of 4", batch=1, tokens=rows) for rows in (1, 2, 3, 4, 7)),
    Case("many rows", batch=1, tokens=3000, hidden=96),
    Case("fp16", dtype=FP16, other_dtype=FP16),
    Case("fp32", dtype=FP32, other_dtype=FP32),
    Case("fp32 x, bf16 others", dtype=FP32),
    Case("bf16 x, fp32 others", other_dtype=FP32),
    Case("chunk of a fused qkv", layout="chunk"),
    Case("chunk, fp32", layout="chunk", dtype=FP32, hidden=200),
    Case("every second token", layout="every_second"),
    Case("batch and tokens swapped", layout="swapped"),
    Case("x not aligned to 16 bytes", layout="offset"),
    Case("no tokens", tokens=0),
    Case("no batch", batch=0),
]

# Of the ops with further tensors.
MODULATED_CASES = [
    *CASES,
    Case("hidden 20000, beyond what Triton holds of a row", tokens=2, hidden=20_000),
    Case("a modulation for each token", other_tokens=0),
    # Whole waves of blocks, so that each walks several rows.
    Case("a modulation for 1999 rows", batch=3, tokens=1999, hidden=4096),
    Case("a modulation for 1999 rows, fp32", batch=3, tokens=1999, hidden=520, dtype=FP32, other_dtype=FP32),
    Case("others are chunks", other_layout="chunk"),
    Case("others are chunks, a modulation for each token", other_layout="chunk", other_tokens=0),
    Case("others not aligned to 16 bytes", other_layout="offset"),
]
UNBOUND_CASES = [
    Case("modulation from unbind", other_layout="unbind"),
    Case("modulation from unbind, for each token", other_layout="unbind", other_tokens=0, hidden=200),
]

# A block is one of these values, alone or among others. Names say what it was elsewhere.
NAN, INF = float("nan"), float("inf")
EXTREMES: dict[str, list[float]] = {
    "zeros": [0.0],
    "negative zeros": [-0.0],
    "1e-30": [1e-30, -3e-31],
    "1e-38, near the smallest normal": [1e-38, -9e-39],
    "the smallest subnormal": [2.0**-149, -(2.0**-149)],
    "just below the smallest amax": [2.0**-118, -(2.0**-117) * (1 - 2.0**-24)],
    "the smallest amax and just above": [2.0**-117, 2.0**-117 * (1 + 2.0**-23)],
    "the largest fp32": [3.4028234663852886e38, -1.0],
    "one NaN": [1.0, NAN],
    "one negative NaN": [1.0, -NAN],
    "one Inf": [1.0, INF],
    "one negative Inf": [1.0, -INF],
    "Inf and NaN": [NAN, INF],
    "a large range": [1e30, 1e-30, 1.0],
}


def extreme_block(name: str) -> Tensor:
    """128 values: those of an extreme at both ends, zeros between, or all where it is one value."""
    values = torch.tensor(EXTREMES[name])
    if len(values) == 1:
        return values.repeat(128)
    block = torch.zeros(128)
    block[: len(values)] = values
    block[-len(values) :] = values
    return block
