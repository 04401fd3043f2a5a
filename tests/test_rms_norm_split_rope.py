"""rms_norm_split_rope and its _qk form, on every device, against float64."""

import pytest
import torch
from cases.norm_rope import NormRopeCase
from norm_rope_tests import NormRopeTests
from reference import assert_rounded_once
from torch import Tensor

from ltx_kernels.blockwise import rms_norm_split_rope, rms_norm_split_rope_qk


class TestRmsNormSplitRope(NormRopeTests):
    name = "rms_norm_split_rope"
    single = rms_norm_split_rope
    both = rms_norm_split_rope_qk
    half_tables = (False,)

    @staticmethod
    def make_tables(case: NormRopeCase) -> tuple[Tensor, Tensor]:
        angles = torch.rand(case.table_batch, case.tokens, case.heads, case.head_dim // 2) * 6.3
        return angles.cos().swapaxes(1, 2), angles.sin().swapaxes(1, 2)

    @staticmethod
    def rotate(v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        v1, v2 = v.unflatten(-1, (cos.shape[1], 2, cos.shape[3])).unbind(-2)
        cos, sin = cos.swapaxes(1, 2), sin.swapaxes(1, 2)
        straight = torch.stack([v1 * cos, v2 * cos], dim=-2).flatten(-3)
        return straight, torch.stack([-v2 * sin, v1 * sin], dim=-2).flatten(-3)

    def bad_inputs(self) -> list[tuple[dict[str, object], str]]:
        table = "must have shape [2 or 1, heads, 5, head_dim / 2] with heads * head_dim = 256, got"
        return [
            *super().bad_inputs(),
            ({"x": torch.zeros(5, 256)}, "x must have 3 dimensions, got [5, 256]"),
            ({"cos_freqs": torch.zeros(1, 5, 128)}, "cos_freqs must have 4 dimensions, got [1, 5, 128]"),
            ({"cos_freqs": torch.zeros(1, 4, 4, 32)}, f"cos_freqs {table} [1, 4, 4, 32]"),
            ({"cos_freqs": torch.zeros(3, 4, 5, 32)}, f"cos_freqs {table} [3, 4, 5, 32]"),
            ({"cos_freqs": torch.zeros(1, 4, 5, 64)}, f"cos_freqs {table} [1, 4, 5, 64]"),
            (
                {"sin_freqs": torch.zeros(1, 8, 5, 16)},
                "sin_freqs must have the heads of cos_freqs, 4, got [1, 8, 5, 16]",
            ),
            (
                {"sin_freqs": torch.zeros(1, 4, 32, 5).swapaxes(2, 3)},
                "sin_freqs must have a contiguous last dimension, got stride 5",
            ),
        ]

    def test_hand_computed(self, device: str) -> None:
        x = torch.tensor([[[3.0, 0.0, 4.0, 0.0]]], device=device)  # two heads of 2; mean of squares 6.25, rms 2.5
        cos = torch.tensor([[[[0.5]], [[0.25]]]], device=device)
        sin = torch.tensor([[[[2.0]], [[1.0]]]], device=device)
        out = rms_norm_split_rope(x, cos, sin, eps=1e-20)  # v = (1.2, 0), (1.6, 0)
        assert torch.equal(out.cpu(), torch.tensor([[[0.6, 2.4, 0.4, 1.6]]]).bfloat16())

    def test_table_layouts(self, device: str) -> None:
        case = NormRopeCase("layouts", batch=3, table_batch=3)
        x, cos, sin, weights = self.make_inputs(case, device)
        for change in (Tensor.contiguous, lambda t: t.expand(3, -1, -1, -1), lambda t: t[:1].expand(3, -1, -1, -1)):
            tables = change(cos), change(sin)
            out = rms_norm_split_rope(x, *tables, weights)
            assert_rounded_once(out, *self.exact(x, *tables, weights))

    def test_batch_2_with_a_table_of_batch_1(self, device: str) -> None:
        x, cos, sin, weights = self.make_inputs(NormRopeCase("broadcast", batch=2, table_batch=1), device)
        out = rms_norm_split_rope(x, cos, sin, weights)
        assert torch.equal(out[1:], rms_norm_split_rope(x[1:], cos, sin, weights))

    def test_qk_of_other_head_counts(self, device: str) -> None:
        q, cos, sin, _ = self.make_inputs(NormRopeCase("q", heads=4, head_dim=64), device)
        k, k_cos, k_sin, _ = self.make_inputs(NormRopeCase("k", heads=8, head_dim=32), device)
        q_out, k_out = rms_norm_split_rope_qk(q, k, cos, sin, k_cos_freqs=k_cos, k_sin_freqs=k_sin)
        assert_rounded_once(q_out, *self.exact(q, cos, sin, None))
        assert_rounded_once(k_out, *self.exact(k, k_cos, k_sin, None))

    def test_qk_messages(self) -> None:
        q, table = torch.zeros(2, 5, 256), torch.zeros(1, 4, 5, 32)
        message = r"^rms_norm_split_rope_qk: k must have the last size of q, 256, got \[2, 5, 128\]$"
        with pytest.raises(RuntimeError, match=message):
            rms_norm_split_rope_qk(
                q, torch.zeros(2, 5, 128), table, table, k_cos_freqs=table[:, :2], k_sin_freqs=table[:, :2]
            )
        with pytest.raises(
            RuntimeError, match=r"^rms_norm_split_rope_qk: k_cos_freqs must have shape \[2 or 1, heads, 6, "
        ):
            rms_norm_split_rope_qk(q, torch.zeros(2, 6, 256), table, table)
        with pytest.raises(
            RuntimeError, match=r"^rms_norm_split_rope_qk: k_weights must have shape \[256\], got \[5\]$"
        ):
            rms_norm_split_rope_qk(q, q, table, table, None, torch.ones(5))
