"""All2All and LocalGroup on CPUs: results bit for bit against plain indexing, and how calls end that cannot succeed."""

import functools
import gc
import itertools
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from cases.all2all import CASES, DTYPES, Case, bits, equal
from torch import Tensor

from ltx_kernels import All2All, All2AllMismatch, All2AllTimeout, LocalGroup
from ltx_kernels.all2all import _choose, _facts

BF16 = torch.bfloat16
HEADS, HEAD_DIM = 8, 4  # of the tests below that do not divide unevenly
HIDDEN = HEADS * HEAD_DIM


@pytest.fixture(autouse=True)
def _no_leaked_files() -> Any:
    ranks.files.clear()
    yield
    assert not ranks.left_files()


def of_case(case: Case, rank: int, **options: Any) -> All2All:
    heads = None if case.even_heads else case.heads
    all2all = All2All(rank, case.world_size, case.seqlen, case.hidden_dim, 1, case.dtype, rank_heads=heads, **options)
    all2all.set_rank_tokens(case.tokens)
    return all2all


def local_group(case: Case) -> LocalGroup:
    group = All2All.local_group(
        case.world_size, case.seqlen, case.hidden_dim, 1, case.dtype, rank_heads=None if case.even_heads else case.heads
    )
    group.set_rank_tokens(case.tokens)
    return group


def differing_ops(case: Case, rank: int, all2all: All2All, seed: int, copy_out: bool) -> list[str]:
    """Ops whose result is not what plain indexing gives."""
    q, k, v = (case.whole(3 * seed + i) for i in range(3))
    local, share = case.tokens_of(q, rank), case.heads_of(q, rank)
    wrong = []
    if not equal(all2all.send_recv_heads(local, copy_out=copy_out), share):
        wrong.append("send_recv_heads")
    if not equal(all2all.gather_heads(share, copy_out=copy_out), local):
        wrong.append("gather_heads")
    if not equal(all2all.allgather(local, copy_out=copy_out), q):
        wrong.append("allgather")
    parts = [case.tokens_of(x, rank) for x in (q, k, v)]
    results = all2all.send_recv_qkv(parts[0], parts[1], parts[2], copy_out=copy_out)
    if not all(equal(out, case.heads_of(x, rank)) for out, x in zip(results, (q, k, v), strict=True)):
        wrong.append("send_recv_qkv")
    return wrong


# In one process.


