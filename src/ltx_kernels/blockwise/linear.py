"""The blockwise FP8 product, Linear layers with weights of 8 or 6 bits, and the swap of a model's layers for them."""

import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import Self

from ltx_kernels._backends import forward_only, get_backend, lacks, linear_backend, route
from ltx_kernels.blockwise.functional import (
    blockwise_dequantize,
    blockwise_quantize,
    fp6_blockwise_quantize_weights_torch,
    fp6_pack_tensor,
    fp6_unpack_tensor,
    fp8_blockwise_quantize_weights_torch,
    pair_of,
)

FP8 = torch.float8_e4m3fn
BLOCK_SIZE = 128
TILE_ROWS = 4 * BLOCK_SIZE  # of a weight that is dequantized at a time
MAX_SIZE = 2**30  # of a product on a GPU

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)

_ops = torch.ops.ltx_kernels


def blockwise_fp8_gemm(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    bias: Tensor | None,
    use_fast_accum: bool,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    residual: Tensor | None = None,
) -> Tensor:
    """The product of two quantized matrices, ``dequant(a) @ dequant(b).T + bias + residual``.

    The sum over each block of 128 along k is fp32; times the two scales of its block it is added in fp32. Then
    ``out = round((sum + bias) + residual)``.

    Args:
        a: (q, scales). q: ``[m, k]`` fp8, k % 16 == 0. scales: ``[m, ceil(k/128)]``; bf16, fp16 or fp32, any strides.
            On a GPU scales as :func:`blockwise_quantize` returns them are read as they are, others are copied first.
        b: (q, scales). q: ``[n, k]`` fp8, n % 8 == 0, or packed fp6, uint8 ``[n, k * 3/4]``. scales:
            ``[ceil(n/128), ceil(k/128)]``; bf16, fp16 or fp32, any strides.
        bias: ``[n]`` fp32, or None.
        use_fast_accum: allow half-precision sums where a GPU is faster with them. Honoured for packed fp6 b alone,
            whose range proves that no sum overflows; otherwise ignored.
        out_dtype: bf16, fp16 or fp32.
        residual: ``[m, n]`` of out_dtype, or None.

    q and residual have any row strides with a contiguous last dimension; on a GPU rows of q start at multiples of 16
    bytes.

    Returns:
        ``[m, n]`` of out_dtype, contiguous. A NaN byte or scale makes NaN of every element that it enters.

    Raises:
        RuntimeError: an argument breaks a rule above, or the device has no code for the product; the message names it,
            the rule and the value.
    """
    q, scales = pair_of("fp8_gemm", "a", a)
    weight, weight_scale = pair_of("fp8_gemm", "b", b)
    product = route(_ops.fp8_gemm.default)
    return product(q, scales, weight, weight_scale, bias, residual, use_fast_accum, out_dtype)


class GemmConfig(NamedTuple):
    """How a GPU kernel cuts a product into tiles."""

    arch: int
    """the kernel: 90 is that of Hopper, 89 that of all others"""
    tile_m: int
    """rows of the output that a block computes at a time"""
    tile_n: int
    """and columns"""
    stages: int
    """blocks of 128 along k that shared memory holds"""
    cluster_m: int
    """blocks with tiles below each other that share what they load of b"""
    split_k: int
    """blocks that share a tile, each summing a part of k"""
    band: int
    """clusters' tiles in m that are computed side by side"""


