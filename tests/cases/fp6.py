"""Cases of packing and unpacking 6-bit codes, shared by all backends. `path` says what a case exercises."""

from dataclasses import dataclass

import torch
from torch import Tensor

POISON = 0xEE  # in the bytes around a matrix


@dataclass(frozen=True)
class Fp6Case:
    path: str
    m: int
    n: int
    gap: int = 0  # bytes between the rows of the input
    offset: int = 0  # of the input's first byte from a 16-byte boundary

    def __str__(self) -> str:
        return self.path.replace(" ", "_")


CASES = [
    Fp6Case("one group", 1, 4),
    *(
        Fp6Case(f"one row of {n}", 1, n)
        for n in (8, 60, 64, 68, 124, 128, 2044, 2048, 2052, 2108, 2112, 2116, 4096, 8192)
    ),
    *(Fp6Case(f"rows of {n}, no gap", 5, n) for n in (4, 12, 64, 100, 2044, 2048, 2052, 4096)),
    *(Fp6Case(f"rows of {n}, 16 bytes apart", 5, n, gap=16) for n in (4, 64, 68, 2044, 2048, 2052, 2112, 4160, 8192)),
    *(Fp6Case(f"rows of 2112, {gap} bytes apart", 17, 2112, gap=gap) for gap in (1, 2, 4, 8, 48, 2112)),
    *(Fp6Case(f"rows of 4100, {gap} bytes apart", 33, 4100, gap=gap) for gap in (4, 12, 13)),
    *(Fp6Case(f"starts {offset} bytes off", 3, 2112, offset=offset) for offset in (1, 2, 3, 4, 8, 12, 15)),
    *(Fp6Case(f"starts {offset} bytes off, 16 apart", 3, 2112, 16, offset) for offset in (1, 4, 8, 16)),
    Fp6Case("many short rows", 5000, 4, gap=4),
    Fp6Case("many blocks", 300, 4096),
    Fp6Case("many blocks, strided", 300, 4096, gap=64),
    Fp6Case("LTX-2 weight", 4096, 4096),
    Fp6Case("no rows", 0, 64),
    Fp6Case("no columns", 5, 0),
    Fp6Case("no columns, rows apart", 5, 0, gap=16),
    Fp6Case("nothing", 0, 0),
]


def lay_out(matrix: Tensor, gap: int, offset: int) -> Tensor:
    """matrix's bytes in another memory layout, with poison around them."""
    m, width = matrix.shape
    buffer = torch.full((offset + m * (width + gap) + 16,), POISON, dtype=torch.uint8, device=matrix.device)
    view = buffer[offset:].as_strided((m, width), (width + gap, 1))
    view.copy_(matrix)
    return view
