"""Which backend runs an op, and the one call that all public functions make."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ltx_kernels import blockwise_cpp, ops_cpp  # noqa: F401  (registers the ops)

# What each op has code for. "linear" stands for the Linear layers, which can also run by dequantizing their weight.
BACKENDS: dict[str, tuple[str, ...]] = {
    "rms_norm_rope": ("cpu", "cuda"),
    "rms_norm_rope_qk": ("cpu", "cuda"),
    "rms_norm_split_rope": ("cpu", "cuda"),
    "rms_norm_split_rope_qk": ("cpu", "cuda"),
    "fp6_pack": ("cpu", "cuda"),
    "fp6_unpack": ("cpu", "cuda"),
    "quantize": ("cpu", "cuda", "triton"),
    "quantize_weights": ("cpu", "cuda", "triton"),
    "dequantize": ("cpu", "cuda", "triton"),
    "dequantize_weights": ("cpu", "cuda", "triton"),
    "adanorm_quantize": ("cpu", "cuda", "triton"),
    "rms_fma_quantize": ("cpu", "cuda", "triton"),
    "rms_fma": ("cpu", "cuda", "triton"),
    "gated_attention": ("cpu", "cuda", "triton"),
    "fp8_gemm": ("cpu", "cuda"),
    "linear": ("cpu", "cuda", "dequantize"),
}

_forced: dict[str, str] = {}

# Whether every GPU here is known to run this build's CUDA code: found out at the first call on one. Then a call that
# nothing forces is a call of the torch op itself.
_cuda_everywhere = False


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
    _check_op("set_backend", op)
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
        ValueError: an unknown op or device.
        RuntimeError: no backend can run it there; the message says why.
    """
    _check_op("get_backend", op)
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError):
        raise ValueError(f"get_backend: device must be one that torch knows, got {device!r}") from None
    if op == "linear":
        return linear_backend(device)
    backend, reason = _backend(op, device)
    if not backend:
        raise RuntimeError(f"{op}: {reason}")
    return backend


def _check_op(function: str, op: object) -> None:
    if not isinstance(op, str) or op not in BACKENDS:
        raise ValueError(f"{function}: op must be one of {', '.join(BACKENDS)}, got {op!r}")


def linear_backend(device: torch.device) -> str:
    """:func:`get_backend` of "linear", which every forward pass of a layer asks."""
    forced = _forced.get("linear")
    if forced in ("cpu", "cuda"):
        backend, reason = _backend("linear", device)
        if not backend:
            raise RuntimeError(f"linear: {reason}")
        return backend
    return "dequantize" if forced or lacks("fp8_gemm", device) else device.type


def lacks(op: str, device: torch.device) -> str:
    """Why an op cannot run on a device, or an empty string."""
    return _backend(op, device)[1]


# A compiled graph keeps the answer as a constant: finding it calls a torch op that returns text.
@torch.compiler.assume_constant_result
def backend_lacks(backend: str, device: torch.device, op: str = "") -> str:
    """Why a backend's code, of all ops or of one, cannot run on a device, or an empty string."""
    return _look_up(backend, device, op)


def route(op: OpOverload) -> Callable[..., Any]:
    """:func:`call` of a torch op, or the op itself where that will do: it spares the host from handing on arguments."""
    if torch.is_grad_enabled() or _forced or not _cuda_everywhere or forward_ad._current_level >= 0:
        return functools.partial(call, op)
    return op


def call(op: OpOverload, *args: Any) -> Any:
    """Run a torch op: forward only, on the backend that is forced or else on that of its first tensor's device."""
    if _derivatives_wanted(op_name(op), args):
        return _ForwardOnly.apply(op_name(op), functools.partial(call, op), *args)
    if isinstance(args[0], torch.Tensor) and (_forced or (args[0].is_cuda and not _cuda_everywhere)):
        op = serving(op, args[0].device)
    return op(*args)


def call_in_place(op: OpOverload, x: torch.Tensor, *args: Any) -> Any:
    """:func:`call` of an op that writes to its first argument, which therefore must not require grad."""
    if _derivatives_wanted(op_name(op), (x, *args)):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise RuntimeError(f"{op_name(op)}: x must not require grad (it is written to), use torch.no_grad()")
        _, *results = _ForwardOnlyInPlace.apply(op_name(op), functools.partial(call, op), x, *args)
        return results[0] if len(results) == 1 else tuple(results)
    out = call(op, x, *args)
    # For a backward of other ops that saved x: it must raise, not compute with the new values. A compiler sees to it.
    if not torch.compiler.is_compiling() and not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return out


def forward_only(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function as :func:`call` runs an op: without derivatives, the names in its errors being that of an op."""
    if _derivatives_wanted(name, args):
        return _ForwardOnly.apply(name, function, *args)
    return function(*args)


def _derivatives_wanted(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a backward may come for the result of a call. Forward-mode derivatives are due at once: they raise."""
    if forward_ad._current_level >= 0 and any(
        isinstance(arg, torch.Tensor) and forward_ad.unpack_dual(arg).tangent is not None for arg in args
    ):
        raise RuntimeError(f"{name}: has no forward-mode derivative, call it with tensors that have no tangent")
    return torch.is_grad_enabled() and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)


def op_name(op: OpOverload) -> str:
    return op._opname


def serving(op: OpOverload, device: torch.device) -> OpOverload:
    """The torch op that runs a call of op with tensors on a device: op itself, or its form in Triton."""
    global _cuda_everywhere
    if device.type == "cuda" and not torch.compiler.is_compiling():
        _cuda_everywhere = not any(_look_up("cuda", torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
    name = op_name(op)
    backend, reason = _backend(name, device)
    if name in _forced and not backend:
        raise RuntimeError(f"{name}: {reason}")
    return getattr(torch.ops.ltx_kernels, f"{name}_triton").default if backend == "triton" else op


def _backend(op: str, device: torch.device) -> tuple[str, str]:
    """What runs an op on a device, or an empty string and the reason."""
    forced = _forced.get(op)
    if forced in ("cpu", "cuda") and device.type not in (forced, "meta"):
        return "", f"tensors must be on {forced} (set_backend), got {device}"
    if device.type in ("cpu", "meta") and forced != "triton":
        return device.type, ""
    candidates = [forced] if forced else [b for b in ("cuda", "triton") if device.type == "cuda" and b in BACKENDS[op]]
    reasons = []
    for backend in candidates:
        reason = backend_lacks(backend, device, op)
        if not reason:
            return backend, ""
        reasons.append(reason)
    return "", "; ".join(reasons) or f"has no code for {device.type} tensors"


@functools.cache
def _look_up(backend: str, device: torch.device, op: str = "") -> str:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is False"
    if backend == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        reason = torch.ops.ltx_kernels.cuda_device_lacks(index)
        if not reason and op in ("fp8_gemm", "linear"):
            reason = torch.ops.ltx_kernels.fp8_gemm_device_lacks(index)
        return reason
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
    def forward(name: str, function: Callable[..., Any], *args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{ctx.name}: has no backward, use torch.no_grad()")


class _ForwardOnlyInPlace(_ForwardOnly):
    """x is a result too: a backward through it must raise, not leave the other arguments out."""

    @staticmethod
    def forward(name: str, function: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
        out = _ForwardOnly.forward(name, function, x, *args)
        return (x, *out) if isinstance(out, tuple) else (x, out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _ForwardOnly.setup_context(ctx, inputs, output)
        ctx.mark_dirty(inputs[2])
