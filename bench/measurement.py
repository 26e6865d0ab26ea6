"""One measurement, as one rank takes it: build, warm up, time a few steps, read the memory.

Only what the contender itself causes is counted. Before its model exists, imports, process group and batches are
there, and a tiny model has taken a step, so that the pages of the kernels' code are resident; the peak is what
comes on top. The clock runs over several steps between two barriers, so ranks may run ahead of each other as they
do in training. CPU seconds are those of all threads of the process.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .contenders import CONTENDERS, SHAPES, WORLD_SIZE, batches, build_model, floor


def meet(rank: int, listener: socket.socket, timeout: float) -> None:
    """Join the other ranks on a port that the parent has bound already, so that nobody else can take it."""
    port = listener.getsockname()[1]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    limit = timedelta(seconds=timeout)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", port, WORLD_SIZE, True, limit, master_listen_fd=os.dup(listener.fileno())
        )
    else:
        store = dist.TCPStore("127.0.0.1", port, WORLD_SIZE, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)


def measure(rank: int, contender: str, shape_name: str, warmup: int, steps: int) -> dict[str, Any]:
    """Train ``warmup`` + ``steps`` steps and measure the latter.

    Returns:
        ``seconds`` and ``cpu_seconds`` a step; ``losses`` of this rank, one a step; ``peak_bytes`` from before
        the model was built to the end, ``training_peak_bytes`` of the measured steps alone, both above what was
        resident before the model was built; None where the system does not tell.
    """
    torch.set_num_threads(1)
    shape = SHAPES[shape_name]
    data = batches(shape, rank, warmup + steps)
    floor(build_model(SHAPES["tiny"]))(*batches(SHAPES["tiny"], rank, 1)[0])
    gc.collect()
    before = resident_bytes()
    can_tell = reset_peak()

    step = CONTENDERS[contender].build(build_model(shape))
    losses = [step(*batch) for batch in data[:warmup]]
    peak_of_warmup = peak_bytes()
    dist.barrier()
    reset_peak()
    started, cpu_started = time.perf_counter(), time.process_time()
    losses += [step(*batch) for batch in data[warmup:]]
    cpu = time.process_time() - cpu_started
    dist.barrier()
    seconds = time.perf_counter() - started
    training_peak = peak_bytes()
    return {
        "seconds": seconds / steps,
        "cpu_seconds": cpu / steps,
        "losses": [loss.item() for loss in losses],
        "peak_bytes": max(peak_of_warmup, training_peak) - before if can_tell else None,
        "training_peak_bytes": training_peak - before if can_tell else None,
    }


def resident_bytes() -> int:
    """Memory of this process in RAM, now; 0 where there is no /proc."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most that was in RAM since :func:`reset_peak`; 0 where there is no /proc."""
    return _status("VmHWM")


def reset_peak() -> bool:
    """Let the peak start again from what is in RAM now; False where the kernel cannot (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(key: str) -> int:
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