@pytest.mark.parametrize("copy_out", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_local_group(case: Case, copy_out: bool) -> None:
    group = local_group(case)
    assert group.transport == "shm" and group.fallback_reason is None
    all_ranks = range(case.world_size)
    for seed in range(3):
        q, k, v = (case.whole(3 * seed + i) for i in range(3))
        local = [case.tokens_of(q, rank) for rank in all_ranks]
        share = [case.heads_of(q, rank) for rank in all_ranks]
        assert all(map(equal, group.send_recv_heads(local, copy_out=copy_out), share))
        assert all(map(equal, group.gather_heads(share, copy_out=copy_out), local))
        assert all(map(equal, group.allgather(local, copy_out=copy_out), [q] * case.world_size))
        parts = [[case.tokens_of(x, rank) for rank in all_ranks] for x in (q, k, v)]
        for rank, results in enumerate(group.send_recv_qkv(*parts, copy_out=copy_out)):
            assert all(equal(out, case.heads_of(x, rank)) for out, x in zip(results, (q, k, v), strict=True))
    group.destroy()


def test_views_of_a_fused_projection_and_swapped_axes() -> None:
    case = Case("strided", (3, 2), (1, 1))
    group = local_group(case)
    qkv = torch.randn(1, 5, 3, 2, 16).bfloat16()
    for x in (
        qkv[:, :, 1],
        torch.randn(1, 2, 5, 16).bfloat16().swapaxes(1, 2),
        torch.randn(1, 5, 1, 16).bfloat16().expand(1, 5, 2, 16),
    ):
        results = group.send_recv_heads([case.tokens_of(x, rank) for rank in range(2)])
        assert all(equal(out, case.heads_of(x, rank)) for rank, out in enumerate(results))
    back = group.gather_heads([case.heads_of(qkv[:, :, 2], rank) for rank in range(2)])
    assert all(equal(out, case.tokens_of(qkv[:, :, 2], rank)) for rank, out in enumerate(back))


def group_of(world_size: int, tokens: int = 2, seqlen: int | None = None, **options: Any) -> LocalGroup:
    group = All2All.local_group(world_size, seqlen or tokens, HIDDEN, 1, torch.float32, **options)
    group.set_rank_tokens([tokens] * world_size)
    return group


def test_view_is_of_the_buffer_and_copy_is_not() -> None:
    group = group_of(2)
    xs = [torch.full((1, 2, HEADS, HEAD_DIM), float(rank)) for rank in range(2)]
    views, copies = group.send_recv_heads(xs), group.send_recv_heads(xs, copy_out=True)
    assert views[0].data_ptr() == group.send_recv_heads(xs)[0].data_ptr()  # two buffers alternate
    assert views[0].data_ptr() != copies[0].data_ptr()
    assert copies[0].is_contiguous() and views[0].is_contiguous()
    group.send_recv_heads([-x - 1 for x in xs]), group.send_recv_heads([-x - 1 for x in xs])
    assert views[0].max() < 0 and copies[0].min() >= 0


def test_view_of_the_call_before_the_last_is_refused() -> None:
    group = group_of(2)
    x = [torch.full((1, 2, HEADS, HEAD_DIM), float(rank)) for rank in range(2)]
    older, last = group.send_recv_heads(x), group.send_recv_heads(x)
    with pytest.raises(RuntimeError) as error:
        group.gather_heads([last[0], older[1]])
    assert str(error.value) == (
        "gather_heads: x must not lie in the buffer that this call writes to, got a view of an earlier result "
        "(copy_out=True gives a copy)"
    )
    assert all(map(equal, group.gather_heads(last), x))  # nobody had begun to wait


def test_view_keeps_the_buffer_alive() -> None:
    group = group_of(2)
    view = group.send_recv_heads([torch.full((1, 2, HEADS, HEAD_DIM), 7.0)] * 2)[0]
    group.destroy()
    del group
    gc.collect()
    assert view.unique().tolist() == [7.0]


def test_destroy_twice_and_use_after_it() -> None:
    all2all = All2All(0, 1, 2, HIDDEN, 1, torch.float32, transport="shm")
    all2all.set_rank_tokens([2])
    x = torch.randn(1, 2, HEADS, HEAD_DIM)
    all2all.send_recv_heads(x)
    all2all.destroy()
    all2all.destroy()
    for op in ("send_recv_heads", "gather_heads", "allgather"):
        with pytest.raises(RuntimeError, match=f"^{op}: this communicator was destroyed$"):
            getattr(all2all, op)(x)
    with pytest.raises(RuntimeError, match="^check: this communicator was destroyed$"):
        all2all.check()


def test_finalizer_releases_and_does_not_raise() -> None:
    all2all = All2All(0, 1, 2, HIDDEN, 1, torch.float32, transport="shm")
    number = all2all._id
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del all2all
        gc.collect()
    with pytest.raises(RuntimeError, match="^check: this communicator was destroyed$"):
        torch.ops.ltx_kernels.all2all_check(number)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rank_needs_no_process_group(dtype: torch.dtype) -> None:
    case = Case("one rank", (5,), (3,), batch=2, dtype=dtype)
    for transport in ("auto", "shm", "nccl"):
        all2all = of_case(case, 0, transport=transport)
        assert all2all.transport in ((transport,) if transport != "auto" else ("shm", "nccl"))
        assert differing_ops(case, 0, all2all, 0, copy_out=False) == []
        assert differing_ops(case, 0, all2all, 1, copy_out=True) == []
        all2all.destroy()


# Wrong arguments: each is refused before anything is sent.

ARGUMENTS = {"rank": 0, "world_size": 1, "seqlen": 4, "hidden_dim": HIDDEN, "num_sms": 1, "tensor_dtype": BF16}
SHM = {**ARGUMENTS, "transport": "shm"}  # else it is nccl on a machine with GPUs
LOCAL = {name: value for name, value in ARGUMENTS.items() if name != "rank"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"world_size": 0}, "world_size must be >= 1, got 0"),
        ({"rank": 1}, "rank must be >= 0 and < 1, got 1"),
        ({"seqlen": -1}, "seqlen must be >= 0, got -1"),
        ({"hidden_dim": 0}, "hidden_dim must be >= 1, got 0"),
        ({"seqlen": 1 << 60}, "seqlen * hidden_dim must be at most 1125899906842624, got 36893488147419103232"),
        ({"num_sms": 0}, "num_sms must be >= 1, got 0"),
        ({"tensor_dtype": torch.int64}, f"tensor_dtype must be one of {tuple(DTYPES)}, got torch.int64"),
        ({"transport": "tcp"}, "transport must be one of ('auto', 'ipc', 'nccl', 'shm'), got 'tcp'"),
        ({"rank_heads": [1, 2]}, "rank_heads must be 1 counts >= 0, one for each rank, got [1, 2]"),
        ({"timeout_seconds": -1}, "timeout_seconds must be finite and >= 0, got -1"),
        ({"rank_heads": [1.0]}, "rank_heads must be 1 counts >= 0, one for each rank, got [1.0]"),
        ({"rank_heads": [1 << 62]}, f"rank_heads must be 1 counts >= 0, one for each rank, got [{1 << 62}]"),
        ({"rank_heads": 8}, "rank_heads must be 1 counts >= 0, one for each rank, got 8"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be finite and >= 0, got nan"),
        ({"timeout_seconds": "10"}, "timeout_seconds must be finite and >= 0, got '10'"),
        ({"timeout_seconds": 10**400}, f"timeout_seconds must be finite and >= 0, got {10**400}"),
        *(
            ({name: value}, f"{name} must be an integer, got {value!r}")
            for name in ("rank", "world_size", "seqlen", "hidden_dim", "num_sms")
            for value in (None, "1", 1.0, np.float32(1))
        ),
        (
            {"seqlen": np.int64(1 << 40), "hidden_dim": np.int64(1 << 40)},
            f"seqlen * hidden_dim must be at most 1125899906842624, got {1 << 80}",
        ),
        (
            {"world_size": 2},
            "world_size must be 1 without torch.distributed.init_process_group, got 2",
        ),
    ],
)
def test_wrong_arguments_of_the_constructor(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        All2All(**{**ARGUMENTS, **wrong})
    assert str(error.value) == f"All2All: {message}"


def test_ipc_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError) as error:
        All2All(**ARGUMENTS, transport="ipc")
    assert str(error.value) == (
        "All2All: transport must be auto, nccl or shm (ipc is not available yet: its kernels have not been run on a "
        "GPU), got 'ipc'"
    )


def test_timeout_seconds() -> None:
    all2all = All2All(**SHM)
    assert all2all._timeout_seconds == 10.0
    for seconds, expected in ((0, 0.0), (2.5, 2.5), (None, 10.0)):
        all2all.set_timeout_seconds(seconds)
        assert all2all._timeout_seconds == expected
    for seconds in (-0.1, float("nan"), float("inf"), "1", [1]):
        with pytest.raises(ValueError, match="^set_timeout_seconds: seconds must be finite and >= 0, got "):
            all2all.set_timeout_seconds(seconds)


