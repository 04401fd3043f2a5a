"""The Linear layers of 8 and 6 bits, their life cycle, and quantize_model."""

import copy
import io
import pickle
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from behaviour import assert_compiles, assert_no_backward, assert_same_bits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ltx_kernels import _backends
from ltx_kernels.blockwise import (
    BlockwiseFP6Linear,
    BlockwiseFP8Linear,
    blockwise_fp8_gemm,
    blockwise_quantize,
    fp6_pack_tensor,
    fp6_unpack_tensor,
    get_backend,
    linear,
    quantize_model,
    set_backend,
)

FP8 = torch.float8_e4m3fn
DTYPES = "bfloat16, float16 or float32"
LAYERS = [BlockwiseFP8Linear, BlockwiseFP6Linear]
Layer = BlockwiseFP8Linear | BlockwiseFP6Linear
both = pytest.mark.parametrize("cls", LAYERS)


@pytest.fixture(autouse=True)
def _backends_as_they_were() -> Iterator[None]:
    yield
    for op in ("linear", "fp8_gemm"):
        set_backend(op, None)


class LiveBytes(TorchDispatchMode):
    """The most bytes that storages made by torch ops, since it was entered, held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.is_meta:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def make_linear(in_features: int = 272, out_features: int = 136, **options: object) -> nn.Linear:
    return nn.Linear(in_features, out_features, **options).to(torch.bfloat16).requires_grad_(False)


def make_layer(cls: type[Layer], *sizes: int) -> Layer:
    return cls.from_linear(make_linear(*sizes))


def dequantized(layer: Layer) -> Tensor:
    """The weight in float64, from the stored parameters."""
    q = layer.fp8weight.double()
    scale = layer.weight_scale.double().repeat_interleave(128, 0)[: q.shape[0]]
    return q * scale.repeat_interleave(128, 1)[:, : q.shape[1]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


# The product


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_forward_is_quantize_and_product(cls: type[Layer], dtype: torch.dtype) -> None:
    layer = make_layer(cls)
    x = torch.randn(2, 5, 272, dtype=dtype)
    out = layer(x)
    assert out.shape == (2, 5, 136) and out.dtype == dtype and out.is_contiguous()
    q, scales = blockwise_quantize(x)
    weight = (layer.weight, layer.weight_scale)
    expected = blockwise_fp8_gemm((q.flatten(0, 1), scales), weight, layer.bias, False, out_dtype=dtype)
    assert_same_bits(out, expected.view(2, 5, 136))
    assert relative_error(out, x.double() @ dequantized(layer).T + layer.bias.double()) < 0.03


@both
def test_forward_of_a_pair_is_bf16_and_that_of_the_tensor(cls: type[Layer]) -> None:
    layer = make_layer(cls)
    x = torch.randn(2, 3, 272, dtype=torch.bfloat16)
    pair = blockwise_quantize(x)
    assert layer(pair).dtype == torch.bfloat16
    assert_same_bits(layer(pair), layer(x))


@both
@pytest.mark.parametrize("shape", [(272,), (1, 272), (0, 272), (2, 0, 272), (2, 3, 4, 272)])
def test_forward_of_any_rank(cls: type[Layer], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16)
    assert make_layer(cls)(x).shape == (*shape[:-1], 136)


@both
@pytest.mark.parametrize("backend", [None, "dequantize"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # columns apart, as after an nn.Conv1d
        lambda x: torch.stack([x, x + 1], -1)[..., 0],
        lambda x: torch.cat([x + 1, x, x - 1], -1)[..., 272:544],
        lambda x: x[:1, :1].expand(2, 5, 272),
        lambda x: x[..., :1].expand(2, 5, 272),
    ],
    ids=["rows", "columns", "every_other", "slice", "expanded_rows", "expanded_columns"],
)
def test_strides(cls: type[Layer], backend: str | None, view: Callable[[Tensor], Tensor]) -> None:
    set_backend("linear", backend)
    layer = make_layer(cls)
    x = view(torch.randn(2, 5, 272))
    expected = x.double() @ dequantized(layer).T + layer.bias.double()
    assert relative_error(layer(x), expected) < (1e-6 if backend else 0.05)


@both
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 8), (192, 136), (80, 8), (80, 10944)])
def test_odd_sizes(cls: type[Layer], in_features: int, out_features: int) -> None:
    layer = make_layer(cls, in_features, out_features)
    x = torch.randn(3, in_features, dtype=torch.bfloat16)
    assert relative_error(layer(x), x.double() @ dequantized(layer).T + layer.bias.double()) < 0.05


@both
def test_no_bias(cls: type[Layer]) -> None:
    layer = cls.from_linear(make_linear(bias=False))
    assert layer.bias is None and sorted(layer.state_dict()) == ["weight", "weight_scale"]
    assert not layer(torch.zeros(1, 272)).any()


@both
@pytest.mark.parametrize("backend", [None, "dequantize"])
def test_compiles_once_for_all_lengths(cls: type[Layer], backend: str | None) -> None:
    set_backend("linear", backend)
    layer = make_layer(cls)
    assert_compiles(layer, *([torch.randn(2, tokens, 272, dtype=torch.bfloat16)] for tokens in (3, 64, 130)))
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(lambda x: layer(blockwise_quantize(x)), backend=graphs, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 64, 130, 7):
            compiled(torch.randn(2, tokens, 272))
    assert graphs.frame_count == 1


def test_a_compiled_layer_follows_set_backend() -> None:
    layer = make_layer(BlockwiseFP8Linear)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 272, dtype=torch.bfloat16)
    with torch.no_grad():
        quantized = compiled(x)
        set_backend("linear", "dequantize")
        assert not torch.equal(compiled(x), quantized)


@both
@pytest.mark.parametrize("backend", [None, "dequantize"])
def test_derivatives_raise(cls: type[Layer], backend: str | None) -> None:
    set_backend("linear", backend)
    layer = make_layer(cls)
    x = torch.randn(2, 272)
    name = "fp8_gemm" if backend is None else "linear"
    assert_no_backward(layer, [x], name if backend else "(fp8_gemm|quantize)")
    q, scales = blockwise_quantize(x)
    assert_no_backward(lambda scales: layer((q, scales)), [scales], name)
    with pytest.raises(RuntimeError, match=f"^{name}: has no backward, use torch.no_grad"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    for parameter in ("bias", "weight_scale"):
        getattr(layer, parameter).requires_grad_()
        with pytest.raises(RuntimeError, match=f"^{name}: has no backward, use torch.no_grad"):
            layer(x).sum().backward()
        getattr(layer, parameter).requires_grad_(False)


@pytest.mark.parametrize("backend", [None, "dequantize"])
def test_a_compiled_layer_refuses_derivatives(backend: str | None) -> None:
    set_backend("linear", backend)
    torch._dynamo.reset()
    layer = make_layer(BlockwiseFP8Linear)
    x = torch.randn(2, 272)
    with pytest.raises(RuntimeError, match="(fp8_gemm|quantize|linear): has no backward, use torch.no_grad"):
        torch.compile(layer, backend="eager", fullgraph=True)(x.requires_grad_())
    out = torch.compile(layer, backend="eager")(x)
    with pytest.raises(RuntimeError, match="(fp8_gemm|linear): has no backward, use torch.no_grad"):
        out.sum().backward()
    compiled = torch.compile(lambda x: torch.func.jvp(layer, (x,), (x,)), backend="eager")
    with pytest.raises(RuntimeError, match="(quantize|linear): has no forward-mode derivative"):
        compiled(x.detach())


# Construction


@both
def test_parameters(cls: type[Layer]) -> None:
    layer = cls(272, 136)
    width, dtype = (272, FP8) if cls is BlockwiseFP8Linear else (204, torch.uint8)
    described = {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()}
    assert described == {
        "weight": ((136, width), dtype, False),
        "weight_scale": ((2, 3), torch.float32, False),
        "bias": ((136,), torch.float32, False),
    }
    assert not list(layer.buffers())


@both
def test_construction_takes_device_and_dtype(cls: type[Layer]) -> None:
    layer = cls(16, 8, False, "meta", torch.bfloat16)
    assert layer.weight.is_meta and layer.weight_scale.dtype == torch.float32 and layer.bias is None


@both
def test_construction_refuses_sizes(cls: type[Layer]) -> None:
    name = cls.__name__
    with pytest.raises(ValueError, match=f"^{name}: in_features must be a positive multiple of 16, got 40$"):
        cls(40, 8)
    with pytest.raises(ValueError, match=f"^{name}: out_features must be a positive multiple of 8, got 12$"):
        cls(16, 12)
    with pytest.raises(ValueError, match=f"^{name}: in_features must be a positive multiple of 16, got '16'$"):
        cls("16", 8)
    with pytest.raises(ValueError, match=f"^{name}: out_features must be a positive multiple of 8, got 8.0$"):
        cls(16, 8.0)


class Marked(Tensor):
    """A tensor of a kind that the ops do not know, as a sharded one is."""


def with_extra(**extra: object) -> nn.Linear:
    linear = nn.Linear(32, 16)
    for name, value in extra.items():
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            delattr(linear, name)
        setattr(linear, name, value)
    return linear


def without(name: str) -> nn.Linear:
    linear = nn.Linear(32, 16)
    delattr(linear, name)
    return linear


def hooked(register: str, *hook: object) -> nn.Linear:
    linear = nn.Linear(32, 16)
    getattr(linear, register)(*hook or [print])
    return linear


# What quantize_model refuses too, each with the end of the message.
REFUSED = [
    (nn.Linear(72, 8), ".in_features must be a positive multiple of 16, got 72"),
    (nn.Linear(16, 12), ".out_features must be a positive multiple of 8, got 12"),
    (nn.Linear(32, 16).double(), f".weight must be {DTYPES}, got torch.float64"),
    (with_extra(weight=nn.Parameter(torch.ones(16, 64))), ".weight must have shape [16, 32], got [16, 64]"),
    (with_extra(bias=nn.Parameter(torch.ones(32))), ".bias must have shape [16], got [32]"),
    (with_extra(bias=nn.Parameter(torch.ones(16).double())), f".bias must be {DTYPES}, got torch.float64"),
    (with_extra(weight=torch.ones(16, 32)), ".weight must be a parameter, got Tensor"),
    (without("weight"), ".weight must be a parameter, got NoneType"),
    (without("bias"), ".bias must be a parameter, got NoneType"),
    (
        with_extra(weight=nn.Parameter(torch.ones(16, 32).as_subclass(Marked))),
        ".weight must be a plain nn.Parameter, got Marked",
    ),
    (with_extra(lora=nn.Linear(8, 8)), " must have nothing that the new layer would lose, got lora"),
    (with_extra(gain=nn.Parameter(torch.ones(1))), " must have nothing that the new layer would lose, got gain"),
    (with_extra(forward=lambda x: x), " must have nothing that the new layer would lose, got forward"),
    *(
        (hooked(f"register_{name}"), f" must have nothing that the new layer would lose, got _{name}s")
        for name in ("forward_hook", "forward_pre_hook", "state_dict_pre_hook", "load_state_dict_post_hook")
    ),
    (hooked("register_full_backward_hook"), " must have nothing that the new layer would lose, got _backward_hooks"),
]


@both
@pytest.mark.parametrize(("source", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_from_linear_refuses(cls: type[Layer], source: nn.Linear, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape('from_linear: linear' + message)}$"):
        cls.from_linear(source)


@both
def test_from_linear_refuses_other_modules(cls: type[Layer]) -> None:
    for value, kind in (
        (3, "int"),
        (None, "NoneType"),
        (nn.Embedding(16, 16), "Embedding"),
        (cls(16, 8), cls.__name__),
    ):
        for transform_weights in (True, False):
            with pytest.raises(TypeError, match=f"^from_linear: linear must be an nn.Linear, got {kind}$"):
                cls.from_linear(value, transform_weights)


@both
def test_from_linear_of_a_transposed_weight(cls: type[Layer]) -> None:
    source, transposed = make_linear(), make_linear()
    transposed.weight.data = source.weight.T.contiguous().T
    assert_same_bits([*cls.from_linear(transposed).parameters()][:2], [*cls.from_linear(source).parameters()][:2])


@both
def test_from_linear_keeps_mode_and_leaves_the_linear_alone(cls: type[Layer]) -> None:
    source = make_linear().eval()
    before = copy.deepcopy(source.state_dict())
    layer = cls.from_linear(source)
    assert isinstance(layer, cls) and not layer.training
    assert_same_bits(source.state_dict(), before)
    assert_same_bits(layer.bias, source.bias.float())


@both
def test_from_linear_shares_no_memory(cls: type[Layer]) -> None:
    source = nn.Linear(32, 16)  # fp32, as the layer's bias is
    layer = cls.from_linear(source)
    expected = layer(torch.ones(1, 32))
    for parameter in source.parameters():
        parameter.data.zero_()
    assert expected.any() and torch.equal(layer(torch.ones(1, 32)), expected)


@both
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_from_linear_without_values(cls: type[Layer], device: str) -> None:
    layer = cls.from_linear(nn.Linear(272, 136, device=device, dtype=torch.bfloat16), False)
    assert {p.device.type for p in layer.parameters()} == {device}
    other = make_layer(cls)
    layer.load_state_dict(other.state_dict(), strict=False, assign=True)
    x = torch.randn(2, 272)
    assert_same_bits(layer(x), other(x))


def test_fp8weight() -> None:
    source = make_linear()
    eight, six = (cls.from_linear(source) for cls in LAYERS)
    assert eight.fp8weight is eight.weight
    unpacked = six.fp8weight
    assert unpacked.dtype == FP8 and unpacked.shape == (136, 272) and unpacked.float().abs().max() == 0.1171875
    assert torch.equal(fp6_pack_tensor(unpacked), six.weight)
    for layer in (eight, six):  # half a step of three mantissa bits
        assert relative_error(dequantized(layer), source.weight) < 0.03


# Backends


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantizing(cls: type[Layer], dtype: torch.dtype) -> None:
    layer = make_layer(cls, 272, 1160)  # two whole tiles and a part of one
    x = torch.randn(2, 5, 272, dtype=dtype)
    set_backend("linear", "dequantize")
    assert layer.backend == "dequantize" and "backend=dequantize" in repr(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = layer(x)
    assert out.shape == (2, 5, 1160) and out.dtype == dtype
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    assert relative_error(out, x.double() @ dequantized(layer).T + layer.bias.double()) < tolerance
    pair = layer(blockwise_quantize(x))
    assert pair.dtype == torch.bfloat16 and relative_error(pair, out) < 0.05


@both
@pytest.mark.parametrize("backend", ["dequantize", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_changes_nothing(cls: type[Layer], dtype: torch.dtype, backend: str | None) -> None:
    layer = make_layer(cls)
    x = torch.randn(3, 272, dtype=dtype)
    set_backend("linear", backend)
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)


@both
@pytest.mark.parametrize("pair", [False, True])
def test_dequantizing_holds_one_tile_of_the_weight(cls: type[Layer], pair: bool) -> None:
    """What it holds besides its result does not grow with the weight."""
    set_backend("linear", "dequantize")
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    given = blockwise_quantize(x) if pair else x
    beside = []
    for out_features in (512, 4096):
        layer = make_layer(cls, 256, out_features)
        with LiveBytes() as live:
            out = layer(given)
        beside.append(live.peak - out.nbytes)
    assert 0 < beside[1] <= beside[0] < 2.5 * 512 * 256 * 4  # the values and scales of 512 rows, in fp32


PAIR = blockwise_quantize(torch.ones(3, 272))


@pytest.mark.parametrize("backend", ["dequantize", None])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 272, dtype=torch.int64), f"x must be {DTYPES}, got (torch.)?int64"),
        (torch.ones(2, 272, dtype=torch.float64), f"x must be {DTYPES}, got (torch.)?float64"),
        (torch.ones(2, 272).to(FP8), f"x must be {DTYPES}, got (torch.)?float8_e4m3fn"),
        (torch.randn(3, 0), r"x must have a last size of 272, got \[3, 0\]"),
        (torch.randn(3, 136), r"x must have a last size of 272, got \[3, 136\]"),
        (torch.tensor(1.0), r"x must have a last size of 272, got \[\]"),
        (torch.ones(2, 272).to_sparse(), r"x must be torch.strided, got torch.sparse_coo"),
        (torch.ones(2, 272, device="meta"), "x must be on cpu like weight, got meta"),
        (None, r"x must be a tensor or a tuple \(q, scales\), got NoneType"),
        ([*PAIR], r"x must be a tensor or a tuple \(q, scales\), got list"),
        ((torch.ones(2, 272),), r"x must be a pair \(q, scales\), got 1 entries"),
        ((*PAIR, None), r"x must be a pair \(q, scales\), got 3 entries"),
        ((3, 4), r"x must be a tensor or a tuple \(q, scales\), got a tuple of 2"),
        ((PAIR[0][:, :256], PAIR[1][:, :2]), r"x must have a last size of 272, got \[3, 256\]"),
        ((PAIR[0].float(), PAIR[1]), "(q|a) must be float8_e4m3fn, got float32"),
        ((PAIR[0].view(torch.uint8), PAIR[1]), "(q|a) must be float8_e4m3fn, got uint8"),
        ((PAIR[0].t().contiguous().t(), PAIR[1]), "(q|a) must have a contiguous last dimension, got stride 3"),
        ((PAIR[0].to("meta"), PAIR[1]), "x must be on cpu like weight, got meta"),
        ((PAIR[0], PAIR[1].to("meta")), "(a_)?scales must be on cpu like (q|a), got meta"),
        ((PAIR[0], PAIR[1].double()), f"(a_)?scales must be {DTYPES}, got float64"),
        ((PAIR[0], PAIR[1][:, :2]), r"(a_)?scales must have shape \[3, 3\], got \[3, 2\]"),
        ((PAIR[0], PAIR[1][:2]), r"(a_)?scales must have shape \[3, 3\], got \[2, 3\]"),
        ((PAIR[0], None), "(a_)?scales must be on cpu like (q|a), got None"),
    ],
    ids=lambda value: "x" if not isinstance(value, str) else value,
)
def test_x_that_is_refused(backend: str | None, x: object, message: str) -> None:
    set_backend("linear", backend)
    with pytest.raises((RuntimeError, TypeError), match=f"^(linear|quantize|dequantize|fp8_gemm): {message}$"):
        make_layer(BlockwiseFP8Linear)(x)


@pytest.mark.parametrize("backend", ["dequantize", None])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", torch.zeros(136, 272).bfloat16(), "(weight|b) must be .*, got (torch.)?bfloat16"),
        (
            "weight",
            torch.zeros(136, 272).byte(),
            "(weight must be .*, got torch.uint8|b must .*(uint8 is packed fp6).*)",
        ),
        ("weight_scale", torch.ones(2, 3).double(), "(weight_scale|b_scales) must be .*, got (torch.)?float64"),
        ("weight_scale", torch.ones(3, 2), r"(weight_scale|b_scales) must have shape \[2, 3\], got \[3, 2\]"),
        ("weight_scale", torch.ones(4, 6), r"(weight_scale|b_scales) must have shape \[2, 3\], got \[4, 6\]"),
        ("bias", torch.ones(136).bfloat16(), "bias must be (torch.)?float32, got (torch.)?bfloat16"),
        ("bias", torch.ones(272), r"bias must have shape \[136\], got \[272\]"),
    ],
)
def test_parameters_that_were_assigned_are_checked(backend: str | None, name: str, value: Tensor, message: str) -> None:
    set_backend("linear", backend)
    layer = make_layer(BlockwiseFP8Linear)
    setattr(layer, name, nn.Parameter(value, requires_grad=False))
    with pytest.raises(RuntimeError, match=f"^(linear|fp8_gemm): {message}$"):
        layer(torch.ones(1, 272))


@both
def test_a_device_without_the_product_dequantizes_and_warns_once(
    cls: type[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = iter(["device 0 is sm_80"] * 2 + ["device 1 is sm_80"] * 9)

    def backend(op: str, device: torch.device) -> tuple[str, str]:
        return ("", next(reasons)) if op == "fp8_gemm" else (device.type, "")

    monkeypatch.setattr(_backends, "_backend", backend)
    monkeypatch.setattr(linear, "_unwarned", [True])
    layer = make_layer(cls)
    x = torch.randn(2, 272)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = layer(x)
        make_layer(cls)(x)
    assert layer.backend == "dequantize"
    assert [str(warning.message) for warning in caught] == [
        "ltx_kernels: Linear layers dequantize their weights, tile by tile: fp8_gemm device 0 is sm_80"
    ]
    assert relative_error(out, x.double() @ dequantized(layer).T + layer.bias.double()) < 1e-6
    with pytest.raises(RuntimeError, match="^fp8_gemm: device 1 is sm_80$"):
        get_backend("fp8_gemm", "cpu")
    assert get_backend("quantize", "cpu") == "cpu"


def test_backends_by_device_and_force() -> None:
    layer = make_layer(BlockwiseFP8Linear)
    assert layer.backend == "cpu" and get_backend("linear", "meta") == "meta"
    set_backend("linear", "cuda")
    with pytest.raises(RuntimeError, match=r"^linear: tensors must be on cuda \(set_backend\), got cpu$"):
        layer(torch.zeros(1, 272))
    assert "backend=none" in repr(layer)
    set_backend("linear", "cpu")
    assert layer(torch.zeros(1, 272)).shape == (1, 136)
    with pytest.raises(
        ValueError, match="^set_backend: backend of linear must be one of cpu, cuda, dequantize, got 'triton'$"
    ):
        set_backend("linear", "triton")
    with pytest.raises(
        ValueError, match="^set_backend: backend of fp8_gemm must be one of cpu, cuda, got 'dequantize'$"
    ):
        set_backend("fp8_gemm", "dequantize")


# Parameters under conversions, copies and moves


@both
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float64),
        lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
    ],
    ids=["half", "double", "bfloat16", "float", "to_dtype", "to_device_and_dtype", "type", "to_tensor"],
)
def test_conversions_change_no_parameter(cls: type[Layer], convert: object) -> None:
    model = nn.Sequential(make_layer(cls), nn.Linear(136, 8, dtype=torch.bfloat16))
    before = {name: (p.dtype, p.data_ptr()) for name, p in model[0].named_parameters()}
    values = copy.deepcopy(model[0].state_dict())
    assert convert(model) is model
    assert {name: (p.dtype, p.data_ptr()) for name, p in model[0].named_parameters()} == before
    assert_same_bits(model[0].state_dict(), values)


@both
def test_conversion_with_a_move(cls: type[Layer]) -> None:
    layer = make_layer(cls).to("meta", torch.float16)
    assert [(p.device.type, p.dtype) for p in layer.parameters()] == [
        ("meta", cls.weight_dtype),
        ("meta", torch.float32),
        ("meta", torch.float32),
    ]


@both
def test_meta_round_trip(cls: type[Layer]) -> None:
    layer = make_layer(cls)
    values = copy.deepcopy(layer.state_dict())
    x = torch.randn(2, 272)
    expected = layer(x)
    layer.to("meta")
    assert layer(x.to("meta")).shape == (2, 136)
    assert "backend=meta" in repr(layer)
    layer.to_empty(device="cpu")
    layer.load_state_dict(values)
    assert_same_bits(layer(x), expected)


@both
def test_copies_by_deepcopy_pickle_and_save(cls: type[Layer]) -> None:
    layer = make_layer(cls)
    x = torch.randn(2, 272)
    expected = layer(x)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(saved, weights_only=False)]
    shallow = copy.copy(layer)
    assert [id(p) for p in shallow.parameters()] == [id(p) for p in layer.parameters()]
    layer.weight.data.view(torch.uint8).zero_()
    for one in copies:
        assert type(one) is cls and one.weight.dtype == cls.weight_dtype and not one.weight.requires_grad
        assert_same_bits(one(x), expected)


@both
def test_copies_of_layers_that_share_parameters_share_them(cls: type[Layer]) -> None:
    model = nn.ModuleList([make_layer(cls), make_layer(cls)])
    model.append(model[0])
    for name in ("weight", "weight_scale"):
        setattr(model[1], name, getattr(model[0], name))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 2))):
        assert one[2] is one[0] and one[1] is not one[0]
        assert one[0].weight is one[1].weight and one[0].weight_scale is one[1].weight_scale
        assert one[0].bias is not one[1].bias
        assert_same_bits(one.state_dict(), model.state_dict())
    first, second = (pickle.loads(pickle.dumps(model)) for _ in range(2))
    assert first[0].weight is not second[0].weight and first[0].weight.data_ptr() != second[0].weight.data_ptr()


@both
def test_a_weight_rewritten_in_place_is_used(cls: type[Layer]) -> None:
    layer, other = make_layer(cls), make_layer(cls)
    x = torch.randn(2, 272)
    layer(x)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(other, name))
    assert_same_bits(layer(x), other(x))


@both
def test_repr(cls: type[Layer]) -> None:
    layer = cls(272, 136)
    assert repr(layer) == f"{cls.__name__}(in_features=272, out_features=136, bias=True, backend=cpu)"
    del layer.weight, layer.bias  # as loaders do with layers that they drop
    assert repr(layer) == f"{cls.__name__}(in_features=272, out_features=136, bias=False, backend=none)"
    layer.load_state_dict({}, strict=False)


# State dicts

either_assign = pytest.mark.parametrize("assign", [False, True])


def load_error(layer: nn.Module, state: dict[str, Tensor], **options: bool) -> list[str]:
    with pytest.raises(RuntimeError) as error:
        layer.load_state_dict(state, **options)
    return [line.strip() for line in str(error.value).splitlines()[1:]]


def nested(layer: Layer) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(layer)})


@both
@either_assign
@pytest.mark.parametrize("strict", [False, True])
def test_wrong_weight_dtype_is_refused_by_key(cls: type[Layer], assign: bool, strict: bool) -> None:
    model = nested(make_layer(cls))
    before = copy.deepcopy(model.state_dict())
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.int8, FP8 if cls is BlockwiseFP6Linear else torch.uint8):
        state = copy.deepcopy(before)
        state["blocks.0.weight"] = torch.zeros(state["blocks.0.weight"].shape).to(dtype)
        message = f"blocks.0.weight must be {cls.weight_dtype}, got {dtype}"
        assert load_error(model, state, strict=strict, assign=assign) == [message]
        assert_same_bits(model.state_dict(), before)


@both
@either_assign
def test_state_dict_of_the_other_bit_width_is_refused(cls: type[Layer], assign: bool) -> None:
    (other,) = set(LAYERS) - {cls}
    message = f"blocks.0.weight must be {cls.weight_dtype}, got {other.weight_dtype}"
    state = nested(make_layer(other)).state_dict()
    assert load_error(nested(make_layer(cls)), state, strict=False, assign=assign) == [message]


@both
@either_assign
@pytest.mark.parametrize("strict", [False, True])
def test_half_a_layer_is_refused_by_key(cls: type[Layer], assign: bool, strict: bool) -> None:
    for name, other in (("weight", "weight_scale"), ("weight_scale", "weight")):
        model = nested(make_layer(cls))
        state = dict(model.state_dict())
        del state[f"blocks.0.{name}"]
        message = f"blocks.0.{name} must come with blocks.0.{other}, got no such key"
        assert load_error(model, state, strict=strict, assign=assign) == [message]


@both
@either_assign
def test_absent_layers_follow_strict(cls: type[Layer], assign: bool) -> None:
    model = nested(make_layer(cls))
    before = copy.deepcopy(model.state_dict())
    missing = [f"blocks.0.{name}" for name in ("weight", "weight_scale", "bias")]
    result = model.load_state_dict({}, strict=False, assign=assign)
    assert result.missing_keys == missing and result.unexpected_keys == []
    assert load_error(model, {}, assign=assign) == [
        "Missing key(s) in state_dict: " + ", ".join(f'"{key}"' for key in missing) + "."
    ]
    without_bias = {key: value for key, value in before.items() if not key.endswith("bias")}
    assert model.load_state_dict(without_bias, strict=False, assign=assign).missing_keys == ["blocks.0.bias"]
    assert load_error(model, without_bias, assign=assign) == ['Missing key(s) in state_dict: "blocks.0.bias".']
    assert load_error(model, {**before, "blocks.0.input_scale": torch.ones(1)}, assign=assign) == [
        'Unexpected key(s) in state_dict: "blocks.0.input_scale".'
    ]
    assert_same_bits(model.state_dict(), before)


@both
@either_assign
def test_wrong_shapes_are_refused_by_key(cls: type[Layer], assign: bool) -> None:
    model = nested(make_layer(cls))
    state = {**model.state_dict(), "blocks.0.weight_scale": torch.ones(3, 2)}
    (message,) = load_error(model, state, assign=assign)
    assert message.startswith("size mismatch for blocks.0.weight_scale")


@both
@either_assign
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scale_and_bias_are_cast(cls: type[Layer], assign: bool, dtype: torch.dtype) -> None:
    source, layer = make_layer(cls), make_layer(cls)
    state = {key: value.to(dtype) if key != "weight" else value for key, value in source.state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    for name in ("weight_scale", "bias"):
        parameter = getattr(layer, name)
        assert parameter.dtype == torch.float32 and not parameter.requires_grad
        assert_same_bits(parameter, state[name].float())
    integers = {**state, "bias": torch.zeros(136, dtype=torch.int32)}
    assert load_error(layer, integers, assign=assign) == ["bias must be of a float dtype, got torch.int32"]


@both
def test_assign_keeps_the_given_storage(cls: type[Layer]) -> None:
    state = dict(make_layer(cls).state_dict())
    layer = make_layer(cls)
    layer.load_state_dict(state, assign=True)
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr() and not parameter.requires_grad
    layer.load_state_dict(make_layer(cls).state_dict())
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()


@both
@either_assign
def test_safetensors_round_trip(cls: type[Layer], assign: bool, tmp_path: Path) -> None:
    layer, other = make_layer(cls), cls(272, 136, device="meta" if assign else None)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"), assign=assign)
    assert_same_bits(other.state_dict(), layer.state_dict())
    x = torch.randn(2, 272)
    assert_same_bits(other(x), layer(x))


@both
@either_assign
def test_load_hooks_run_once_and_before_the_checks(cls: type[Layer], assign: bool) -> None:
    """As torch has it: a hook may give entries their names, and what it gives is checked."""
    model, source = nested(make_layer(cls)), nested(make_layer(cls))
    calls = []

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        calls.append(module)
        state[prefix + "weight_scale"] = state.pop(prefix + "scale")

    handle = model["blocks"][0].register_load_state_dict_pre_hook(rename)
    old = {key.replace("weight_scale", "scale"): value for key, value in source.state_dict().items()}
    model.load_state_dict(old, assign=assign)
    assert_same_bits(model.state_dict(), source.state_dict())
    model.load_state_dict(old, assign=assign)
    assert calls == [model["blocks"][0]] * 2
    handle.remove()

    def spoil(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        state[prefix + "weight"] = torch.zeros(136, 272, dtype=torch.bfloat16)

    model["blocks"][0].register_load_state_dict_pre_hook(spoil)
    (message,) = load_error(model, source.state_dict(), assign=assign)
    assert message == f"blocks.0.weight must be {cls.weight_dtype}, got torch.bfloat16"


# fuse_delta


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fuse_delta_adds_and_undoes(cls: type[Layer], dtype: torch.dtype) -> None:
    layer = make_layer(cls, 272, 1160)
    weight, scale = layer.weight.data_ptr(), layer.weight_scale.data_ptr()
    before = dequantized(layer)
    delta = (torch.randn(1160, 4) @ torch.randn(4, 272) / 20).to(dtype)
    layer.fuse_delta(delta)
    tolerance = {BlockwiseFP8Linear: 0.03, BlockwiseFP6Linear: 0.04}[cls]
    assert relative_error(dequantized(layer), before + delta.double()) < tolerance
    assert relative_error(dequantized(layer), before) > 1
    layer.fuse_delta(-delta)  # what is lost is a rounding of the sum
    assert (dequantized(layer) - before).norm() < 1.5 * tolerance * (before + delta.double()).norm()
    assert layer.weight.data_ptr() == weight and layer.weight_scale.data_ptr() == scale


@both
def test_fuse_delta_takes_all_bits_of_the_delta(cls: type[Layer]) -> None:
    layer = cls.from_linear(nn.Linear(32, 16))
    layer.weight.data.zero_()
    value = 1 + 2**-12  # no number of bf16 or fp16
    with torch.no_grad():
        layer.fuse_delta(torch.full((16, 32), value, requires_grad=True))
    scale_max = {BlockwiseFP8Linear: 448, BlockwiseFP6Linear: 0.1172}[cls]
    assert layer.weight_scale.item() == pytest.approx(value / scale_max, rel=2**-22)
    assert (layer.fp8weight.float() == {448: 448, 0.1172: 0.1171875}[scale_max]).all()


@both
def test_fuse_delta_of_zeros_changes_no_value(cls: type[Layer]) -> None:
    layer = make_layer(cls, 272, 1160)
    before = dequantized(layer)
    layer.fuse_delta(torch.zeros(1160, 272))
    # A tile's largest 6-bit value is 0.1171875 of its scale, and becomes 0.1172 of the new one.
    assert relative_error(dequantized(layer), before) < {BlockwiseFP8Linear: 1e-6, BlockwiseFP6Linear: 1.1e-4}[cls]


@both
def test_fuse_delta_into_a_scale_that_cannot_be_written_changes_nothing(cls: type[Layer]) -> None:
    layer = make_layer(cls)
    state = {**layer.state_dict(), "weight_scale": torch.ones(1, 1).expand(2, 3)}  # one scale for the whole tensor
    layer.load_state_dict(state, assign=True)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        layer.fuse_delta(torch.ones(136, 272))
    assert_same_bits(layer.state_dict(), before)


@both
def test_fuse_delta_refuses(cls: type[Layer]) -> None:
    layer = make_layer(cls)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"^fuse_delta: delta must have shape \[136, 272\], got \[272, 136\]$"):
        layer.fuse_delta(torch.zeros(272, 136))
    with pytest.raises(ValueError, match="^fuse_delta: delta must be bfloat16, float16 or float32, got torch.int32$"):
        layer.fuse_delta(torch.zeros(136, 272, dtype=torch.int32))
    with pytest.raises(ValueError, match="^fuse_delta: delta must be on cpu like weight, got meta$"):
        layer.fuse_delta(torch.zeros(136, 272, device="meta"))
    with pytest.raises(ValueError, match="^fuse_delta: delta must be torch.strided, got torch.sparse_coo$"):
        layer.fuse_delta(torch.zeros(136, 272).to_sparse())
    with pytest.raises(ValueError, match="^fuse_delta: delta must not require grad .*, use torch.no_grad"):
        layer.fuse_delta(torch.zeros(136, 272, requires_grad=True))
    with pytest.raises(TypeError, match="^fuse_delta: delta must be a tensor, got int$"):
        layer.fuse_delta(3)
    assert_same_bits(layer.state_dict(), before)


# quantize_model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(64, 64)
        self.up = nn.Linear(64, 192, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(192, 64), nn.SiLU(), shared, shared) for _ in range(2)])
        self.special = nn.MultiheadAttention(64, 2)  # its out_proj is a subclass of nn.Linear
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(self.up(x))
        return self.head(x)


@pytest.mark.parametrize(("bits", "cls"), [(8, BlockwiseFP8Linear), (6, BlockwiseFP6Linear)])
def test_quantize_model(bits: int, cls: type[Layer]) -> None:
    model = Model().to(torch.bfloat16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    expected = model(x)
    special = model.special.out_proj
    assert quantize_model(model, bits, progress=False) is model
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, cls))}
    assert kinds == {
        "up": cls,
        "blocks.0.0": cls,
        "blocks.0.2": cls,
        "blocks.1.0": cls,
        "special.out_proj": type(special),
        "head": cls,
    }
    assert model.blocks[0][2] is model.blocks[0][3] is model.blocks[1][2] is model.blocks[1][3]
    assert model.special.out_proj is special and model.up.bias is None
    assert relative_error(model(x), expected) < 0.1


def test_quantize_model_filters_by_name_and_layer() -> None:
    model = Model()
    seen: dict[str, nn.Linear] = {}

    def accept(name: str, layer: nn.Linear) -> bool:
        seen[name] = layer
        return name != "head" and layer.in_features == 64

    before = dict(model.named_modules(remove_duplicate=False))
    quantize_model(model, filter=accept, progress=False)
    assert all(before[name] is layer for name, layer in seen.items())
    assert {"up", "blocks.0.0", "blocks.1.0", "blocks.0.2", "head"} <= set(seen)
    kinds = {name: type(module) for name, module in model.named_modules() if hasattr(module, "in_features")}
    assert kinds["up"] is kinds["blocks.0.2"] is BlockwiseFP8Linear
    assert kinds["head"] is kinds["blocks.0.0"] is nn.Linear


def test_quantize_model_leaves_a_shared_layer_that_one_place_excludes() -> None:
    model = Model()
    shared = model.blocks[0][2]
    quantize_model(model, filter=lambda name, layer: name != "blocks.1.3", progress=False)
    assert model.blocks[0][2] is model.blocks[1][3] is shared


def test_quantize_model_of_a_layer_and_of_none() -> None:
    layer = quantize_model(nn.Linear(16, 8), 6, filter=lambda name, layer: name == "", progress=False)
    assert isinstance(layer, BlockwiseFP6Linear)
    model = nn.Sequential(nn.ReLU())
    assert quantize_model(model) is model


@pytest.mark.parametrize(("layer", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_quantize_model_checks_all_layers_first(layer: nn.Linear, message: str) -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Sequential(layer))
    with pytest.raises(ValueError, match=f"^{re.escape(f'quantize_model: 1.0{message}; exclude it by filter')}$"):
        quantize_model(model, filter=lambda name, layer: name in ("0", "1.0"), progress=False)
    assert type(model[0]) is nn.Linear
    quantize_model(model, filter=lambda name, layer: name == "0", progress=False)
    assert type(model[0]) is BlockwiseFP8Linear and model[1][0] is layer


def test_quantize_model_refuses_arguments() -> None:
    model = nn.Sequential(nn.Linear(16, 8))
    for options, error, message in [
        ({"module": 3}, TypeError, "module must be an nn.Module, got int"),
        ({"module": nn.Linear}, TypeError, "module must be an nn.Module, got type"),
        (
            {"module": nn.Linear(8, 8)},
            ValueError,
            "module.in_features must be a positive .*, got 8; exclude it by filter",
        ),
        ({"bits": 7}, ValueError, "bits must be 8 or 6, got 7"),
        ({"bits": "8"}, ValueError, "bits must be 8 or 6, got '8'"),
        ({"filter": "0"}, TypeError, "filter must be a function of name and layer or None, got str"),
        ({"filter": lambda name, layer: None}, TypeError, "filter must return True or False, got None for 0"),
        ({"progress": None}, TypeError, "progress must be True or False, got None"),
        ({"progress": 1}, TypeError, "progress must be True or False, got 1"),
    ]:
        with pytest.raises(error, match=f"^quantize_model: {message}$"):
            quantize_model(**{"module": model, "progress": False, **options})
    with pytest.raises(ZeroDivisionError):
        quantize_model(model, filter=lambda name, layer: 1 / 0)
    assert type(model[0]) is nn.Linear


def test_quantize_model_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is then the old or the new one, and a second call takes the rest."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(2, 16)
    expected = model(x)
    quantize = BlockwiseFP8Linear.from_linear.__func__

    def interrupted(cls: type[Layer], layer: nn.Linear) -> Layer:
        if layer is third:
            raise KeyboardInterrupt
        return quantize(cls, layer)

    third = model[2]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(BlockwiseFP8Linear, "from_linear", classmethod(interrupted))
        quantize_model(model)
    assert [type(layer) for layer in model] == 2 * [BlockwiseFP8Linear] + 2 * [nn.Linear]
    quantize_model(model, progress=False)
    assert {type(layer) for layer in model} == {BlockwiseFP8Linear}
    assert relative_error(model(x), expected) < 0.1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("other", [nn.Linear(32, 32), nn.LayerNorm(32)], ids=["linear", "norm"])
def test_quantize_model_refuses_shared_parameters(device: str, name: str, other: nn.Module) -> None:
    model = nn.ModuleDict({"one": nn.Linear(32, 32), "other": nn.Sequential(copy.deepcopy(other))}).to(device)
    setattr(model["other"][0], name, getattr(model["one"], name))
    message = (
        f"^quantize_model: one.{name} must be shared with no other module, got other.0.{name}; exclude it by filter$"
    )
    with pytest.raises(ValueError, match=message):
        quantize_model(model, filter=lambda name, layer: name == "one", progress=False)
    assert type(model["one"]) is nn.Linear
    setattr(model["other"][0], name, nn.Parameter(getattr(model["one"], name).detach().clone()))
    quantize_model(model, filter=lambda name, layer: name == "one", progress=False)


def test_quantize_model_refuses_parameters_of_one_memory() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        ValueError, match="^quantize_model: 0.weight must be shared with no other module, got 1.weight; "
    ):
        quantize_model(model, progress=False)


def test_quantize_model_holds_one_layer_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    originals = [weakref.ref(layer.weight) for layer in model]
    alive = []
    quantize = BlockwiseFP8Linear.from_linear.__func__

    def counting(cls: type[Layer], layer: nn.Linear) -> Layer:
        alive.append(sum(weight() is not None for weight in originals))
        return quantize(cls, layer)

    monkeypatch.setattr(BlockwiseFP8Linear, "from_linear", classmethod(counting))
    quantize_model(model, progress=False)
    assert alive == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("bits", [8, 6])
def test_quantize_model_makes_no_more_than_it_keeps_and_one_layer(bits: int) -> None:
    model = nn.Sequential(*(make_linear(256, 512) for _ in range(4)))
    layer = sum(p.nbytes for p in model[0].parameters())
    with LiveBytes() as live:
        quantize_model(model, bits, progress=False)
    assert live.peak <= sum(p.nbytes for p in model.parameters()) + layer / 2  # 6 bits: the e4m3 values of one


def test_quantize_model_leaves_lazy_layers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(16))
    lazy = quantize_model(model, progress=False)[1]
    assert type(model[0]) is BlockwiseFP8Linear and type(lazy) is nn.LazyLinear


def test_quantize_model_shows_a_bar_if_rich_is_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_model(nn.Sequential(nn.Linear(16, 8)))
    shown = capfd.readouterr()
    assert shown.out == "" and "Quantizing" in shown.err
    quantize_model(nn.Sequential(nn.Linear(16, 8)), progress=False)
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # importing it raises ImportError
    model = quantize_model(nn.Sequential(nn.Linear(16, 8)))
    assert isinstance(model[0], BlockwiseFP8Linear)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("bits", [8, 6])
def test_a_quantized_model_runs_in_a_fresh_process(bits: int, tmp_path: Path) -> None:
    model = quantize_model(Model().to(torch.bfloat16), bits, progress=False)
    del model.special
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    state = {key: value for key, value in model.state_dict().items() if ".3." not in key}
    state = {key: value for key, value in state.items() if not key.startswith("blocks.1.2.")}  # shared with blocks.0
    save_file(state, tmp_path / "model.safetensors")
    save_file({"x": x, "out": model(x).contiguous()}, tmp_path / "run.safetensors")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(model, tmp_path / "model.pt")
    program = f"""
import sys
import torch
from safetensors.torch import load_file
from test_linear import Model
from ltx_kernels.blockwise import quantize_model

with torch.device("meta"):
    model = Model().to(torch.bfloat16)
    del model.special
quantize_model(model, {bits}, progress=False)
result = model.load_state_dict(load_file(sys.argv[1] + "/model.safetensors"), strict=False, assign=True)
shared = ("blocks.0.3", "blocks.1.2", "blocks.1.3")
assert result.unexpected_keys == [] and all(key.startswith(shared) for key in result.missing_keys)
run = load_file(sys.argv[1] + "/run.safetensors")
assert torch.equal(model(run["x"]), run["out"])
model.to("meta")
model.load_state_dict(torch.load(sys.argv[1] + "/state.pt", mmap=True, weights_only=True), assign=True)
assert torch.equal(model(run["x"]), run["out"])
whole = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
assert whole.blocks[0][2] is whole.blocks[1][3] and torch.equal(whole(run["x"]), run["out"])
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, cwd=Path(__file__).parent)


def test_fp6_weights_unpack_to_what_was_packed() -> None:
    layer = make_layer(BlockwiseFP6Linear)
    assert_same_bits(fp6_unpack_tensor(layer.weight, 272).view(FP8), layer.fp8weight)
