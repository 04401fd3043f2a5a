"""The public interface: names, signatures and defaults as literals, and the calls that ltx-core makes.

What is written here is what callers rely on: a change of it breaks them.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from importlib import metadata

import pytest
import torch
from cases.quantize import BF16, FP32
from reference import assert_pair, assert_quantized, assert_rounded_once
from torch import Tensor, nn

import ltx_kernels
from ltx_kernels import All2All, All2AllMismatch, All2AllTimeout, LocalGroup, __main__, blockwise
from ltx_kernels.blockwise import functional, linear, triton_ops

OP = "adanorm_quantize"  # a device that has code for one of the quantizing ops has it for all

FP8 = torch.float8_e4m3fn
HEADS, HEAD_DIM = 4, 64
HIDDEN = HEADS * HEAD_DIM

NORM_ROPE = "(x, cos_freqs, sin_freqs, weights=None, out_fp8=False, *, eps=1e-06)"
NORM_ROPE_QK = (
    "(q, k, cos_freqs, sin_freqs, q_weights=None, k_weights=None, out_fp8=False, *, "
    "k_cos_freqs=None, k_sin_freqs=None, eps=1e-06)"
)
LAYER = "(in_features, out_features, bias=True, device=None, dtype=None)"

FUNCTIONAL = {
    "rms_norm_rope": NORM_ROPE,
    "rms_norm_split_rope": NORM_ROPE,
    "rms_norm_rope_qk": NORM_ROPE_QK,
    "rms_norm_split_rope_qk": NORM_ROPE_QK,
    "blockwise_quantize": "(x, *, gelu=None)",
    "blockwise_quantize_triton": "(x)",
    "blockwise_quantize_gelu_triton": "(x)",
    "blockwise_dequantize": "(pair)",
    "blockwise_dequantize_triton": "(q, scales)",
    "blockwise_dequantize_weights": "(q, scales)",
    "blockwise_quantize_weights": "(w, block_size=128, scale_max=448.0)",
    "fp8_blockwise_quantize_weights_torch": "(w, block_size=128)",
    "fp6_blockwise_quantize_weights_torch": "(w, block_size=128)",
    "blockwise_quantize_adanorm_triton": (
        "(x, w, norm_scale, norm_shift, out_dtype=torch.float8_e4m3fn, hd_scale=None)"
    ),
    "blockwise_quantize_rms_fma_triton": "(x, y, z)",
    "rms_fma_triton": "(x, y, z)",
    "gated_attention_triton": "(x, gate_logits, quantize=True)",
    "fp6_pack_tensor": "(x)",
    "fp6_unpack_tensor": "(x, original_n)",
}
LINEAR = {
    "blockwise_fp8_gemm": "(a, b, bias, use_fast_accum, *, out_dtype=torch.bfloat16, residual=None)",
    "BlockwiseFP8Linear": LAYER,
    "BlockwiseFP6Linear": LAYER,
    "quantize_model": "(module, bits=8, filter=None, progress=True)",
    "gemm_config": "(m, n, k, num_sms=None, capability=None)",
}
LAYER_METHODS = {
    "from_linear": "(linear, transform_weights=True)",
    "forward": "(self, x)",
    "fuse_delta": "(self, delta)",
}
BACKEND_CHOICE = {"set_backend": "(op, backend)", "get_backend": "(op, device)"}

ALL2ALL = {
    "__init__": (
        "(self, rank, world_size, seqlen, hidden_dim, num_sms, tensor_dtype, group=None, timeout_seconds=None, *, "
        "transport='auto', allgather=False, rank_heads=None)"
    ),
    "set_rank_tokens": "(self, rank_tokens)",
    "set_timeout_seconds": "(self, seconds)",
    "send_recv_heads": "(self, x, *, copy_out=False)",
    "send_recv_qkv": "(self, q, k, v, *, copy_out=False)",
    "gather_heads": "(self, x, *, copy_out=False)",
    "allgather": "(self, x, *, copy_out=False)",
    "check": "(self)",
    "destroy": "(self)",
    "local_group": (
        "(world_size, seqlen, hidden_dim, num_sms, tensor_dtype, *, devices=None, timeout_seconds=None, rank_heads=None)"
    ),
}

BLOCKWISE = {
    "BlockwiseFP6Linear",
    "BlockwiseFP8Linear",
    "blockwise_dequantize",
    "blockwise_fp8_gemm",
    "blockwise_quantize",
    "blockwise_quantize_adanorm_triton",
    "blockwise_quantize_rms_fma_triton",
    "fp6_blockwise_quantize_weights_torch",
    "fp6_pack_tensor",
    "fp6_unpack_tensor",
    "fp8_blockwise_quantize_weights_torch",
    "gated_attention_triton",
    "gemm_config",
    "get_backend",
    "quantize_model",
    "rms_norm_rope",
    "rms_norm_rope_qk",
    "rms_norm_split_rope",
    "rms_norm_split_rope_qk",
    "set_backend",
}
TRITON_OPS = {
    "blockwise_dequantize_triton",
    "blockwise_quantize_adanorm_triton",
    "blockwise_quantize_gelu_triton",
    "blockwise_quantize_rms_fma_triton",
    "blockwise_quantize_triton",
    "gated_attention_triton",
    "rms_fma_triton",
}
TORCH_OPS = {
    "adanorm_quantize",
    "dequantize",
    "dequantize_weights",
    "fp6_pack",
    "fp6_unpack",
    "fp8_gemm",
    "gated_attention",
    "quantize",
    "quantize_weights",
    "rms_fma",
    "rms_fma_quantize",
    "rms_norm_rope",
    "rms_norm_rope_qk",
    "rms_norm_split_rope",
    "rms_norm_split_rope_qk",
}
EXCHANGE_OPS = {"send_recv_heads", "send_recv_qkv", "gather_heads", "allgather"}


def signature(function: Callable[..., object]) -> str:
    """Names, order, kinds and defaults of the parameters, without annotations."""
    whole = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in whole.parameters.values()]
    return str(whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize(
    ("owner", "signatures"),
    [
        (functional, FUNCTIONAL),
        (linear, LINEAR),
        (linear.BlockwiseFP8Linear, LAYER_METHODS),
        (linear.BlockwiseFP6Linear, LAYER_METHODS),
        (blockwise, BACKEND_CHOICE),
        (All2All, ALL2ALL),
        (LocalGroup, {name: text for name, text in ALL2ALL.items() if name not in ("__init__", "local_group")}),
    ],
    ids=["functional", "linear", "fp8_layer", "fp6_layer", "backend_choice", "all2all", "local_group"],
)
def test_signatures(owner: object, signatures: dict[str, str]) -> None:
    assert {name: signature(getattr(owner, name)) for name in signatures} == signatures


def test_names_of_each_module() -> None:
    assert set(blockwise.__all__) == BLOCKWISE
    assert set(triton_ops.__all__) == TRITON_OPS
    for name in BLOCKWISE - BACKEND_CHOICE.keys():
        assert getattr(blockwise, name) is getattr(functional if name in FUNCTIONAL else linear, name)
    for name in TRITON_OPS:
        assert signature(getattr(triton_ops, name)) == FUNCTIONAL[name]
    assert functional.FP8_SCALE_MAX == 448.0 and functional.FP6_SCALE_MAX == 0.1172


def test_properties_of_the_layers() -> None:
    for cls in (blockwise.BlockwiseFP8Linear, blockwise.BlockwiseFP6Linear):
        assert all(isinstance(inspect.getattr_static(cls, name), property) for name in ("fp8weight", "backend"))
        assert issubclass(cls, nn.Module) and not issubclass(cls, nn.Linear)


def test_exchange_between_ranks() -> None:
    for cls in (All2All, LocalGroup):
        assert all(isinstance(inspect.getattr_static(cls, name), property) for name in ("transport", "fallback_reason"))
    assert issubclass(All2AllTimeout, RuntimeError) and issubclass(All2AllMismatch, RuntimeError)
    assert all(hasattr(torch.ops.ltx_kernels, name) for name in EXCHANGE_OPS)


def test_extension_modules_and_torch_ops() -> None:
    for name in ("ops_cpp", "blockwise_cpp", "all2all_cpp"):
        assert getattr(ltx_kernels, name) is importlib.import_module(f"ltx_kernels.{name}")
    assert all(hasattr(torch.ops.ltx_kernels, name) for name in TORCH_OPS)
    assert isinstance(ltx_kernels.__version__, str)


def test_set_backend_knows_each_op_and_linear() -> None:
    for op in sorted(TORCH_OPS) + ["linear"]:
        blockwise.set_backend(op, "cpu")
        assert blockwise.get_backend(op, "cpu") == "cpu"
        blockwise.set_backend(op, None)
    for op in ("nonsense", ["quantize"], None):
        got = re.escape(repr(op))
        with pytest.raises(ValueError, match=f"^set_backend: op must be one of rms_norm_rope, .*, got {got}$"):
            blockwise.set_backend(op, "cpu")
        with pytest.raises(ValueError, match=f"^get_backend: op must be one of rms_norm_rope, .*, got {got}$"):
            blockwise.get_backend(op, "cpu")
    for device in ("moon", None, 2.5):
        with pytest.raises(ValueError, match=f"^get_backend: device must be one that torch knows, got {device!r}$"):
            blockwise.get_backend("quantize", device)


def test_a_forced_backend_holds_in_a_compiled_graph() -> None:
    compiled = torch.compile(blockwise.blockwise_quantize, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, HIDDEN)
    expected = blockwise.blockwise_quantize(x)
    blockwise.set_backend("quantize", "cpu")
    try:
        q, scales = compiled(x)
    finally:
        blockwise.set_backend("quantize", None)
    assert torch.equal(q.float(), expected[0].float()) and torch.equal(scales, expected[1])


def test_command_line() -> None:
    parse = __main__._parser().parse_args
    assert vars(parse(["info"])) == {"command": "info", "json": False, "self_test": False}
    assert vars(parse(["info", "--json", "--self-test"])) == {"command": "info", "json": True, "self_test": True}
    assert vars(parse(["demo"])) == {"command": "demo", "tokens": None, "save": None}
    demo = parse(["demo", "--tokens", "7", "--save", "out.png"])
    assert demo.tokens == 7 and str(demo.save) == "out.png"
    assert metadata.metadata("ltx-kernels").get_all("Provides-Extra") == ["demo"]


# The calls of ltx-core, as it makes them: positional unless named, in inference mode.


def modulation(tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """shift, scale, gate, ...: strided views of [batch, tokens, 6, hidden]."""
    return torch.randn(2, tokens, 6, HIDDEN, device=device).to(dtype).unbind(dim=2)


def double(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().cpu().double() for tensor in tensors]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rms_norm_split_rope(dtype: torch.dtype, device: str) -> None:
    norm = nn.RMSNorm(HIDDEN, dtype=dtype, device=device)
    nn.init.normal_(norm.weight)
    q = torch.randn(2, 5, HIDDEN, device=device).to(dtype)
    angles = torch.rand(2, 5, HEADS, HEAD_DIM // 2, device=device) * 6.3
    pe = tuple(table.to(dtype).swapaxes(1, 2) for table in (angles.cos(), angles.sin()))
    with torch.inference_mode():
        out = blockwise.rms_norm_split_rope(q, pe[0], pe[1], norm.weight, False)
    assert out.dtype == BF16 and out.shape == q.shape
    x, cos, sin, weight = double(q, *pe, norm.weight)
    first, second = nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6).view(2, 5, HEADS, -1).swapaxes(1, 2).chunk(2, -1)
    straight = torch.cat([first * cos, second * cos], dim=-1).swapaxes(1, 2).flatten(2)
    crossed = torch.cat([-second * sin, first * sin], dim=-1).swapaxes(1, 2).flatten(2)
    assert_rounded_once(out, straight + crossed, torch.maximum(straight.abs(), crossed.abs()))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rms_norm_rope(dtype: torch.dtype, device: str) -> None:
    norm = nn.RMSNorm(HIDDEN, dtype=dtype, device=device)
    nn.init.normal_(norm.weight)
    q = torch.randn(2, 5, HIDDEN, device=device).to(dtype)
    angles = torch.rand(2, 5, HIDDEN // 2, device=device).repeat_interleave(2, dim=-1) * 6.3
    pe = angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.inference_mode():
        out = blockwise.rms_norm_rope(q, pe[0], pe[1], norm.weight, False)
    assert out.dtype == BF16 and out.shape == q.shape
    x, cos, sin, weight = double(q, *pe, norm.weight)
    v = nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6)
    straight, crossed = v * cos, torch.stack([-v[..., 1::2], v[..., ::2]], dim=-1).flatten(-2) * sin
    assert_rounded_once(out, straight + crossed, torch.maximum(straight.abs(), crossed.abs()))


@pytest.mark.parametrize("tokens", [1, 5], ids=["for_all_tokens", "for_each_token"])
def test_adanorm(tokens: int, device: str) -> None:
    x = torch.randn(2, 5, HIDDEN, device=device).bfloat16()
    shift, scale, *_ = modulation(tokens, BF16, device)
    with torch.inference_mode():
        pair = blockwise.blockwise_quantize_adanorm_triton(x, None, scale, shift, torch.float8_e4m3fn, 1.0)
    assert isinstance(pair, tuple)
    wide_x, wide_scale, wide_shift = double(x, scale, shift)
    product = nn.functional.rms_norm(wide_x, (HIDDEN,), None, 1e-5) * (1 + wide_scale)
    assert_quantized(pair, product + wide_shift, torch.maximum(product.abs(), wide_shift.abs().expand_as(product)))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_add_and_norm_in_place_then_dequantize(dtype: torch.dtype, device: str) -> None:
    x, y = torch.randn(2, 5, HIDDEN, device=device).to(dtype), torch.randn(2, 5, HIDDEN, device=device).bfloat16()
    *_, gate = modulation(1, BF16, device)
    exact_x = double(x)[0] + double(y)[0] * double(gate)[0]
    with torch.inference_mode():
        pair = blockwise.blockwise_quantize_rms_fma_triton(x, y, gate)
        normed = blockwise.blockwise_dequantize(pair)
    assert isinstance(pair, tuple)
    assert_rounded_once(x, exact_x, exact_x.abs())
    exact = nn.functional.rms_norm(double(x)[0], (HIDDEN,), None, 1e-6)
    assert_quantized(pair, exact, exact.abs())
    assert normed.dtype == BF16 and normed.shape == x.shape
    q, scales = double(pair[0].float(), pair[1])
    blocks = scales.repeat_interleave(128, dim=1)[:, :HIDDEN].view(x.shape)
    assert_rounded_once(normed, q * blocks, (q * blocks).abs())


def test_gated_attention_into_a_layer(device: str) -> None:
    attn_out = torch.randn(2, 5, HIDDEN, device=device).bfloat16()
    logits = torch.randn(2, 5, HEADS, device=device).bfloat16()
    layer = blockwise.BlockwiseFP8Linear.from_linear(nn.Linear(HIDDEN, 136, device=device).to(BF16))
    with torch.inference_mode():
        pair = blockwise.gated_attention_triton(attn_out, logits)
        out = layer(pair)
    assert isinstance(pair, tuple)
    x, gates = double(attn_out, logits)
    gated = (x.unflatten(-1, (HEADS, -1)) * 2 * gates.sigmoid()[..., None]).flatten(-2)
    assert_quantized(pair, gated, x.abs())
    assert out.dtype == BF16 and out.shape == (2, 5, 136)
    weight = double(layer.fp8weight.float())[0]
    weight = weight * double(layer.weight_scale)[0].repeat_interleave(128, 0)[:136].repeat_interleave(128, 1)
    exact = gated @ weight.T + double(layer.bias)[0]
    assert (double(out)[0] - exact).norm() < 0.04 * exact.norm()


def test_weights_with_a_leading_dimension_are_dequantized_by_row_scales(device: str) -> None:
    w, s = blockwise.fp8_blockwise_quantize_weights_torch(torch.randn(256, 384, device=device).bfloat16())
    with torch.inference_mode():
        out = blockwise.blockwise_dequantize((w[None], s.repeat_interleave(128, 0)))
    assert out.dtype == BF16 and out.shape == (1, 256, 384)
    q, scales = double(w.float(), s)
    exact = q * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert_rounded_once(out[0], exact, exact.abs())


def test_weights_in_8_and_6_bits(device: str) -> None:
    w = torch.randn(136, 272, device=device).bfloat16()
    with torch.inference_mode():
        q, scales = blockwise.fp8_blockwise_quantize_weights_torch(w)
        low_q, low_scales = blockwise.fp6_blockwise_quantize_weights_torch(w)
        packed = blockwise.fp6_pack_tensor(low_q)
        of_bytes = blockwise.fp6_pack_tensor(low_q.view(torch.uint8))
        unpacked = blockwise.fp6_unpack_tensor(packed, 272).view(FP8)
    assert q.dtype == low_q.dtype == FP8 and scales.shape == low_scales.shape == (2, 3)
    assert packed.dtype == torch.uint8 and packed.shape == (136, 204) and torch.equal(packed, of_bytes)
    assert torch.equal(unpacked.view(torch.uint8), low_q.view(torch.uint8))
    for values, tiles in ((q, scales), (unpacked, low_scales)):
        wide, spread = double(values.float(), tiles)
        dequantized = wide * spread.repeat_interleave(128, 0)[:136].repeat_interleave(128, 1)[:, :272]
        assert (dequantized - double(w)[0]).norm() < 0.03 * double(w)[0].norm()


def test_layers_made_on_meta_are_loaded_later(device: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"kept": nn.Linear(HIDDEN, 136), "dropped": nn.Linear(HIDDEN, 136)})
    for name in ("kept", "dropped"):
        model[name] = blockwise.BlockwiseFP8Linear.from_linear(model[name], False)
    del model["dropped"].weight, model["dropped"].bias
    full = nn.Linear(HIDDEN, 136, device=device).to(BF16)
    weight, scale = blockwise.fp8_blockwise_quantize_weights_torch(full.weight.detach())
    sd = {"kept.weight": weight, "kept.weight_scale": scale, "kept.bias": full.bias.detach()}
    model.load_state_dict(sd, strict=False, assign=True)
    assert model["kept"].fp8weight.data_ptr() == weight.data_ptr()
    assert model["kept"].weight_scale.dtype == model["kept"].bias.dtype == FP32
    x = torch.randn(2, 5, HIDDEN, device=device).bfloat16()
    with torch.inference_mode():
        out = model["kept"](x)
        expected = double(full(x))[0]
    assert (double(out)[0] - expected).norm() < 0.06 * expected.norm()


def test_one_compiled_graph_for_all_token_counts() -> None:
    layer = blockwise.BlockwiseFP8Linear.from_linear(nn.Linear(HIDDEN, HIDDEN).to(BF16))

    def part_of_a_block(x: Tensor, scale: Tensor, shift: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pair = blockwise.blockwise_quantize_adanorm_triton(x, None, scale, shift, torch.float8_e4m3fn, 1.0)
        return blockwise.rms_norm_split_rope(layer(pair), cos, sin, None, False)

    compiled = torch.compile(part_of_a_block, backend="aot_eager", fullgraph=True)
    for tokens in (5, 7, 130):
        x = torch.randn(1, tokens, HIDDEN).bfloat16()
        shift, scale, *_ = (part[:1] for part in modulation(1, BF16, "cpu"))
        cos, sin = (torch.randn(1, tokens, HEADS, HEAD_DIM // 2).bfloat16().swapaxes(1, 2) for _ in range(2))
        torch._dynamo.mark_dynamic(x, 1)
        for table in (cos, sin):
            torch._dynamo.mark_dynamic(table, 2)
        with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x, scale, shift, cos, sin), part_of_a_block(x, scale, shift, cos, sin))


def test_pairs_have_the_layout_that_the_product_reads(device: str) -> None:
    x = torch.randn(2, 3, 200, device=device)
    with torch.inference_mode():
        for pair in (blockwise.blockwise_quantize(x), triton_ops.blockwise_quantize_gelu_triton(x)):
            assert isinstance(pair, tuple)
            assert_pair(pair, x.shape)


def test_exchange_of_heads() -> None:
    all2all = ltx_kernels.All2All(
        rank=0, world_size=1, seqlen=7, hidden_dim=HIDDEN, num_sms=16, tensor_dtype=BF16, group=None
    )
    with pytest.raises(ValueError):
        all2all.set_timeout_seconds(-1.0)
    all2all.set_timeout_seconds(None)

    def around_attention(x: Tensor, copy_out: bool) -> Tensor:
        return all2all.gather_heads(all2all.send_recv_heads(x, copy_out=copy_out), copy_out=copy_out)

    compiled = torch.compile(around_attention, backend="aot_eager", fullgraph=True)
    for tokens in (5, 7):
        all2all.set_rank_tokens([tokens])
        x = torch.randn(1, tokens, HEADS, HEAD_DIM).bfloat16()
        torch._dynamo.mark_dynamic(x, 1)
        with torch.inference_mode():
            assert torch.equal(around_attention(x, False), x) and torch.equal(around_attention(x, True), x)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert torch.equal(compiled(x, False), x)
    all2all.destroy()
