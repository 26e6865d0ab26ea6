"""Train the course's GPT under one rung and measure all that the course predicts of it.

What is measured comes from outside the rung wherever there is a second witness: everything alive is counted by asking
the garbage collector for tensors, resident memory by asking the kernel, the wire by asking the interface. The classes
of memory and the purposes of traffic are the rung's own account, which the witnesses hold to be complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import zero_course as zc

from ..comm import Communicator
from ..data import ByteDataset, python_reference_text
from ..data_parallel import DataParallel
from ..memory import (
    PeakMeter,
    live_bytes,
    live_tensors,
    peak_device_bytes,
    peak_resident_bytes,
    resident_bytes,
)
from ..models import GPT, GPTConfig
from . import wire
from .processes import Tell

STRATEGIES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
TIED_GPT_GATHERS = {"token_embedding": 3, "position_embedding": 1}
"""How often stage 3 gathers these in a step. A lookup's gradient does not read the table, so an embedding is gathered
in forward only; the token embedding is the output layer's weight too, which is gathered twice like any other."""


@dataclass(frozen=True)
class Experiment:
    """What to train, the same under every rung.

    Attributes:
        model: shape of the GPT.
        steps: optimizer steps.
        rows: sequences on each rank in a micro-batch.
        bucket_size: elements, ``reduce_bucket_size``.
        threshold, prefetch: elements, stage 3's persistence threshold and prefetch size.
        learning_rate, warmup: peak of the rate, and the steps up to it; then a cosine down to a tenth.
        betas, weight_decay: AdamW's.
        seed: of weights and of the order of the text.
        wire_steps: how many of the last steps the interface is read around.
    """

    model: GPTConfig
    steps: int = 20
    rows: int = 2
    bucket_size: int = 2**22
    threshold: int = 0
    prefetch: int = 0
    learning_rate: float = 1e-3
    warmup: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    seed: int = 0
    wire_steps: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        part = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))


@dataclass
class Run:
    """What one rank saw of one training.

    Attributes:
        stage, rank, world_size: of the rung.
        transport: of its communicator.
        losses: this rank's, one a step.
        memory: class to bytes, as the rung accounts for it after the last step.
        own_memory, own_traffic: what the rung itself predicts.
        alive: bytes behind all tensors of the process, less those that were there before the rung.
        traffic: purpose to bytes sent in the last step.
        wire: bytes that the interface counted in each of the last ``wire_steps`` steps, for all ranks together;
            empty where it could not be read.
        tokens_per_second: of all ranks together.
        peak: bytes of resident (GPU: allocated) memory at the peak, above those before the model was built; None
            where the kernel does not tell.
        peak_gathered, window: stage 3's counters, elements; 0 below.
        digest: of all weights.
        weights: name to values; on rank 0 only, empty on the others.
    """

    stage: int
    rank: int
    world_size: int
    transport: str
    losses: list[float]
    memory: dict[str, int]
    own_memory: dict[str, int]
    own_traffic: dict[str, int]
    alive: int
    traffic: dict[str, int]
    wire: list[int]
    tokens_per_second: float
    peak: int | None
    peak_gathered: int
    window: int
    digest: str
    weights: dict[str, torch.Tensor] = field(repr=False)


def make_rung(
    stage: int, model: torch.nn.Module, experiment: Experiment, comm: Communicator, **more: Any
) -> DataParallel:
    """The rung of ``stage`` around ``model``, with AdamW."""
    rung = (zc.DataParallel, zc.Zero1, zc.Zero2, zc.Zero3)[stage]
    if stage == 3:
        more.setdefault("stage3_param_persistence_threshold", experiment.threshold)
        more.setdefault("stage3_prefetch_bucket_size", experiment.prefetch)
    more.setdefault("reduce_bucket_size", experiment.bucket_size)
    return rung(
        model,
        torch.optim.AdamW,
        comm=comm,
        lr=experiment.learning_rate,
        betas=experiment.betas,
        weight_decay=experiment.weight_decay,
        **more,
    )


