"""How every benchmark measures and reports.

A contender's calls are captured in a CUDA graph that rotates over several input sets, so that neither launch gaps nor
the L2 cache are measured. All contenders of a case run in turn inside each round, so that they share one state of the
chip; the median over rounds is reported. Each benchmark verifies its op before it times it.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROUNDS = 9
ROTATED_BYTES = 400e6  # several times the L2 of any GPU
MIN_SETS, MAX_SETS = 3, 12


@dataclass
class Row:
    """One line of a report. `fraction` is against a copy of as many bytes in the same run."""

    op: str
    case: str
    contender: str
    microseconds: float
    gigabytes: float
    fraction: float


def num_sets(bytes_per_call: float) -> int:
    """Input sets to rotate over so that none is still in the L2 when its turn comes again."""
    return min(MAX_SETS, max(MIN_SETS, math.ceil(ROTATED_BYTES / bytes_per_call)))


def capture(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """One graph of all calls; their outputs stay alive, so that no call writes where the one before wrote."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.outputs = [call() for call in calls]
    return graph


def time_in_turn(contenders: dict[str, Sequence[Callable[[], Any]]]) -> dict[str, float]:
    """Seconds a call of each contender, given as its calls over the rotating input sets."""
    with torch.no_grad():
        graphs = {name: capture(calls) for name, calls in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) * 1e-3 / len(contenders[name]))
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def copies(num_bytes: float, sets: int) -> list[Callable[[], Any]]:
    """Calls that read num_bytes / 2 and write as many: an elementwise kernel over bf16."""
    elements = max(8, int(num_bytes / 4))
    pairs = [torch.randn(2, elements, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    return [lambda pair=pair: torch.neg(pair[0], out=pair[1]) for pair in pairs]


def bench(op: str, case: str, num_bytes: float, contenders: dict[str, Sequence[Callable[[], Any]]]) -> list[Row]:
    """Times the contenders and a copy of num_bytes in turn."""
    sets = len(next(iter(contenders.values())))
    seconds = time_in_turn({**contenders, "copy": copies(num_bytes, sets)})
    return [Row(op, case, name, time * 1e6, num_bytes / 1e9, seconds["copy"] / time) for name, time in seconds.items()]


def host_seconds(call: Callable[[], Any], calls: int = 1000) -> float:
    """Seconds that one call keeps the host busy, while the GPU keeps up with short kernels."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - begin) / calls
    torch.cuda.synchronize()
    return seconds


def host_row(op: str, case: str, call: Callable[[], Any], rounds: int = 15) -> Row:
    """Host cost of a call; its fraction is the ratio to torch.add, which is timed in turn with it."""
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        pairs = [(host_seconds(lambda: torch.add(x, x)), host_seconds(call)) for _ in range(ROUNDS + 1)][1:]
    add, own = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Row(op, case, f"host (torch.add {add * 1e6:.2f} us)", own * 1e6, 0.0, own / add)


def main(run: Callable[[], list[Row]], description: str | None, needs_gpu: bool = True) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    if needs_gpu and not torch.cuda.is_available():
        raise SystemExit("a benchmark needs a GPU: torch.cuda.is_available() is False")
    rows = run()
    chip = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    table = Table(title=f"{chip}, torch {torch.__version__}")
    for heading, justify in (
        ("op", "left"),
        ("case", "left"),
        ("contender", "left"),
        ("us", "right"),
        ("TB/s", "right"),
        ("of copy", "right"),
    ):
        table.add_column(heading, justify=justify)
    for row in rows:
        speed = f"{row.gigabytes / row.microseconds * 1e3:.2f}" if row.gigabytes else ""
        table.add_row(row.op, row.case, row.contender, f"{row.microseconds:.2f}", speed, f"{row.fraction:.3f}")
    Console(width=140).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
