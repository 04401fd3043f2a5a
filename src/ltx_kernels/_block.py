"""One video block of LTX-2, self-attention and feed-forward, as the steps that this package runs it in.

`video_block` reads as the model does and runs nothing itself: it hands each step with its arguments to `do`, so the
same description serves the kernels, whatever is measured about them, and full precision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, pi
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ltx_kernels import _exact
from ltx_kernels.blockwise import functional, linear

HIDDEN = 4096
HEADS = 32
FFN = 16384

# A clip of 121 frames of 1216 x 704 pixels: its latent grid (time, height, width), 13,376 tokens.
FULL_GRID = (16, 22, 38)
FULL_TOKENS = 16 * 22 * 38

FRAMES_PER_LATENT = 8
PIXELS_PER_LATENT = 32
FRAMES_PER_SECOND = 24

ROPE_THETA = 10000.0
ROPE_MAX = (20.0, 2048.0, 2048.0)  # seconds, pixels, pixels: the positions that the angles are scaled to


QuantizedLayer = linear.BlockwiseFP8Linear | linear.BlockwiseFP6Linear
Layer = TypeVar("Layer", nn.Linear, QuantizedLayer)


@dataclass(frozen=True)
class Step:
    """A step of the block.

    Arguments and results are tensors, (q, scales) tuples, Linear layers; a list holds several results.
    """

    title: str
    op: str  # the op behind it, or "attention", which is torch's own
    run: Callable[..., Any]  # with the kernels
    exact: Callable[..., Any]  # the formula, on plain numbers; a layer is a (weight, bias) tuple there
    computing: float = 0.0  # relative error that a right result may have before it is rounded
    writes: int | None = None  # the argument that the step updates in place


def _run_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _run_add_norm(x: Tensor, y: Tensor, gate: Tensor) -> list[Any]:
    normed = functional.blockwise_quantize_rms_fma_triton(x, y, gate)
    return [x, normed]


def _exact_add_norm(x: Tensor, y: Tensor, gate: Tensor) -> list[Tensor]:
    x = x + y * gate
    return [x, _exact.rms_norm(x)]


def _run_down(act: tuple[Tensor, Tensor], layer: QuantizedLayer, residual: Tensor) -> Tensor:
    rows = act[0].flatten(0, -2), act[1]
    weight = layer.weight, layer.weight_scale
    out = linear.blockwise_fp8_gemm(rows, weight, layer.bias, False, residual=residual.flatten(0, -2))
    return out.view(residual.shape)


# Tensor cores keep about 13 bits of the sums inside a block of 128: at most 6e-4 on uniform data of one sign.
PRODUCT = 6e-4
# torch's attention rounds the softmax weights to bf16 before their product with v.
ATTENTION = 2.0**-9

ADANORM = Step(
    "Adanorm, quantize",
    "adanorm_quantize",
    run=lambda x, scale, shift: functional.blockwise_quantize_adanorm_triton(x, None, scale, shift),
    exact=lambda x, scale, shift: _exact.adanorm(x, None, scale, shift),
)
QKV = Step("QKV, gate product", "fp8_gemm", lambda x, layer: layer(x), lambda x, layer: F.linear(x, *layer), PRODUCT)
NORM_ROPE = Step(
    "RMS norm, split rope",
    "rms_norm_split_rope_qk",
    run=lambda q, k, cos, sin, q_weights, k_weights: list(
        functional.rms_norm_split_rope_qk(q, k, cos, sin, q_weights, k_weights)
    ),
    exact=lambda q, k, cos, sin, q_weights, k_weights: [
        _exact.split_rope(_exact.rms_norm(x, weights), cos, sin) for x, weights in ((q, q_weights), (k, k_weights))
    ],
)
ATTEND = Step(
    "Attention", "attention", _run_attention, lambda q, k, v: _exact.attention(q, k, v, HEADS), computing=ATTENTION
)
GATE = Step("Gate heads, quantize", "gated_attention", functional.gated_attention_triton, _exact.gate_heads)
OUT = Step("Output product", "fp8_gemm", QKV.run, QKV.exact, PRODUCT)
ADD_NORM = Step("Add, norm, quantize", "rms_fma_quantize", _run_add_norm, _exact_add_norm, writes=0)
UP = Step("FFN up product", "fp8_gemm", QKV.run, QKV.exact, PRODUCT)
GELU = Step(
    "GELU, quantize", "quantize", lambda x: functional.blockwise_quantize(x, gelu="tanh"), lambda x: _exact.gelu(x)
)
DOWN = Step(
    "FFN down, residual", "fp8_gemm", _run_down, lambda x, layer, residual: F.linear(x, *layer) + residual, PRODUCT
)
STEPS = (ADANORM, QKV, NORM_ROPE, ATTEND, GATE, OUT, ADD_NORM, UP, GELU, DOWN)


@dataclass(frozen=True)
class Weights(Generic[Layer]):
    qkv: Layer  # q, k, v and the gate's logits stacked: one product
    out: Layer
    up: Layer
    down: Layer
    q_norm: Tensor
    k_norm: Tensor

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.qkv, self.out, self.up, self.down


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [batch, tokens, HIDDEN]
    scale: Tensor  # [batch, 1, HIDDEN], as are the next two: what the diffusion time step makes of the block
    shift: Tensor
    gate: Tensor
    cos: Tensor  # [1, HEADS, tokens, HIDDEN / HEADS / 2]
    sin: Tensor


def video_block(do: Callable[..., Any], inputs: Inputs, weights: Weights[Any]) -> Any:
    normed = do(ADANORM, inputs.x, inputs.scale, inputs.shift)
    q, k, v, gate_logits = do(QKV, normed, weights.qkv).split([HIDDEN, HIDDEN, HIDDEN, HEADS], dim=-1)
    q, k = do(NORM_ROPE, q, k, inputs.cos, inputs.sin, weights.q_norm, weights.k_norm)
    attended = do(ATTEND, q, k, v)
    gated = do(GATE, attended, gate_logits)
    y = do(OUT, gated, weights.out)
    x, normed = do(ADD_NORM, inputs.x, y, inputs.gate)
    act = do(GELU, do(UP, normed, weights.up))
    return do(DOWN, act, weights.down, x)


def latent_positions(grid: tuple[int, int, int]) -> Tensor:
    """Middle of each latent of a (time, height, width) grid: [tokens, 3] seconds and pixels, width running fastest.

    The first latent in time holds one frame, every later one eight.
    """
    frames, height, width = (torch.arange(size, dtype=torch.float64) for size in grid)
    end = frames * FRAMES_PER_LATENT + 1
    start = (end - FRAMES_PER_LATENT).clamp(min=0)
    seconds = (start + end) / 2 / FRAMES_PER_SECOND
    return torch.cartesian_prod(seconds, (height + 0.5) * PIXELS_PER_LATENT, (width + 0.5) * PIXELS_PER_LATENT)


def rope_tables(positions: Tensor, hidden: int = HIDDEN, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    """cos and sin of LTX-2's rotary embedding for [tokens, 3] positions: [1, heads, tokens, hidden / heads / 2] each.

    Angle j of an axis is ``pi/2 * theta**linspace(0, 1, hidden // 6)[j] * (2 * position / max - 1)``. A token's
    hidden/2 entries go by j, then axis; what 3 * (hidden // 6) leaves over comes first and turns nothing.
    """
    frequencies = pi / 2 * ROPE_THETA ** torch.linspace(0, 1, hidden // 6, dtype=torch.float64)
    centred = 2 * positions / torch.tensor(ROPE_MAX, dtype=torch.float64) - 1
    angles = (frequencies[:, None] * centred[:, None, :]).flatten(1)
    angles = F.pad(angles, (hidden // 2 - angles.shape[1], 0))
    angles = angles.unflatten(1, (heads, -1)).swapaxes(0, 1)[None]
    return angles.cos(), angles.sin()


def smallest_grid(tokens: int) -> tuple[int, int, int]:
    """The proportions of FULL_GRID, no larger than needed to hold so many tokens."""
    scale = (tokens / FULL_TOKENS) ** (1 / 3)
    frames, height, width = (ceil(scale * size) for size in FULL_GRID)
    return frames, height, width


def draw_inputs(tokens: int) -> Inputs:
    """Inputs of a fixed seed, in the precision of the model (bf16), with tables in float64."""
    draw = _Draw(seed=1)
    cos, sin = rope_tables(latent_positions(smallest_grid(tokens))[:tokens])
    return Inputs(
        x=draw(1, tokens, HIDDEN),
        scale=draw(1, 1, HIDDEN, std=0.2),
        shift=draw(1, 1, HIDDEN, std=0.2),
        gate=draw(1, 1, HIDDEN, std=0.5),
        cos=cos,
        sin=sin,
    )


def draw_weights() -> Weights[nn.Linear]:
    """bf16 weights of a fixed seed, scaled so that a product keeps the size of its input."""
    draw = _Draw(seed=0)

    def layer(in_features: int, out_features: int) -> nn.Linear:
        made = nn.Linear(in_features, out_features, device="meta", dtype=torch.bfloat16)
        made.weight = nn.Parameter(draw(out_features, in_features, std=in_features**-0.5), requires_grad=False)
        made.bias = nn.Parameter(draw(out_features, std=0.1), requires_grad=False)
        return made

    return Weights(
        qkv=layer(HIDDEN, 3 * HIDDEN + HEADS),
        out=layer(HIDDEN, HIDDEN),
        up=layer(HIDDEN, FFN),
        down=layer(FFN, HIDDEN),
        q_norm=draw(HIDDEN, std=0.25, mean=1.0),
        k_norm=draw(HIDDEN, std=0.25, mean=1.0),
    )


class _Draw:
    """Normal numbers of a seed, drawn on the CPU: the same on every machine."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.empty(shape).normal_(mean, std, generator=self.generator).to(torch.bfloat16)
