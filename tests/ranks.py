"""Run a function on several gloo ranks on this machine and collect what each returns."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import forked  # noqa: F401  what the server of the forks imports


def _worker(rank: int, world: int, port: int, folder: str, function, args):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.save(function(rank, world, *args), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function, *args, world: int = 2) -> list:
    "`function(rank, world, *args)` on each rank; module-level functions that return tensors or plain values."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (world, port, folder, function, args), world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=True) for r in range(world)]