@pytest.mark.parametrize("tokens", [[], [1, 2], [-1], [1.5], ["1"], "1", [None], 1, None, [1 << 62]])
def test_wrong_rank_tokens(tokens: Any) -> None:
    with pytest.raises(ValueError) as error:
        All2All(**SHM).set_rank_tokens(tokens)
    assert str(error.value) == f"set_rank_tokens: rank_tokens must be 1 counts >= 0, one for each rank, got {tokens!r}"


def test_counts_of_other_integer_types() -> None:
    all2all = All2All(**{**SHM, "seqlen": np.int64(4), "rank_heads": torch.tensor([HEADS])})
    for tokens in (np.array([4], dtype=np.int32), torch.tensor([4]), (4,), range(4, 5)):
        all2all.set_rank_tokens(tokens)
        assert torch.equal(all2all.send_recv_heads(X), X)


X = torch.zeros(1, 4, HEADS, HEAD_DIM, dtype=BF16)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.float(), "x must be bfloat16, got float32"),
        (X[0], "x must have 4 dimensions, got [4, 8, 4]"),
        (X[:, :3], "x must have 4 tokens in dimension 1 (rank 0 of set_rank_tokens([4])), got 3"),
        (X[..., ::2], "x must have a contiguous last dimension, got stride 2"),
        (
            X.repeat(2, 1, 1, 1),
            (
                "x must give each rank a result of at most 128 elements (seqlen * hidden_dim), got 256: needs seqlen * "
                "hidden_dim >= 256"
            ),
        ),
    ],
)
def test_wrong_tensors(x: Tensor, message: str, transport: str) -> None:
    all2all = All2All(**ARGUMENTS, transport=transport)
    all2all.set_rank_tokens([4])
    for op in ("send_recv_heads", "gather_heads", "allgather"):
        with pytest.raises(RuntimeError) as error:
            getattr(all2all, op)(x)
        assert str(error.value) == f"{op}: {message}"
    with pytest.raises(RuntimeError) as error:
        all2all.send_recv_qkv(x, x, x)
    assert str(error.value) == f"send_recv_qkv: {message.replace('x must', 'q must')}"
    assert int(all2all._state) == 0
    assert torch.equal(all2all.send_recv_heads(X), X)  # and the communicator still works


@pytest.mark.parametrize("transport", ["shm", "nccl", "local"])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (None, TypeError, "must be a tensor, got NoneType"),
        ("x", TypeError, "must be a tensor, got str"),
        (np.zeros((1, 4, HEADS, HEAD_DIM)), TypeError, "must be a tensor, got ndarray"),
        (X.to_sparse(), RuntimeError, "must be torch.strided, got torch.sparse_coo"),
    ],
)
def test_no_tensors(
    wrong: Any, error: type[Exception], message: str, transport: str, capfd: pytest.CaptureFixture[str]
) -> None:
    local = transport == "local"
    end = All2All.local_group(**LOCAL) if local else All2All(**ARGUMENTS, transport=transport)
    end.set_rank_tokens([4])

    def refused(op: str, *tensors: Any) -> str:
        with pytest.raises(error) as caught:
            getattr(end, op)(*([tensor] if local else tensor for tensor in tensors))
        return str(caught.value)

    for op in ("send_recv_heads", "gather_heads", "allgather"):
        assert refused(op, wrong) == f"{op}: x {message}"
    for name in ("q", "k", "v"):
        assert refused("send_recv_qkv", *(wrong if name == other else X for other in "qkv")).startswith(
            f"send_recv_qkv: {name} {message}"
        )
    assert capfd.readouterr().err == ""


def test_heads_must_divide_or_be_given() -> None:
    group = All2All.local_group(2, 4, 7 * HEAD_DIM, 1, BF16)
    group.set_rank_tokens([2, 2])
    with pytest.raises(
        RuntimeError, match=r"x must have a number of heads in dimension 2 that is divisible by 2 ranks"
    ):
        group.send_recv_heads([torch.zeros(1, 2, 7, HEAD_DIM, dtype=BF16)] * 2)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_first_exchange_needs_the_tokens(transport: str) -> None:
    all2all = All2All(**ARGUMENTS, transport=transport)
    with pytest.raises(RuntimeError, match="^allgather: needs the tokens of each rank: call set_rank_tokens first$"):
        all2all.allgather(X)


def test_wrong_arguments_of_a_local_group() -> None:
    for wrong, message in (
        ({"world_size": 9}, "local_group: world_size must be at most 8, got 9"),
        ({"seqlen": -1}, "local_group: seqlen must be >= 0, got -1"),
        ({"seqlen": 1.5}, "local_group: seqlen must be an integer, got 1.5"),
        *(
            (
                {"devices": devices},
                f"local_group: devices must be 2 times cpu (GPUs are not served yet), got {devices!r}",
            )
            for devices in (["cpu"], [], "cpu", ["cpu", None], ["cpu", "moon"], ["cpu", "cuda:0"], 2)
        ),
    ):
        arguments = {"world_size": 2, "seqlen": 2, "hidden_dim": HIDDEN, "num_sms": 1, "tensor_dtype": BF16, **wrong}
        with pytest.raises(ValueError) as error:
            All2All.local_group(**arguments)
        assert str(error.value) == message
    group = group_of(2)
    with pytest.raises(TypeError, match="^allgather: each argument must be a list of tensors, got Tensor$"):
        group.allgather(torch.zeros(2, 1, 2, HEADS, HEAD_DIM))
    with pytest.raises(ValueError, match="^allgather: each list must have 2 tensors, got 1$"):
        group.allgather([torch.zeros(1, 2, HEADS, HEAD_DIM)])
    with pytest.raises(RuntimeError, match="^allgather: x must be float32, got bfloat16$"):
        group.allgather([torch.zeros(1, 2, HEADS, HEAD_DIM), torch.zeros(1, 2, HEADS, HEAD_DIM, dtype=BF16)])
    xs = [torch.ones(1, 2, HEADS, HEAD_DIM)] * 2
    assert equal(group.allgather(xs)[1], torch.ones(1, 4, HEADS, HEAD_DIM))  # nobody had begun to wait