def gemm_config(
    m: int, n: int, k: int, num_sms: int | None = None, capability: tuple[int, int] | None = None
) -> GemmConfig:
    """How the GPU kernel of :func:`blockwise_fp8_gemm` cuts a product into tiles: a pure function of its arguments.

    It also answers for capabilities 8.9 and from 10.0 on, though :func:`blockwise_fp8_gemm` refuses to run there: no
    such GPU has run their kernel (``arch`` 89).

    Args:
        m, n, k: sizes of the product.
        num_sms: multiprocessors of the device; None: of the current one.
        capability: its compute capability, (9, 0) say; None: the current one's.

    Raises:
        RuntimeError: devices of this capability have no kernel of the product, or an argument breaks a rule of the
            product; or num_sms or capability is None without a GPU.
    """
    if (num_sms is None or capability is None) and not torch.cuda.is_available():
        raise RuntimeError("gemm_config: num_sms and capability must be given where there is no GPU, got None")
    if num_sms is None:
        num_sms = torch.cuda.get_device_properties().multi_processor_count
    if capability is None:
        capability = torch.cuda.get_device_capability()
    for name, value, least, factor in (("m", m, 0, 1), ("n", n, 8, 8), ("k", k, 16, 16), ("num_sms", num_sms, 1, 1)):
        if not isinstance(value, Integral) or not least <= value <= MAX_SIZE or value % factor != 0:
            kind = f"a multiple of {factor}" if factor > 1 else "an integer"
            raise RuntimeError(f"gemm_config: {name} must be {kind} from {least} to 2^30, got {value!r}")
    pair = isinstance(capability, tuple) and len(capability) == 2
    if not pair or not all(isinstance(part, Integral) and 0 <= part < end for part, end in zip(capability, (100, 10))):
        raise RuntimeError(f"gemm_config: capability must be a pair such as (9, 0), got {capability!r}")
    major, minor = capability
    config = _ops.fp8_gemm_config(m, n, k, num_sms, 10 * major + minor)
    if not config:
        raise RuntimeError(f"gemm_config: capability must be one with a kernel of fp8_gemm, got {major}.{minor}")
    return GemmConfig(*config)


