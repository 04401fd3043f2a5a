"""fp6_pack and fp6_unpack against a copy of as many bytes and torch.compile."""

from collections.abc import Callable
from functools import partial

import torch
from harness import Row, bench, host_row, main, num_sets
from torch import Tensor

from ltx_kernels.blockwise import fp6_pack_tensor, fp6_unpack_tensor

SIZES = [(16384, 16384), (4096, 4096)]


def pack_in_torch(e4m3: Tensor) -> Tensor:
    codes = (e4m3 >> 2 & 0x20) | torch.where((e4m3 & 0x60) != 0, 0x1F, e4m3 & 0x1F)
    c0, c1, c2, c3 = codes.unflatten(-1, (-1, 4)).unbind(-1)
    return torch.stack([c0 << 2 | c1 >> 4, (c1 & 15) << 4 | c2 >> 2, (c2 & 3) << 6 | c3], dim=-1).flatten(-2)


def unpack_in_torch(packed: Tensor) -> Tensor:
    b0, b1, b2 = packed.unflatten(-1, (-1, 3)).unbind(-1)
    codes = torch.stack([b0 >> 2, (b0 & 3) << 4 | b1 >> 4, (b1 & 15) << 2 | b2 >> 6, b2 & 63], dim=-1).flatten(-2)
    return (codes & 0x20) << 2 | (codes & 0x1F)


def bench_one(
    op: str, case: str, ours: Callable[[Tensor], Tensor], peer: Callable[[Tensor], Tensor], inputs: list[Tensor]
) -> list[Row]:
    out = ours(inputs[0])
    assert torch.equal(out, peer(inputs[0])), f"{op} differs from torch"
    num_bytes = inputs[0].numel() + out.numel()
    compiled = torch.compile(peer)
    contenders = {
        "ltx-kernels": [partial(ours, x) for x in inputs],
        "torch.compile": [partial(compiled, x) for x in inputs],
    }
    return bench(op, case, num_bytes, contenders)


def run() -> list[Row]:
    rows: list[Row] = []
    for m, n in SIZES:
        unpack = partial(fp6_unpack_tensor, original_n=n)
        for op, width, ours, peer in (
            ("fp6_pack", n, fp6_pack_tensor, pack_in_torch),
            ("fp6_unpack", n * 3 // 4, unpack, unpack_in_torch),
        ):
            inputs = [
                torch.randint(0, 256, (m, width), dtype=torch.uint8, device="cuda")
                for _ in range(num_sets(m * n * 7 / 4))
            ]
            rows += bench_one(op, f"{m}x{n}", ours, peer, inputs)
    x = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    packed = fp6_pack_tensor(x)
    rows.append(host_row("fp6_pack", "64x4096", lambda: fp6_pack_tensor(x)))
    rows.append(host_row("fp6_unpack", "64x4096", lambda: fp6_unpack_tensor(packed, 4096)))
    return rows


if __name__ == "__main__":
    main(run, __doc__)
