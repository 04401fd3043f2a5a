"""The exchange's kernels: all ranks in this process, on one GPU and on several, against plain indexing.

The ops called here are the package's own. A call may name some of the ranks, so that the others are late or absent.
"""

import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from cases.all2all import CASES, Case, equal
from torch import Tensor

from ltx_kernels import all2all_cpp  # noqa: F401  (registers the ops)
from ltx_kernels._backends import backend_lacks

_ops = torch.ops.ltx_kernels
OPS = {"send_recv_heads": 1, "send_recv_qkv": 2, "gather_heads": 3, "allgather": 4}
EVERY_SM = 1000
TIMEOUT_SECONDS = 0.2


@pytest.fixture
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda.is_available() is False")
    reason = backend_lacks("cuda", torch.device("cuda"))
    if reason:
        pytest.skip(reason)


class Group:
    """The ranks of a case."""

    def __init__(self, case: Case, devices: Sequence[int] | None = None, num_sms: int = EVERY_SM) -> None:
        self.case = case
        self.devices = devices or [0] * case.world_size
        heads = None if case.even_heads else case.heads
        self.ids = [
            _ops.all2all_open(rank, case.world_size, case.seqlen * case.hidden_dim, case.dtype, heads)
            for rank in range(case.world_size)
        ]
        _ops.all2all_share_gpus(self.ids, self.devices, num_sms)
        self.set_tokens(case.tokens, range(case.world_size))

    def set_tokens(self, tokens: Sequence[int], ranks: Sequence[int]) -> None:
        for rank in ranks:
            _ops.all2all_set_rank_tokens(self.ids[rank], tokens)

    def inputs(self, op: str, seed: int) -> list[list[Tensor]]:
        """Of each rank."""
        wholes = [self.case.whole(seed + i) for i in range(3 if op == "send_recv_qkv" else 1)]
        part = self.case.heads_of if op == "gather_heads" else self.case.tokens_of
        return [
            [part(whole, rank).to(f"cuda:{device}") for whole in wholes] for rank, device in enumerate(self.devices)
        ]

    def expected(self, op: str, seed: int) -> list[list[Tensor]]:
        wholes = [self.case.whole(seed + i) for i in range(3 if op == "send_recv_qkv" else 1)]
        parts = {"gather_heads": self.case.tokens_of, "allgather": lambda whole, _: whole}
        part = parts.get(op, self.case.heads_of)
        return [[part(whole, rank) for whole in wholes] for rank in range(self.case.world_size)]

    def exchange(
        self, op: str, inputs: Sequence[Sequence[Tensor]], copy_out: bool = False, ranks: Sequence[int] | None = None
    ) -> list[list[Tensor]]:
        ids = [self.ids[rank] for rank in ranks] if ranks is not None else self.ids
        flat = [x for tensors in inputs for x in tensors]
        results = _ops.all2all_exchange_on_gpus(flat, OPS[op], ids, copy_out)
        each = len(results) // len(ids)
        return [results[i : i + each] for i in range(0, len(results), each)]

    def check(self) -> None:
        for communicator in self.ids:
            _ops.all2all_check(communicator)

    def set_timeout(self, seconds: float) -> None:
        for communicator in self.ids:
            _ops.all2all_set_timeout(communicator, seconds)

    def close(self) -> None:
        for communicator in self.ids:
            _ops.all2all_close(communicator)


@pytest.fixture
def groups(_gpu: None) -> Iterator[list[Group]]:
    made: list[Group] = []
    yield made
    torch.cuda.synchronize()
    for group in made:
        group.close()