def test_has_no_backward() -> None:
    all2all = All2All(**SHM | {"tensor_dtype": torch.float32})
    all2all.set_rank_tokens([4])
    x = X.float().requires_grad_()
    out = all2all.send_recv_heads(x)
    with pytest.raises(RuntimeError, match="^send_recv_heads: has no backward, use torch.no_grad()"):
        out.sum().backward()


def test_local_group_called_by_several_threads() -> None:
    group = group_of(2, timeout_seconds=5)

    def calls(value: int) -> None:
        for _ in range(50):
            xs = [torch.full((1, 2, HEADS, HEAD_DIM), float(value + rank)) for rank in range(2)]
            for out in group.allgather(xs, copy_out=True):
                assert torch.equal(out, torch.cat(xs, dim=1))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(calls, range(4)))


def test_local_group_knows_the_callers_grad_mode() -> None:
    group = group_of(2)
    xs = [torch.zeros(1, 2, HEADS, HEAD_DIM, requires_grad=True)] * 2
    assert all(out.requires_grad for out in group.allgather(xs))
    with torch.no_grad():
        assert not any(out.requires_grad for out in group.allgather(xs))


# Torch: ops, graphs.

OPS = ("send_recv_heads", "gather_heads", "allgather")


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    all2all = All2All(**SHM)
    all2all.set_rank_tokens([4])
    state = torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(getattr(torch.ops.ltx_kernels, op).default, (X, state, all2all._id, 4, HEADS, True))
    number = {"send_recv_heads": 1, "gather_heads": 3, "allgather": 4}[op]
    call = torch.ops.ltx_kernels.all2all_exchange.default
    torch.library.opcheck(call, (X, state, all2all._id, number, 4, HEADS))
    all2all.set_rank_tokens([0])
    torch.library.opcheck(call, (X[:, :0], state, all2all._id, number, 0, HEADS))


def test_opcheck_of_qkv() -> None:
    all2all = All2All(**SHM)
    all2all.set_rank_tokens([4])
    state = torch.zeros(1, dtype=torch.int64)
    arguments = (X, X + 1, X + 2, state, all2all._id, 4, HEADS)
    torch.library.opcheck(torch.ops.ltx_kernels.send_recv_qkv.default, (*arguments, True))
    torch.library.opcheck(torch.ops.ltx_kernels.all2all_exchange_qkv.default, arguments)


def test_torch_ops_count_their_calls_and_check_the_size_of_the_result() -> None:
    all2all = All2All(**SHM)
    all2all.set_rank_tokens([4])
    state = torch.zeros(1, dtype=torch.int64)
    torch.ops.ltx_kernels.allgather(X, state, all2all._id, 4, HEADS, False)
    assert state.item() == 1
    for name, sizes in (("out_tokens", (5, HEADS)), ("out_heads", (4, HEADS + 1))):
        with pytest.raises(RuntimeError, match=f"^allgather: {name} must be ., the size of the result, got "):
            torch.ops.ltx_kernels.allgather(X, state, all2all._id, *sizes, False)
    with pytest.raises(RuntimeError, match=r"^allgather: state must be int64, got float32$"):
        torch.ops.ltx_kernels.allgather(X, state.float(), all2all._id, 4, HEADS, False)


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_keeps_unused_and_repeated_exchanges(backend: str, transport: str) -> None:
    torch._dynamo.reset()  # graphs of the other parameters
    all2all = All2All(0, 1, 64, HIDDEN, 1, torch.float32, transport=transport)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:  # no other op, for which inductor would call a C++ compiler
        all2all.send_recv_heads(x)  # unused
        one, two = all2all.send_recv_heads(x), all2all.send_recv_heads(x)  # the same twice
        q, _, _ = all2all.send_recv_qkv(one, two, one)
        return all2all.gather_heads(q), all2all.allgather(two)

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    for calls, tokens in enumerate((4, 5, 64), start=1):
        all2all.set_rank_tokens([tokens])
        x = torch.randn(1, tokens, HEADS, HEAD_DIM)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
            assert all(torch.equal(out, x) for out in compiled(x))
        assert all2all._state.item() == calls * 6


