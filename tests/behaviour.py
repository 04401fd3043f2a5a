"""What every op must do besides the right arithmetic: each function checks one such thing of one call."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree


def bits(value: Any) -> list[Tensor]:
    """The tensors in a result, as bytes on the CPU: NaN equals NaN, -0 differs from 0."""
    return [
        leaf.detach().cpu().contiguous().view(torch.uint8)
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def assert_same_bits(actual: Any, expected: Any) -> None:
    for one, other in zip(bits(actual), bits(expected), strict=True):
        assert torch.equal(one, other)


def move(value: Tensor, device: str | torch.device) -> Tensor:
    """A copy on a device with the same strides: to() would make it contiguous."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


def clone(inputs: Sequence[Any]) -> list[Any]:
    """Inputs with values of their own and the same strides."""
    return [move(value, value.device) if isinstance(value, Tensor) else value for value in inputs]


def assert_compiles(function: Callable[..., Any], *input_sets: Sequence[Any]) -> None:
    """One compiled graph (fullgraph, dynamic shapes) gives for each input set what the eager call gives."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for inputs in input_sets:
            expected = function(*clone(inputs))
            actual = compiled(*clone(inputs))
            assert_same_bits(actual, expected)
            for one, other in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
                assert one.stride() == other.stride() and one.dtype == other.dtype and one.shape == other.shape


def assert_repeatable(function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    expected = function(*clone(inputs))
    for _ in range(3):
        assert_same_bits(function(*clone(inputs)), expected)


def assert_inputs_untouched(function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    before = bits(inputs)
    function(*inputs)
    assert_same_bits(bits(inputs), before)


def assert_captures(function: Callable[..., Any], inputs: Sequence[Any], new_inputs: Sequence[Any]) -> None:
    """A captured CUDA graph, replayed over new values, gives what an eager call gives."""
    static = clone(inputs)
    function(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*static)
    for slot, value in zip(static, new_inputs, strict=True):
        if isinstance(slot, Tensor):
            slot.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(out, function(*clone(new_inputs)))


def assert_uses_current_stream(function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """On a side stream the op waits for work queued there before it: its input is written late, on that stream."""
    expected = function(*clone(inputs))
    late = clone(inputs)
    values = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    for value in late:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float8_e4m3fn:
            value.fill_(float("nan"))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for slot, value in zip(late, values, strict=True):
            if isinstance(slot, Tensor):
                slot.copy_(value)
        actual = function(*late)
    side.synchronize()
    assert_same_bits(actual, expected)


def assert_uses_own_device(function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    """With another device current, the op runs on its tensors' device and leaves the current one as it was."""
    expected = function(*inputs)
    moved = [move(value, "cuda:1") if isinstance(value, Tensor) else value for value in inputs]
    with torch.cuda.device(0):
        actual = function(*moved)
        assert torch.cuda.current_device() == 0
    assert all(leaf.device.index == 1 for leaf in pytree.tree_leaves(actual))
    assert_same_bits(actual, expected)


def assert_no_backward(function: Callable[..., Any], inputs: Sequence[Any], op: str) -> None:
    """With an input that requires grad the forward is the same and the backward raises by name; so does forward mode."""
    expected = function(*inputs)
    inputs = [
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.dtype.is_floating_point else value
        for value in inputs
    ]
    out = function(*inputs)
    assert_same_bits(out, expected)
    leaf = next(leaf for leaf in pytree.tree_leaves(out) if leaf.requires_grad)
    with pytest.raises(RuntimeError, match=f"^{op}: has no backward, use torch.no_grad\\(\\)$"):
        leaf.float().sum().backward()
    with torch.no_grad(), forward_ad.dual_level():
        function(*inputs)
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor) and value.requires_grad:
                dual = forward_ad.make_dual(value.detach(), torch.ones_like(value))
                with pytest.raises(RuntimeError, match=f"^{op}: has no forward-mode derivative, call it with tensors "):
                    function(*inputs[:i], dual, *inputs[i + 1 :])
