"""rms_norm_rope and its _qk form, on every device, against float64."""

import pytest
import torch
from cases.norm_rope import FP32, NormRopeCase
from norm_rope_tests import NormRopeTests
from reference import assert_rounded_once
from torch import Tensor

from ltx_kernels.blockwise import rms_norm_rope, rms_norm_rope_qk


class TestRmsNormRope(NormRopeTests):
    name = "rms_norm_rope"
    single = rms_norm_rope
    both = rms_norm_rope_qk
    half_tables = (False, True)

    @staticmethod
    def make_tables(case: NormRopeCase) -> tuple[Tensor, Tensor]:
        width = case.hidden // 2 if case.half_table else case.hidden
        angles = torch.rand(case.table_batch, case.tokens, width) * 6.3
        return angles.cos(), angles.sin()

    @staticmethod
    def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if cos.shape[-1] != v.shape[-1]:
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        return v * cos, torch.stack([-v[..., 1::2], v[..., ::2]], dim=-1).flatten(-2) * sin

    def bad_inputs(self) -> list[tuple[dict[str, object], str]]:
        return [
            *super().bad_inputs(),
            ({"x": torch.zeros(())}, "x must have 1 to 8 dimensions, got []"),
            ({"x": torch.zeros([1] * 8 + [256])}, "x must have 1 to 8 dimensions, got 9 dimensions"),
            ({"cos_freqs": torch.zeros(1, 5, 64)}, "cos_freqs must have a last size of 256 or 128, got [1, 5, 64]"),
            ({"cos_freqs": torch.zeros(1, 4, 256)}, "cos_freqs must broadcast to [2, 5, 256], got [1, 4, 256]"),
            ({"cos_freqs": torch.zeros(3, 5, 256)}, "cos_freqs must broadcast to [2, 5, 256], got [3, 5, 256]"),
            ({"sin_freqs": torch.zeros(1, 2, 5, 256)}, "sin_freqs must broadcast to [2, 5, 256], got [1, 2, 5, 256]"),
            (
                {"sin_freqs": torch.zeros(1, 5, 128)},
                "sin_freqs must have the last size of cos_freqs, 256, got [1, 5, 128]",
            ),
            ({"sin_freqs": torch.zeros(1, 5, 256).int()}, "sin_freqs must be bfloat16, float16 or float32, got int32"),
        ]

    def test_hand_computed(self, device: str) -> None:
        x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], device=device)  # mean of squares 6.25, rms 2.5
        cos = torch.tensor([[0.5, 1.0, 1.0, 1.0]], device=device)
        sin = torch.tensor([[2.0, 4.0, 0.0, 0.0]], device=device)
        weights = torch.tensor([1.0, 2.0, 1.0, 1.0], device=device)
        out = rms_norm_rope(x, cos, sin, weights, eps=1e-20)  # v = 1.2, 3.2, 0, 0
        expected = torch.tensor([[0.6 - 6.4, 3.2 + 4.8, 0.0, 0.0]])
        assert torch.equal(out.cpu(), expected.bfloat16())

    @pytest.mark.parametrize(
        ("leading", "table_leading"),
        [((), ()), ((7,), ()), ((7,), (1,)), ((2, 3, 4), (3, 1)), ((2, 3, 4), (2, 1, 4)), ((2, 1, 3, 4), (1, 4))],
    )
    @pytest.mark.parametrize("half", [False, True])
    def test_any_leading_sizes(
        self, leading: tuple[int, ...], table_leading: tuple[int, ...], half: bool, device: str
    ) -> None:
        x = torch.randn(*leading, 96, device=device)
        cos, sin = (torch.randn(*table_leading, 48 if half else 96, device=device) for _ in range(2))
        out = rms_norm_rope(x, cos, sin)
        assert_rounded_once(out, *self.exact(x, cos, sin, None))

    def test_qk_with_full_and_half_tables(self, device: str) -> None:
        q, cos, sin, _ = self.make_inputs(NormRopeCase("full", dtype=FP32, table_dtype=FP32), device)
        k, k_cos, k_sin, _ = self.make_inputs(
            NormRopeCase("half", dtype=FP32, table_dtype=FP32, half_table=True), device
        )
        q_out, k_out = rms_norm_rope_qk(q, k, cos, sin, k_cos_freqs=k_cos, k_sin_freqs=k_sin)
        assert_rounded_once(q_out, *self.exact(q, cos, sin, None))
        assert_rounded_once(k_out, *self.exact(k, k_cos, k_sin, None))

    def test_qk_messages(self) -> None:
        q, table = torch.zeros(2, 5, 256), torch.zeros(1, 5, 256)
        with pytest.raises(
            RuntimeError, match=r"^rms_norm_rope_qk: k must have the last size of q, 256, got \[2, 5, 128\]$"
        ):
            rms_norm_rope_qk(
                q, torch.zeros(2, 5, 128), table, table, k_cos_freqs=table[..., :128], k_sin_freqs=table[..., :128]
            )
        with pytest.raises(
            RuntimeError, match=r"^rms_norm_rope_qk: k_cos_freqs must broadcast to \[2, 6, 256\], got \[1, 5, 256\]$"
        ):
            rms_norm_rope_qk(q, torch.zeros(2, 6, 256), table, table)
        with pytest.raises(RuntimeError, match=r"^rms_norm_rope_qk: q_weights must have shape \[256\], got \[5\]$"):
            rms_norm_rope_qk(q, q, table, table, torch.ones(5))
