"""From a torch op to the launch of a kernel."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from ltx_kernels import blockwise_cpp  # noqa: F401  (registers the ops that these stand in for)

_library = torch.library.Library("ltx_kernels", "FRAGMENT")


def register(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the torch op ``<op>_triton`` of the function named ``<op>``, with the schema and the fake of ``<op>``.

    The compiler sees an op, not its kernels: Inductor compiles the kernels that it sees by itself, without
    enable_fp_fusion=False, and a compiled graph would round otherwise than an eager call. It also keeps the interpreter
    usable in a compiled graph, and costs an eager call less than torch.library.custom_op or triton_op.
    """
    op = getattr(torch.ops.ltx_kernels, function.__name__).default
    name = f"{function.__name__}_triton"
    _library.define(str(op._schema).replace(f"ltx_kernels::{function.__name__}", name))
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, key)
    torch.library.register_fake(f"ltx_kernels::{name}", op, lib=_library)
    return function


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Runs a kernel on the device of its first argument. No multiply-add is fused that is not written as one."""
    if programs > 0:
        with torch.cuda.device_of(args[0]):
            kernel[(programs,)](*args, **constants, enable_fp_fusion=False)


def rows_of(x: Tensor, *others: Tensor) -> tuple[tuple[int, ...], ...]:
    """Where the rows of x lie in x and in tensors that broadcast to its leading sizes, for ``block.row_offset``.

    Returns the sizes of all leading dimensions but the outermost, then the strides of each tensor in all of them, both
    from the innermost out. Dimensions that follow each other evenly in all tensors are one.
    """
    return _rows_of(*((t.shape, t.stride()) for t in (x, *others)))


@functools.lru_cache(1024)
def _rows_of(*layouts: tuple[torch.Size, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    leading = layouts[0][0][:-1]
    aligned = []
    for shape, stride in layouts:
        steps = [0 if size == 1 else step for size, step in zip(shape[:-1], stride, strict=False)]
        aligned.append([0] * (len(leading) - len(steps)) + steps)
    sizes: list[int] = []
    strides: list[tuple[int, ...]] = []
    for size, *together in zip(leading, *aligned, strict=True):
        if size == 1:
            continue
        if sizes and all(outer == size * inner for outer, inner in zip(strides[-1], together, strict=True)):
            size *= sizes.pop()
            strides.pop()
        sizes.append(size)
        strides.append(tuple(together))
    return tuple(sizes[:0:-1]), *zip(*strides[::-1] or [(0,) * len(layouts)], strict=True)


@functools.cache
def whole_row(hidden: int) -> dict[str, int]:
    """How a program holds a row: in chunks of up to 128 blocks, 16,384 columns; nearly always in one."""
    blocks = max(1, triton.cdiv(hidden, 128))
    held = min(triton.next_power_of_2(blocks), 128)
    return {"BLOCKS": held, "CHUNKS": triton.cdiv(blocks, held), "num_warps": max(1, min(16, held // 4))}
