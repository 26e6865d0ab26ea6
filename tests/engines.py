"""Engines, models and data that the tests of the engine and of checkpoints share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import zero_course as zc
from zero_course.engine import ShardedDataLoader

FEATURES, TOKENS = 6, 11


class Everything(nn.Module):
    """Whatever a checkpoint could lose: tied and frozen weights, a scalar, an empty tensor, buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 7)
        self.inner = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.dropout = nn.Dropout(0.2)
        self.frozen = nn.Linear(13, 7).requires_grad_(False)
        self.head = nn.Linear(7, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.inner(self.embed(tokens))))
        return self.head(self.frozen(self.dropout(hidden))) * self.scale + self.nothing.sum()


class Tokens(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pairs of one token and the one to predict; item i is always the same."""

    def __init__(self, length: int = 54) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index % TOKENS), torch.tensor((3 * index + 1) % TOKENS)


def config(stage: int = 0, micro: int = 4, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A configuration in which every rank has a part of everything."""
    zero = {"stage": stage, "reduce_bucket_size": 40, **more.pop("zero_optimization", {})}
    if stage == 3:
        zero = {"stage3_param_persistence_threshold": 15, "stage3_prefetch_bucket_size": 60, **zero}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "gradient_clipping": 0.5,
        "zero_optimization": zero,
        **more,
    }


def everything(stage: int, seed: int = 0, data: Dataset[Any] | None = None, **more: Any) -> zc.Engine:
    """An engine that trains `Everything` on `Tokens`, with a warm-up."""
    torch.manual_seed(seed)
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 20}}
    settings = config(stage, **{"scheduler": schedule, "seed": 7, **more})
    return zc.initialize(model=Everything(), config=settings, training_data=data or Tokens())[0]


def train(engine: zc.Engine, micro_batches: int) -> list[float]:
    """Train on so many micro-batches of the engine's own loader; this rank's losses."""
    losses: list[float] = []
    loader: ShardedDataLoader = engine.training_dataloader
    while len(losses) < micro_batches:
        for x, y in loader:
            loss = nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if len(losses) == micro_batches:
                break
    return losses


def snapshot(engine: zc.Engine) -> dict[str, Any]:
    """All that a checkpoint keeps, whole, the same on every rank. A collective."""
    state: dict[str, Any] = {k: v.clone() for k, v in engine.rung.full_state_dict().items()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = zc.safe_get_full_optimizer_state(param, key) if param.numel() else None
            state[f"{key} of {name}"] = moment
    state["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    state["lr_scheduler"] = engine.lr_scheduler.state_dict()
    for name in ("global_steps", "micro_steps", "global_samples", "skipped_steps"):
        state[name] = getattr(engine, name)
    state["data"] = engine.training_dataloader.state_dict()
    return state


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What differs between two snapshots, bit for bit."""
    found = sorted(ours.keys() ^ theirs.keys())
    for key in ours.keys() & theirs.keys():
        a, b = ours[key], theirs[key]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        if not same:
            found.append(key)
    return found
