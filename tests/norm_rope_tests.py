"""The tests that rms_norm_rope and rms_norm_split_rope share. Each op's own module says how its tables look."""

import dataclasses
from collections.abc import Callable

import behaviour
import pytest
import torch
from cases.norm_rope import BF16, CASES, FP16, FP32, NormRopeCase, lay_out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import assert_rounded_once
from torch import Tensor

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


class NormRopeTests:
    """A subclass sets these four."""

    name: str
    single: Callable[..., Tensor]
    both: Callable[..., tuple[Tensor, Tensor]]
    half_tables: tuple[bool, ...]

    @staticmethod
    def make_tables(case: NormRopeCase) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin of a case."""
        raise NotImplementedError

    @staticmethod
    def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """v * cos and the rotated v * sin, whose sum is the result."""
        raise NotImplementedError

    def make_inputs(self, case: NormRopeCase, device: str) -> Inputs:
        x = torch.randn(case.batch, case.tokens, case.hidden).to(case.dtype).to(device)
        weights = None
        if case.weight_dtype is not None:
            weights = (1 + torch.randn(case.hidden) / 4).to(case.weight_dtype).to(device)
        # A cast keeps the strides, so a swapped view stays one.
        cos, sin = (table.to(case.table_dtype).to(device) for table in self.make_tables(case))
        return lay_out(x, case.layout), cos, sin, weights

    def exact(
        self, x: Tensor, cos: Tensor, sin: Tensor, weights: Tensor | None, eps: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        """The result and the largest product in each of its sums, in float64 on the CPU."""
        x, cos, sin = (t.detach().cpu().double() for t in (x, cos, sin))
        v = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        if weights is not None:
            v = v * weights.cpu().double()
        straight, crossed = self.rotate(v, cos, sin)
        return straight + crossed, torch.maximum(straight.abs(), crossed.abs())

    @property
    def op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ltx_kernels, self.name).default

    @property
    def qk_op(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.ltx_kernels, f"{self.name}_qk").default

    @pytest.mark.parametrize("out_fp8", [False, True])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_against_float64(self, case: NormRopeCase, out_fp8: bool, device: str) -> None:
        if case.half_table not in self.half_tables:
            case = dataclasses.replace(case, half_table=False)
        inputs = self.make_inputs(case, device)
        out = type(self).single(*inputs, out_fp8, eps=case.eps)
        expected_dtype = torch.float8_e4m3fn if out_fp8 else FP16 if case.dtype == FP16 else BF16
        assert out.dtype == expected_dtype and out.shape == inputs[0].shape and out.is_contiguous()
        assert_rounded_once(out, *self.exact(*inputs, case.eps))

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_qk_equals_two_calls(self, case: NormRopeCase, device: str) -> None:
        q, cos, sin, q_weights = self.make_inputs(case, device)
        k, k_cos, k_sin, k_weights = self.make_inputs(case, device)
        single = type(self).single
        expected = single(q, cos, sin, q_weights, eps=case.eps), single(k, cos, sin, k_weights, eps=case.eps)
        behaviour.assert_same_bits(type(self).both(q, k, cos, sin, q_weights, k_weights, eps=case.eps), expected)
        expected = expected[0], single(k, k_cos, k_sin, k_weights, eps=case.eps)
        actual = type(self).both(
            q, k, cos, sin, q_weights, k_weights, eps=case.eps, k_cos_freqs=k_cos, k_sin_freqs=k_sin
        )
        behaviour.assert_same_bits(actual, expected)

    def test_qk_with_other_tokens_dtypes_and_fp8(self, device: str) -> None:
        q, cos, sin, _ = self.make_inputs(NormRopeCase("q"), device)
        other = NormRopeCase("k", batch=3, tokens=9, dtype=FP32, table_dtype=FP32, table_batch=3, weight_dtype=FP16)
        k, k_cos, k_sin, k_weights = self.make_inputs(other, device)
        actual = type(self).both(q, k, cos, sin, None, k_weights, True, k_cos_freqs=k_cos, k_sin_freqs=k_sin)
        single = type(self).single
        expected = single(q, cos, sin, None, True), single(k, k_cos, k_sin, k_weights, True)
        behaviour.assert_same_bits(actual, expected)
        # A q without rows leaves k's.
        behaviour.assert_same_bits(
            type(self).both(q[:0], k, cos, sin, None, k_weights, True, k_cos_freqs=k_cos, k_sin_freqs=k_sin)[1],
            expected[1],
        )

    def test_qk_refuses_half_of_its_own_tables(self, device: str) -> None:
        q, cos, sin, _ = self.make_inputs(NormRopeCase("tables"), device)
        for own in ({"k_cos_freqs": cos}, {"k_sin_freqs": sin}):
            with pytest.raises(RuntimeError) as error:
                type(self).both(q, q, cos, sin, **own)
            rule = "k_cos_freqs and k_sin_freqs must come together, got one of them"
            assert str(error.value) == f"{self.name}_qk: {rule}"

    # The two subclasses run it, each with its own op.
    @settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.differing_executors])
    @given(
        batch=st.integers(0, 3),
        tokens=st.integers(0, 6),
        heads=st.integers(1, 6),
        half_head=st.integers(1, 70),
        dtypes=st.tuples(*[st.sampled_from([BF16, FP16, FP32])] * 3),
        broadcast=st.booleans(),
        half_table=st.booleans(),
        layout=st.sampled_from(["contiguous", "chunk", "every_second", "swapped", "offset"]),
        eps=st.sampled_from([1e-6, 1e-5, 1.0]),
        exponent=st.integers(-4, 4),
        out_fp8=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def test_any_size_layout_and_dtype(
        self,
        batch: int,
        tokens: int,
        heads: int,
        half_head: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        broadcast: bool,
        half_table: bool,
        layout: str,
        eps: float,
        exponent: int,
        out_fp8: bool,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        case = NormRopeCase(
            "drawn",
            *(batch, tokens, heads, 2 * half_head, *dtypes),
            table_batch=1 if broadcast else batch,
            half_table=half_table and True in self.half_tables,
            eps=eps,
            layout=layout,
        )
        for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
            x, *others = self.make_inputs(case, device)
            x.mul_(10.0**exponent)
            assert_rounded_once(type(self).single(x, *others, out_fp8, eps=eps), *self.exact(x, *others, eps))

    def test_zero_row_gives_zeros(self, device: str) -> None:
        x, cos, sin, weights = self.make_inputs(NormRopeCase("zeros"), device)
        x[1, 2] = 0
        out = type(self).single(x, cos, sin, weights)
        assert torch.equal(out[1, 2], torch.zeros_like(out[1, 2]))
        assert out[1, 3].abs().sum() > 0

    @pytest.mark.parametrize("hidden", [256, 40002])  # in vectors and value by value
    def test_weights_as_large_as_fp32_holds(self, hidden: int, device: str) -> None:
        case = NormRopeCase("large weights", heads=1, head_dim=hidden, weight_dtype=FP32)
        x, cos, sin, weights = self.make_inputs(case, device)
        weights.fill_(3e38)  # times rstd, 1000 for these rows, it is infinite
        x[0] = 0
        x[1] *= 1e-6
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        out = type(self).single(x, cos, sin, weights)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert_rounded_once(out[1], *(part[1] for part in self.exact(x, cos, sin, weights)))

    @pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e19])
    @pytest.mark.parametrize("out_fp8", [False, True])
    def test_row_without_finite_sum_is_nan_everywhere(self, poison: float, out_fp8: bool, device: str) -> None:
        x, cos, sin, weights = self.make_inputs(NormRopeCase("poison", dtype=FP32), device)
        x[1, 2, :100] = poison  # 100 squares of 1e19 exceed fp32
        out = type(self).single(x, cos, sin, weights, out_fp8)
        assert out[1, 2].float().isnan().all()
        if out_fp8:
            assert (out[1, 2].view(torch.uint8) == 0x7F).all()
        others = [(0, token) for token in range(5)] + [(1, token) for token in (0, 1, 3, 4)]
        assert all(not out[row].float().isnan().any() for row in others)

    def test_fp8_saturates_finite_values(self, device: str) -> None:
        x, cos, sin, _ = self.make_inputs(NormRopeCase("large"), device)
        weights = torch.full((256,), 1e30, device=device)
        out = type(self).single(x, torch.ones_like(cos), torch.zeros_like(sin), weights, True).float()
        assert torch.equal(out, torch.where(x > 0, 448.0, -448.0).float())

    def test_all_positions_zero_is_the_norm_alone(self, device: str) -> None:
        x, cos, sin, weights = self.make_inputs(NormRopeCase("norm", dtype=FP32), device)
        out = type(self).single(x, torch.ones_like(cos), torch.zeros_like(sin), weights)
        norm = torch.nn.functional.rms_norm(x.cpu().double(), (256,), weights.cpu().double(), 1e-6)
        assert_rounded_once(out, norm, norm.abs())

    def test_rows_after_the_last_are_never_read(self, device: str) -> None:
        x, cos, sin, weights = self.make_inputs(NormRopeCase("tail", batch=1, tokens=7), device)
        longer = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
        behaviour.assert_same_bits(
            type(self).single(longer[:, :7], cos, sin, weights), type(self).single(x, cos, sin, weights)
        )

    def test_behaviour(self, device: str) -> None:
        inputs = self.make_inputs(NormRopeCase("odd", tokens=3, head_dim=80), device)
        behaviour.assert_repeatable(type(self).single, inputs)
        behaviour.assert_inputs_untouched(type(self).single, inputs)
        behaviour.assert_no_backward(type(self).single, inputs, self.name)

    def test_compiles_with_dynamic_tokens_and_a_transposed_input(self, device: str) -> None:
        sets = [self.make_inputs(NormRopeCase("dynamic", tokens=t, layout="swapped"), device) for t in (5, 7, 12)]
        behaviour.assert_compiles(type(self).single, *sets)
        behaviour.assert_compiles(lambda *i: type(self).both(i[0], i[0] * 2, *i[1:], None), *sets)

    def test_opcheck(self, device: str) -> None:
        for layout in ("contiguous", "chunk", "swapped"):
            inputs = self.make_inputs(NormRopeCase("opcheck", tokens=3, head_dim=80, layout=layout), device)
            torch.library.opcheck(self.op, (*inputs, False, 1e-6))
            torch.library.opcheck(self.op, (*inputs, True, 1e-6))
            x, cos, sin, weights = inputs
            torch.library.opcheck(self.qk_op, (x, x, cos, sin, weights, None, False, None, None, 1e-6))

    def test_gpu_graph_stream_and_device(self, device: str) -> None:
        if device == "cpu":
            pytest.skip("CUDA graphs and streams need a GPU")
        case = NormRopeCase("LTX-2 video", heads=32, head_dim=128)
        inputs, new_inputs = self.make_inputs(case, device), self.make_inputs(case, device)
        behaviour.assert_captures(type(self).single, inputs, new_inputs)
        behaviour.assert_uses_current_stream(type(self).single, inputs)
        if torch.cuda.device_count() > 1:
            behaviour.assert_uses_own_device(type(self).single, inputs)

    def test_offsets_beyond_32_bits(self, device: str) -> None:
        if device == "cpu":
            pytest.skip("9 GB of rows take too long on a CPU")
        case = NormRopeCase("long", batch=1, tokens=65537, heads=2, head_dim=64)
        x, cos, sin, weights = self.make_inputs(dataclasses.replace(case, tokens=4), device)
        wide = torch.empty(65537, 34816, dtype=BF16, device=device)[:, :128]  # offsets up to 2^31.1
        rows = torch.tensor([0, 1, 61681, 65536], device=device)  # 61681 * 34816 is just beyond 2^31
        wide.fill_(1)
        wide[rows] = x[0]
        tables = [
            torch.zeros(*table.shape[:-2], 65537, table.shape[-1], dtype=BF16, device=device) for table in (cos, sin)
        ]
        for table, values in zip(tables, (cos, sin), strict=True):
            table[..., rows, :] = values
        out = type(self).single(wide[None], *tables, weights)
        behaviour.assert_same_bits(out[:, rows], type(self).single(x, cos, sin, weights))

    def bad_inputs(self) -> list[tuple[dict[str, object], str]]:
        """Changed arguments and the message, for rules that both ops have."""
        return [
            ({"x": torch.zeros(2, 5, 256, dtype=torch.int32)}, "x must be bfloat16, float16 or float32, got int32"),
            ({"x": torch.zeros(2, 5, 256, dtype=torch.float64)}, "x must be bfloat16, float16 or float32, got float64"),
            ({"x": torch.zeros(2, 5, 512)[..., ::2]}, "x must have a contiguous last dimension, got stride 2"),
            ({"x": torch.zeros(2, 5, 0)}, "x must have a last size that is even and > 0, got [2, 5, 0]"),
            ({"x": torch.zeros(2, 5, 255)}, "x must have a last size that is even and > 0, got [2, 5, 255]"),
            ({"weights": torch.ones(255)}, "weights must have shape [256], got [255]"),
            ({"weights": torch.ones(1, 256)}, "weights must have shape [256], got [1, 256]"),
            ({"weights": torch.ones(512)[::2]}, "weights must have a contiguous last dimension, got stride 2"),
            (
                {"weights": torch.ones(256, dtype=torch.uint8)},
                "weights must be bfloat16, float16 or float32, got uint8",
            ),
            ({"eps": 0.0}, "eps must be finite and > 0, got 0"),
            ({"eps": -1e-6}, "eps must be finite and > 0, got -1e-06"),
            ({"eps": float("nan")}, "eps must be finite and > 0, got nan"),
            ({"eps": float("inf")}, "eps must be finite and > 0, got inf"),
            ({"eps": 1e-60}, "eps must be finite and > 0, got 1e-60"),
            ({"eps": 1e60}, "eps must be finite and > 0, got 1e+60"),
        ]

    def test_messages(self, device: str) -> None:
        for changed, message in self.bad_inputs():
            x, cos, sin, weights = self.make_inputs(NormRopeCase("messages", dtype=FP32, table_dtype=FP32), device)
            arguments = {"x": x, "cos_freqs": cos, "sin_freqs": sin, "weights": weights, "eps": 1e-6}
            for name, value in changed.items():
                arguments[name] = behaviour.move(value, device) if isinstance(value, Tensor) else value
            with pytest.raises(RuntimeError) as error:
                type(self).single(**arguments)
            assert str(error.value) == f"{self.name}: {message}"

    def test_messages_about_devices(self, device: str) -> None:
        if device == "cpu":
            pytest.skip("a tensor on another device needs a GPU")
        x, cos, sin, weights = self.make_inputs(NormRopeCase("devices"), device)
        with pytest.raises(RuntimeError, match=f"{self.name}: cos_freqs must be on cuda:0 like x, got cpu"):
            type(self).single(x, cos.cpu(), sin, weights)
        with pytest.raises(RuntimeError, match=f"{self.name}: weights must be on cuda:0 like x, got cpu"):
            type(self).single(x, cos, sin, weights.cpu())
        with pytest.raises(RuntimeError, match=f"{self.name}_qk: k must be on cuda:0 like q, got cpu"):
            type(self).both(x, x.cpu(), cos, sin)
