"""Which backend runs an op, and the one call that all public functions make."""

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
    "quantize": ("cpu", "cuda"),
    "quantize_weights": ("cpu", "cuda"),
    "dequantize": ("cpu", "cuda"),
    "dequantize_weights": ("cpu", "cuda"),
    "adanorm_quantize": ("cpu", "cuda"),
    "rms_fma_quantize": ("cpu", "cuda"),
    "rms_fma": ("cpu", "cuda"),
    "gated_attention": ("cpu", "cuda"),
    "fp8_gemm": ("cpu",),
    "linear": ("cpu", "cuda", "dequantize"),
}

_forced: dict[str, str] = {}


def set_backend(op: str, backend: str | None) -> None:
    """Make every later call of an op use one backend, in the whole process.

    Args:
        op: a torch op's name ("quantize", "rms_norm_rope_qk", ...) or "linear".
        backend: "cuda", "triton", "cpu" or, for "linear" alone, "dequantize"; None for the default. A backend that
            cannot take a call's tensors is an error at that call: no tensor is moved.

    Raises:
        ValueError: an unknown op, or a backend that the op has no code for.
    """
    if op not in BACKENDS:
        raise ValueError(f"set_backend: op must be one of {', '.join(BACKENDS)}, got {op!r}")
    if backend is None:
        _forced.pop(op, None)
    elif backend in BACKENDS[op]:
        _forced[op] = backend
    else:
        raise ValueError(f"set_backend: backend of {op} must be one of {', '.join(BACKENDS[op])}, got {backend!r}")


def get_backend(op: str, device: torch.device | str) -> str:
    """The backend that a call of an op with tensors on a device would run.

    Args:
        op: a torch op's name or "linear". The layers run the product "fp8_gemm" where it has code for the device, else
            they dequantize.
        device: where the call's tensors are. On "meta" every op gives shapes alone.

    Raises:
        ValueError: an unknown op.
        RuntimeError: no backend can run it there; the message says why.
    """
    if op not in BACKENDS:
        raise ValueError(f"get_backend: op must be one of {', '.join(BACKENDS)}, got {op!r}")
    device = torch.device(device)
    forced = _forced.get(op)
    if forced == "dequantize":
        return forced
    if forced is not None:
        _check_forced(op, forced, device)
    reason = lacks("fp8_gemm" if op == "linear" else op, device)
    if not reason:
        return device.type
    if op == "linear" and forced is None:
        return "dequantize"
    raise RuntimeError(f"{op}: {reason}")


# A compiled graph keeps the answer as a constant: asking calls a torch op that returns text.
@torch.compiler.assume_constant_result
def lacks(op: str, device: torch.device) -> str:
    """Why a torch op cannot run on a device, or an empty string."""
    if device.type in ("cpu", "meta"):
        return ""
    if device.type != "cuda" or "cuda" not in BACKENDS[op]:
        return f"has no code for {device.type} tensors"
    return cuda_device_lacks(device)


def cuda_device_lacks(device: torch.device) -> str:
    """Why this build's CUDA code cannot run on a device, or an empty string."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.ops.ltx_kernels.cuda_device_lacks(index)


def call(op: OpOverload, *args: Any) -> Any:
    """Run a torch op: forward only, on the backend that is forced or else on that of its first tensor's device."""
    if torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return _ForwardOnly.apply(op, *args)
    if _forced:
        name = op_name(op)
        if name in _forced:
            _check_forced(name, _forced[name], args[0].device)
    return op(*args)


def call_in_place(op: OpOverload, x: torch.Tensor, *args: Any) -> Any:
    """:func:`call` of an op that writes to its first argument, which therefore must not require grad."""
    if torch.is_grad_enabled():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise RuntimeError(f"{op_name(op)}: x must not require grad (it is written to), use torch.no_grad()")
        if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
            _, *results = _ForwardOnlyInPlace.apply(op, x, *args)
            return results[0] if len(results) == 1 else tuple(results)
    out = call(op, x, *args)
    # For a backward of other ops that saved x: it must raise, not compute with the new values. A compiler sees to it.
    if not torch.compiler.is_compiling() and not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return out


def op_name(op: OpOverload) -> str:
    return op._opname


def _check_forced(op: str, backend: str, device: torch.device) -> None:
    if backend != device.type:
        raise RuntimeError(f"{op}: tensors must be on {backend} (set_backend), got {device}")


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
