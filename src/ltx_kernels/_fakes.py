"""How the ops' shapes are registered."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_fake(name: str, fake: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``torch.library.register_fake`` of a function that has the op's argument names, with a check of devices.

    Torch runs the fake of a call as soon as one tensor is on "meta", also where the others hold values: without the
    check a weight that is not loaded yet would give a result that nothing has written.
    """
    if fake is None:
        return functools.partial(register_fake, name)
    op = name.removeprefix("ltx_kernels::")
    names = tuple(inspect.signature(fake).parameters)

    @functools.wraps(fake)
    def checked(*args: Any) -> Any:
        tensors = [(argument, value) for argument, value in zip(names, args) if isinstance(value, Tensor)]
        first, like = tensors[0]
        for argument, value in tensors[1:]:
            if value.device != like.device:
                raise RuntimeError(f"{op}: {argument} must be on {like.device} like {first}, got {value.device}")
        return fake(*args)

    torch.library.register_fake(name, checked)
    return fake
