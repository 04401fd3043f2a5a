"""Exchange of attention heads between the ranks of a process group, or of one process."""

import functools
import operator
import os
import platform
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ltx_kernels
from ltx_kernels import _distributed_exchange as distributed
from ltx_kernels import all2all_cpp  # noqa: F401  (registers the ops)
from ltx_kernels._backends import forward_only
from ltx_kernels._fakes import register_fake

_ops = torch.ops.ltx_kernels

MAX_RANKS = 8  # of a communicator that shares memory
MAX_ELEMENTS = 2**50  # of a result, so that no size in bytes exceeds 64 bits
DEFAULT_TIMEOUT_SECONDS = 10.0
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
TRANSPORTS = ("auto", "ipc", "nccl", "shm")
SHARED_FOLDER = Path("/dev/shm")
NO_IPC = "ipc is not available yet: its kernels have not been run on a GPU"

# As csrc/all2all/division.h numbers them.
_OP_NUMBERS = {"send_recv_heads": 1, "send_recv_qkv": 2, "gather_heads": 3, "allgather": 4}

# For the ops that compiled graphs call: communicators by their number.
_communicators: "weakref.WeakValueDictionary[int, _Communicator]" = weakref.WeakValueDictionary()


class All2AllTimeout(RuntimeError):
    """Ranks did not arrive in time: `ranks`, which `rank` waited for in `op`. The communicator is dead."""

    def __init__(self, message: str, op: str = "", rank: int = -1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.op, self.rank, self.ranks = op, rank, tuple(ranks)


class All2AllMismatch(RuntimeError):
    """Ranks called different ops, or with other counts, shapes or dtypes. The communicator is dead."""

    def __init__(self, message: str, op: str = "", rank: int = -1, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.op, self.rank, self.ranks = op, rank, tuple(ranks)


class _Communicator:
    """One rank's end: what All2All adds a process group to, and LocalGroup has one of for each rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        max_elements: int,
        dtype: torch.dtype,
        rank_heads: list[int] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._rank_heads = rank_heads
        self._rank_tokens: list[int] | None = None
        self._even = True  # all ranks hold as many tokens: a compiled graph takes sizes from its inputs
        self._group = group
        self._transport = ""
        self._fallback_reason: str | None = None
        self._timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._told = False  # of its death
        self._state = torch.zeros(1, dtype=torch.int64)  # counts calls
        self._id = _ops.all2all_open(rank, world_size, max_elements, dtype, self._rank_heads)
        self._finalizer = weakref.finalize(self, _close, self._id)
        _communicators[self._id] = self

    @property
    def transport(self) -> str:
        """What carries the tensors: "shm" or "nccl"."""
        return self._transport

    @property
    def fallback_reason(self) -> str | None:
        """Why transport="auto" did not take a faster transport, or None."""
        return self._fallback_reason

    def set_rank_tokens(self, rank_tokens: Sequence[int]) -> None:
        """Set how many tokens each rank holds from the next exchange on; the same list on all ranks.

        Args:
            rank_tokens: a count for each rank, zero too.

        Raises:
            ValueError: not one count for each rank, or one that is no integer or negative; or too many in all.
        """
        tokens = _counts(rank_tokens)
        if not _is_one_a_rank(tokens, self._world_size):
            raise ValueError(
                f"set_rank_tokens: rank_tokens must be {self._world_size} counts >= 0, one for each rank, "
                f"got {rank_tokens!r}"
            )
        _ops.all2all_set_rank_tokens(self._id, tokens)
        self._rank_tokens = tokens
        self._even = len(set(tokens)) == 1

    def set_timeout_seconds(self, seconds: float | None) -> None:
        """Set how long a call waits for the other ranks. With the transport nccl the group's own timeout holds.

        Args:
            seconds: 0 waits for ever, None is 10 s.

        Raises:
            ValueError: not a number, not finite, or negative.
        """
        self._timeout_seconds = _timeout("set_timeout_seconds", "seconds", seconds)
        _ops.all2all_set_timeout(self._id, self._timeout_seconds)

    def check(self) -> None:
        """Wait for pending exchanges, and raise what one of them has failed with."""
        if self._transport == "nccl" and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._call(lambda: _ops.all2all_check(self._id))

    def destroy(self) -> None:
        """Release the buffers; views of them stay valid. A second call does nothing."""
        try:
            if self._transport == "ipc" and self._finalizer.alive and not self._told:
                self._call(lambda: _ops.all2all_part_gpu(self._id))
        finally:
            self._finalizer()

    def _result_size(self, op: str, x: Tensor) -> tuple[int, int]:
        """Tokens and heads of the result."""
        if x.dim() != 4:
            return 0, 0  # refused by the op
        tokens, heads = x.shape[1], x.shape[2]
        uneven_tokens = None if self._even else self._rank_tokens
        if op == "gather_heads":
            return (
                uneven_tokens[self._rank] if uneven_tokens else tokens // self._world_size,
                sum(self._rank_heads) if self._rank_heads else heads * self._world_size,
            )
        out_tokens = sum(uneven_tokens) if uneven_tokens else tokens * self._world_size
        if op == "allgather":
            return out_tokens, heads
        return out_tokens, self._rank_heads[self._rank] if self._rank_heads else heads // self._world_size

    def _exchange(self, op: str, copy_out: bool, *tensors: Tensor) -> Any:
        """The result, or the results of q, k and v."""
        _check_tensors(op, tensors)
        out_tokens, out_heads = self._result_size(op, tensors[0])
        if torch.compiler.is_compiling():
            if op == "send_recv_qkv":
                return _ops.all2all_exchange_qkv(*tensors, self._state, self._id, out_tokens, out_heads)
            return _ops.all2all_exchange(*tensors, self._state, self._id, _OP_NUMBERS[op], out_tokens, out_heads)
        return self._exchange_now(op, copy_out, tensors, self._state, out_tokens, out_heads)

    def _exchange_now(
        self, op: str, copy_out: bool, tensors: Sequence[Tensor], state: Tensor, out_tokens: int, out_heads: int
    ) -> Any:
        if self._transport == "shm":
            call = getattr(_ops, op).default
            return self._call(lambda: call(*tensors, state, self._id, out_tokens, out_heads, copy_out))
        if self._transport == "ipc":
            call = _ops.all2all_exchange_on_gpus
            results = self._call(lambda: call(list(tensors), _OP_NUMBERS[op], [self._id], copy_out))
            state += 1
        else:
            self._check_call(op, tensors)
            state += 1
            results = self._exchange_distributed(op, tensors)
        return tuple(results) if op == "send_recv_qkv" else results[0]

    def _check_call(self, op: str, tensors: Sequence[Tensor]) -> None:
        _ops.all2all_check_call(list(tensors), _OP_NUMBERS[op], self._id)

    def _exchange_distributed(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert self._rank_tokens is not None  # _check_call
        rank_tokens, heads = self._rank_tokens, tensors[0].shape[2]
        each = heads if op == "gather_heads" else heads // self._world_size
        rank_heads = self._rank_heads or [each] * self._world_size
        try:
            if op == "gather_heads":
                return distributed.gather_heads(tensors[0], self._rank, rank_tokens, rank_heads, self._group)
            if op == "allgather":
                return distributed.allgather(tensors[0], rank_tokens, self._group)
            return distributed.send_recv_heads(tensors, self._rank, rank_tokens, rank_heads, self._group)
        except distributed.CollectiveError as error:
            raise All2AllTimeout(f"{op}: rank {self._rank}: {error}", op, self._rank) from error

    def _call(self, call: Callable[[], Any]) -> Any:
        """Calls an op; the error of a dead communicator has its own type."""
        try:
            return call()
        except RuntimeError as error:
            status = _ops.all2all_status(self._id)
            if not status:
                raise
            kind, op, rank, peers = (status >> shift & 0xFF for shift in (0, 8, 16, 24))
            name = next((name for name, number in _OP_NUMBERS.items() if number == op), "")
            ranks = [peer for peer in range(MAX_RANKS) if peers >> peer & 1]
            death = (All2AllTimeout, All2AllMismatch)[kind - 1](str(error), name, rank, ranks)
            self._told = True
            raise death from None


class All2All(_Communicator):
    """Exchanges between the ranks of a process group, all of which make the same calls in the same order.

    A result that is not copied out (``copy_out=False``) is a view of the communicator's buffer. It is valid until this
    rank's next call on the same communicator, of which it may be the input. Under torch.compile results are always
    copied out. Inference only: an input that requires grad runs forward, and its backward raises.

    Args:
        rank, world_size: this process's place in the group.
        seqlen: the largest number of tokens of one rank. A result of send_recv_heads or gather_heads holds at most
            seqlen * hidden_dim elements, one of allgather world_size times as many. Two results are kept.
        hidden_dim: heads * head size, of all heads.
        num_sms: multiprocessors that a GPU's kernels may use; without meaning for the transports shm and nccl.
        tensor_dtype: bfloat16, float16, float32, float8_e4m3fn or uint8.
        group: a torch.distributed group; None for the default one. world_size 1 needs none.
        timeout_seconds: as in set_timeout_seconds.
        transport: "shm", processes of one machine that share memory, CPU tensors; "nccl", torch.distributed with
            whatever backend the group has; "auto", the first of these that serves all ranks, which is nccl where a
            rank sees a GPU.
        allgather: have the memory for allgather from the start, not from its first call on.
        rank_heads: heads of each rank where they are not equal.

    Raises:
        ValueError: a wrong argument, on this rank.
        RuntimeError: a wrong argument on another rank, a transport that cannot serve the group, or a rank that dies
            meanwhile; on every rank.
        All2AllMismatch: arguments that differ between ranks.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        seqlen: int,
        hidden_dim: int,
        num_sms: int,
        tensor_dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float | None = None,
        *,
        transport: str = "auto",
        allgather: bool = False,
        rank_heads: Sequence[int] | None = None,
    ) -> None:
        agreed = {
            "version": ltx_kernels.__version__,
            "world_size": world_size,
            "seqlen": seqlen,
            "hidden_dim": hidden_dim,
            "tensor_dtype": tensor_dtype,
            "transport": transport,
            "allgather": allgather,
            "rank_heads": _counts(rank_heads),
        }
        error = _wrong_argument(rank, agreed, num_sms, timeout_seconds)
        in_group = dist.is_available() and dist.is_initialized()
        if not error and world_size > 1 and not in_group:
            error = f"All2All: world_size must be 1 without torch.distributed.init_process_group, got {world_size}"
        if world_size == 1 or not in_group:
            if error:
                raise ValueError(error)
            facts = [_facts(agreed, error)]
        else:
            place = dist.get_rank(group), dist.get_world_size(group)
            if place[0] < 0:
                raise ValueError("All2All: group must hold this process, got one of others")
            if not error and place != (rank, world_size):
                error = f"All2All: rank and world_size must be the group's, {place}, got {(rank, world_size)}"
            facts = _gather(_facts(agreed, error), group, place[1])
            if error:
                raise ValueError(error)
            _check_agreement(facts)
        chosen, reason = self._choose(transport, facts)
        super().__init__(rank, world_size, int(seqlen) * int(hidden_dim), tensor_dtype, agreed["rank_heads"], group)
        try:
            failure = ""
            if chosen == "shm":
                failure = _share_memory(self._id, rank, world_size, allgather, group)
            elif chosen == "ipc":
                seconds = _timeout("All2All", "timeout_seconds", timeout_seconds)
                failure = _share_gpu(self, int(num_sms), allgather, seconds)
            if failure and transport != "auto":
                raise RuntimeError(failure)
        except BaseException:
            self.destroy()  # now: who keeps the error keeps this object
            raise
        if failure:
            _ops.all2all_release_memory(self._id)
            chosen, reason = "nccl", failure
        self._transport, self._fallback_reason = chosen, reason
        self.set_timeout_seconds(timeout_seconds)

    def _choose(self, transport: str, facts: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        return _choose(transport, facts)

    def send_recv_heads(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        """From a share of the tokens with all heads to all tokens with a share of the heads.

        Args:
            x: [batch, local tokens, heads, d], with a contiguous last dimension.
            copy_out: give memory of its own, not a view of the buffer.

        Returns:
            [batch, total tokens, this rank's heads, d]: the tokens in rank order.

        Raises:
            TypeError: x is no tensor.
            RuntimeError: an x that does not fit set_rank_tokens, the heads, the dtype or the buffer.
            All2AllTimeout, All2AllMismatch: see there.
        """
        return forward_only("send_recv_heads", functools.partial(self._exchange, "send_recv_heads", copy_out), x)

    def send_recv_qkv(
        self, q: Tensor, k: Tensor, v: Tensor, *, copy_out: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """send_recv_heads of three tensors of one shape in one exchange."""
        return forward_only("send_recv_qkv", functools.partial(self._exchange, "send_recv_qkv", copy_out), q, k, v)

    def gather_heads(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        """The inverse of send_recv_heads: [batch, total tokens, this rank's heads, d] to [batch, local tokens, heads, d]."""
        return forward_only("gather_heads", functools.partial(self._exchange, "gather_heads", copy_out), x)

    def allgather(self, x: Tensor, *, copy_out: bool = False) -> Tensor:
        """All tokens on every rank: [batch, local tokens, heads, d] to [batch, total tokens, heads, d]."""
        return forward_only("allgather", functools.partial(self._exchange, "allgather", copy_out), x)

    @staticmethod
    def local_group(
        world_size: int,
        seqlen: int,
        hidden_dim: int,
        num_sms: int,
        tensor_dtype: torch.dtype,
        *,
        devices: Sequence[torch.device | str] | None = None,
        timeout_seconds: float | None = None,
        rank_heads: Sequence[int] | None = None,
    ) -> "LocalGroup":
        """All ranks in this process: see LocalGroup."""
        return LocalGroup(
            world_size,
            seqlen,
            hidden_dim,
            num_sms,
            tensor_dtype,
            devices=devices,
            timeout_seconds=timeout_seconds,
            rank_heads=rank_heads,
        )


class LocalGroup:
    """All ranks of a communicator in one process. CPU tensors: each rank is a thread.

    The methods are those of All2All. Each takes a list with an entry for each rank in place of a tensor, and returns
    a list: of tensors, or of (q, k, v).

    Args:
        devices: one for each rank; None: all on the CPU.
        world_size, seqlen, hidden_dim, num_sms, tensor_dtype, timeout_seconds, rank_heads: as in All2All.

    Raises:
        ValueError: a wrong argument.
    """

    def __init__(
        self,
        world_size: int,
        seqlen: int,
        hidden_dim: int,
        num_sms: int,
        tensor_dtype: torch.dtype,
        *,
        devices: Sequence[torch.device | str] | None = None,
        timeout_seconds: float | None = None,
        rank_heads: Sequence[int] | None = None,
    ) -> None:
        agreed = {
            "world_size": world_size,
            "seqlen": seqlen,
            "hidden_dim": hidden_dim,
            "tensor_dtype": tensor_dtype,
            "transport": "shm",
            "rank_heads": _counts(rank_heads),
        }
        error = _wrong_argument(0, agreed, num_sms, timeout_seconds)
        if error:
            raise ValueError(error.replace("All2All:", "local_group:", 1))
        if world_size > MAX_RANKS:
            raise ValueError(f"local_group: world_size must be at most {MAX_RANKS}, got {world_size}")
        self.devices = _devices(["cpu"] * world_size if devices is None else devices)
        if len(self.devices) != world_size or any(device.type != "cpu" for device in self.devices):
            raise ValueError(
                f"local_group: devices must be {world_size} times cpu (GPUs are not served yet), got {devices!r}"
            )
        self._ends = [
            _Communicator(rank, world_size, int(seqlen) * int(hidden_dim), tensor_dtype, agreed["rank_heads"], None)
            for rank in range(world_size)
        ]
        _ops.all2all_share_memory([end._id for end in self._ends])
        for end in self._ends:
            end._transport = "shm"
        self._threads = ThreadPoolExecutor(world_size, thread_name_prefix="ltx_kernels.LocalGroup")
        self._calls = threading.Lock()  # calls of two threads, mixed, would wait for each other
        self.set_timeout_seconds(timeout_seconds)

    @property
    def transport(self) -> str:
        """As All2All.transport."""
        return self._ends[0].transport

    @property
    def fallback_reason(self) -> str | None:
        """As All2All.fallback_reason."""
        return self._ends[0].fallback_reason

    def set_rank_tokens(self, rank_tokens: Sequence[int]) -> None:
        """As All2All.set_rank_tokens."""
        for end in self._ends:
            end.set_rank_tokens(rank_tokens)

    def set_timeout_seconds(self, seconds: float | None) -> None:
        """As All2All.set_timeout_seconds."""
        for end in self._ends:
            end.set_timeout_seconds(seconds)

    def check(self) -> None:
        """As All2All.check."""
        for end in self._ends:
            end.check()

    def destroy(self) -> None:
        """As All2All.destroy."""
        self._threads.shutdown()
        for end in self._ends:
            end.destroy()

    def send_recv_heads(self, x: Sequence[Tensor], *, copy_out: bool = False) -> list[Tensor]:
        """As All2All.send_recv_heads."""
        return self._exchange("send_recv_heads", copy_out, x)

    def send_recv_qkv(
        self, q: Sequence[Tensor], k: Sequence[Tensor], v: Sequence[Tensor], *, copy_out: bool = False
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """As All2All.send_recv_qkv."""
        return self._exchange("send_recv_qkv", copy_out, q, k, v)

    def gather_heads(self, x: Sequence[Tensor], *, copy_out: bool = False) -> list[Tensor]:
        """As All2All.gather_heads."""
        return self._exchange("gather_heads", copy_out, x)

    def allgather(self, x: Sequence[Tensor], *, copy_out: bool = False) -> list[Tensor]:
        """As All2All.allgather."""
        return self._exchange("allgather", copy_out, x)

    def _exchange(self, op: str, copy_out: bool, *arguments: Sequence[Tensor]) -> list[Any]:
        for argument in arguments:
            if not isinstance(argument, Sequence):
                raise TypeError(f"{op}: each argument must be a list of tensors, got {type(argument).__name__}")
            if len(argument) != len(self._ends):
                raise ValueError(f"{op}: each list must have {len(self._ends)} tensors, got {len(argument)}")
        of_ranks = list(zip(*arguments, strict=True))

        def run(end: _Communicator, tensors: Sequence[Tensor]) -> Any:
            return forward_only(op, functools.partial(end._exchange, op, copy_out), *tensors)

        grad = torch.is_grad_enabled()

        def in_thread(end: _Communicator, tensors: Sequence[Tensor]) -> Any:
            with torch.set_grad_enabled(grad):
                return run(end, tensors)

        with self._calls:
            for end, tensors in zip(self._ends, of_ranks, strict=True):
                _check_tensors(op, tensors)
                end._check_call(op, tensors)  # all ranks, before one of them waits for the others
            return list(self._threads.map(in_thread, self._ends, of_ranks))


def transport_lacks(transport: str) -> str:
    """Why a transport cannot serve any group on this machine, or an empty string."""
    if transport == "ipc":
        return NO_IPC
    if transport == "shm":
        return "" if os.access(SHARED_FOLDER, os.W_OK) else f"{SHARED_FOLDER} must be a folder that can be written to"
    return "" if dist.is_available() else "this torch has no torch.distributed"


def _close(communicator: int) -> None:
    try:
        _ops.all2all_close(communicator)
    except Exception as error:  # noqa: BLE001  (a finalizer must not raise)
        warnings.warn(f"All2All: cannot be released: {error}", stacklevel=2)


def _timeout(op: str, name: str, seconds: float | None) -> float:
    if seconds is None:
        return DEFAULT_TIMEOUT_SECONDS
    if not isinstance(seconds, Real) or not 0 <= seconds <= sys.float_info.max:
        raise ValueError(f"{op}: {name} must be finite and >= 0, got {seconds!r}")
    return float(seconds)


def _counts(values: Iterable[int] | None) -> Any:
    """The values as Python integers; as they came if they are not integers, for the message."""
    try:
        return None if values is None else [operator.index(value) for value in values]
    except TypeError:
        return values


def _is_one_a_rank(counts: Any, world_size: int) -> bool:
    """Whether _counts found a count for each rank."""
    return (
        isinstance(counts, list)
        and all(isinstance(count, int) for count in counts)
        and len(counts) == world_size
        and min(counts) >= 0
        and sum(counts) <= MAX_ELEMENTS
    )


def _devices(values: Iterable[torch.device | str]) -> list[torch.device]:
    """Nothing if one of them is none."""
    try:
        return [torch.device(value) for value in values]
    except (TypeError, RuntimeError):
        return []


def _check_tensors(op: str, tensors: Sequence[Tensor]) -> None:
    """What the ops cannot say: torch refuses these before them, or reads a pointer that is not there."""
    for name, tensor in zip(("x",) if len(tensors) == 1 else ("q", "k", "v"), tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{op}: {name} must be torch.strided, got {tensor.layout}")


def _wrong_argument(rank: int, agreed: dict[str, Any], num_sms: int, timeout_seconds: float | None) -> str:
    """What is wrong with the arguments as this rank alone sees them, or an empty string."""
    integers = {name: agreed[name] for name in ("world_size", "seqlen", "hidden_dim")}
    for name, value in {**integers, "rank": rank, "num_sms": num_sms}.items():
        if not isinstance(value, Integral):
            return f"All2All: {name} must be an integer, got {value!r}"
    world_size, seqlen, hidden_dim = (int(value) for value in integers.values())  # numpy's would overflow
    elements, heads = seqlen * hidden_dim, agreed["rank_heads"]
    rules = [
        ("world_size", world_size, world_size >= 1, "be >= 1"),
        ("rank", rank, 0 <= rank < max(world_size, 1), f"be >= 0 and < {world_size}"),
        ("seqlen", seqlen, seqlen >= 0, "be >= 0"),
        ("hidden_dim", hidden_dim, hidden_dim >= 1, "be >= 1"),
        ("seqlen * hidden_dim", elements, elements <= MAX_ELEMENTS, f"be at most {MAX_ELEMENTS}"),
        ("num_sms", num_sms, num_sms >= 1, "be >= 1"),
        ("tensor_dtype", agreed["tensor_dtype"], agreed["tensor_dtype"] in DTYPES, f"be one of {DTYPES}"),
        ("transport", agreed["transport"], agreed["transport"] in TRANSPORTS, f"be one of {TRANSPORTS}"),
        (
            "rank_heads",
            heads,
            heads is None or (_is_one_a_rank(heads, world_size) and sum(heads) > 0),
            f"be {world_size} counts >= 0, one for each rank",
        ),
    ]
    for name, value, holds, rule in rules:
        if not holds:
            return f"All2All: {name} must {rule}, got {value!r}"
    try:
        _timeout("All2All", "timeout_seconds", timeout_seconds)
    except ValueError as error:
        return str(error)
    return ""


def _facts(agreed: dict[str, Any], error: str) -> dict[str, Any]:
    """What the choice of a transport depends on, of this rank."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    place = SHARED_FOLDER.stat() if SHARED_FOLDER.is_dir() else None
    return {
        "error": error,
        "agreed": None if error else agreed,  # what is wrong may be an object that cannot be sent
        "machine": (boot.read_text() if boot.exists() else platform.node(), place and (place.st_dev, place.st_ino)),
        "user": os.getuid(),
        "gpu": torch.cuda.is_available(),
    }


def _gather(value: Any, group: dist.ProcessGroup | None, world_size: int) -> list[Any]:
    values = [None] * world_size
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:  # a rank is dead, or later than the group's timeout
        raise RuntimeError(f"All2All: not all ranks of the group can be reached: {error}") from error
    return values


def _check_agreement(facts: Sequence[dict[str, Any]]) -> None:
    """Raises the same on every rank."""
    for rank, fact in enumerate(facts):
        if fact["error"]:
            raise RuntimeError(f"All2All: rank {rank}: {fact['error']}")
    for name, value in facts[0]["agreed"].items():
        for rank, fact in enumerate(facts):
            other = fact["agreed"][name]
            if other != value:
                raise All2AllMismatch(
                    f"All2All: ranks 0 and {rank} must agree on {name}, got {value!r} and {other!r}", ranks=(0, rank)
                )


def _choose(transport: str, facts: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """The transport of the group, and why it is no faster one. The same on all ranks, who all know the same facts."""
    if transport == "ipc":
        raise RuntimeError(f"All2All: transport must be auto, nccl or shm ({NO_IPC}), got 'ipc'")
    if transport == "nccl":
        return "nccl", None
    not_shared = ""
    if len(facts) > MAX_RANKS:
        not_shared = f"shm serves up to {MAX_RANKS} ranks, here are {len(facts)}"
    elif len({fact["machine"] for fact in facts}) > 1:
        not_shared = "shm serves one machine, the ranks are on several (or in containers with /dev/shm of their own)"
    elif len({fact["user"] for fact in facts}) > 1:
        not_shared = "shm serves processes of one user, here are several"
    if transport == "shm":
        if not_shared:
            raise RuntimeError(f"All2All: transport must be auto or nccl ({not_shared}), got 'shm'")
        return "shm", None
    if any(fact["gpu"] for fact in facts):
        return "nccl", NO_IPC
    return ("nccl", not_shared) if not_shared else ("shm", None)


def _share_memory(communicator: int, rank: int, world_size: int, allgather: bool, group: Any) -> str:
    """Maps the ranks' memory. What kept it from one of them, the same text on all, or an empty string."""
    if world_size == 1:
        _ops.all2all_share_memory([communicator])
        return ""

    def open_it(name: str) -> None:
        if rank > 0:
            _ops.all2all_open_memory(communicator, name)
        if allgather:
            _ops.all2all_reserve_allgather(communicator)

    failure = _map_file(rank, world_size, group, lambda: _ops.all2all_create_memory(communicator), open_it)
    if not failure:
        _ops.all2all_unlink_memory(communicator)  # all have it
    return failure


def _share_gpu(end: _Communicator, num_sms: int, allgather: bool, timeout_seconds: float) -> str:
    """As _share_memory, for the memory of GPUs: ranks that die meanwhile are an All2AllTimeout."""

    def open_it(name: str) -> None:
        if end._rank > 0:
            _ops.all2all_open_board(end._id, name)

    def create() -> str:
        return _ops.all2all_create_board(end._id)

    def share() -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        end._call(lambda: _ops.all2all_share_gpu(end._id, device, num_sms, allgather, timeout_seconds))

    failure = _map_file(end._rank, end._world_size, end._group, create, open_it)
    return failure or _failure_of(share)


def _map_file(rank: int, world_size: int, group: Any, create: Callable[[], str], open_it: Callable[[str], None]) -> str:
    """Rank 0 makes a file, whose name all get. What kept one of them from it, the same text on all."""
    name = ""

    def create_it() -> None:
        nonlocal name
        name = create()

    failure = _failure_of(create_it) if rank == 0 else ""
    if world_size > 1:
        name, failure = _gather((name, failure), group, world_size)[0]
    if failure:
        return failure
    failure = _failure_of(lambda: open_it(name))
    failures = _gather(failure, group, world_size) if world_size > 1 else [failure]
    return next((failure for failure in failures if failure), "")


def _failure_of(step: Callable[[], Any]) -> str:
    try:
        step()
    except (All2AllTimeout, All2AllMismatch):
        raise
    except RuntimeError as error:
        return str(error)
    return ""


class _IpcAll2All(All2All):
    """All2All over CUDA IPC, for its tests alone: no GPU has run them yet."""

    def _choose(self, transport: str, facts: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
        return "ipc", None


# What compiled graphs call: any transport, and errors of their own types. The state, which it writes to, keeps a compiler
# from dropping, merging or reordering exchanges.
_library = torch.library.Library("ltx_kernels", "FRAGMENT")
_library.define(
    "all2all_exchange(Tensor x, Tensor(a!) state, int communicator, int op, SymInt out_tokens, SymInt out_heads) -> Tensor"
)
_library.define(
    "all2all_exchange_qkv(Tensor q, Tensor k, Tensor v, Tensor(a!) state, int communicator, SymInt out_tokens, "
    "SymInt out_heads) -> (Tensor, Tensor, Tensor)"
)


def _find(op: str, communicator: int) -> _Communicator:
    found = _communicators.get(communicator)
    if found is None:
        raise RuntimeError(f"{op}: this communicator was destroyed")
    return found


def _all2all_exchange(x: Tensor, state: Tensor, communicator: int, op: int, out_tokens: int, out_heads: int) -> Tensor:
    name = next(name for name, number in _OP_NUMBERS.items() if number == op)
    return _find(name, communicator)._exchange_now(name, True, (x,), state, out_tokens, out_heads)


def _all2all_exchange_qkv(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, communicator: int, out_tokens: int, out_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    end = _find("send_recv_qkv", communicator)
    return end._exchange_now("send_recv_qkv", True, (q, k, v), state, out_tokens, out_heads)


_library.impl("all2all_exchange", _all2all_exchange, "CompositeExplicitAutograd")
_library.impl("all2all_exchange_qkv", _all2all_exchange_qkv, "CompositeExplicitAutograd")


@register_fake("ltx_kernels::all2all_exchange")
def _fake_exchange(x: Tensor, state: Tensor, communicator: int, op: int, out_tokens: int, out_heads: int) -> Tensor:
    return x.new_empty((x.shape[0], out_tokens, out_heads, x.shape[3]))


@register_fake("ltx_kernels::all2all_exchange_qkv")
def _fake_exchange_qkv(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, communicator: int, out_tokens: int, out_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q_out, k_out, v_out = (x.new_empty((x.shape[0], out_tokens, out_heads, x.shape[3])) for x in (q, k, v))
    return q_out, k_out, v_out
