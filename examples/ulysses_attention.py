"""Attention over a sequence that is divided among ranks, against attention in one process.

Each rank holds a share of the tokens with all heads. One exchange gives it all tokens with a share of the heads, on which
attention is a matter of its own; a second one brings the result back (DeepSpeed-Ulysses, arXiv 2309.14509).

    python examples/ulysses_attention.py --ranks 4
    torchrun --nproc-per-node 4 examples/ulysses_attention.py
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ltx_kernels import All2All


def ulysses_attention(all2all: All2All, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of [batch, local tokens, heads, d]; the result alike."""
    q, k, v = all2all.send_recv_qkv(q, k, v)  # all tokens, this rank's heads
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return all2all.gather_heads(out.transpose(1, 2))


def run(rank: int, world_size: int, arguments: argparse.Namespace) -> None:
    """One rank. All draw the same q, k and v, and take their tokens of them."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    generator = torch.Generator().manual_seed(0)
    shape = (1, arguments.tokens, arguments.heads, arguments.head_dim)
    whole = [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in range(3)]
    tokens = [arguments.tokens // world_size + (r < arguments.tokens % world_size) for r in range(world_size)]
    heads = [arguments.heads // world_size + (r < arguments.heads % world_size) for r in range(world_size)]
    q, k, v = (x.split(tokens, dim=1)[rank] for x in whole)

    hidden = arguments.heads * arguments.head_dim
    seqlen = -(-arguments.tokens * max(heads) // arguments.heads) + 1  # room for the largest share of the heads
    all2all = All2All(rank, world_size, seqlen, hidden, 16, torch.bfloat16, rank_heads=heads)
    all2all.set_rank_tokens(tokens)
    with torch.inference_mode():
        ulysses_attention(all2all, q, k, v)  # warms up
        begin = time.perf_counter()
        out = ulysses_attention(all2all, q, k, v)
        all2all.check()
        milliseconds = (time.perf_counter() - begin) * 1e3
        single = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)
    expected = single.split(tokens, dim=1)[rank]
    difference = (out.float() - expected.float()).abs().max().item() if out.numel() else 0.0
    largest = torch.tensor([difference], device=device)
    if world_size > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"{arguments.tokens} tokens on {world_size} {'ranks' if world_size > 1 else 'rank'} {tokens}, {arguments.heads} heads {heads}, on {device.type}"
        )
        print(f"transport {all2all.transport}" + (f" ({all2all.fallback_reason})" if all2all.fallback_reason else ""))
        print(f"{milliseconds:.1f} ms; largest difference from attention in one process: {largest.item():g}")
    all2all.destroy()
    if largest.item() > 2**-8 * expected.abs().max().item():  # a step of bf16
        raise SystemExit(f"ulysses_attention: results must agree to a step of bfloat16, got {largest.item():g}")


def start(rank: int, world_size: int, port: int, arguments: argparse.Namespace) -> None:
    """One of the processes that this program starts itself."""
    backend = "nccl" if arguments.device == "cuda" else "gloo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    run(rank, world_size, arguments)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention over tokens that are divided among ranks.")
    parser.add_argument("--ranks", type=int, default=4, help="processes to start; torchrun says it itself")
    parser.add_argument("--tokens", type=int, default=1001)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
        run(dist.get_rank(), dist.get_world_size(), arguments)
        dist.destroy_process_group()
    elif arguments.ranks == 1:
        run(0, 1, arguments)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        torch.multiprocessing.spawn(start, (arguments.ranks, store.port, arguments), arguments.ranks)


if __name__ == "__main__":
    main()
