"""All2All over CUDA IPC: real processes that share one GPU, and what the host does without one.

Processes on one GPU take turns of milliseconds, in which a kernel that waits for another process's waits in vain: so
there are few rounds, and timeouts are long.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from cases.all2all import CASES, Case, equal
from torch import Tensor

from ltx_kernels import All2AllMismatch, All2AllTimeout
from ltx_kernels._backends import backend_lacks
from ltx_kernels.all2all import _IpcAll2All

NUM_SMS = 16
PATIENCE_SECONDS = 20


@pytest.fixture(autouse=True)
def _no_leaked_files() -> Any:
    ranks.files.clear()
    yield
    assert not ranks.left_files()


@pytest.fixture
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    reason = backend_lacks("cuda", torch.device("cuda"))
    if reason:
        pytest.skip(reason)


on_gpu = pytest.mark.usefixtures("_gpu")


def of_case(case: Case, rank: int, timeout_seconds: float = PATIENCE_SECONDS, **options: Any) -> _IpcAll2All:
    end = _IpcAll2All(
        rank,
        case.world_size,
        case.seqlen,
        case.hidden_dim,
        NUM_SMS,
        case.dtype,
        timeout_seconds=timeout_seconds,
        transport="ipc",
        rank_heads=None if case.even_heads else case.heads,
        **options,
    )
    end.set_rank_tokens(case.tokens)
    return end


def seconds_since(begin: float) -> float:
    return time.monotonic() - begin


# Without a GPU.


def without_a_gpu(rank: int, world_size: int) -> tuple[str, str]:
    with pytest.raises(RuntimeError) as error:
        of_case(CASES[0], rank)
    end = _IpcAll2All(rank, world_size, 1, 2, 1, torch.float32)  # transport="auto"
    assert end.transport == "nccl"
    end.set_rank_tokens([1, 1])
    x = torch.tensor([2.0 * rank, 2.0 * rank + 1]).view(1, 1, 2, 1)
    assert end.send_recv_heads(x).flatten().tolist() == [rank, 2.0 + rank]
    return str(error.value), str(end.fallback_reason)


def test_what_keeps_ipc_from_a_rank_is_told_on_all() -> None:
    results = ranks.run(2, without_a_gpu)
    assert len({text for result in results for text in result}) == 1
    text = results[0][0]
    built = torch.ops.ltx_kernels.built_architectures()
    assert text.startswith(f"All2All: rank 0: {'cuda:0 cannot be used: ' if built else 'this build has no CUDA code'}")
    assert "; rank 1: " in text
    assert len(ranks.files) == 2  # of which none is left


def dies_in_set_up(rank: int, world_size: int) -> tuple[str, str, tuple[int, ...], float]:
    if rank == 1:
        torch.ops.ltx_kernels.all2all_share_gpu = lambda *_: ranks.die()
    begin = time.monotonic()
    with pytest.raises(All2AllTimeout) as error:
        of_case(CASES[2], rank, timeout_seconds=1)
    return str(error.value), error.value.op, error.value.ranks, seconds_since(begin)


def test_rank_that_dies_in_set_up_is_named_in_time() -> None:
    first, _, last = ranks.run(3, dies_in_set_up)
    for rank, result in ((0, first), (2, last)):
        message, op, missing, waited = result
        assert message == f"All2All: rank {rank} waited in vain for rank 1 (timeout 1 s)"
        assert op == "" and missing == (1,) and waited < 2


# On a GPU.


def wrong_ops(end: _IpcAll2All, case: Case, rank: int, seed: int, copy_out: bool) -> list[str]:
    """Ops whose result is not what plain indexing gives."""
    wholes = [case.whole(3 * seed + i) for i in range(3)]
    local, share = ([part(x, rank) for x in wholes] for part in (case.tokens_of, case.heads_of))
    on_device = [x.cuda() for x in local]
    results = {
        "send_recv_heads": lambda: ([end.send_recv_heads(on_device[0], copy_out=copy_out)], share[:1]),
        "gather_heads": lambda: ([end.gather_heads(share[1].cuda(), copy_out=copy_out)], local[1:2]),
        "allgather": lambda: ([end.allgather(on_device[2], copy_out=copy_out)], wholes[2:]),
        "send_recv_qkv": lambda: (end.send_recv_qkv(*on_device, copy_out=copy_out), share),
    }
    wrong = []
    for op, call in results.items():
        tensors, expected = call()
        if not all(equal(x.cpu(), other) for x, other in zip(tensors, expected, strict=True)):
            wrong.append(op)
    return wrong


def every_case(rank: int, world_size: int, cases: Sequence[Case]) -> list[str]:
    if world_size == 2:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # whose memory has no IPC handle
    wrong = []
    for number, case in enumerate(cases):
        end = of_case(case, rank, allgather=number % 2 == 0)
        for seed in range(2):
            copy_out = (rank + seed) % 2 == 0
            wrong += [f"{op} of {case}" for op in wrong_ops(end, case, rank, seed, copy_out)]
        end.destroy()
    return wrong


@on_gpu
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_on_one_gpu(world_size: int) -> None:
    cases = [case for case in CASES if case.world_size == world_size]
    assert ranks.run(world_size, every_case, cases, gpu=True) == [[]] * world_size


THREE = Case("three ranks", (300, 100, 400), (2, 2, 2), head_dim=64)


def late_ranks_and_views(rank: int, world_size: int) -> list[bool]:
    """There and back through views, no host waiting; each rank is late in turn, on the host or on the GPU."""
    end = of_case(THREE, rank)
    inputs = [THREE.tokens_of(THREE.whole(seed), rank).cuda() for seed in range(6)]
    results = []
    for i, x in enumerate(inputs):
        if i % 3 == rank and i < 3:
            time.sleep(0.2)
        elif i % 3 == rank:
            torch.cuda._sleep(50_000_000)
        results.append(end.gather_heads(end.send_recv_heads(x)).clone())
    end.check()
    return [equal(result, x) for result, x in zip(results, inputs, strict=True)]


@on_gpu
def test_late_ranks_and_views_that_are_sent_on() -> None:
    assert ranks.run(3, late_ranks_and_views, gpu=True) == [[True] * 6] * 3


def replays(rank: int, world_size: int) -> list[bool]:
    case = Case("two ranks", (3, 4), (2, 2))
    end = of_case(case, rank)
    x = case.tokens_of(case.whole(0), rank).cuda()
    message = "^allgather: must have been called once before it is captured into a graph, for its memory"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.zero_()  # torch warns of an empty graph
        end.allgather(x)
    end.allgather(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        share, whole = end.send_recv_heads(x, copy_out=True), end.allgather(x)
    right = []
    for seed in range(1, 5):
        expected = case.whole(seed)
        x.copy_(case.tokens_of(expected, rank))
        graph.replay()
        right.append(equal(share.cpu(), case.heads_of(expected, rank)) and equal(whole.cpu(), expected))
        if seed == 2:  # an eager call in between
            right.append(equal(end.allgather(x).cpu(), expected))
    end.check()
    return right


@on_gpu
def test_graph_is_replayed() -> None:
    assert ranks.run(2, replays, gpu=True) == [[True] * 5] * 2


def survives(rank: int, world_size: int, tokens: int, between: bool) -> tuple[str, tuple[int, ...], float, list[float]]:
    """Exchanges until rank 1 dies, then without it."""
    case = Case("whole", (tokens,) * world_size, (2,) * world_size, dtype=torch.float32)
    end = of_case(case, rank, timeout_seconds=3)
    x = torch.full((1, tokens, 2 * world_size, case.head_dim), float(rank), device="cuda")
    calls = 0
    while True:
        begin = time.monotonic()
        try:
            view = end.send_recv_heads(x)
            end.check()
        except All2AllTimeout as error:
            waited, timeout = seconds_since(begin), error
            break
        kept = view
        calls += 1
        if calls == 3:
            ranks.ready()
            if between and rank == 1:
                ranks.die()
    for call in (end.check, lambda: end.allgather(x)):
        with pytest.raises(All2AllTimeout):
            call()
    end.destroy()
    assert kept[0, ::tokens, 0, 0].tolist() == [float(peer) for peer in range(world_size)]
    survivors = [other for other in range(world_size) if other != 1]
    group = dist.new_group(survivors, use_local_synchronization=True)
    without = Case("survivors", (tokens,) * len(survivors), (2,) * len(survivors), dtype=torch.float32)
    again = of_case(without, survivors.index(rank), group=group)
    values = again.allgather(x[:, :, : 2 * len(survivors)].contiguous())[0, ::tokens, 0, 0].tolist()
    return str(timeout), timeout.ranks, waited, values


@on_gpu
@pytest.mark.parametrize("between", [True, False], ids=["between calls", "during calls"])
def test_killed_rank_is_named_and_the_others_go_on(between: bool) -> None:
    kill = None if between else {1: 0.5}
    results = ranks.run(3, survives, 4 if between else 50_000, between, kill=kill, gpu=True)
    assert results[1] is None
    for rank in (0, 2):
        message, missing, waited, values = results[rank]
        assert message.startswith(f"send_recv_heads: rank {rank} waited in vain for rank 1 (call ")
        assert missing == (1,) and waited <= 4 and values == [0.0, 2.0]


def disagrees(rank: int, world_size: int) -> tuple[list[str], float]:
    """In the op, one of which needs more memory than there is; in the counts; one alone needs more memory."""
    case = Case("two ranks", (4, 4), (2, 2))
    x = torch.zeros(1, 4, 4, 16, dtype=case.dtype, device="cuda")
    texts = []
    begin = time.monotonic()
    for what in ("growth", "both grow", "tokens"):
        end = of_case(case, rank)
        with pytest.raises(All2AllMismatch) as error:
            if what == "tokens":
                end.set_rank_tokens([4, 3 + rank])
                end.send_recv_heads(x[:, : 3 + rank] if rank else x)
            elif rank == 0:
                end.allgather(x)
            elif what == "growth":
                end.send_recv_heads(x)
            else:
                end.send_recv_qkv(x, x, x)
            end.check()
        assert error.value.ranks == (1 - rank,)
        texts.append(str(error.value))
        end.destroy()
    waited = seconds_since(begin)
    end = of_case(case, rank, timeout_seconds=1)
    if rank == 0:
        with pytest.raises(All2AllTimeout) as late:
            end.allgather(x)
        assert (late.value.op, late.value.ranks) == ("allgather", (1,))
        texts.append(str(late.value))
    return texts, waited


@on_gpu
def test_ranks_that_disagree_or_do_not_come_where_memory_is_to_grow() -> None:
    (first, waited), (second, _) = ranks.run(2, disagrees, gpu=True)
    rule = "must agree on op, rank_tokens, shape, heads and dtype, got others (call 1)"
    assert first == [
        f"allgather: ranks 0 and 1 {rule}",
        f"allgather: ranks 0 and 1 {rule}",
        f"send_recv_heads: ranks 0 and 1 {rule}",
        "allgather: rank 0 waited in vain for rank 1 (call 1, timeout 1 s)",
    ]
    assert second == [f"{op}: ranks 1 and 0 {rule}" for op in ("send_recv_heads", "send_recv_qkv", "send_recv_heads")]
    assert waited < PATIENCE_SECONDS  # no timeout


def destroys_in_turn(rank: int, world_size: int) -> list[int]:
    """MiB that are not given back, after each order."""
    large = Case("large", (1 << 14,) * world_size, (4,) * world_size, head_dim=128)  # 48 MiB a result
    x = torch.ones(1, 1 << 14, 12, 128, dtype=large.dtype, device="cuda")
    lost = []
    free_before = 0
    for order in ((), (0, 1, 2), (2, 0, 1)):
        end = of_case(large, rank)
        end.send_recv_heads(x)
        end.allgather(x)  # grows
        for turn in order:
            if turn == rank:
                end.destroy()
                end.destroy()
            dist.barrier()
        if not order:
            del end  # the finalizer
            gc.collect()
        torch.cuda.synchronize()
        dist.barrier()
        of_case(Case("one rank", (1,), (1,)), 0).destroy()  # frees what peers have let go
        dist.barrier()
        free = torch.cuda.mem_get_info()[0]
        dist.barrier()
        lost.append((free_before - free) >> 20 if order else 0)
        free_before = free_before or free
    with pytest.raises(RuntimeError, match="^send_recv_heads: this communicator was destroyed$"):
        end.send_recv_heads(x)
    return lost


@on_gpu
def test_memory_is_given_back_in_whatever_order_ranks_destroy() -> None:
    for lost in ranks.run(3, destroys_in_turn, gpu=True):
        assert all(mebibytes < 32 for mebibytes in lost), lost


def destroys_while_waiting_for_ever(rank: int, world_size: int) -> float:
    case = CASES[0]
    end = of_case(case, rank)
    x: Tensor = case.tokens_of(case.whole(0), rank).cuda()
    end.send_recv_heads(x)
    end.check()
    if rank == 1:
        ranks.die()
    end.set_timeout_seconds(0)
    end.send_recv_heads(x)
    begin = time.monotonic()
    with pytest.raises(All2AllTimeout, match="^send_recv_heads: rank 0 waited in vain for rank 1 "):
        end.destroy()
    return seconds_since(begin)


@on_gpu
def test_destroy_ends_a_wait_without_a_timeout() -> None:
    waited, _ = ranks.run(2, destroys_while_waiting_for_ever, gpu=True)
    assert 9 < waited < 12
