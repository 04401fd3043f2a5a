"""What all tests compare with: float64 compositions in torch, and the error bound of docs/numerics.md."""

import torch
from torch import Tensor

# dtype: (mantissa bits, exponent of the smallest normal, largest finite value)
FORMATS = {
    torch.float32: (23, -126, torch.finfo(torch.float32).max),
    torch.bfloat16: (7, -126, torch.finfo(torch.bfloat16).max),
    torch.float16: (10, -14, 65504.0),
    torch.float8_e4m3fn: (3, -6, 448.0),
}


def unit_in_last_place(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbours in dtype around each (float64) value."""
    mantissa_bits, smallest_exponent, _ = FORMATS[dtype]
    exponent = torch.where(value == 0, smallest_exponent, torch.frexp(value).exponent - 1)
    return torch.ldexp(torch.ones_like(value), exponent.clamp(min=smallest_exponent) - mantissa_bits)


def assert_rounded_once(actual: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """actual is exact, rounded to its dtype, up to 2^-18 of `magnitude`: the largest that enters the last sum.

    exact and magnitude are float64. NaN must meet NaN; fp8 saturates.
    """
    actual_dtype = actual.dtype
    actual = actual.detach().cpu().to(torch.float32).double()
    exact, magnitude = exact.cpu(), magnitude.cpu()
    assert actual.shape == exact.shape
    assert torch.equal(actual.isnan(), exact.isnan()), "NaN in other places"
    if actual_dtype == torch.float8_e4m3fn:
        exact = exact.clamp(-448, 448)
    good = ~exact.isnan()
    allowed = unit_in_last_place(exact, actual_dtype) / 2 + magnitude * 2.0**-18
    excess = ((actual - exact).abs() - allowed)[good]
    if excess.numel():
        worst = excess.argmax()
        assert excess[worst] <= 0, (
            f"got {actual[good][worst]}, exact {exact[good][worst]}, allowed error {allowed[good][worst]}"
        )


BLOCK = 128
SMALLEST_AMAX = 2.0**-117
# The magnitude of each e4m3 byte below 0x7F, which is NaN.
E4M3_MAGNITUDES = torch.tensor(
    [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:-1],
    dtype=torch.float64,
)


def nearest_e4m3(values: Tensor) -> Tensor:
    """The bytes nearest to finite values by comparison with all magnitudes: ties to even, saturating, -0 kept."""
    middles = (E4M3_MAGNITUDES[:-1] + E4M3_MAGNITUDES[1:]) / 2
    magnitudes = values.double().abs()
    below = torch.searchsorted(middles, magnitudes)  # the middles below the value; at a tie the byte below it
    tie = torch.isin(magnitudes, middles)
    return (below + (tie & (below % 2 == 1)) + 128 * values.signbit()).to(torch.uint8)


def quantize_block(blocks: Tensor, scale_max: float = 448.0) -> tuple[Tensor, Tensor]:
    """Bytes and scales of blocks (the last dimension), by docs/numerics.md. Tensors divide tensors: that is IEEE."""
    blocks = blocks.cpu().float()
    amax = blocks.abs().amax(-1) if blocks.shape[-1] else blocks.new_zeros(blocks.shape[:-1])
    poisoned = ~amax.isfinite()
    amax_c = amax.clamp(min=SMALLEST_AMAX)
    largest = torch.full_like(amax_c, scale_max)
    scaled = torch.where(poisoned[..., None], 0.0, blocks * (largest / amax_c)[..., None])
    scales = torch.where(poisoned, torch.tensor(0x7FC00000, dtype=torch.int32).view(torch.float32), amax_c / largest)
    return nearest_e4m3(scaled), scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of x's shape and scales [rows, blocks]."""
    rows = x.cpu().float().reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    parts = [quantize_block(part) for part in rows.split(BLOCK, dim=1)] if x.shape[-1] else []
    q = torch.cat([q for q, _ in parts], dim=1) if parts else rows.to(torch.uint8)
    scales = torch.stack([s for _, s in parts], dim=1) if parts else rows.new_empty(len(rows), 0)
    return q.reshape(x.shape), scales


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    """The same bits: NaN equals NaN of the same payload, -0 differs from 0."""
    assert actual.shape == expected.shape
    actual, expected = (
        t.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format) for t in (actual, expected)
    )
    assert actual.dtype == expected.dtype and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def assert_pair(pair: tuple[Tensor, Tensor], shape: torch.Size) -> None:
    """Dtypes, shapes and strides of (q, scales), and zeros in the padding of the scales."""
    q, scales = pair
    rows, blocks = shape[:-1].numel(), -(-shape[-1] // BLOCK)
    padded_rows = -(-rows // 4) * 4
    assert q.dtype == torch.float8_e4m3fn and q.shape == shape and q.is_contiguous()
    assert scales.dtype == torch.float32 and scales.shape == (rows, blocks) and scales.stride() == (1, padded_rows)
    whole = scales.as_strided((blocks, padded_rows), (padded_rows, 1))
    assert torch.equal(whole[:, rows:].cpu(), torch.zeros(blocks, padded_rows - rows))


def assert_quantized(pair: tuple[Tensor, Tensor], exact: Tensor, magnitude: Tensor) -> None:
    """(q, scales) are those of exact (float64), up to 2^-18 of `magnitude`: docs/numerics.md."""
    assert_pair(pair, exact.shape)
    exact, magnitude = (t.cpu().double().reshape(len(pair[1]), exact.shape[-1]) for t in (exact, magnitude))
    q = pair[0].cpu().float().double().reshape(exact.shape)
    for block in range(pair[1].shape[1]):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        scales = pair[1][:, block].cpu()
        poisoned = ~exact[:, columns].isfinite().all(-1)
        assert (scales[poisoned].view(torch.int32) == 0x7FC00000).all(), "a block that is not finite has another scale"
        assert (pair[0].view(torch.uint8).cpu().reshape(exact.shape)[poisoned, columns] == 0).all()
        good_exact, good_magnitude = exact[~poisoned, columns], magnitude[~poisoned, columns]
        scales = scales[~poisoned].double()
        amax = good_exact.abs().amax(-1).clamp(min=SMALLEST_AMAX)
        allowed = (good_magnitude.amax(-1) * 2.0**-18).clamp(min=SMALLEST_AMAX * 2.0**-24)
        assert ((scales * 448 - amax).abs() <= allowed).all()
        scaled = (good_exact / scales[:, None]).clamp(-448, 448)
        allowed = unit_in_last_place(scaled, torch.float8_e4m3fn) / 2 + good_magnitude / scales[:, None] * 2.0**-18
        assert ((q[~poisoned, columns] - scaled).abs() <= allowed).all()
