"""The CPU backends compute alike on every thread, whatever torch has set there."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from behaviour import assert_same_bits
from torch import Tensor

from ltx_kernels.blockwise import functional as F

FP8 = torch.float8_e4m3fn
SUBNORMAL = (torch.arange(1024, dtype=torch.int32) * 8000).view(torch.float32).view(4, 256)
SUBNORMAL_FP16 = torch.arange(1024, dtype=torch.int16).view(torch.float16).view(4, 256)
SMALL_SCALES = torch.full((4, 2), 2.0**-130)
ONES, ZEROS = torch.ones(4, 256), torch.zeros(4, 256)

CALLS: dict[str, Callable[[], object]] = {
    "quantize": lambda: F.blockwise_quantize(SUBNORMAL),
    "quantize fp16": lambda: F.blockwise_quantize(SUBNORMAL_FP16),
    "quantize_weights": lambda: F.blockwise_quantize_weights(SUBNORMAL),
    "dequantize": lambda: F.blockwise_dequantize((ONES.to(FP8), SMALL_SCALES)),
    "dequantize_weights": lambda: F.blockwise_dequantize_weights(ONES.to(FP8), SMALL_SCALES[:1]),
    "adanorm_quantize": lambda: F.blockwise_quantize_adanorm_triton(ZEROS, None, ZEROS, SUBNORMAL),
    "rms_fma": lambda: _in_place(F.rms_fma_triton),
    "rms_fma_quantize": lambda: _in_place(F.blockwise_quantize_rms_fma_triton),
    "gated_attention": lambda: F.gated_attention_triton(SUBNORMAL, torch.zeros(4, 2)),
    "rms_norm_rope": lambda: F.rms_norm_rope(SUBNORMAL_FP16, ONES, ZEROS, eps=1e-20),
    "rms_norm_split_rope": lambda: F.rms_norm_split_rope(
        SUBNORMAL_FP16[None],
        *(table.view(1, 4, 2, 128)[:, :, :1].transpose(1, 2) for table in (ONES, ZEROS)),
        eps=1e-20,
    ),
}


def _in_place(op: Callable[[Tensor, Tensor, Tensor], object]) -> tuple[object, Tensor]:
    x = SUBNORMAL.clone()
    return op(x, ZEROS, ZEROS), x


@pytest.fixture
def _restored() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("name", CALLS)
def test_subnormals_are_kept_where_torch_flushes_them(name: str) -> None:
    expected = CALLS[name]()
    torch.set_flush_denormal(True)
    actual = CALLS[name]()
    torch.set_flush_denormal(False)
    assert_same_bits(actual, expected)


@pytest.mark.usefixtures("_restored")
def test_one_thread_and_many_agree_where_torch_flushes() -> None:
    x = SUBNORMAL.repeat(256, 1)
    torch.set_num_threads(2)
    expected = F.blockwise_quantize(x)
    torch.set_flush_denormal(True)
    assert (SUBNORMAL * 1 == 0).all()  # it does flush on this thread
    many = F.blockwise_quantize(x)
    torch.set_num_threads(1)
    one = F.blockwise_quantize(x)
    assert (SUBNORMAL * 1 == 0).all()  # and still does
    torch.set_flush_denormal(False)
    assert_same_bits(many, expected)
    assert_same_bits(one, expected)


def test_a_new_thread_keeps_to_the_number_of_threads() -> None:
    """OpenMP would start a thread a core there: it keeps its count by thread."""
    script = """
import os, threading, torch
from ltx_kernels.blockwise.functional import blockwise_quantize
torch.set_num_threads(1)
x = torch.ones(512, 1024)
def work():
    before = len(os.listdir("/proc/self/task"))
    blockwise_quantize(x)
    print(len(os.listdir("/proc/self/task")) - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    env = {"OMP_NUM_THREADS": "4"}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert run.stdout == "0\n"
