"""Models, data and training loops that the tests of every rung share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_course as zc

RUNGS = {0: zc.DataParallel, 1: zc.Zero1, 2: zc.Zero2, 3: zc.Zero3}
FEATURES = 6


class Plain(nn.Module):
    """Odd sizes that no number of ranks divides, and parameters of one element, of no element, of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 13)
        self.outer = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x))) * self.scale + self.shift + self.nothing.sum()


class Tied(nn.Module):
    """One weight used as an embedding and as the output layer, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.twice = nn.Linear(7, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, 0].abs() * 10).long() % 11
        hidden = self.twice(torch.tanh(self.twice(self.embed(tokens))))
        return self.head(hidden)


class Frozen(nn.Module):
    """A frozen layer between trained ones, and a frozen bias beside a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 9)
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.last = nn.Linear(9, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))


class Unused(nn.Module):
    """One layer that no rank ever uses, one that is used only when the input's first value is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(FEATURES, 4)
        self.sometimes = nn.Linear(FEATURES, 4)
        self.always = nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = x[:, :1] > 0
        y = self.always(x)
        return y + positive * self.sometimes(x) if positive.any() else y


class Recomputed(nn.Module):
    """Two blocks whose activations are recomputed in backward."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(FEATURES, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 17), nn.GELU(), nn.Linear(17, 10)) for _ in "ab"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Buffers(nn.Module):
    """A buffer that forward changes, alike on every rank, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("constant", torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.constant.sum() / self.calls


class MixedDtypes(nn.Module):
    """A float64 layer between two of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.double_layer = nn.Linear(8, 8).double()
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.double_layer(self.first(x).double())).float())


class LowPrecision(nn.Module):
    """A bfloat16 layer before one of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(FEATURES, 8).bfloat16()
        self.high = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(torch.tanh(self.low(x.bfloat16()).float()))


class Attention(nn.Module):
    """torch's own attention, whose forward reads its child's weight without calling the child.

    Without biases: the gradient of the keys' bias is zero but for rounding, which Adam would blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, bias=False, batch_first=True)
        self.out = nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.stack([x, x.flip(-1)], dim=1)  # (rows, 2, FEATURES): each row is a sequence of its own
        return self.out(self.attention(x, x, x, need_weights=False)[0]).flatten(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (Plain, Tied, Frozen, Unused, Recomputed, Buffers, MixedDtypes, LowPrecision, Attention)
}


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The joined batch of one step: x (size, FEATURES), y (size,)."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, FEATURES, generator=generator), torch.randn(size, generator=generator)


def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A loss that is a mean over the rows, so that the mean of the parts is the whole."""
    return F.mse_loss(output.float().sum(-1), y)


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of the zoo with seeded weights."""
    torch.manual_seed(seed)
    return MODELS[name]()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, the rest without and with a larger rate."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]


def train(
    model: Any,
    optimizer: Any,
    *,
    rank: int,
    world: int,
    steps: int,
    rows: int = 4,
    micro: int = 1,
    clip: float = 0,
) -> list[float]:
    """Train on this rank's rows of each joined batch of world * rows rows; losses of this rank."""
    losses = []
    for step in range(steps):
        x, y = batch(step, world * rows)
        mine = slice(rank * rows, (rank + 1) * rows)
        parts = list(zip(x[mine].chunk(micro), y[mine].chunk(micro), strict=True))
        for x_part, y_part in parts:
            loss = loss_of(model(x_part), y_part) / micro
            loss.backward()
            losses.append(loss.item())
        if clip:
            if isinstance(model, zc.DataParallel):
                model.clip_grad_norm_(clip)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reference(
    name: str,
    optimizer_class: Any,
    args: dict[str, Any],
    *,
    world: int,
    steps: int,
    groups: bool = False,
    **how: Any,
) -> dict[str, torch.Tensor]:
    """The state dict after single-process training on the joined batches."""
    model = build(name)
    optimizer = optimizer_class(groups_of(model) if groups else model.parameters(), **args)
    rows = how.pop("rows", 4)
    train(model, optimizer, rank=0, world=1, steps=steps, rows=world * rows, **how)
    return {key: value.clone() for key, value in model.state_dict().items()}


def wrapped(
    stage: int,
    name: str,
    optimizer_class: Any,
    args: dict[str, Any],
    *,
    steps: int,
    groups: bool = False,
    **how: Any,
) -> dict[str, torch.Tensor]:
    """The same, on the ranks that call it, under one rung."""
    rung_args = {"reduce_bucket_size": 40, **args}
    if stage == 3:
        rung_args = {"stage3_param_persistence_threshold": 10, "stage3_prefetch_bucket_size": 60, **rung_args}
    model = build(name, seed=zc.get_rank())  # other weights on each rank: rank 0's must win
    params = groups_of(model) if groups else None
    rung = RUNGS[stage](model, optimizer_class, params=params, **rung_args)
    train(rung, rung, rank=rung.comm.rank, world=rung.comm.world_size, steps=steps, **how)
    return {key: value.clone() for key, value in rung.full_state_dict().items()}
