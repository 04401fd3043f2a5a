"""A tensor on "meta" among others, with which torch runs an op's fake and not its backend, and None in its place."""

import pytest
import torch
from torch import Tensor

from ltx_kernels import All2All, blockwise_cpp, ops_cpp  # noqa: F401  (registers the ops)
from ltx_kernels.blockwise import BlockwiseFP6Linear, BlockwiseFP8Linear

FP8 = torch.float8_e4m3fn
X = torch.ones(2, 3, 16)
ROW = torch.ones(16)
SPLIT_TABLE = torch.ones(1, 2, 3, 4)
Q, SCALES = torch.zeros(2, 16).to(FP8), torch.ones(2, 1)
B, B_SCALES = torch.zeros(8, 16).to(FP8), torch.ones(1, 1)

SPLIT = {"cos_freqs": SPLIT_TABLE, "sin_freqs": SPLIT_TABLE}
ROPE = {"cos_freqs": X, "sin_freqs": X}
QK = {"q": X, "k": X, "q_weights": ROW, "k_weights": ROW, "out_fp8": False, "eps": 1e-6}
BIAS, OUT = {"bias": torch.ones(8), "residual": torch.ones(2, 8)}, {"use_fast_accum": False, "out_dtype": torch.float32}
HEADS = torch.ones(1, 2, 3, 4)
ONE_RANK = All2All(0, 1, 2, 12, 1, torch.float32, transport="shm")
ONE_RANK.set_rank_tokens([2])
STATE = {"state": torch.zeros(1, dtype=torch.int64), "communicator": ONE_RANK._id}
EXCHANGE = {**STATE, "out_tokens": 2, "out_heads": 3, "copy_out": True}
CALLS = {
    "rms_norm_rope": {"x": X, **ROPE, "weights": ROW, "out_fp8": False, "eps": 1e-6},
    "rms_norm_rope_qk": {**QK, **ROPE, "k_cos_freqs": X, "k_sin_freqs": X},
    "rms_norm_split_rope": {"x": X, **SPLIT, "weights": ROW, "out_fp8": False, "eps": 1e-6},
    "rms_norm_split_rope_qk": {**QK, **SPLIT, "k_cos_freqs": SPLIT_TABLE, "k_sin_freqs": SPLIT_TABLE},
    "dequantize": {"q": Q, "scales": SCALES},
    "dequantize_weights": {"q": Q, "scales": B_SCALES},
    "adanorm_quantize": {"x": X, "w": ROW, "norm_scale": X, "norm_shift": X},
    "rms_fma": {"x": X, "y": X, "z": ROW},
    "rms_fma_quantize": {"x": X, "y": X, "z": ROW},
    "gated_attention": {"x": X, "gate_logits": X, "quantize": True},
    "send_recv_heads": {"x": HEADS, **EXCHANGE},
    "send_recv_qkv": {"q": HEADS, "k": HEADS, "v": HEADS, **EXCHANGE},
    "gather_heads": {"x": HEADS, **EXCHANGE},
    "allgather": {"x": HEADS, **EXCHANGE},
    "fp8_gemm": {"a": Q, "a_scales": SCALES, "b": B, "b_scales": B_SCALES, **BIAS, **OUT},
}


@pytest.mark.parametrize("op", CALLS)
def test_one_tensor_on_meta_is_an_error(op: str) -> None:
    first, *others = [name for name, value in CALLS[op].items() if isinstance(value, Tensor)]
    call = getattr(torch.ops.ltx_kernels, op)
    for name in others:
        value = CALLS[op][name]
        assert isinstance(value, Tensor)
        with pytest.raises(RuntimeError) as error:
            call(**{**CALLS[op], name: value.to("meta")})
        assert str(error.value) == f"{op}: {name} must be on cpu like {first}, got meta"


@pytest.mark.parametrize("op", CALLS)
def test_none_in_the_place_of_a_tensor(op: str, capfd: pytest.CaptureFixture[str]) -> None:
    call = getattr(torch.ops.ltx_kernels, op).default
    arguments = [
        argument for argument in call._schema.arguments if argument.type.isSubtypeOf(torch._C.TensorType.get())
    ]
    first, *others = [argument.name for argument in arguments]
    for name in others:
        with pytest.raises(RuntimeError, match=f"^{op}: {name} must be on cpu like {first}, got None"):
            call(**{**CALLS[op], name: None})
    with pytest.raises(RuntimeError, match=f"^{op}: {first} must be on a CPU or a CUDA device, got None"):
        call(**{**CALLS[op], first: None})
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("layer", [BlockwiseFP8Linear, BlockwiseFP6Linear])
def test_layer_that_is_not_loaded_yet(layer: type[BlockwiseFP8Linear | BlockwiseFP6Linear]) -> None:
    with pytest.raises(RuntimeError, match="^linear: x must be on meta like weight, got cpu$"):
        layer(16, 8, device="meta")(X)