class Batches:
    """The same joined batches for any rung: step by step, this rank's rows of them.

    Args:
        experiment: its model's block size, rows and seed.
        comm: whose rank takes which rows.
    """

    def __init__(self, experiment: Experiment, comm: Communicator) -> None:
        self.text = ByteDataset(python_reference_text(), experiment.model.block_size, stride=1)
        self.rows, self.comm = experiment.rows, comm
        self.generator = torch.Generator().manual_seed(experiment.seed + 1)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self.next()

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x and y, (rows, block_size) each, of this rank."""
        n, rank = self.comm.world_size, self.comm.rank
        places = torch.randint(len(self.text), (n * self.rows,), generator=self.generator).tolist()
        items = [self.text[place] for place in places[rank * self.rows : (rank + 1) * self.rows]]
        x, y = (torch.stack(side).to(self.comm.device) for side in zip(*items))
        return x, y


def train_jobs(tell: Tell, jobs: Sequence[tuple[int, Experiment]]) -> list[Run]:
    """Train one rung after the other on this rank; a function for :func:`.processes.run_ranks`."""
    return [
        train(lambda event, job=job: tell({**event, "job": job}), stage, experiment)
        for job, (stage, experiment) in enumerate(jobs)
    ]


def train(tell: Tell, stage: int, experiment: Experiment) -> Run:
    """Train one rung on this rank; a function for :func:`.processes.run_ranks`."""
    comm = Communicator()
    batches = Batches(experiment, comm)
    on_gpu = comm.device.type == "cuda"
    _warm_up(experiment, comm)
    before = alive_bytes()
    resident = _resident_baseline()
    if on_gpu:
        peak_device_bytes(reset=True)
    torch.manual_seed(experiment.seed)
    model = GPT(experiment.model).to(comm.device)
    rung = make_rung(stage, model, experiment, comm)

    losses: list[float] = []
    traffic: dict[str, int] = {}
    counted: list[int] = []
    started, timed = time.perf_counter(), 0
    for step in range(experiment.steps):
        if step == min(5, experiment.steps // 2):  # the first steps fill pools and caches
            started, timed = time.perf_counter(), step
        batch = batches.next()
        read = step >= experiment.steps - experiment.wire_steps and wire.reason_outside() is None
        begin = read_wire(comm) if read else 0
        comm.ledger.clear()
        loss = train_step(rung, batch, experiment.rate(step))
        losses.append(loss)
        traffic = comm.ledger.by_purpose()
        if read:
            counted.append(read_wire(comm) - begin)
        if step < experiment.steps - 1:
            rung.zero_grad()
        if comm.rank == 0:
            tell({"stage": stage, "step": step + 1, "loss": loss})
    seconds = time.perf_counter() - started
    del batch
    alive = alive_bytes() - before
    peak = peak_device_bytes() if on_gpu else peak_resident_bytes()
    rung.zero_grad()
    weights = {name: value.detach().cpu() for name, value in rung.full_state_dict().items()}
    tokens = experiment.rows * comm.world_size * experiment.model.block_size * (experiment.steps - timed)
    return Run(
        stage=stage,
        rank=comm.rank,
        world_size=comm.world_size,
        transport=comm.transport,
        losses=losses,
        memory=rung.memory(),
        own_memory=rung.predicted_memory(),
        own_traffic=rung.predicted_traffic(),
        alive=alive,
        traffic=traffic,
        wire=counted,
        tokens_per_second=tokens / seconds,
        peak=None if peak is None else peak - (0 if on_gpu else resident),
        peak_gathered=getattr(rung, "peak_gathered_elements", 0),
        window=getattr(rung, "window_elements", 0),
        digest=digest(weights),
        weights=weights if comm.rank == 0 else {},
    )


def train_step(
    rung: DataParallel,
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float,
    after_backward: Callable[[], None] = lambda: None,
) -> float:
    """Forward, backward, step; returns the loss."""
    for group in rung.optimizer.param_groups:
        group["lr"] = rate
    loss = rung(*batch)
    loss.backward()
    after_backward()
    rung.step()
    return loss.item()


def alive_bytes() -> int:
    """Bytes behind every tensor in this process, each byte once."""
    with (
        torch._C.DisableTorchFunctionSubclass()
    ):  # partitioned parameters answer no questions about their storage
        return live_bytes(live_tensors())


def meter_of_everything() -> PeakMeter:
    """A meter that begins with every tensor there is in this process."""
    with torch._C.DisableTorchFunctionSubclass():
        return PeakMeter(live_tensors())


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A fingerprint of all bits of all weights."""
    summary = hashlib.sha256()
    for name in sorted(weights):
        summary.update(name.encode())
        summary.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return summary.hexdigest()


def read_wire(comm: Communicator) -> int:
    """The interface's counter at a moment when no rank has anything on its way."""
    comm.barrier()
    count = wire.loopback_bytes()
    comm.barrier()
    return count


def _warm_up(experiment: Experiment, comm: Communicator) -> None:
    """Have torch load the code it needs before the baseline is read: tens of MB that belong to no strategy."""
    small = GPT(GPTConfig(experiment.model.vocab_size, 1, 1, 8, 8)).to(comm.device)
    optimizer = torch.optim.AdamW(small.parameters())
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=comm.device)
    small(tokens, tokens).backward()
    optimizer.step()


def _resident_baseline() -> int | None:
    """Resident bytes now, from which on the peak is measured."""
    with contextlib.suppress(OSError):  # without the reset the peak is of the imports too, as is the baseline
        peak_resident_bytes(reset=True)
    return resident_bytes()