class _BlockwiseLinear(nn.Module):
    """What the two layers share; they differ in how ``weight`` holds its e4m3 values.

    No conversion of dtypes changes a parameter, and nothing derived from one is kept, so that a weight may be rewritten
    in place, moved, or replaced by loading at any time.
    """

    weight_dtype: ClassVar[torch.dtype]

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(f"{type(self).__name__}: ", in_features, out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = _parameter(torch.empty(self._weight_shape(), dtype=self.weight_dtype, device=device))
        self.weight_scale = _parameter(torch.empty(self._scale_shape(), dtype=torch.float32, device=device))
        if bias:
            self.bias = _parameter(torch.empty(out_features, dtype=torch.float32, device=device))
        else:
            self.register_parameter("bias", None)

    def _weight_shape(self) -> tuple[int, int]:
        raise NotImplementedError

    def _scale_shape(self) -> tuple[int, int]:
        return -(-self.out_features // BLOCK_SIZE), -(-self.in_features // BLOCK_SIZE)

    @staticmethod
    def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """(as ``weight`` holds it, scales) of a float matrix."""
        raise NotImplementedError

    def _e4m3(self, weight: Tensor) -> Tensor:
        """Rows of ``weight`` as fp8."""
        raise NotImplementedError

    @classmethod
    def from_linear(cls, linear: nn.Linear, transform_weights: bool = True) -> Self:
        """A layer in place of an ``nn.Linear``, on its device.

        Args:
            linear: weights bf16, fp16 or fp32; sizes as the class has them; no hooks and the like, which would be lost.
            transform_weights: quantize its weights. False reads no values and leaves the parameters uninitialized, to
                be loaded later; the device may be "meta".

        Raises:
            TypeError: linear is something else.
            ValueError: it breaks a rule above; the message names it.
            RuntimeError: it is on a device that has no code for quantizing.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"from_linear: linear must be an nn.Linear, got {_kind(linear)}")
        _check_linear("from_linear: linear", linear)
        if transform_weights:
            _check_weights("from_linear: linear", linear)
        device = "meta" if transform_weights else linear.weight.device
        layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device=device)
        layer.train(linear.training)
        if transform_weights:
            source = linear.weight.detach()
            # A transposed weight is copied; of one with rows apart, the op takes the strides as they are.
            weight, scale = cls._quantize(source if source.stride(1) == 1 else source.contiguous())
            layer.weight = _parameter(weight)
            layer.weight_scale = _parameter(scale)
            if layer.bias is not None:
                layer.bias = _parameter(linear.bias.detach().to(torch.float32, copy=True))
        return layer

    @property
    def fp8weight(self) -> Tensor:
        """The weight as fp8 ``[out, in]``, without its scales."""
        return self._e4m3(self.weight)

    @property
    def backend(self) -> str:
        """What a forward pass runs: "cpu", "cuda" or "dequantize"; :func:`set_backend` of "linear" forces one."""
        return linear_backend(self.weight.device)

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """``x @ weight.T + bias``.

        Args:
            x: ``[..., in]``, bf16, fp16 or fp32, any strides, which is quantized on the way; or (q, scales) as
                :func:`blockwise_quantize` returns them. Where the layer dequantizes, a tensor is taken as it is.

        Returns:
            ``[..., out]``, of x's dtype; bf16 for a pair.

        Raises:
            TypeError: x is something else.
            RuntimeError: x breaks a rule above; the message names it, the rule and the value.
        """
        weight, weight_scale, bias = self.weight, self.weight_scale, self.bias
        device = weight.device
        values = pair_of("linear", "x", x)[0] if isinstance(x, tuple) else x
        if not isinstance(values, Tensor):
            raise TypeError(f"linear: x must be a tensor or a tuple (q, scales), got {_kind(x)}")
        if values.layout != torch.strided:
            raise RuntimeError(f"linear: x must be torch.strided, got {values.layout}")
        if values.dim() == 0 or values.shape[-1] != self.in_features:
            raise RuntimeError(f"linear: x must have a last size of {self.in_features}, got {list(values.shape)}")
        if values.device != device:
            raise RuntimeError(f"linear: x must be on {device} like weight, got {values.device}")
        if linear_backend(device) == "dequantize":
            reason = lacks("fp8_gemm", device)
            if reason:
                _warn_that_layers_dequantize(reason)
            given = x if isinstance(x, tuple) else (x,)
            return forward_only("linear", self._dequantizing_product, weight, weight_scale, bias, *given)
        if isinstance(x, tuple):
            (q, scales), out_dtype = x, torch.bfloat16
        else:
            # A transposed x is copied, as models that call an nn.Linear may pass one.
            (q, scales), out_dtype = blockwise_quantize(x if x.stride(-1) == 1 else x.contiguous()), x.dtype
        product = route(_ops.fp8_gemm.default)
        if q.dim() == 2:
            return product(q, scales, weight, weight_scale, bias, None, False, out_dtype)
        rows = q.reshape(-1, self.in_features)
        out = product(rows, scales, weight, weight_scale, bias, None, False, out_dtype)
        return out.view(*q.shape[:-1], self.out_features)

    def _dequantizing_product(self, weight: Tensor, scale: Tensor, bias: Tensor | None, *x_or_pair: Tensor) -> Tensor:
        x = blockwise_dequantize(x_or_pair) if len(x_or_pair) == 2 else x_or_pair[0]
        if x.dtype not in _FLOATS:
            raise RuntimeError(f"linear: x must be bfloat16, float16 or float32, got {x.dtype}")
        self._check_parameters(weight, scale, bias)
        out = x.new_empty((*x.shape[:-1], self.out_features))
        with _without_autocast(x.device):
            for rows in self._tiles():
                # Without a name for the tile: it would live on beside the next one.
                out[..., rows] = nn.functional.linear(
                    x,
                    self._dequantized(weight, scale, rows).to(x.dtype),
                    None if bias is None else bias[rows].to(x.dtype),
                )
        return out

    def _check_parameters(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        """What the product checks of them: somebody may have assigned others."""
        for name, tensor, dtypes, shape in (
            ("weight", weight, (self.weight_dtype,), self._weight_shape()),
            ("weight_scale", scale, _FLOATS, self._scale_shape()),
            ("bias", bias, (torch.float32,), (self.out_features,)),
        ):
            if tensor is None:
                continue
            if tensor.dtype not in dtypes:
                raise RuntimeError(f"linear: {name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
            if tuple(tensor.shape) != shape:
                raise RuntimeError(f"linear: {name} must have shape {list(shape)}, got {list(tensor.shape)}")

    def fuse_delta(self, delta: Tensor) -> None:
        """Add a matrix to the weight, in place: dequantize, add, quantize again, some rows at a time.

        Args:
            delta: ``[out, in]``, bf16, fp16 or fp32, on the weight's device; a LoRA's product, say. Adding the negated
                matrix later undoes it up to rounding.

        Raises:
            TypeError: delta is no tensor.
            ValueError: delta has another shape, dtype, layout or device, or requires grad while grad mode is on.
        """
        if not isinstance(delta, Tensor):
            raise TypeError(f"fuse_delta: delta must be a tensor, got {_kind(delta)}")
        shape = (self.out_features, self.in_features)
        if tuple(delta.shape) != shape:
            raise ValueError(f"fuse_delta: delta must have shape {list(shape)}, got {list(delta.shape)}")
        if delta.dtype not in _FLOATS:
            raise ValueError(f"fuse_delta: delta must be bfloat16, float16 or float32, got {delta.dtype}")
        if delta.device != self.weight.device:
            raise ValueError(f"fuse_delta: delta must be on {self.weight.device} like weight, got {delta.device}")
        if delta.layout != torch.strided:
            raise ValueError(f"fuse_delta: delta must be torch.strided, got {delta.layout}")
        if torch.is_grad_enabled() and delta.requires_grad:
            raise ValueError("fuse_delta: delta must not require grad (there is no backward), use torch.no_grad()")
        self._check_parameters(self.weight, self.weight_scale, None)
        with torch.no_grad():
            for rows in self._tiles():
                before = self._dequantized(self.weight, self.weight_scale, rows)
                weight, scale = self._quantize(before + delta[rows].float())
                self.weight_scale[_scale_rows(rows)].copy_(scale)  # first: torch refuses it if it was expanded
                self.weight[rows].copy_(weight)

    def _tiles(self) -> Iterable[slice]:
        return (slice(row, row + TILE_ROWS) for row in range(0, self.out_features, TILE_ROWS))

    def _dequantized(self, weight: Tensor, scale: Tensor, rows: slice) -> Tensor:
        """Rows of the weight in fp32, by torch alone: it serves devices for which this package has no code."""
        q = self._e4m3(weight[rows]).float()
        scale = scale[_scale_rows(rows)]
        scale = scale.repeat_interleave(BLOCK_SIZE, 0)[: q.shape[0]]
        return q.mul_(scale.repeat_interleave(BLOCK_SIZE, 1)[:, : q.shape[1]])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_dtype(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))  # asks what fn does without a copy of the tensor in another dtype
            return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Those hooks may rename or convert entries: they come before the checks.
        hooks, self._load_state_dict_pre_hooks = self._load_state_dict_pre_hooks, OrderedDict()
        missing: list[str] = []
        try:
            for hook in hooks.values():
                hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
            refused = self._refuse_and_cast(state_dict, prefix, error_msgs)
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
            )
        finally:
            self._load_state_dict_pre_hooks = hooks
        missing_keys += [key for key in missing if key not in refused]

    def _refuse_and_cast(self, state_dict: dict[str, Any], prefix: str, error_msgs: list[str]) -> set[str]:
        """Take out what the layer cannot hold, with an error; scale and bias become fp32. Returns the keys refused."""
        refused = set()

        def refuse(name: str, rule: str, got: object) -> None:
            error_msgs.append(f"{prefix}{name} must {rule}, got {got}")
            refused.add(prefix + name)
            state_dict.pop(prefix + name, None)

        held = {name for name, parameter in self._parameters.items() if parameter is not None}
        given = {name: state_dict[prefix + name] for name in held if isinstance(state_dict.get(prefix + name), Tensor)}
        for name, other in (("weight", "weight_scale"), ("weight_scale", "weight")):
            if name in given and other in held and prefix + other not in state_dict:
                refuse(other, f"come with {prefix}{name}", "no such key")
        if "weight" in given and given["weight"].dtype != self.weight_dtype:
            refuse("weight", f"be {self.weight_dtype}", given["weight"].dtype)
        for name in given.keys() - {"weight"}:
            if given[name].is_floating_point():
                state_dict[prefix + name] = given[name].to(torch.float32)
            else:
                refuse(name, "be of a float dtype", given[name].dtype)
        return refused

    # Torch pickles fp8 in torch.save alone: elsewhere the weight travels as bytes.
    def __getstate__(self) -> dict[str, Any]:
        parameters = dict(self._parameters)
        weight = parameters.get("weight")
        if weight is not None:
            parameters["weight"] = _view(weight, torch.uint8)
        return {**self.__dict__, "_parameters": parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        weight = self._parameters.get("weight")
        if weight is not None:
            self.weight = _view(weight, self.weight_dtype)

    def extra_repr(self) -> str:
        try:
            backend = self.backend
        except (AttributeError, RuntimeError):  # a layer whose weight was deleted; a forced backend of another device
            backend = "none"
        bias = self._parameters.get("bias") is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, backend={backend}"


def _check_sizes(prefix: str, in_features: int, out_features: int) -> None:
    for name, size, factor in (("in_features", in_features, 16), ("out_features", out_features, 8)):
        if not isinstance(size, Integral) or size <= 0 or size % factor != 0:
            raise ValueError(f"{prefix}{name} must be a positive multiple of {factor}, got {size!r}")


def _check_linear(name: str, linear: nn.Linear) -> None:
    """Refuse what a quantized layer could not be or hold."""
    _check_sizes(f"{name}.", linear.in_features, linear.out_features)
    for attribute in ("weight", "bias"):
        if attribute not in linear._parameters:
            raise ValueError(f"{name}.{attribute} must be a parameter, got {_kind(getattr(linear, attribute, None))}")
    lost = [attribute for attribute, value in vars(linear).items() if attribute.endswith("_hooks") and value]
    lost += ["forward"] if "forward" in vars(linear) else []  # one of its own, as wrappers set it
    lost += {**linear._parameters, **linear._buffers, **linear._modules}.keys() - {"weight", "bias"}
    if lost:
        raise ValueError(f"{name} must have nothing that the new layer would lose, got {', '.join(lost)}")


def _check_weights(name: str, linear: nn.Linear) -> None:
    """Refuse values that cannot be quantized."""
    shapes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
    for attribute, shape in shapes.items():
        tensor = getattr(linear, attribute)
        if tensor is None:
            continue
        if type(tensor) is not nn.Parameter:
            raise ValueError(f"{name}.{attribute} must be a plain nn.Parameter, got {_kind(tensor)}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name}.{attribute} must be bfloat16, float16 or float32, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.{attribute} must have shape {list(shape)}, got {list(tensor.shape)}")
    get_backend("quantize_weights", linear.weight.device)


def _kind(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


_views = WeakTensorKeyDictionary()


def _view(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A parameter as another dtype, and back: one object while it lives, which layers share as they do the first."""
    if parameter.dtype == dtype:
        return parameter
    ref = _views.get(parameter)
    view = ref() if ref else None
    if view is None:
        view = _parameter(parameter.view(dtype))
        _views[parameter] = weakref.ref(view)
        _views[view] = weakref.ref(parameter)
    return view


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Torch's products in their inputs' dtype: the other backends do not follow autocast either."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _scale_rows(rows: slice) -> slice:
    return slice(rows.start // BLOCK_SIZE, rows.stop // BLOCK_SIZE)


_unwarned = [True]  # popped by the first to warn: one warning a process, on however many devices and threads


# Under a compiler the warning comes from tracing.
@torch.compiler.assume_constant_result
def _warn_that_layers_dequantize(reason: str) -> None:
    try:
        _unwarned.pop()
    except IndexError:
        return
    warnings.warn(f"ltx_kernels: Linear layers dequantize their weights, tile by tile: fp8_gemm {reason}", stacklevel=2)


class BlockwiseFP8Linear(_BlockwiseLinear):
    """A Linear layer with an 8-bit weight: one fp32 scale for each tile of 128 x 128.

    Parameters, uninitialized until they are loaded: ``weight`` fp8 ``[out, in]``, ``weight_scale`` fp32
    ``[ceil(out/128), ceil(in/128)]``, ``bias`` fp32 ``[out]``.

    Args:
        in_features: a positive multiple of 16.
        out_features: a positive multiple of 8.
        bias: have one.
        device: of the parameters.
        dtype: taken as ``nn.Linear`` takes it, and of no effect.
    """

    weight_dtype = FP8

    def _weight_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @staticmethod
    def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_blockwise_quantize_weights_torch(weight)

    def _e4m3(self, weight: Tensor) -> Tensor:
        return weight


class BlockwiseFP6Linear(_BlockwiseLinear):
    """A Linear layer with a 6-bit weight: :class:`BlockwiseFP8Linear`, but ``weight`` is uint8 ``[out, in * 3/4]``.

    The bytes are what :func:`fp6_pack_tensor` makes of the e4m3 values.
    """

    weight_dtype = torch.uint8

    def _weight_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features * 3 // 4

    @staticmethod
    def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = fp6_blockwise_quantize_weights_torch(weight)
        return fp6_pack_tensor(q), scale

    def _e4m3(self, weight: Tensor) -> Tensor:
        return fp6_unpack_tensor(weight, self.in_features).view(FP8)


def quantize_model(
    module: nn.Module,
    bits: int = 8,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Swap the Linear layers of a model for quantized ones, in place.

    Exactly ``nn.Linear`` is swapped, not its subclasses. A layer that the model holds in several places stays shared;
    it is swapped if the filter takes it in each of them. A parameter that other modules share is refused: it would be
    shared no more. All layers are checked before the first is changed, and no more than one is held twice. A module
    that reads the weights of its layers instead of calling them, as ``nn.TransformerEncoderLayer`` does in its fast
    path, fails then by torch's error: exclude such layers.

    Args:
        module: the model.
        bits: 8 or 6.
        filter: which layers to swap, by name and layer, as True or False; None: all.
        progress: show a bar on stderr, if rich is installed.

    Returns:
        The model; if it is a Linear layer itself, the new layer.

    Raises:
        TypeError: module, filter, what filter returns, or progress is something else.
        ValueError: bits is another number, or a layer breaks a rule of :meth:`BlockwiseFP8Linear.from_linear`, or has a
            parameter that another module has too.
        RuntimeError: a layer is on a device that has no code for quantizing.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize_model: module must be an nn.Module, got {_kind(module)}")
    if bits not in (8, 6):
        raise ValueError(f"quantize_model: bits must be 8 or 6, got {bits!r}")
    if filter is not None and not callable(filter):
        raise TypeError(f"quantize_model: filter must be a function of name and layer or None, got {_kind(filter)}")
    if not isinstance(progress, bool):
        raise TypeError(f"quantize_model: progress must be True or False, got {progress!r}")
    cls = BlockwiseFP8Linear if bits == 8 else BlockwiseFP6Linear
    root = nn.ModuleList([module])  # so that a model that is a layer itself has a place too
    queue = _find_linears(root, filter)
    _check_quantizable(root, queue)
    with _bar(len(queue), progress) as advance:
        while queue:
            linear, places = queue.popleft()  # its memory is free once its places hold the new layer
            layer = cls.from_linear(linear)
            for place in places:
                setattr(place.parent, place.attribute, layer)
            advance()
    return root[0]


class _Place(NamedTuple):
    parent: nn.Module
    attribute: str
    name: str


def _find_linears(
    root: nn.ModuleList, filter: Callable[[str, nn.Linear], bool] | None
) -> deque[tuple[nn.Linear, list[_Place]]]:
    found: dict[nn.Linear, list[_Place]] = {}
    for prefix, parent in root.named_modules():
        for attribute, child in parent._modules.items():  # named_children() would name a shared layer once
            if type(child) is nn.Linear:
                found.setdefault(child, []).append(_Place(parent, attribute, _name_in_model(prefix, attribute)))

    def taken(name: str, linear: nn.Linear) -> bool:
        answer = True if filter is None else filter(name, linear)
        if not isinstance(answer, bool):
            raise TypeError(f"quantize_model: filter must return True or False, got {answer!r} for {name}")
        return answer

    return deque(
        (linear, places) for linear, places in found.items() if all(taken(place.name, linear) for place in places)
    )


def _name_in_model(prefix: str, attribute: str) -> str:
    """The name without that of the model itself, root's only entry."""
    return f"{prefix}.{attribute}".removeprefix(".").partition(".")[2]


def _check_quantizable(root: nn.ModuleList, queue: Iterable[tuple[nn.Linear, list[_Place]]]) -> None:
    owners: dict[int, dict[nn.Module, str]] = {}
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(_address(parameter), {})[module] = _name_in_model(prefix, attribute)
    for linear, places in queue:
        name = f"quantize_model: {places[0].name or 'module'}"
        try:
            _check_linear(name, linear)
            _check_weights(name, linear)
        except ValueError as error:
            raise ValueError(f"{error}; exclude it by filter") from None
        for parameter in linear.parameters():
            held = owners[_address(parameter)]
            for module, name in held.items():
                if module is not linear:
                    raise ValueError(
                        f"quantize_model: {held[linear]} must be shared with no other module, got {name}; "
                        "exclude it by filter"
                    )


def _address(tensor: Tensor) -> int:
    return id(tensor) if nn.parameter.is_lazy(tensor) else tensor.data_ptr() or id(tensor)


@contextmanager
def _bar(count: int, progress: bool) -> Iterator[Callable[[], object]]:
    """A bar over a number of layers, and the call that says that one is done."""
    if progress and count:
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("Quantizing", total=count)
                yield lambda: bar.advance(task)
            return
    yield lambda: None
