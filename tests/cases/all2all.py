"""How tokens and heads are divided in tests of the exchange, and what each rank must hold by plain indexing."""

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]


@dataclass(frozen=True)
class Case:
    path: str  # what it exercises
    tokens: tuple[int, ...]
    heads: tuple[int, ...]
    batch: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def world_size(self) -> int:
        return len(self.tokens)

    @property
    def even_heads(self) -> bool:
        return len(set(self.heads)) == 1

    @property
    def seqlen(self) -> int:
        """Of the smallest buffers that do."""
        elements = max(
            self.batch * max(sum(self.tokens) * max(self.heads), max(self.tokens) * sum(self.heads)) * self.head_dim,
            -(-self.batch * sum(self.tokens) * sum(self.heads) * self.head_dim // self.world_size),
        )
        return -(-elements // self.hidden_dim)

    @property
    def hidden_dim(self) -> int:
        return max(sum(self.heads) * self.head_dim, 1)

    def whole(self, seed: int) -> Tensor:
        """All tokens with all heads, of any bits: NaN among them."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, sum(self.tokens), sum(self.heads), self.head_dim * self.dtype.itemsize)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(self.dtype)

    def tokens_of(self, whole: Tensor, rank: int) -> Tensor:
        first = sum(self.tokens[:rank])
        return whole[:, first : first + self.tokens[rank]]

    def heads_of(self, whole: Tensor, rank: int) -> Tensor:
        first = sum(self.heads[:rank])
        return whole[:, :, first : first + self.heads[rank]]

    def __str__(self) -> str:
        return self.path.replace(" ", "_")


CASES = [
    Case("two ranks", (5, 5), (2, 2)),
    Case("four ranks, batch of 2", (3, 3, 3, 3), (1, 1, 1, 1), batch=2),
    Case("uneven tokens", (3, 1, 4), (2, 2, 2)),
    Case("a rank without tokens", (0, 6, 1), (2, 2, 2)),
    Case("1 token over 2 ranks", (1, 0), (3, 3)),
    Case("10,001 tokens over 4 ranks", (2501, 2500, 2500, 2500), (1, 1, 1, 1)),
    Case("no tokens at all", (0, 0), (1, 1)),
    Case("no batch", (2, 1), (1, 2), batch=0),
    Case("heads of size 0", (2, 1), (1, 1), head_dim=0, dtype=torch.uint8),
    Case("five ranks", (3, 0, 2, 1, 4), (2, 1, 0, 3, 1), batch=2),
    Case("7 heads over 4 ranks", (2, 2, 2, 2), (2, 2, 2, 1)),
    Case("20 heads over 8 ranks", (1, 2, 3, 0, 1, 2, 3, 4), (3, 3, 3, 3, 2, 2, 2, 2)),
    Case("a rank without heads", (2, 3), (0, 3)),
    Case("one rank", (7,), (3,)),
    Case("rows of 3 bytes", (3, 2), (1, 1), head_dim=3, dtype=torch.uint8),
    Case("rows of 10 bytes, batch of 3", (3, 2), (1, 2), batch=3, head_dim=5),
    *(Case(f"{dtype}".removeprefix("torch."), (3, 4), (2, 1), dtype=dtype) for dtype in DTYPES),
]


def equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN too."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
