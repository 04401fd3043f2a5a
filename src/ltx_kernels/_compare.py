"""The block through this package's kernels, step by step, timed and held against full precision."""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ltx_kernels import _block, _exact
from ltx_kernels._block import FFN, FULL_TOKENS, HIDDEN, STEPS, Inputs, Step, Weights
from ltx_kernels.blockwise import get_backend
from ltx_kernels.blockwise.linear import BlockwiseFP6Linear, BlockwiseFP8Linear

FEW_TOKENS = 256
FORMATS: dict[str, type[_block.QuantizedLayer]] = {"FP8": BlockwiseFP8Linear, "FP6": BlockwiseFP6Linear}

# GPUs whose float64 runs at half the rate of their float32; others take 1/32 and less.
FULL_RATE_FLOAT64 = ((8, 0), (9, 0), (10, 0))

REPEAT_SECONDS = 0.25  # a step that is done sooner is repeated for so long, but no more than
MAX_REPEATS = 9


@dataclass(frozen=True)
class Row:
    """A line of the table: a step, or a copy that the demo had to make before it (then without an error)."""

    title: str
    backend: str
    size: str
    seconds: float
    error: float = 0.0
    limit: float = 0.0

    @property
    def is_copy(self) -> bool:
        return self.backend == "copy"


@dataclass(frozen=True)
class Result:
    """What one format did."""

    rows: list[Row]
    weight_bytes: int
    bf16_bytes: int  # what the same layers take in the model
    weight_error: float  # of the four layers, the one nearest to its limit
    weight_limit: float
    block_error: float
    block_limit: float


def place(op: str, device: torch.device) -> tuple[torch.device, str]:
    """Where a step runs and on which backend: on `device` if the op has code for it, else on the CPU."""
    if op == "attention":
        return device, "torch"
    try:
        return device, get_backend(op, device)
    except RuntimeError:
        cpu = torch.device("cpu")
        return cpu, get_backend(op, cpu)


def bytes_needed(tokens: int) -> int:
    """Memory at the peak: torch, the weights as they come and quantized, one of them in float64 with its scales; and
    either four float64 activations of the FFN's size, or the float64 scores of one head, three times, beside five
    activations of the block's size."""
    fixed = int(3e9)
    return fixed + 8 * tokens * max(4 * FFN, 3 * tokens + 5 * HIDDEN)


def default_tokens(device: torch.device) -> int:
    """A clip of five seconds where every step runs on the GPU, as much of it as memory allows; a few elsewhere."""
    if device.type == "cpu" or any(place(step.op, device)[0] != device for step in STEPS):
        return FEW_TOKENS
    tokens = FULL_TOKENS
    while tokens > FEW_TOKENS and bytes_needed(tokens) > torch.cuda.mem_get_info(device)[0]:
        tokens //= 2
    return tokens


def reference_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in FULL_RATE_FLOAT64:
        return torch.float32
    return torch.float64


class Kernels:
    """Runs steps as `video_block` hands them over: places, times and compares each, and keeps a row of it."""

    def __init__(self, device: torch.device, exact: "Exact") -> None:
        self.device = device
        self.exact = exact
        self.rows: list[Row] = []

    def __call__(self, step: Step, *args: Any) -> Any:
        device, backend = place(step.op, self.device)
        args = self._on(device, args)
        exact = self.exact(step, *args)
        output, seconds = _measure(step, args, device)
        outputs, exacts = (x if isinstance(x, list) else [x] for x in (output, exact))
        errors = [_exact.error_and_limit(*pair, step.computing) for pair in zip(outputs, exacts, strict=True)]
        error, limit = next((pair for pair in errors if not pair[0] <= pair[1]), errors[-1])
        last = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
        self.rows.append(Row(step.title, backend, f"{last.shape[-2]}×{last.shape[-1]}", seconds, error, limit))
        return output

    def _on(self, device: torch.device, args: tuple[Any, ...]) -> tuple[Any, ...]:
        copied = 0

        def moved(arg: Any) -> Any:
            nonlocal copied
            if isinstance(arg, tuple):
                return tuple(moved(part) for part in arg)
            if isinstance(arg, nn.Module) or arg.device == device:
                return arg
            copied += arg.nbytes
            return arg.to(device)

        _wait()
        start = time.perf_counter()
        args = tuple(moved(arg) for arg in args)
        _wait()
        if copied:
            seconds = time.perf_counter() - start
            self.rows.append(Row(f"  to {device.type}", "copy", f"{copied / 1e6:.1f} MB", seconds))
        return args


