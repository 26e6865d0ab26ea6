"""What is compared: each way to train the same GPT on two processes, as its own users would set it up.

Every contender gets the same model, the same batches, the same optimizer kernel (torch's AdamW, fused) and one
thread, and turns them into a function that takes one training step. Where a peer has an option that helps it
here, it has it: DDP keeps gradients as views of its buckets, and DeepSpeed has our bucket size, with which it is
faster and smaller on both shapes than with its default of 500 million elements. DeepSpeed clips gradients at 1.0
unless told otherwise; here nobody clips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zero_course.models.gpt import GPT, GPTConfig

WORLD_SIZE = 2
ADAMW = dict(lr=1e-4, fused=True)
BUCKET = 2**20  # elements, zero_course's default; for peers that count buckets in elements
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (tokens, targets) → the loss of this rank


@dataclass(frozen=True)
class Shape:
    """A model, and how much work a step of it is.

    Attributes:
        config: the GPT.
        micro_batch: rows a rank and step.
        sequence: tokens a row.
        title: for tables and plots.
    """

    config: GPTConfig
    micro_batch: int
    sequence: int
    title: str

    @property
    def tokens(self) -> int:
        """Tokens of one step on all ranks."""
        return WORLD_SIZE * self.micro_batch * self.sequence

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.config.num_parameters()


SHAPES = {
    "compute": Shape(
        GPTConfig(vocab_size=8192, n_layer=6, n_head=6, d_model=384, block_size=128), 4, 128, "compute-heavy"
    ),
    "communication": Shape(
        GPTConfig(vocab_size=8192, n_layer=6, n_head=16, d_model=1024, block_size=128),
        1,
        16,
        "communication-heavy",
    ),
    "tiny": Shape(
        GPTConfig(vocab_size=256, n_layer=2, n_head=2, d_model=64, block_size=16), 2, 16, "tiny, for tests"
    ),
}
DEFAULT_SHAPES = ("compute", "communication")


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        build: turns a model into a training step.
        label: for tables and plots.
        family: "floor", "zero_course", "torch" or "deepspeed".
        stage: of ZeRO; None for the floor.
    """

    build: Callable[[nn.Module], Step]
    label: str
    family: str
    stage: int | None


def floor(model: nn.Module) -> Step:
    """Each process trains for itself: what two processes can do at best on this machine."""
    return _plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def ddp(model: nn.Module) -> Step:
    """torch's DistributedDataParallel."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain_step(wrapped, torch.optim.AdamW(model.parameters(), **ADAMW))


def zero_redundancy(model: nn.Module) -> Step:
    """torch's ZeRO-1: DistributedDataParallel with a ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    return _plain_step(wrapped, optimizer)


def fsdp2(model: nn.Module) -> Step:
    """torch's ZeRO-3: ``fully_shard`` on each block and on what is left at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def zero_course(stage: int) -> Callable[[nn.Module], Step]:
    """The course's own rung of that stage, with its defaults."""

    def build(model: nn.Module) -> Step:
        import zero_course as zc

        rung = (zc.DataParallel, zc.Zero1, zc.Zero2, zc.Zero3)[stage]
        wrapped = rung(model, torch.optim.AdamW, **ADAMW)
        return _plain_step(wrapped, wrapped)

    return build


def deepspeed(stage: int) -> Callable[[nn.Module], Step]:
    """DeepSpeed at that stage, in fp32, with torch's optimizer handed to it."""

    def build(model: nn.Module) -> Step:
        import deepspeed

        zero = {
            "stage": stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
        }
        config = {
            "train_micro_batch_size_per_gpu": 1,  # only for its own reports; batches are made by the bench
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


CONTENDERS = {
    "floor": Contender(floor, "no communication", "floor", None),
    "ddp": Contender(ddp, "torch DDP", "torch", 0),
    "deepspeed-0": Contender(deepspeed(0), "DeepSpeed stage 0", "deepspeed", 0),
    "dp": Contender(zero_course(0), "zero_course DataParallel", "zero_course", 0),
    "zero-redundancy": Contender(zero_redundancy, "ZeroRedundancyOptimizer", "torch", 1),
    "deepspeed-1": Contender(deepspeed(1), "DeepSpeed stage 1", "deepspeed", 1),
    "zero1": Contender(zero_course(1), "zero_course Zero1", "zero_course", 1),
    "deepspeed-2": Contender(deepspeed(2), "DeepSpeed stage 2", "deepspeed", 2),
    "zero2": Contender(zero_course(2), "zero_course Zero2", "zero_course", 2),
    "fsdp2": Contender(fsdp2, "torch FSDP2", "torch", 3),
    "deepspeed-3": Contender(deepspeed(3), "DeepSpeed stage 3", "deepspeed", 3),
    "zero3": Contender(zero_course(3), "zero_course Zero3", "zero_course", 3),
}


def build_model(shape: Shape) -> GPT:
    """The same model on every rank."""
    torch.manual_seed(0)
    return GPT(shape.config)


def batches(shape: Shape, rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``count`` batches (tokens, targets), each (micro_batch, sequence): random, the same for every contender."""
    generator = torch.Generator().manual_seed(1000 + rank)
    size = (count, shape.micro_batch, shape.sequence + 1)
    tokens = torch.randint(shape.config.vocab_size, size, generator=generator)
    return [(batch[:, :-1], batch[:, 1:]) for batch in tokens]


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
