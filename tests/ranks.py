"""Runs a function as the ranks of a process group, each a process of its own.

A fork server that has imported torch forks them, so that a process starts in milliseconds. The store lives in this
process: any rank may die.
"""

import functools
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ltx_kernels.all2all  # noqa: F401  (registers the ops)

LIMIT_SECONDS = 60

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "ltx_kernels.all2all", "torch.testing"])


# Files in /dev/shm that ranks have made: their names are gone once the group has them.
files: set[str] = set()


class Failed(AssertionError):
    """A rank raised what its test did not expect."""


def run(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    kill: dict[int, float] | None = None,
    gpu: bool = False,
) -> list[Any]:
    """body(rank, world_size, *arguments) on each rank; the results, None of a rank that died.

    kill: seconds after the ranks' first message (``ready()``) at which a rank is killed.
    gpu: the ranks see this machine's GPUs.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    for rank in range(world_size):
        pipe, end = _context.Pipe()
        arguments_of_main = (rank, world_size, store.port, end, gpu, body, arguments)
        process = _context.Process(target=_main, args=arguments_of_main, daemon=True)
        process.start()
        end.close()
        processes.append(process)
        pipes.append(pipe)
    results: list[Any] = [None] * world_size
    failures: list[str] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    kills: dict[int, float] = {}
    waiting_for_ready = set(range(world_size)) if kill else set()
    open_pipes = dict(zip(pipes, range(world_size), strict=True))
    try:
        while open_pipes:
            now = time.monotonic()
            if now > deadline:
                raise Failed(f"ranks {sorted(open_pipes.values())} did not end in {LIMIT_SECONDS} s; {failures}")
            for rank in [rank for rank, moment in kills.items() if now >= moment]:
                del kills[rank]
                os.kill(processes[rank].pid or 0, signal.SIGKILL)
            for pipe in wait(list(open_pipes), timeout=0.005 if kills else 0.5):
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, ConnectionResetError):  # died, or has said all
                    del open_pipes[pipe]
                    continue
                if kind == "ready":
                    waiting_for_ready.discard(rank)
                    if not waiting_for_ready and kill:
                        kills = {victim: time.monotonic() + delay for victim, delay in kill.items()}
                        kill = None
                elif kind == "file":
                    files.add(value)
                elif kind == "result":
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
    finally:
        for process in processes:
            process.join(0 if failures else 5)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise Failed("\n".join(failures))
    return results


_pipe: Connection
_create_ops = {name: getattr(torch.ops.ltx_kernels, name) for name in ("all2all_create_memory", "all2all_create_board")}


def ready() -> None:
    """Tells the parent that kills may begin."""
    _pipe.send(("ready", None))


def now() -> float:
    """Seconds on a clock that stands still while this thread would run and has no core: other programs may be busy."""
    waited_for_core = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.monotonic() - int(waited_for_core) / 1e9


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _create(op: str, communicator: int) -> str:
    name: str = _create_ops[op](communicator)
    _pipe.send(("file", name))
    return name


def _main(
    rank: int, world_size: int, port: int, pipe: Connection, gpu: bool, body: Callable[..., Any], arguments: Any
) -> None:
    global _pipe
    _pipe = pipe
    if not gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU processes on a machine with GPUs too
    torch.set_num_threads(1)
    for op in _create_ops:
        setattr(torch.ops.ltx_kernels, op, functools.partial(_create, op))
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_SECONDS)
        )
        pipe.send(("result", body(rank, world_size, *arguments)))
    except BaseException:  # noqa: BLE001
        with suppress(OSError):
            pipe.send(("failure", traceback.format_exc()))
    # A rank whose peers are dead must not wait for them in destroy_process_group.
    pipe.close()
    os._exit(0)


def left_files() -> set[str]:
    """What is left of `files`. Other tests of this user may run at the same time, each with files of its own."""
    return {name for name in files if (Path("/dev/shm") / name).exists()}


def shared_descriptors() -> list[int]:
    """Open files of this process that All2All has in /dev/shm, without a name by now."""
    numbers = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            if f"/ltx-kernels-{os.getuid()}-" in str(entry.readlink()):
                numbers.append(int(entry.name))
    return numbers