def test_a_compiled_call_raises_errors_of_their_own_types() -> None:
    group = group_of(2)
    end = group._ends[0]
    end.set_timeout_seconds(0.1)
    compiled = torch.compile(lambda x: end._exchange("allgather", True, x), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(All2AllTimeout, match="^allgather: rank 0 waited in vain for rank 1 "):
        compiled(torch.zeros(1, 2, HEADS, HEAD_DIM))


def test_two_communicators_in_one_graph_and_a_destroyed_one() -> None:
    one, two = (All2All(**SHM) for _ in range(2))
    for all2all in (one, two):
        all2all.set_rank_tokens([4])
    compiled = torch.compile(lambda x: two.gather_heads(one.send_recv_heads(x)), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(X + 1), X + 1)
        two.destroy()
        with pytest.raises(RuntimeError, match="^gather_heads: this communicator was destroyed$"):
            compiled(X + 1)


# Between processes.


def every_case(rank: int, world_size: int, cases: list[Case], transport: str, rounds: int) -> list[str]:
    wrong = []
    noise = random.Random(rank)
    for case in cases:
        all2all = of_case(case, rank, transport=transport)
        assert all2all.transport == transport and all2all.fallback_reason is None
        for seed in range(rounds):
            if noise.random() < 0.3:
                time.sleep(noise.random() * 0.004)
            wrong += [f"{op} of {case}" for op in differing_ops(case, rank, all2all, seed, noise.random() < 0.5)]
        all2all.destroy()
    return wrong


@pytest.mark.parametrize("transport", ["shm", "nccl"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_processes(world_size: int, transport: str) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    rounds = 20 if transport == "shm" else 3
    assert ranks.run(world_size, every_case, cases, transport, rounds) == [[]] * world_size


def compiled(rank: int, world_size: int, transport: str) -> list[tuple[int, ...]]:
    """Token counts at which a compiled call is wrong: counts change, from even to uneven ones and back."""
    heads = (2, 1, 3)
    # One may compile for long.
    all2all = of_case(Case("largest", (4, 4, 4), heads), rank, transport=transport, timeout_seconds=40)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def forward(x: Tensor, y: Tensor) -> list[Tensor]:
        # The graph flattens to the shapes that it expects.
        return [
            out.flatten(1, 2) for out in (all2all.send_recv_heads(x), all2all.gather_heads(y), all2all.allgather(x))
        ]

    wrong = []
    for seed, tokens in enumerate([(2, 2, 2), (3, 3, 3), (3, 1, 2), (1, 0, 4), (4, 4, 4), (0, 1, 0)]):
        case = Case("one of them", tokens, heads)
        all2all.set_rank_tokens(tokens)
        whole = case.whole(seed)
        x, y = case.tokens_of(whole, rank).clone(), case.heads_of(whole, rank).clone()
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 1)
        with torch.no_grad():
            results = forward(x, y)
        if not all(map(equal, results, [out.flatten(1, 2) for out in (y, x, whole)])):
            wrong.append(tokens)
    return wrong


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_compiled_calls_follow_the_tokens_of_the_ranks(transport: str) -> None:
    assert ranks.run(3, compiled, transport) == [[]] * 3


def a_thousand_rounds(rank: int, world_size: int) -> int:
    """q, k and v back to back into views, with a slow rank now and then; the number of wrong results."""
    case = Case("four ranks", (2, 2, 2, 2), (2, 2, 2, 2), head_dim=HEAD_DIM, dtype=torch.float32)
    all2all = of_case(case, rank)
    noise = random.Random(rank)
    wrong = 0
    base = torch.arange(8 * 8 * HEAD_DIM).view(1, 8, 8, HEAD_DIM).float()
    for seed in range(1000):
        if noise.random() < 0.02:
            time.sleep(noise.random() * 0.01)
        for i in range(3):
            whole = base + 1e5 * (seed % 100) + i / 4
            out = all2all.send_recv_heads(case.tokens_of(whole, rank))
            if noise.random() < 0.01:
                time.sleep(0.003)  # the others are at their next call meanwhile
            wrong += not torch.equal(out, case.heads_of(whole, rank))
    return wrong


def test_a_thousand_rounds() -> None:
    assert ranks.run(4, a_thousand_rounds) == [0] * 4


def endless(
    rank: int, world_size: int, victims: tuple[int, ...], timeout_seconds: float, tokens: int
) -> tuple[str, tuple[int, ...], float, list[float]]:
    """Exchanges until ranks die; then the survivors build a communicator without them."""
    all2all = All2All(rank, world_size, tokens, 24 * 16, 1, BF16, timeout_seconds=30)
    all2all.set_rank_tokens([tokens] * world_size)
    x = torch.full((1, tokens, 24, 16), float(rank)).bfloat16()
    while True:
        begin = ranks.now()
        try:
            all2all.send_recv_heads(x)
        except All2AllTimeout as error:
            waited, timeout = ranks.now() - begin, error
            break
        if all2all._state.item() == 5:
            ranks.ready()
            if rank not in victims:
                all2all.set_timeout_seconds(timeout_seconds)
    for call in (all2all.check, lambda: all2all.allgather(x)):
        with pytest.raises(All2AllTimeout, match=re.escape(str(timeout))):
            call()
    survivors = [other for other in range(world_size) if other not in victims]
    group = dist.new_group(survivors, use_local_synchronization=True)
    place = survivors.index(rank)
    again = All2All(place, len(survivors), tokens, 24 * 16, 1, BF16, group=group, transport=all2all.transport)
    again.set_rank_tokens([tokens] * len(survivors))
    values = again.allgather(x)[0, ::tokens, 0, 0].tolist()
    return str(timeout), timeout.ranks, waited, values


@pytest.mark.parametrize(
    ("world_size", "victims", "tokens"),
    [(2, (1,), 4), (3, (0,), 4), (4, (0, 2), 4), (8, (5,), 4), (3, (1,), 20000), (4, (3,), 20000)],
    ids=str,
)
def test_killed_during_exchanges(world_size: int, victims: tuple[int, ...], tokens: int) -> None:
    """20,000 tokens: mostly copying, so that the death comes in the middle of a push."""
    timeout_seconds = 1.0
    kill = dict.fromkeys(victims, 0.03)
    results = ranks.run(world_size, endless, victims, timeout_seconds, tokens, kill=kill)
    survivors = [rank for rank in range(world_size) if rank not in victims]
    for rank in survivors:
        message, missing, waited, values = results[rank]
        assert re.match(
            rf"send_recv_heads: rank {rank} waited in vain for ranks? [\d, and]+ \(call \d+, timeout 1 s\)$", message
        )
        # Of two ranks that die at once, one may have posted to this rank before.
        assert missing and set(missing) <= set(victims)
        assert waited <= timeout_seconds + 1
        assert values == [float(other) for other in survivors]


def dies_between_calls(rank: int, world_size: int) -> tuple[int, ...]:
    all2all = All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, timeout_seconds=1)
    all2all.set_rank_tokens([2] * world_size)
    x = torch.ones(1, 2, HEADS, HEAD_DIM)
    view = all2all.send_recv_heads(x)
    if rank == 1:
        ranks.die()
    with pytest.raises(All2AllTimeout) as error:
        all2all.gather_heads(view)
    assert torch.equal(view, torch.ones_like(view))
    return error.value.ranks


def test_killed_between_exchanges() -> None:
    assert ranks.run(4, dies_between_calls) == [(1,), None, (1,), (1,)]


def slow_or_raising(rank: int, world_size: int, slow: bool) -> str:
    all2all = All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, timeout_seconds=0.8)
    all2all.set_rank_tokens([2] * world_size)
    x = torch.ones(1, 2, 3, HEAD_DIM)
    all2all.send_recv_heads(x)
    if rank == 2 and slow:
        time.sleep(2)
        all2all.send_recv_heads(x)  # the others had posted theirs before they gave up
    elif rank == 2:
        with pytest.raises(RuntimeError, match="^send_recv_heads: x must be float32, got float16$"):
            all2all.send_recv_heads(x.half())
        return "raised"
    with pytest.raises(All2AllTimeout) as error:
        all2all.send_recv_heads(x)
    return str(error.value)


