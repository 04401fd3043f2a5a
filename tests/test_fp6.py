"""fp6_pack and fp6_unpack on every device, against the format worked out bit by bit and by value."""

import pytest
import torch
from cases.fp6 import CASES, Fp6Case, lay_out
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ltx_kernels.blockwise import fp6_pack_tensor, fp6_unpack_tensor

FP8 = torch.float8_e4m3fn
pack_op = torch.ops.ltx_kernels.fp6_pack.default
unpack_op = torch.ops.ltx_kernels.fp6_unpack.default


def regroup(values: Tensor, bits_in: int, bits_out: int) -> Tensor:
    """The last dimension as one string of bits, highest first, cut into pieces of another length."""
    bits = values.to(torch.int64)[..., None] >> torch.arange(bits_in - 1, -1, -1) & 1
    pieces = bits.reshape(*values.shape[:-1], values.shape[-1] * bits_in // bits_out, bits_out)
    return (pieces << torch.arange(bits_out - 1, -1, -1)).sum(-1).to(torch.uint8)


def packed_reference(e4m3: Tensor) -> Tensor:
    e4m3 = e4m3.cpu()
    return regroup(torch.where(e4m3 >= 0x80, 0x20, 0) + (e4m3 % 0x80).clamp(max=0x1F), 6, 8)


def unpacked_reference(packed: Tensor) -> Tensor:
    codes = regroup(packed.cpu(), 8, 6)
    return torch.where(codes >= 0x20, codes + 0x60, codes)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def at_every_place(values: Tensor) -> Tensor:
    """Rows of four: each value at each of the places in a group, among random others."""
    rows = values[torch.randint(0, len(values), (4, len(values), 4))]
    for place in range(4):
        rows[place, :, place] = values
    return rows.flatten(0, 1)


def test_bytes_worked_out_by_hand(device: str) -> None:
    # 2^-9, -2^-8, -0.0, 0.1171875: codes 000001 100010 100000 011111
    values = torch.tensor([[2**-9, -(2**-8), -0.0, 0.1171875]], device=device).to(FP8)
    packed = fp6_pack_tensor(values)
    assert packed.tolist() == [[0b00000110, 0b00101000, 0b00011111]]
    assert fp6_unpack_tensor(packed, 4).tolist() == [[0x01, 0x82, 0x80, 0x1F]]


def test_values_that_do_not_fit_saturate(device: str) -> None:
    values = torch.tensor([[0.118, 0.125, 448, torch.inf], [-0.118, -448, -torch.inf, torch.nan]], device=device)
    unpacked = fp6_unpack_tensor(fp6_pack_tensor(values.to(FP8)), 4).view(FP8).float()
    largest = 0.1171875
    assert unpacked[0].tolist() == [largest] * 4
    assert unpacked[1].tolist() == [-largest] * 3 + [largest]


@pytest.mark.parametrize("dtype", [torch.uint8, FP8], ids=str)
def test_all_bytes_at_every_place(dtype: torch.dtype, device: str) -> None:
    e4m3 = at_every_place(torch.arange(256, dtype=torch.uint8))
    packed = fp6_pack_tensor(e4m3.to(device).view(dtype))
    assert torch.equal(packed.cpu(), packed_reference(e4m3))
    actual = fp6_unpack_tensor(packed, 4).view(FP8).cpu().double()
    value = e4m3.view(FP8).double()
    sign = torch.where(e4m3 >= 0x80, -1.0, 1.0).double()
    expected = torch.where(value.isnan(), sign, value).clamp(-0.1171875, 0.1171875)
    assert torch.equal(actual, expected)
    assert torch.equal(actual.signbit(), e4m3 >= 0x80)


def test_all_codes_round_trip(device: str) -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    e4m3 = at_every_place(torch.where(codes >= 32, codes + 0x60, codes))
    packed = fp6_pack_tensor(e4m3.to(device))
    assert torch.equal(fp6_unpack_tensor(packed, 4).cpu(), e4m3)
    assert len(packed.unique(dim=0)) == len(e4m3.unique(dim=0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pack(case: Fp6Case, device: str) -> None:
    e4m3 = random_bytes(case.m, case.n)
    x = lay_out(e4m3.to(device), case.gap, case.offset)
    packed = fp6_pack_tensor(x)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert torch.equal(packed.cpu(), packed_reference(e4m3))
    assert torch.equal(x.cpu(), e4m3)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_unpack(case: Fp6Case, device: str) -> None:
    packed = random_bytes(case.m, case.n // 4 * 3)
    x = lay_out(packed.to(device), case.gap, case.offset)
    unpacked = fp6_unpack_tensor(x, case.n)
    assert unpacked.dtype == torch.uint8 and unpacked.is_contiguous()
    assert torch.equal(unpacked.cpu(), unpacked_reference(packed))
    assert torch.equal(x.cpu(), packed)


def test_expanded_rows(device: str) -> None:
    row = random_bytes(1, 2112)
    x = row.to(device).expand(7, -1)
    packed = fp6_pack_tensor(x)
    assert torch.equal(packed.cpu(), packed_reference(row).expand(7, -1))
    assert torch.equal(fp6_unpack_tensor(packed[:1].expand(7, -1), 2112), fp6_unpack_tensor(packed, 2112))


@settings(deadline=None, max_examples=100)
@given(
    m=st.integers(0, 9),
    groups=st.integers(0, 1100),
    gap=st.integers(0, 64),
    offset=st.integers(0, 16),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_layout(m: int, groups: int, gap: int, offset: int, seed: int) -> None:
    e4m3 = torch.randint(0, 256, (m, groups * 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        packed = fp6_pack_tensor(lay_out(e4m3.to(device), gap, offset))
        assert torch.equal(packed.cpu(), packed_reference(e4m3))
        unpacked = fp6_unpack_tensor(lay_out(packed, gap, offset), groups * 4)
        assert torch.equal(unpacked.cpu(), unpacked_reference(packed))


def test_offsets_beyond_32_bits(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: minutes of plain loops on a CPU")
    m, n = 2**31 // 16384 + 3, 16384
    needed = 4 * m * n
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    x = torch.empty(m, n + 16, dtype=torch.uint8, device=device).random_()
    ends = torch.tensor([0, m // 2, m - 2, m - 1], device=device)
    for e4m3 in (x[:, :n], x.flatten()[: m * n].view(m, n)):  # row by row, and as one row
        packed = fp6_pack_tensor(e4m3)
        assert torch.equal(packed[ends].cpu(), packed_reference(e4m3[ends]))
        unpacked = fp6_unpack_tensor(packed, n)
        assert torch.equal(unpacked[ends].cpu(), unpacked_reference(packed[ends]))
        del packed, unpacked
    x = x.flatten()
    far = x.as_strided((2, 4096), (2**31 + 16, 1))
    assert torch.equal(fp6_pack_tensor(far).cpu(), packed_reference(far))
    far = x.as_strided((2, 3072), (2**31 + 16, 1))
    assert torch.equal(fp6_unpack_tensor(far, 4096).cpu(), unpacked_reference(far))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.bfloat16), "x must be uint8 or float8_e4m3fn, got bfloat16"),
        (torch.zeros(2, 8, dtype=torch.int8), "x must be uint8 or float8_e4m3fn, got int8"),
        (torch.zeros(2, 8, dtype=torch.float8_e5m2), "x must be uint8 or float8_e4m3fn, got float8_e5m2"),
        (torch.zeros(8, dtype=torch.uint8), "x must have 2 dimensions, got [8]"),
        (torch.zeros(1, 2, 8, dtype=torch.uint8), "x must have 2 dimensions, got [1, 2, 8]"),
        (torch.zeros(2, 6, dtype=torch.uint8), "x must have a last size that is a multiple of 4, got [2, 6]"),
        (torch.zeros(8, 4, dtype=torch.uint8).t(), "x must have a contiguous last dimension, got stride 4"),
    ],
)
def test_pack_refuses(x: Tensor, message: str, device: str) -> None:
    with pytest.raises(RuntimeError) as error:
        fp6_pack_tensor(x.to(device))
    assert str(error.value) == f"fp6_pack: {message}"


@pytest.mark.parametrize(
    ("x", "original_n", "message"),
    [
        (torch.zeros(2, 6).to(FP8), 8, "x must be uint8, got float8_e4m3fn"),
        (torch.zeros(2, 6, dtype=torch.bfloat16), 8, "x must be uint8, got bfloat16"),
        (torch.zeros(6, dtype=torch.uint8), 8, "x must have 2 dimensions, got [6]"),
        (torch.zeros(2, 7, dtype=torch.uint8), 8, "x must have a last size that is a multiple of 3, got [2, 7]"),
        (torch.zeros(2, 6, dtype=torch.uint8), 4, "original_n must be 8, 4/3 of x's last size, got 4"),
        (torch.zeros(2, 6, dtype=torch.uint8), 6, "original_n must be 8, 4/3 of x's last size, got 6"),
        (torch.zeros(2, 6, dtype=torch.uint8), 12, "original_n must be 8, 4/3 of x's last size, got 12"),
        (torch.zeros(2, 6, dtype=torch.uint8), -8, "original_n must be 8, 4/3 of x's last size, got -8"),
        (torch.zeros(6, 4, dtype=torch.uint8).t(), 8, "x must have a contiguous last dimension, got stride 4"),
    ],
)
def test_unpack_refuses(x: Tensor, original_n: int, message: str, device: str) -> None:
    with pytest.raises(RuntimeError) as error:
        fp6_unpack_tensor(x.to(device), original_n)
    assert str(error.value) == f"fp6_unpack: {message}"


@pytest.mark.parametrize(("m", "n", "gap"), [(3, 20, 0), (3, 20, 5), (0, 8, 0), (3, 0, 0)])
def test_opcheck(m: int, n: int, gap: int, device: str) -> None:
    x = lay_out(random_bytes(m, n).to(device), gap, 0)
    torch.library.opcheck(pack_op, (x,))
    # torch cannot compare fp8 on a CPU, which the schema test does; test_pack sees that inputs keep their bytes.
    torch.library.opcheck(pack_op, (x.view(FP8),), test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
    torch.library.opcheck(unpack_op, (lay_out(random_bytes(m, n // 4 * 3).to(device), gap, 0), n))


def test_one_compiled_graph_for_all_sizes(device: str) -> None:
    def round_trip(x: Tensor) -> tuple[Tensor, Tensor]:
        packed = fp6_pack_tensor(x)
        return packed, fp6_unpack_tensor(packed, x.shape[1])

    torch._dynamo.reset()  # what it compiled for another device would count as a recompilation
    compiled = torch.compile(round_trip, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m, n in ((3, 20), (5, 2112), (2, 64)):
            e4m3 = random_bytes(m, n)
            packed, unpacked = compiled(e4m3.to(device))
            assert torch.equal(packed.cpu(), packed_reference(e4m3))
            assert torch.equal(unpacked.cpu(), unpacked_reference(packed))


def test_captured_graph_and_side_stream(device: str) -> None:
    if device == "cpu":
        pytest.skip("streams and graphs are a GPU's")
    x = random_bytes(40, 2112).to(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # on a stream of its own
        packed = fp6_pack_tensor(x)
        unpacked = fp6_unpack_tensor(packed, 2112)
    for _ in range(2):
        x.copy_(random_bytes(40, 2112))
        graph.replay()
        assert torch.equal(packed.cpu(), packed_reference(x))
        assert torch.equal(unpacked.cpu(), unpacked_reference(packed))