class Exact:
    """Runs the formula of each step in full precision, whatever the arguments are stored as."""

    def __init__(self, device: torch.device, dtype: torch.dtype, after: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.dtype = dtype
        self.after = after

    def __call__(self, step: Step, *args: Any) -> Any:
        result = step.exact(*(self.plain(arg) for arg in args))
        self.after()
        return result

    def plain(self, arg: Any) -> Any:
        if isinstance(arg, tuple):
            q, scales = (part.to(self.device) for part in arg)
            return _exact.dequantize(q, scales, self.dtype)
        if isinstance(arg, nn.Module):
            return self.weight(arg), self.plain(arg.bias)
        return arg.to(self.device, self.dtype)

    def weight(self, layer: nn.Module) -> Tensor:
        if isinstance(layer, nn.Linear):
            return self.plain(layer.weight)
        return self.plain((layer.fp8weight, layer.weight_scale))


def _measure(step: Step, args: tuple[Any, ...], device: torch.device) -> tuple[Any, float]:
    """The step's output and its median time. Repeats leave what the step writes to as the first run left it."""
    scratch = list(args)
    if step.writes is not None:
        scratch[step.writes] = args[step.writes].clone()
    output = step.run(*args)  # also loads what the first call of an op loads
    seconds = [_seconds(step.run, scratch, device)]
    while len(seconds) < MAX_REPEATS and sum(seconds) < REPEAT_SECONDS:
        seconds.append(_seconds(step.run, scratch, device))
    return output, statistics.median(seconds)


def _seconds(run: Callable[..., Any], args: list[Any], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(*args)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    run(*args)
    return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def num_pieces() -> int:
    """How often `run` calls advance."""
    return 1 + len(STEPS) * (1 + len(FORMATS)) + len(FORMATS)


def run(tokens: int, device: torch.device, dtype: torch.dtype, advance: Callable[[str], None]) -> dict[str, Result]:
    """Both formats on the same inputs; `advance(what)` is called before and after each piece of work."""
    torch.set_float32_matmul_precision("highest")  # TF32 would be a poor reference
    advance("weights")
    weights, inputs = _block.draw_weights(), _block.draw_inputs(tokens)
    wanted = _block.video_block(Exact(device, dtype, partial(advance, "full precision")), inputs, weights)
    results = {}
    for name, layer_class in FORMATS.items():
        advance(f"{name} weights")
        exact = Exact(device, dtype, partial(advance, f"{name} block"))
        results[name] = _run_format(layer_class, weights, inputs, wanted, exact)
    return results


def _run_format(
    layer_class: type[_block.QuantizedLayer], weights: Weights[nn.Linear], inputs: Inputs, wanted: Tensor, exact: Exact
) -> Result:
    where = place("fp8_gemm", exact.device)[0]
    layers = qkv, out, up, down = [layer_class.from_linear(layer).to(where) for layer in weights.layers]
    weight_errors = [
        _exact.error_and_limit((ours.fp8weight, ours.weight_scale), theirs.weight.to(exact.device, torch.float32))
        for ours, theirs in zip(layers, weights.layers, strict=True)
    ]
    weight_error, weight_limit = max(weight_errors, key=lambda pair: pair[0] / pair[1])

    kernels = Kernels(exact.device, exact)
    start = Inputs(*(t.to(exact.device, torch.bfloat16, copy=True) for t in vars(inputs).values()))
    quantized = Weights(qkv, out, up, down, weights.q_norm, weights.k_norm)
    block_error, _ = _exact.error_and_limit(_block.video_block(kernels, start, quantized), wanted)
    return Result(
        rows=kernels.rows,
        weight_bytes=_bytes_of(layers),
        bf16_bytes=_bytes_of(weights.layers),
        weight_error=weight_error,
        weight_limit=weight_limit,
        block_error=block_error,
        # Roundings of different steps know nothing of each other: they add as squares. The residual that runs past
        # them is exact and only dilutes.
        block_limit=math.hypot(*(row.limit for row in kernels.rows), *(limit for _, limit in weight_errors)),
    )


def _bytes_of(layers: Iterable[nn.Module]) -> int:
    return sum(parameter.nbytes for layer in layers for parameter in layer.parameters())