def test_a_rank_slower_than_the_timeout_and_one_that_raises() -> None:
    def vain(rank: int, others: str, call: int) -> str:
        return f"send_recv_heads: rank {rank} waited in vain for {others} (call {call}, timeout 0.8 s)"

    slow = ranks.run(3, slow_or_raising, True)
    assert slow == [vain(0, "rank 2", 2), vain(1, "rank 2", 2), vain(2, "ranks 0 and 1", 3)]
    assert ranks.run(3, slow_or_raising, False) == [vain(0, "rank 2", 2), vain(1, "rank 2", 2), "raised"]


def patient(rank: int, world_size: int) -> bool:
    """One rank comes late, as one does that compiles before its first call: the set time is the caller's."""
    all2all = All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, timeout_seconds=0.1)
    all2all.set_rank_tokens([2] * world_size)
    all2all.set_timeout_seconds(0)
    if rank == 0:
        time.sleep(0.5)
    x = torch.full((1, 2, HEADS, HEAD_DIM), float(rank))
    return torch.equal(all2all.allgather(x)[0, :, 0, 0], torch.tensor([0.0, 0, 1, 1]))


def test_no_timeout() -> None:
    assert ranks.run(2, patient) == [True, True]


def disagrees(rank: int, world_size: int, what: str) -> str:
    dtype = torch.float16 if what == "dtype" and rank == 1 else torch.bfloat16
    all2all = All2All(rank, world_size, 8, HIDDEN, 1, dtype, timeout_seconds=20) if what != "dtype" else None
    if all2all is None:
        with pytest.raises(All2AllMismatch) as error:
            All2All(rank, world_size, 8, HIDDEN, 1, dtype)
        return str(error.value)
    all2all.set_rank_tokens([2, 3] if what == "tokens" and rank == 1 else [2, 2])
    shape = (1, 3 if what == "tokens" and rank == 1 else 2, 4 if what == "heads" and rank == 1 else HEADS, HEAD_DIM)
    x = torch.zeros(shape, dtype=dtype)
    with pytest.raises(All2AllMismatch) as error:
        all2all.allgather(x) if what == "op" and rank == 1 else all2all.send_recv_heads(x)
    with pytest.raises(All2AllMismatch):
        all2all.check()
    assert error.value.rank == rank and error.value.ranks == (1 - rank,)
    return str(error.value)


@pytest.mark.parametrize("what", ["op", "tokens", "heads"])
def test_ranks_that_disagree(what: str) -> None:
    rule = "must agree on op, rank_tokens, shape, heads and dtype, got others (call 1)"
    other = "allgather" if what == "op" else "send_recv_heads"
    begin = time.monotonic()
    assert ranks.run(2, disagrees, what) == [f"send_recv_heads: ranks 0 and 1 {rule}", f"{other}: ranks 1 and 0 {rule}"]
    assert time.monotonic() - begin < 10  # no timeout


def test_ranks_that_disagree_in_the_constructor() -> None:
    message = "All2All: ranks 0 and 1 must agree on tensor_dtype, got torch.bfloat16 and torch.float16"
    assert ranks.run(2, disagrees, "dtype") == [message, message]


def wrong_on_one_rank(rank: int, world_size: int) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        All2All(rank, world_size, 8, HIDDEN, 0 if rank == 1 else 1, torch.bfloat16)
    lock = threading.Lock()  # no type of any argument, and it cannot be sent
    with pytest.raises((ValueError, RuntimeError), match="All2All: seqlen must be an integer, got <unlocked "):
        All2All(rank, world_size, lock if rank == 1 else 8, HIDDEN, 1, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^All2All: rank and world_size must be the group's, \(., 2\), got \(., 2\)$"):
        All2All(1 - rank, world_size, 8, HIDDEN, 1, torch.bfloat16)
    return f"{type(error.value).__name__}: {error.value}"


def test_a_wrong_argument_on_one_rank_is_an_error_on_all() -> None:
    message = "All2All: num_sms must be >= 1, got 0"
    assert ranks.run(2, wrong_on_one_rank) == [f"RuntimeError: All2All: rank 1: {message}", f"ValueError: {message}"]


def forks(rank: int, world_size: int, transport: str) -> list[str]:
    """What each method says in a fork of the rank; the rank itself goes on."""
    all2all = All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, timeout_seconds=5, transport=transport)
    all2all.set_rank_tokens([2] * world_size)
    x = torch.full((1, 2, HEADS, HEAD_DIM), float(rank))
    view = all2all.allgather(x)
    parent = os.getpid()
    end, child_end = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        messages = []
        try:
            for call in (
                lambda: all2all.send_recv_heads(x),
                lambda: all2all.set_rank_tokens([1, 1]),
                lambda: all2all.set_timeout_seconds(0),
                all2all.check,
                all2all.destroy,
            ):
                try:
                    call()
                    messages.append("")
                except RuntimeError as error:
                    messages.append(f"{type(error).__name__}: {error}")
            child_end.send(messages)
        finally:
            os._exit(0)
    child_end.close()
    messages = [message.replace(str(child), "CHILD").replace(str(parent), "PARENT") for message in end.recv()]
    os.waitpid(child, 0)
    assert view[0, :, 0, 0].tolist() == [0, 0, 1, 1]
    assert all2all.allgather(-x)[0, :, 0, 0].tolist() == [0, 0, -1, -1]
    return messages


