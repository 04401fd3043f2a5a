"""Which backend runs an op, and the one call that all public functions make."""

import functools
import importlib
from typing import Any

import torch
from torch._ops import OpOverload

from ltx_kernels import blockwise_cpp, ops_cpp  # noqa: F401  (registers the ops)

# What each op has code for. "linear" stands for the Linear layers, which can also run by dequantizing their weight.
BACKENDS: dict[str, tuple[str, ...]] = {
    "rms_norm_rope": ("cpu", "cuda"),
    "rms_norm_rope_qk": ("cpu", "cuda"),
    "rms_norm_split_rope": ("cpu", "cuda"),
    "rms_norm_split_rope_qk": ("cpu", "cuda"),
    "fp6_pack": ("cpu", "cuda"),
    "fp6_unpack": ("cpu", "cuda"),
    "quantize": ("cpu", "triton"),
    "quantize_weights": ("cpu", "triton"),
    "dequantize": ("cpu", "triton"),
    "dequantize_weights": ("cpu", "triton"),
    "adanorm_quantize": ("cpu", "triton"),
    "rms_fma_quantize": ("cpu", "triton"),
    "rms_fma": ("cpu", "triton"),
    "gated_attention": ("cpu", "triton"),
    "fp8_gemm": ("cpu",),
    "linear": ("cpu", "cuda", "dequantize"),
}

_forced: dict[str, str] = {}
_served: dict[
    tuple[OpOverload, torch.device], OpOverload
] = {}  # what `serving` has found out since the last set_backend


def set_backend(op: str, backend: str | None) -> None:
    """Make every later call of an op use one backend, in the whole process.

    Args:
        op: a torch op's name ("quantize", "rms_norm_rope_qk", ...) or "linear".
        backend: "cuda", "triton", "cpu" or, for "linear" alone, "dequantize"; None for the default, which on a GPU is
            CUDA where this build holds code for it, else Triton. "triton" takes CPU tensors only in its interpreter
            (the environment variable TRITON_INTERPRET=1, set before the first such call). A backend that cannot take a
            call's tensors is an error at that call: no tensor is moved.

    Raises:
        ValueError: an unknown op, or a backend that the op has no code for.
    """
    if op not in BACKENDS:
        raise ValueError(f"set_backend: op must be one of {', '.join(BACKENDS)}, got {op!r}")
    _served.clear()
    if backend is None:
        _forced.pop(op, None)
    elif backend in BACKENDS[op]:
        _forced[op] = backend
    else:
        raise ValueError(f"set_backend: backend of {op} must be one of {', '.join(BACKENDS[op])}, got {backend!r}")


def get_backend(op: str, device: torch.device | str) -> str:
    """The backend that a call of an op with tensors on a device would run.

    Args:
        op: a torch op's name or "linear".
        device: where the call's tensors are.

    Raises:
        ValueError: an unknown op.
        RuntimeError: no backend can run it there; the message says why.
    """
    if op not in BACKENDS:
        raise ValueError(f"get_backend: op must be one of {', '.join(BACKENDS)}, got {op!r}")
    return _backend(op, torch.device(device))


@torch.compiler.assume_constant_result
def lacks(backend: str, device: torch.device) -> str:
    """Why a backend's code cannot run on a device, or an empty string."""
    return _look_up(backend, device)


def call(op: OpOverload, *args: Any) -> Any:
    """Run a torch op: forward only, on the backend that is forced or else on that of its first tensor's device."""
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return _ForwardOnly.apply(op, *args)
    if _forced or args[0].is_cuda:
        op = serving(op, args[0].device)
    return op(*args)


def serving(op: OpOverload, device: torch.device) -> OpOverload:
    """The torch op that runs a call of op with tensors on a device: op itself, or its form in Triton."""
    if torch.compiler.is_compiling():  # which guards what is looked at, so that a later set_backend counts
        return _serving(op, device)
    if (op, device) not in _served:
        _served[op, device] = _serving(op, device)
    return _served[op, device]


def call_in_place(op: OpOverload, x: torch.Tensor, *args: Any) -> Any:
    """:func:`call` of an op that writes to its first argument, which therefore must not require grad."""
    if torch.is_grad_enabled():
        if x.requires_grad:
            raise RuntimeError(f"{op_name(op)}: x must not require grad (it is written to), use torch.no_grad()")
        if any(arg.requires_grad for arg in args):
            _, *results = _ForwardOnlyInPlace.apply(op, x, *args)
            return results[0] if len(results) == 1 else tuple(results)
    return call(op, x, *args)


def op_name(op: OpOverload) -> str:
    return op._opname


def _serving(op: OpOverload, device: torch.device) -> OpOverload:
    name = op_name(op)
    routed = name in _forced or (device.type == "cuda" and "triton" in BACKENDS[name])
    if routed and _backend(name, device) == "triton":
        return getattr(torch.ops.ltx_kernels, f"{name}_triton").default
    return op


def _backend(op: str, device: torch.device) -> str:
    forced = _forced.get(op)
    if forced in ("cpu", "cuda") and forced != device.type:
        raise RuntimeError(f"{op}: tensors must be on {forced} (set_backend), got {device}")
    if forced is not None:
        candidates: tuple[str, ...] = (forced,)
    elif device.type == "cuda":
        candidates = tuple(backend for backend in ("cuda", "triton") if backend in BACKENDS[op])
    else:
        candidates = ("cpu",) if device.type == "cpu" else ()
    reasons = []
    for backend in candidates:
        reason = lacks(backend, device)
        if not reason:
            return backend
        reasons.append(reason)
    raise RuntimeError(f"{op}: {'; '.join(reasons) or f'has no code for {device.type} tensors'}")


@functools.cache
def _look_up(backend: str, device: torch.device) -> str:
    if backend == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.ops.ltx_kernels.cuda_device_lacks(index)
    if backend != "triton":
        return ""
    try:
        importlib.import_module("ltx_kernels.blockwise.triton")
    except ImportError as error:
        return f"triton cannot be imported ({error})"
    interpreted = importlib.import_module("triton").knobs.runtime.interpret
    if interpreted != (device.type == "cpu"):
        return f"triton takes cpu tensors in its interpreter (TRITON_INTERPRET=1) and only there, got {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"triton needs sm_80 or newer, {device} is older"
    return ""


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: OpOverload, *args: Any) -> Any:
        ctx.op = op
        with torch.no_grad():
            return call(op, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{op_name(ctx.op)}: has no backward, use torch.no_grad()")


class _ForwardOnlyInPlace(_ForwardOnly):
    """x is a result too: a backward through it must raise, not leave the other arguments out."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, *args: Any) -> Any:
        ctx.mark_dirty(args[0])
        out = _ForwardOnly.forward(ctx, op, *args)
        return (args[0], *out) if isinstance(out, tuple) else (args[0], out)
