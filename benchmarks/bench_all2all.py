"""Exchange between CPU processes, and on a GPU between ranks that share it.

CPU: shared memory against torch.distributed on gloo, and a copy of as many bytes. Bytes: of one rank's tensor, read and written once. The contenders run in turn inside each round, each rank times itself
between two barriers, and the slowest rank counts; the median over rounds is reported. "barrier" is an exchange of one
token, whose time is that of the protocol.

GPU: all ranks' kernels on one stream, against a copy of as many bytes. Bytes: what all ranks read, and what they write.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from harness import ROUNDS, Row, bench, main, num_sets
from torch import Tensor

from ltx_kernels import All2All

WORLD_SIZE = 4
HEADS, HEAD_DIM = 32, 128
CASES = {"16 MB a rank": (2048, 3), "barrier": (1, 100)}  # tokens of a rank, calls a round
OPS = ("send_recv_heads", "gather_heads", "allgather", "send_recv_qkv")
BF16_BYTES = 2
GPU_TOKENS = (13376, 3344, 1)  # of a rank; 1: the protocol alone
GPU_OPS = {"send_recv_heads": 1, "send_recv_qkv": 2, "gather_heads": 3, "allgather": 4}
EVERY_SM = 1000


def run() -> list[Row]:
    on_gpu = [row for tokens in GPU_TOKENS for row in _bench_gpu(tokens)] if torch.cuda.is_available() else []
    return on_gpu + _bench_processes()


def _bench_gpu(tokens: int) -> list[Row]:
    ops = torch.ops.ltx_kernels
    rows = []
    for op in OPS:
        elements = tokens * HEADS * HEAD_DIM
        ids = [ops.all2all_open(rank, WORLD_SIZE, elements, torch.bfloat16, None) for rank in range(WORLD_SIZE)]
        ops.all2all_share_gpus(ids, [0] * WORLD_SIZE, EVERY_SM)
        for communicator in ids:
            ops.all2all_set_rank_tokens(communicator, [tokens] * WORLD_SIZE)
        num_tensors = 3 if op == "send_recv_qkv" else 1
        written = WORLD_SIZE if op == "allgather" else 1
        num_bytes = WORLD_SIZE * num_tensors * elements * (1 + written) * BF16_BYTES
        inputs, expected = [], []
        for _ in range(num_sets(num_bytes)):
            whole = torch.randn(1, WORLD_SIZE * tokens, HEADS, HEAD_DIM, device="cuda").bfloat16()
            local, share = whole.split(tokens, dim=1), whole.split(HEADS // WORLD_SIZE, dim=2)
            of_ranks = [part.contiguous() for part in (share if op == "gather_heads" else local)]
            inputs.append([x for x in of_ranks for _ in range(num_tensors)])
            results = {"gather_heads": local, "allgather": [whole] * WORLD_SIZE}.get(op, share)
            expected.append([x for x in results for _ in range(num_tensors)])

        def call(tensors: list[Tensor], copy_out: bool, op: str = op, ids: list[int] = ids) -> list[Tensor]:
            return ops.all2all_exchange_on_gpus(tensors, GPU_OPS[op], ids, copy_out)

        contenders = {
            label: [functools.partial(call, tensors, copy_out) for tensors in inputs]
            for label, copy_out in (("ltx", False), ("ltx, copied out", True))
        }
        for label, calls in contenders.items():
            for one, others in zip(calls, expected, strict=True):
                if not all(torch.equal(result, other) for result, other in zip(one(), others, strict=True)):
                    raise SystemExit(f"{op}: {label} must give what plain indexing gives")
        rows += bench(op, f"{WORLD_SIZE} x {tokens} tokens, one GPU", num_bytes, contenders)
        for communicator in ids:
            ops.all2all_check(communicator)
        for communicator in ids:
            ops.all2all_close(communicator)
    return rows


def _bench_processes() -> list[Row]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_rank, (store.port, queue), WORLD_SIZE)
    return queue.get()


def _rank(rank: int, port: int, queue: "torch.multiprocessing.SimpleQueue") -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    rows = []
    with torch.inference_mode():
        for case, (tokens, calls) in CASES.items():
            rows += _bench(rank, case, tokens, calls)
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def _bench(rank: int, case: str, tokens: int, calls: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, WORLD_SIZE * tokens, HEADS, HEAD_DIM)
    whole = torch.randint(-9, 9, shape, generator=generator, dtype=torch.int8).bfloat16()
    local = whole.split(tokens, dim=1)[rank].contiguous()
    share = whole.split(HEADS // WORLD_SIZE, dim=2)[rank].contiguous()
    transports = {}
    for transport in ("shm", "nccl"):
        transports[transport] = All2All(
            rank, WORLD_SIZE, tokens, HEADS * HEAD_DIM, 1, torch.bfloat16, transport=transport
        )
        transports[transport].set_rank_tokens([tokens] * WORLD_SIZE)
    rows = []
    for op in OPS if case != "barrier" else OPS[:1]:
        tensors = [share] if op == "gather_heads" else [local] * (3 if op == "send_recv_qkv" else 1)
        contenders = _contenders(op, tensors, {"gather_heads": local, "allgather": whole}.get(op, share), transports)
        seconds = _time_in_turn(contenders, calls)
        num_bytes = 2 * len(tensors) * local.numel() * BF16_BYTES
        rows += [
            Row(op, case, label, time * 1e6, num_bytes / 1e9 if case != "barrier" else 0.0, seconds["copy"] / time)
            for label, time in seconds.items()
        ]
        if rank == 0:
            print(f"{op}, {case}: shm is {seconds['gloo'] / seconds['shm']:.1f} times as fast as gloo")
    for all2all in transports.values():
        all2all.destroy()
    return rows


def _contenders(
    op: str, tensors: Sequence[Tensor], expected: Tensor, transports: dict[str, All2All]
) -> dict[str, Callable[[], object]]:
    """The calls to time, each of which has given what plain indexing gives."""
    contenders: dict[str, Callable[[], object]] = {}
    for label, transport, copy_out in (
        ("shm", "shm", False),
        ("shm, copied out", "shm", True),
        ("gloo", "nccl", False),
    ):
        call = functools.partial(getattr(transports[transport], op), *tensors, copy_out=copy_out)
        result = call()
        if not torch.equal(result[0] if op == "send_recv_qkv" else result, expected):
            raise SystemExit(f"{op}: {label} must give what plain indexing gives")
        contenders[label] = call
    copied = torch.empty_like(tensors[0])
    contenders["copy"] = lambda: [copied.copy_(tensor) for tensor in tensors]
    return contenders


def _time_in_turn(contenders: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Seconds a call, of the slowest rank."""
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(ROUNDS + 1):  # the first warms up
        for label, call in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            slowest = torch.tensor([(time.perf_counter() - begin) / calls])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[label].append(slowest.item())
    return {label: statistics.median(times[1:]) for label, times in seconds.items()}


if __name__ == "__main__":
    main(run, __doc__, needs_gpu=False)