@pytest.mark.parametrize("transport", ["shm", "nccl"])
def test_a_forked_process_is_no_rank(transport: str) -> None:
    def refused(op: str) -> str:
        return f"RuntimeError: {op}: this communicator must be used by the process that made it, PARENT, got its fork CHILD"

    expected = [*map(refused, ("send_recv_heads", "set_rank_tokens", "set_timeout_seconds", "check")), ""]
    assert ranks.run(2, forks, transport) == [expected] * 2


def several_communicators(rank: int, world_size: int) -> list[bool]:
    """As a model has them: for video and audio, of different sizes and dtypes, their calls interleaved."""
    cases = [
        Case("video", (3, 2), (2, 2)),
        Case("audio", (1, 2), (1, 1), head_dim=8, dtype=torch.float32),
        Case("context", (4, 4), (2, 1), batch=2, dtype=torch.float8_e4m3fn),
    ]
    ends = [of_case(case, rank) for case in cases]
    results = []
    for seed in range(50):
        wholes = [case.whole(seed) for case in cases]
        views = [end.send_recv_heads(case.tokens_of(x, rank)) for case, end, x in zip(cases, ends, wholes, strict=True)]
        results += [equal(out, case.heads_of(x, rank)) for case, out, x in zip(cases, views, wholes, strict=True)]
        back = [end.gather_heads(out) for end, out in zip(ends, views, strict=True)]
        results += [equal(out, case.tokens_of(x, rank)) for case, out, x in zip(cases, back, wholes, strict=True)]
    return results


def test_several_communicators_of_one_process() -> None:
    assert ranks.run(2, several_communicators) == [[True] * 300] * 2


def killed_on_gloo(rank: int, world_size: int) -> str:
    all2all = All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, transport="nccl")
    all2all.set_rank_tokens([2] * world_size)
    x = torch.ones(1, 2, HEADS, HEAD_DIM)
    all2all.send_recv_heads(x)
    if rank == 1:
        ranks.die()
    with pytest.raises(All2AllTimeout) as error:
        for _ in range(100):
            all2all.send_recv_heads(x)
    assert error.value.op == "send_recv_heads" and error.value.rank == rank
    return str(error.value)


def test_torch_distributed_raises_the_same_type() -> None:
    (message, _) = ranks.run(2, killed_on_gloo)
    assert re.match(r"send_recv_heads: rank 0: .*\S", message)


def too_many_for_shared_memory(rank: int, world_size: int) -> tuple[str, str | None, list[float]]:
    with pytest.raises(RuntimeError) as error:
        All2All(rank, world_size, 1, 9, 1, torch.float32, transport="shm")
    assert str(error.value) == (
        "All2All: transport must be auto or nccl (shm serves up to 8 ranks, here are 9), got 'shm'"
    )
    all2all = All2All(rank, world_size, 1, 9, 1, torch.float32)
    all2all.set_rank_tokens([1] * 9)
    out = all2all.send_recv_heads(torch.arange(9.0).view(1, 1, 9, 1) + 100 * rank)
    return all2all.transport, all2all.fallback_reason, out.flatten().tolist()


def test_nine_ranks() -> None:
    reason = "shm serves up to 8 ranks, here are 9"
    expected = [("nccl", reason, [100.0 * other + rank for other in range(9)]) for rank in range(9)]
    assert ranks.run(9, too_many_for_shared_memory) == expected


HERE = {"machine": ("one", "boot", (1, 2)), "user": 1000, "gpu": False}


@pytest.mark.parametrize(
    ("others", "chosen", "reason"),
    [
        ([{}], "shm", None),
        ([{"machine": ("two", "boot", (1, 2))}], "nccl", "one machine, the ranks are on several"),
        ([{"user": 0}], "nccl", "one user, here are several"),
        ([{}, {"gpu": True}], "nccl", "ipc is not available yet: its kernels have not been run on a GPU"),
    ],
)
def test_transport_is_chosen_by_what_all_ranks_see(
    others: list[dict[str, Any]], chosen: str, reason: str | None
) -> None:
    facts = [HERE, *({**HERE, **other} for other in others)]
    for order in itertools.permutations(facts):
        transport, why = _choose("auto", order)
        assert transport == chosen
        assert why is None if reason is None else reason in str(why)
    assert _choose("nccl", facts) == ("nccl", None)


def creator_that_dies(rank: int, world_size: int) -> None:
    number = torch.ops.ltx_kernels.all2all_open(0, 2, 1, torch.float32, None)
    torch.ops.ltx_kernels.all2all_create_memory(number)
    ranks.die()


def test_memory_of_a_creator_that_died_goes_with_the_next_group() -> None:
    ranks.run(1, creator_that_dies)
    assert len(ranks.files) == 1
    assert ranks.run(2, patient) == [True, True]
    assert not ranks.left_files()


def dies_in_set_up(rank: int, world_size: int, victim: int) -> bool:
    """One rank dies when it has mapped the memory. Whether another's error is there while the file is."""
    if rank == victim:
        torch.ops.ltx_kernels.all2all_reserve_allgather = lambda _: ranks.die()
    with pytest.raises(RuntimeError, match=r"^All2All: not all ranks of the group can be reached: .*\S") as error:
        All2All(rank, world_size, 2, HIDDEN, 1, torch.float32, allgather=True, transport="shm")
    assert error.value.__traceback__ is not None  # which holds the communicator
    return bool(ranks.shared_descriptors())