def assert_equal(results: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(results) == len(expected)
    for rank, (tensors, others) in enumerate(zip(results, expected, strict=True)):
        for tensor, other in zip(tensors, others, strict=True):
            assert equal(tensor.cpu(), other), f"rank {rank}"
            assert tensor.is_contiguous()


@pytest.mark.parametrize("copy_out", [False, True], ids=["view", "copy"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_what_plain_indexing_gives(case: Case, op: str, copy_out: bool, groups: list[Group]) -> None:
    group = Group(case)
    groups.append(group)
    for seed in range(5):
        assert_equal(group.exchange(op, group.inputs(op, seed), copy_out), group.expected(op, seed))
    group.check()


def test_ops_and_memory_that_grows_in_turn(groups: list[Group]) -> None:
    group = Group(Case("three ranks", (3, 1, 4), (2, 2, 2)))
    groups.append(group)
    for seed in range(3):
        for op in OPS:
            assert_equal(group.exchange(op, group.inputs(op, seed)), group.expected(op, seed))


@pytest.mark.parametrize("num_sms", [1, 5])
def test_large_tensors_on_few_multiprocessors(num_sms: int, groups: list[Group]) -> None:
    group = Group(
        Case("eight ranks", (301, 2, 3, 0, 1, 2, 3, 40), (3, 3, 3, 3, 2, 2, 2, 2), head_dim=128), num_sms=num_sms
    )
    groups.append(group)
    for op in OPS:
        assert_equal(group.exchange(op, group.inputs(op, 0)), group.expected(op, 0))


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_inputs_of_any_alignment_and_strides(offset: int, groups: list[Group]) -> None:
    case = Case("two ranks", (5, 3), (2, 1), batch=2, dtype=torch.uint8)
    group = Group(case)
    groups.append(group)
    padded = []
    for (x,) in group.inputs("send_recv_heads", 0):
        batch, tokens, heads, head_dim = x.shape
        room = torch.zeros(batch, tokens + 1, heads + 2, head_dim + 16, dtype=case.dtype, device=x.device)
        padded.append([room[:, 1:, 1:-1, offset : offset + head_dim].copy_(x)])
    assert_equal(group.exchange("send_recv_heads", padded), group.expected("send_recv_heads", 0))


def test_rank_of_every_gpu(groups: list[Group]) -> None:
    count = min(torch.cuda.device_count(), 4)
    if count < 2:
        pytest.skip(f"needs two GPUs, torch.cuda.device_count() is {count}")
    group = Group(
        Case("a rank a GPU", (301, 2, 77, 40)[:count], (2, 1, 3, 2)[:count], head_dim=128), list(range(count))
    )
    groups.append(group)
    for seed in range(20):
        for op in OPS:
            assert_equal(group.exchange(op, group.inputs(op, seed)), group.expected(op, seed))
    group.check()


def test_results_of_a_late_rank_are_never_overwritten_early(groups: list[Group]) -> None:
    """Ranks 0 and 1 on one stream, rank 2 on another, each late in turn: kernels wait for each other."""
    group = Group(Case("three ranks", (300, 100, 400), (2, 2, 2), head_dim=64))
    groups.append(group)
    op, rounds = "send_recv_heads", 20
    inputs = [group.inputs(op, seed) for seed in range(rounds)]
    # Nothing but kernels that are loaded may come between: the host must not wait while kernels do.
    copies = [[torch.empty_like(tensors[0]) for tensors in group.exchange(op, inputs[0])] for _ in range(rounds)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda._sleep(1)
    copies[0][0].copy_(group.exchange(op, inputs[0])[0][0])
    torch.cuda.synchronize()
    for i in range(rounds):
        for stream, ranks in ((streams[0], (0, 1)), (streams[1], (2,))):
            with torch.cuda.stream(stream):
                if (i // 2 + ranks[0]) % 3 == 0:
                    torch.cuda._sleep(2_000_000)
                results = group.exchange(op, [inputs[i][rank] for rank in ranks], ranks=ranks)
                if i % 5 == ranks[0]:
                    torch.cuda._sleep(2_000_000)  # a result that is read late
                for rank, (result,) in zip(ranks, results, strict=True):
                    copies[i][rank].copy_(result)
    group.check()
    for seed in range(rounds):
        assert_equal([[copy] for copy in copies[seed]], group.expected(op, seed))


def test_view_is_not_overwritten_while_the_next_call_reads_it(groups: list[Group]) -> None:
    """Rank 0's allgather has sent its input, a view, to rank 1, and reads it for rank 2, when rank 1 calls once more."""
    group = Group(Case("three ranks", (20_000, 1, 1), (2, 2, 2), head_dim=128), num_sms=1)
    groups.append(group)
    inputs = [group.inputs("gather_heads", seed) for seed in range(2)]
    group.exchange("allgather", group.exchange("gather_heads", inputs[1]))  # memory
    torch.cuda.synchronize()
    results = []
    for rank in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)  # all launches are there before the first one runs
            views = group.exchange("gather_heads", [inputs[0][rank]], ranks=(rank,))
            results += group.exchange("allgather", views, ranks=(rank,))
            group.exchange("gather_heads", [inputs[1][rank]], ranks=(rank,))
    group.check()
    assert_equal(results, group.expected("allgather", 0))


def test_view_of_the_call_before_the_last_is_refused(groups: list[Group]) -> None:
    group = Group(Case("two ranks", (3, 4), (2, 2)))
    groups.append(group)
    inputs = group.inputs("send_recv_heads", 0)
    older, last = (group.exchange("send_recv_heads", inputs) for _ in range(2))
    message = "^gather_heads: x must not lie in the buffer that this call writes to, got a view of an earlier result "
    with pytest.raises(RuntimeError, match=message):
        group.exchange("gather_heads", [last[0], older[1]])
    assert_equal(group.exchange("gather_heads", last), group.expected("gather_heads", 0))


@pytest.mark.parametrize("copy_out", [False, True], ids=["view", "copy"])
@pytest.mark.parametrize("op", OPS)
def test_graph_is_replayed_with_other_inputs(op: str, copy_out: bool, groups: list[Group]) -> None:
    group = Group(Case("three ranks", (3, 1, 4), (2, 2, 2)))
    groups.append(group)
    inputs = group.inputs(op, 0)
    group.exchange(op, inputs)  # memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = group.exchange(op, inputs, copy_out)
    for seed in range(1, 6):
        for tensors, others in zip(inputs, group.inputs(op, seed), strict=True):
            for x, other in zip(tensors, others, strict=True):
                x.copy_(other)
        graph.replay()
        assert_equal(results, group.expected(op, seed))
        if seed == 3:  # an eager call in between
            assert_equal(group.exchange(op, group.inputs(op, 9)), group.expected(op, 9))
    group.check()


def test_capture_without_memory_is_refused(groups: list[Group]) -> None:
    group = Group(Case("two ranks", (3, 4), (2, 2)))
    groups.append(group)
    inputs = group.inputs("allgather", 0)
    message = "^allgather: must have been called once before it is captured into a graph, for its memory"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs[0][0].zero_()  # torch warns of an empty graph
        group.exchange("allgather", inputs)


@pytest.mark.parametrize("op", OPS)
def test_absent_ranks_are_named_in_time(op: str, groups: list[Group]) -> None:
    group = Group(Case("four ranks", (3, 1, 4, 2), (2, 2, 2, 2)))
    groups.append(group)
    inputs = group.inputs(op, 0)
    group.exchange(op, inputs)
    group.set_timeout(TIMEOUT_SECONDS)
    torch.cuda.synchronize()
    begin = time.monotonic()
    group.exchange(op, [inputs[0], inputs[2]], ranks=(0, 2))
    torch.cuda.synchronize()
    assert TIMEOUT_SECONDS <= time.monotonic() - begin < TIMEOUT_SECONDS + 1
    for rank in (0, 2):
        message = f"^{op}: rank {rank} waited in vain for ranks 1 and 3 \\(call 2, timeout 0.2 s\\)"
        with pytest.raises(RuntimeError, match=message):
            _ops.all2all_check(group.ids[rank])
        with pytest.raises(RuntimeError, match=message):
            group.exchange(op, [inputs[rank]], ranks=(rank,))
    for rank in (1, 3):
        _ops.all2all_check(group.ids[rank])


def test_result_that_its_owner_has_not_consumed_is_not_overwritten(groups: list[Group]) -> None:
    """A replayed graph uses one slot again and again: here rank 0's while rank 1 still reads its result there."""
    group = Group(Case("two ranks", (3, 4), (2, 2)))
    groups.append(group)
    inputs = group.inputs("allgather", 0)
    group.exchange("allgather", inputs)
    group.set_timeout(TIMEOUT_SECONDS)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:  # of either slot, so that rank 0 is back at rank 1's
        with torch.cuda.graph(graph):
            group.exchange("allgather", inputs[:1], ranks=(0,))
    results = group.exchange("allgather", inputs)
    inputs[0][0].copy_(group.inputs("allgather", 1)[0][0])
    graphs[0].replay()
    with pytest.raises(RuntimeError, match="^allgather: rank 0 waited in vain for rank 1 \\(call 3, timeout 0.2 s\\)"):
        _ops.all2all_check(group.ids[0])
    assert_equal(results[1:], group.expected("allgather", 0)[1:])


def test_ranks_that_disagree_both_say_so(groups: list[Group]) -> None:
    group = Group(Case("two ranks", (2, 2), (2, 2)))
    groups.append(group)
    inputs = group.inputs("send_recv_heads", 0)
    group.set_tokens((2, 1), [1])
    group.exchange("send_recv_heads", [inputs[0], [inputs[1][0][:, :1]]])
    for rank in (0, 1):
        message = (
            f"^send_recv_heads: ranks {rank} and {1 - rank} must agree on op, rank_tokens, shape, heads and dtype, "
            "got others \\(call 1\\)"
        )
        with pytest.raises(RuntimeError, match=message):
            _ops.all2all_check(group.ids[rank])


def test_view_outlives_the_group(groups: list[Group]) -> None:
    group = Group(Case("two ranks", (3, 4), (2, 2)))
    results = group.exchange("allgather", group.inputs("allgather", 0))
    group.check()
    group.close()
    assert_equal(results, group.expected("allgather", 0))


def test_tensors_on_a_cpu_are_refused(groups: list[Group]) -> None:
    group = Group(Case("two ranks", (3, 4), (2, 2)))
    groups.append(group)
    inputs = [[x.cpu() for x in tensors] for tensors in group.inputs("allgather", 0)]
    message = r"^allgather: x must be on a CUDA device \(transport ipc\), got cpu"
    with pytest.raises(RuntimeError, match=message):
        group.exchange("allgather", inputs)


def test_machine_or_build_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    communicator = _ops.all2all_open(0, 1, 16, torch.float32, None)
    built = torch.ops.ltx_kernels.built_architectures()
    message = "^All2All: cuda:0 cannot be used: " if built else "^All2All: this build has no CUDA code"
    with pytest.raises(RuntimeError, match=message):
        _ops.all2all_share_gpus([communicator], [0], 1)
    _ops.all2all_close(communicator)
