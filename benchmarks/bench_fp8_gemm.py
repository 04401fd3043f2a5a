"""The blockwise FP8 product against cuBLAS, with block scales, without any and in bf16, and DeepGEMM if importable.

Ratios are against `torch._scaled_mm` with one scale a tensor and fast accumulation, which scales no blocks. In turn, all
contenders of a size share one state of the chip. Alone (--alone), each runs by itself for 0.4 s: at the power limit the
one that needs more energy per product gets the lower clock, as it does in a model, which runs one kernel at a time.

With few rows (--few-rows) a product takes as long as b takes to come, so a kernel that reads b and does no more is the
measure there.

--sm89 adds the kernel for mma.sync, which tests alone reach on a GPU of compute capability 9.0: the instruction is
emulated there, so its speed says nothing about the GPUs that it is for.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from harness import capture, num_sets, time_in_turn
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from ltx_kernels.blockwise import blockwise_fp8_gemm, gemm_config

WIDTHS = [
    (4096, 4096),
    (16384, 4096),
    (4096, 16384),
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
]  # n, k of LTX-2's layers
SIZES = [(m, n, k) for m in (126, 1024, 4096, 13376, 32768) for n, k in WIDTHS]
ALONE_SIZES = [
    *((32768, 4096, 4096), (13376, 4096, 16384), (13376, 16384, 4096)),
    *((4096, 4096, 4096), (1024, 4096, 4096), (13376, 2048, 2048)),
]
OTHER_WIDTHS = [(5120, 2560), (1280, 6144), (3072, 1024), (10240, 4096)]  # that nobody tuned for
OTHER_SIZES = [(m, n, k) for m in (1, 16, 64, 256, 512, 2048, 8192) for n, k in OTHER_WIDTHS]
FEW_ROWS_SIZES = [(m, n, k) for m in (1, 16) for n, k in (*WIDTHS, *OTHER_WIDTHS)]
SM89_SIZES = [(4096, 4096, 4096), (1024, 4096, 4096)]
CEILING_SIZE = (8192, 8192, 16384)

BASELINE = "cuBLAS tensor, fast"
SLOW_BASELINE, BF16 = "cuBLAS tensor", "cuBLAS bf16"
UNSCALED = (BASELINE, SLOW_BASELINE, BF16)
OURS = "ltx-kernels"
SM89 = "SM89 kernel, forced"
MINE = (OURS, SM89)
READ = "reading b"
IN_TURN, ALONE, FEW_ROWS, WITH_SM89 = "in turn", "alone", "in turn, few rows", "in turn, with the SM89 kernel"
READ_BLOCK = 8192  # 32-bit words of a block of threads
CALLS = 12  # of a graph
MAX_OUTPUT_BYTES = 4e9  # of a graph
MAX_ERROR = 1.75e-3  # of bf16 output: rounding
ALONE_SECONDS, REST_SECONDS = 0.4, 0.3


@dataclass
class Inputs:
    a: Tensor
    a_scales: Tensor
    b: Tensor
    b_scales: Tensor
    a_bf16: Tensor  # a without its scales
    b_bf16: Tensor


@dataclass
class Row:
    m: int
    n: int
    k: int
    mode: str
    contender: str
    microseconds: float
    tflops: float
    ratio: float  # the baseline's time to this one's; with few rows the reading kernel's
    error: float  # relative, against float64


@triton.jit
def read_kernel(words, largest, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(largest + tl.program_id(0), tl.max(tl.load(words + at, at < count, -(2**31))))


def read(inputs: Inputs) -> Tensor:
    """The largest of each READ_BLOCK of the 32-bit words of b."""
    words = inputs.b.view(torch.int32)
    largest = torch.empty(triton.cdiv(words.numel(), READ_BLOCK), dtype=torch.int32, device="cuda")
    read_kernel[(len(largest),)](words, largest, words.numel(), READ_BLOCK)
    return largest


def blocks(size: int) -> int:
    return -(-size // 128)


def make_inputs(m: int, n: int, k: int) -> Inputs:
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for rows in (m, n))
    a_scales = (torch.rand(blocks(k), -(-m // 4) * 4, device="cuda") + 0.5).t()[:m]  # as blockwise_quantize has them
    b_scales = torch.rand(blocks(n), blocks(k), device="cuda") + 0.5
    return Inputs(a, a_scales, b, b_scales, a.bfloat16(), b.bfloat16())


def contenders(mode: str) -> dict[str, Callable[[Inputs], Tensor]]:
    one = torch.ones((), device="cuda")

    def tensor(inputs: Inputs, fast: bool) -> Tensor:
        return torch._scaled_mm(inputs.a, inputs.b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def block(inputs: Inputs) -> Tensor:
        recipes = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return scaled_mm(inputs.a, inputs.b.t(), inputs.a_scales, recipes[0], inputs.b_scales.t(), recipes[1])

    def ours(inputs: Inputs) -> Tensor:
        return blockwise_fp8_gemm((inputs.a, inputs.a_scales), (inputs.b, inputs.b_scales), None, False)

    def sm89(inputs: Inputs) -> Tensor:
        (m, k), n = inputs.a.shape, len(inputs.b)
        config = list(gemm_config(m, n, k, capability=(8, 9)))
        operands = inputs.a, inputs.a_scales, inputs.b, inputs.b_scales
        return torch.ops.ltx_kernels.fp8_gemm(*operands, None, None, False, torch.bfloat16, config)

    found: dict[str, Callable[[Inputs], Tensor]] = {
        BASELINE: partial(tensor, fast=True),
        SLOW_BASELINE: partial(tensor, fast=False),
        "cuBLAS block": block,
        OURS: ours,
        BF16: lambda inputs: inputs.a_bf16 @ inputs.b_bf16.t(),
    }
    if mode == WITH_SM89:
        found[SM89] = sm89
    try:
        import deep_gemm
    except ImportError:
        return found

    def deep(inputs: Inputs) -> Tensor:
        out = torch.empty(inputs.a.shape[0], inputs.b.shape[0], device="cuda", dtype=torch.bfloat16)
        deep_gemm.fp8_gemm_nt((inputs.a, inputs.a_scales), (inputs.b, inputs.b_scales), out)
        return out

    return {**found, "DeepGEMM": deep}


def error_of(out: Tensor, inputs: Inputs, scaled: bool) -> float:
    """Over some 64 rows, the last ones among them."""
    m, k = inputs.a.shape
    rows = torch.unique(torch.cat([torch.arange(0, m, max(1, m // 61)), torch.arange(max(0, m - 3), m)])).cuda()
    a, b = inputs.a[rows].double(), inputs.b.double()
    if scaled:
        a *= inputs.a_scales[rows].double().repeat_interleave(128, 1)[:, :k]
        b *= inputs.b_scales.double().repeat_interleave(128, 0)[: len(b)].repeat_interleave(128, 1)[:, :k]
    expected = a @ b.T
    return ((out[rows].double() - expected).norm() / expected.norm()).item()


def verified(inputs: Inputs, mode: str) -> dict[str, tuple[Callable[[Inputs], Tensor], float]]:
    """The contenders that take the size, with their errors; ours must, and must be right."""
    found = {}
    for name, call in contenders(mode).items():
        scaled = name not in UNSCALED
        try:
            error = error_of(call(inputs), inputs, scaled)
        except (RuntimeError, ValueError):  # refuses the size
            if name in MINE:
                raise
            continue
        right = error < MAX_ERROR
        assert right or name not in MINE, f"{name}, {inputs.a.shape} x {inputs.b.shape}: relative error {error}"
        if right or not scaled:
            found[name] = call, error
    if mode == FEW_ROWS:
        words = inputs.b.view(torch.int32).flatten()
        expected = torch.stack([part.max() for part in words.split(READ_BLOCK)])
        assert torch.equal(read(inputs), expected), f"{READ}, {inputs.b.shape}: wrong values"
        found[READ] = read, 0.0
    return found


def baseline_of(mode: str) -> str:
    return READ if mode == FEW_ROWS else BASELINE


def time_alone(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds a call: the better of two medians, each over the second half of a time by itself after a rest."""
    with torch.no_grad():
        graph = capture(calls)
    medians = []
    for _ in range(2):
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        end = time.perf_counter() + ALONE_SECONDS
        times = []
        while time.perf_counter() < end:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            graph.replay()
            events[1].record()
            events[1].synchronize()
            times.append(events[0].elapsed_time(events[1]) * 1e-3 / len(calls))
        medians.append(statistics.median(times[len(times) // 2 :]))
    return min(medians)


def bench_size(m: int, n: int, k: int, mode: str) -> list[Row]:
    sets = [make_inputs(m, n, k) for _ in range(num_sets(m * k + n * k + 2 * m * n))]
    found = verified(sets[0], mode)
    num_calls = max(2, min(CALLS, int(MAX_OUTPUT_BYTES / (2 * m * n))))
    calls = {name: [partial(call, sets[i % len(sets)]) for i in range(num_calls)] for name, (call, _) in found.items()}
    if mode == ALONE:
        seconds = {name: time_alone(calls[name]) for name in calls if name != SLOW_BASELINE}
    else:
        seconds = time_in_turn(calls)
    return [
        Row(
            m, n, k, mode, name, time * 1e6, 2e-12 * m * n * k / time, seconds[baseline_of(mode)] / time, found[name][1]
        )
        for name, time in seconds.items()
    ]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def print_table(rows: list[Row], console: Console) -> None:
    names = list(dict.fromkeys(row.contender for row in rows))
    sizes = list(dict.fromkeys((row.m, row.n, row.k) for row in rows))
    by_key = {(row.m, row.n, row.k, row.contender): row for row in rows}
    table = Table(
        title=f"TFLOP/s and ratio to {baseline_of(rows[0].mode)}, {rows[0].mode}: {torch.cuda.get_device_name()}"
    )
    for heading in ("m x n x k", *names, "error", "tile, cluster, split"):
        table.add_column(heading, justify="right")
    for size in sizes:
        cells = [by_key.get((*size, name)) for name in names]
        config = gemm_config(*size)
        table.add_row(
            "x".join(map(str, size)),
            *(f"{row.tflops:.0f} {row.ratio:.3f}" if row else "" for row in cells),
            f"{by_key[(*size, OURS)].error:.2e}",
            f"{config.tile_m}x{config.tile_n}, {config.cluster_m}, {config.split_k}",
        )
    console.print(table)
    for name in names:
        ratios = {size: by_key[(*size, name)].ratio for size in sizes if (*size, name) in by_key}
        by_m = {
            m: round(geometric_mean([ratio for size, ratio in ratios.items() if size[0] == m]), 3)
            for m in dict.fromkeys(size[0] for size in ratios)
        }
        mean = geometric_mean(list(ratios.values()))
        console.print(f"{name}: geometric mean {mean:.3f}, lowest {min(ratios.values()):.3f}, by m {by_m}")


def draw(rows: list[Row], ceiling: float, path: Path) -> None:
    """TFLOP/s over m: the geometric mean of the widths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    ms = sorted({row.m for row in rows})
    for name in dict.fromkeys(row.contender for row in rows):
        points = [(m, [row.tflops for row in rows if row.m == m and row.contender == name]) for m in ms]
        drawn = [(m, geometric_mean(values)) for m, values in points if values]
        axes.plot(*zip(*drawn, strict=True), marker="o", label=name)
    axes.axhline(ceiling, color="gray", linestyle="--", label=f"{BASELINE} at {'x'.join(map(str, CEILING_SIZE))}")
    axes.set(xscale="log", xlabel="m", ylabel="TFLOP/s", title=f"FP8 products, {torch.cuda.get_device_name()}")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", action="store_true", help="time each contender by itself too, at six sizes")
    parser.add_argument("--other", action="store_true", help="time sizes of no LTX-2 layer too")
    parser.add_argument("--few-rows", action="store_true", help="time 1 and 16 rows too, against reading b")
    parser.add_argument("--sm89", action="store_true", help="time the kernel for mma.sync too, forced, at two sizes")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--png", type=Path, help="draw TFLOP/s over m")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("a benchmark needs a GPU: torch.cuda.is_available() is False")
    console = Console(width=160)
    plans = [(SIZES, IN_TURN)]
    if arguments.other:
        plans.append((OTHER_SIZES, IN_TURN))
    if arguments.alone:
        plans.append((ALONE_SIZES, ALONE))
    if arguments.few_rows:
        plans.append((FEW_ROWS_SIZES, FEW_ROWS))
    if arguments.sm89:
        plans.append((SM89_SIZES, WITH_SM89))
    reports = []
    for sizes, mode in plans:
        reports.append([row for size in sizes for row in bench_size(*size, mode)])
        print_table(reports[-1], console)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for rows in reports for row in rows], indent=1))
    if arguments.png:
        rows = bench_size(*CEILING_SIZE, IN_TURN)
        draw(reports[0], next(row.tflops for row in rows if row.contender == BASELINE), arguments.png)


if __name__ == "__main__":
    main()
