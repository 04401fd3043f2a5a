"""What all tests compare with: float64 compositions in torch, and the error bound of INTERFACE.md 3."""

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
    exponent = torch.frexp(value.abs()).exponent - 1
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