@pytest.mark.parametrize("victim", [0, 1])
def test_death_in_set_up_leaves_no_file(victim: int) -> None:
    left = ranks.run(3, dies_in_set_up, victim)
    assert len(ranks.files) == 1
    assert left == [None if rank == victim else False for rank in range(3)]


def in_a_mesh(rank: int, world_size: int) -> list[float]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    values = []
    for name in ("sp", "dp"):
        group = mesh.get_group(name)
        all2all = All2All(dist.get_rank(group), 2, 1, HIDDEN, 1, torch.float32, group=group)
        all2all.set_rank_tokens([1, 1])
        values += all2all.allgather(torch.full((1, 1, HEADS, HEAD_DIM), float(rank)))[0, :, 0, 0].tolist()
    return values


def test_groups_of_a_device_mesh() -> None:
    assert ranks.run(4, in_a_mesh) == [[0, 1, 0, 2], [0, 1, 1, 3], [2, 3, 0, 2], [2, 3, 1, 3]]


def grows(rank: int, world_size: int, allgather: bool) -> list[int]:
    """Bytes of the group's memory that have pages: after set-up, send_recv_heads, allgather, and destroy."""
    all2all = All2All(rank, world_size, 256, 1024, 1, torch.float32, allgather=allgather)
    all2all.set_rank_tokens([256] * world_size)
    x = torch.zeros(1, 256, 4, 256)
    sizes = []
    for call in (all2all.check, lambda: all2all.send_recv_heads(x), lambda: all2all.allgather(x), all2all.destroy):
        call()
        dist.barrier()
        sizes.append(sum(os.fstat(number).st_blocks * 512 for number in ranks.shared_descriptors()))
        dist.barrier()
    return sizes


@pytest.mark.parametrize("allgather", [False, True])
def test_memory_for_allgather_is_had_when_it_is_needed(allgather: bool) -> None:
    result = 256 * 1024 * 4
    for sizes in ranks.run(4, grows, allgather):
        assert sizes.pop() == 0
        for size, results in zip(sizes, (4, 4, 4) if allgather else (1, 1, 4), strict=True):
            expected = 4 * 2 * results * result  # ranks, slots
            assert expected <= size < expected + (1 << 20)


def fails_to_map(rank: int, world_size: int, transport: str) -> str:
    """Results of 2^52 bytes: no machine has room."""
    try:
        all2all = All2All(rank, world_size, 1 << 30, 1 << 20, 1, torch.float32, transport=transport)
    except RuntimeError as error:
        return str(error)
    assert all2all.transport == "nccl"
    assert all2all.fallback_reason is not None
    return all2all.fallback_reason


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_memory_that_is_not_to_be_had(transport: str) -> None:
    """The same error, or the same fallback, on every rank."""
    one, two = ranks.run(2, fails_to_map, transport)
    assert one == two and re.match("All2All: (cannot map|cannot make a file of) ", one)


def this_machine() -> str:
    return repr(_facts({}, "")["machine"])


def in_little_room(rank: int, world_size: int) -> dict[str, str]:
    """What goes wrong where /dev/shm has room for a megabyte."""
    said = {}

    def of_size(result_bytes: int, transport: str) -> All2All:
        all2all = All2All(rank, world_size, result_bytes // 1024, 1024, 1, torch.uint8, transport=transport)
        all2all.set_rank_tokens([result_bytes // 1024] * world_size)
        return all2all

    for when, result_bytes in (("no rank has room", 1 << 20), ("the second rank has none", 300 << 10)):
        with pytest.raises(RuntimeError) as error:
            of_size(result_bytes, "shm")
        said[when] = str(error.value)
        assert ranks.shared_descriptors() == []
        fallback = of_size(result_bytes, "auto")
        assert fallback.transport == "nccl"
        said[f"{when}: fallback"] = str(fallback.fallback_reason)
        assert ranks.shared_descriptors() == []
    # Room for send_recv_heads, not for allgather, which needs twice that.
    all2all = of_size(200 << 10, "auto")
    assert all2all.transport == "shm"
    x = torch.full((1, 200, 2, 512), rank, dtype=torch.uint8)
    for again in range(2):
        with pytest.raises(RuntimeError) as error:
            all2all.allgather(x)
        said[f"in a call {again}"] = str(error.value)
        out = all2all.send_recv_heads(x)
        assert out[0, ::200, 0, 0].tolist() == [0, 1]
    all2all.destroy()
    assert os.listdir("/dev/shm") == []
    return said


def test_no_room_in_shared_memory() -> None:
    """In a mount namespace with a /dev/shm of its own."""
    new_namespace = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run([*new_namespace, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user must not mount a file system of its own (unshare --user --mount)")
    code = (
        "import json, ranks, test_all2all as tests; "
        "print(json.dumps([tests.this_machine(), *ranks.run(2, tests.in_little_room)]))"
    )
    command = [*new_namespace, f'{mount} && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    machine, one, two = json.loads(done.stdout)
    assert machine != this_machine()  # another /dev/shm: ranks here and there could not share memory
    message = (
        r"All2All: /dev/shm must have room for \d+ bytes more, got \d+ \(No space left on device; containers have an "
        r"option --shm-size\)"
    )
    assert len(one) == len(two) == 6
    for when in one:
        assert re.fullmatch(message, one[when]) and re.fullmatch(message, two[when]), (when, one, two)
        assert one[when] == two[when] or "call" in when


def test_the_whole_of_each_case_has_values_that_a_copy_could_lose() -> None:
    whole = CASES[0].whole(0)
    assert whole.isnan().any() and len(bits(whole).unique()) > 200
    assert not any(equal(CASES[0].whole(a), CASES[0].whole(b)) for a, b in itertools.combinations(range(4), 2))
