"""What a rung should keep and send, from the model's shapes alone.

A rung has its own ``predicted_memory()`` and ``predicted_traffic()``. A lab must not ask the rung what to expect of
the rung: a plain DataParallel in the place of Zero2 would predict itself, and be right. So the same figures come
from outside here: how parameters fall into buckets (chapter 01), who owns what of a bucket (chapter 02), and what is
pooled, for a model in fp32 that Adam trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from ..flat import make_buckets, padded_numel, partition_bounds
from ..memory import ring_bytes

FP32 = 4
STEP_COUNTER = 4  # bytes: torch's Adam counts the steps of each tensor that it updates in one fp32 element


@dataclass(frozen=True)
class Group:
    """Parameters that are reduced, partitioned and gathered as one: (name, elements) of each, in order.

    Attributes:
        members: the parameters.
        module: path of the module whose parameters are partitioned; empty for a bucket of whole parameters.
    """

    members: tuple[tuple[str, int], ...]
    module: str = ""

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(numel for _, numel in self.members)

    def padded(self, world_size: int) -> int:
        """Elements, padded to a multiple of the ranks."""
        return padded_numel(self.numel, world_size)

    def owned(self, world_size: int, rank: int) -> list[int]:
        """Elements of each parameter that lie in the rank's slice; parameters that do not are left out."""
        start, stop = partition_bounds(self.numel, world_size, rank)
        parts, offset = [], 0
        for _, numel in self.members:
            parts.append(min(stop, offset + numel) - max(start, offset))
            offset += numel
        return [part for part in parts if part > 0]


def lay_out(
    model: nn.Module, stage: int, world_size: int, bucket_size: int, threshold: int = 0
) -> list[Group]:
    """How a rung of ``stage`` groups the parameters of ``model``, in the order in which it reduces them.

    Args:
        model: on any device, the meta device too; only names and shapes are read.
        stage: 0 (DP) to 3.
        world_size: N.
        bucket_size: elements, as the rung's ``reduce_bucket_size``.
        threshold: elements, as Zero3's ``stage3_param_persistence_threshold``.
    """
    named = list(model.named_parameters())
    modules: dict[str, list[tuple[str, int]]] = {}
    for name, param in named if stage == 3 else ():
        if param.numel() > threshold:
            modules.setdefault(name.rpartition(".")[0], []).append((name, param.numel()))
    partitioned = {name for members in modules.values() for name, _ in members}
    kept = [(name, param) for name, param in reversed(named) if name not in partitioned]
    groups = [
        Group(tuple((slot.name, slot.numel) for slot in bucket.slots))
        for bucket in make_buckets(kept, bucket_size, world_size)
    ]
    groups += [Group(tuple(members), module) for module, members in modules.items()]
    place = {name: position for position, (name, _) in enumerate(named)}
    return sorted(groups, key=lambda group: -min(place[name] for name, _ in group.members))


@dataclass(frozen=True)
class Prediction:
    """What one rank of one rung keeps between two steps, and what it sends in one.

    Attributes:
        memory: class to bytes: parameters, gradients, optimizer.
        counters: bytes of the optimizer's step counters.
        placeholders: bytes that stand for partitioned parameters (stage 3).
        receive_buffers: bytes in which a rank receives what it sums up.
        bucket_buffers: bytes of pooled buckets: none below stage 2; an upper bound in stage 3.
        traffic: purpose to bytes sent in a step of one micro-batch, without clipping.
        gathered: elements of the largest group that is gathered (stage 3).
        padding: elements that are in a group and in no parameter.
        groups: elements of each group, padded, in the order of their reduction.
    """

    memory: dict[str, int]
    counters: int
    placeholders: int
    receive_buffers: int
    bucket_buffers: int
    traffic: dict[str, int]
    gathered: int
    padding: int
    groups: list[int] = field(default_factory=list)

    @property
    def states(self) -> int:
        """All that is kept between two steps, communication buffers apart."""
        return sum(self.memory.values()) + self.counters + self.placeholders

    @property
    def buffers(self) -> int:
        """Communication buffers."""
        return self.receive_buffers + self.bucket_buffers


def predict(
    model: nn.Module,
    stage: int,
    world_size: int,
    rank: int,
    *,
    bucket_size: int,
    threshold: int = 0,
    prefetch: int = 0,
    native: bool = False,
    gathers: dict[str, int] | None = None,
) -> Prediction:
    """The formulas of stages 0 to 3, for a model in fp32 all of which Adam trains.

    Args:
        model, stage, world_size, bucket_size, threshold: as in :func:`lay_out`.
        rank: whose figures; ranks differ where padding ends a slice early.
        prefetch: elements, as Zero3's ``stage3_prefetch_bucket_size``.
        native: the library carries out collectives (NCCL), and keeps what it needs for that to itself.
        gathers: module to how often its parameters are gathered in a step of stage 3, where that is not twice
            (once in forward, once in backward).

    Returns:
        exact integers; in stage 3 ``bucket_buffers`` is a bound.
    """
    n = world_size
    groups = lay_out(model, stage, n, bucket_size, threshold)
    padded = [group.padded(n) for group in groups]
    owned = [part for group in groups for part in group.owned(n, rank)]
    tensors = sum(len(group.members) for group in groups)
    everything, with_padding = sum(group.numel for group in groups), sum(padded)
    of_modules = sum(group.padded(n) for group in groups if group.module)

    if stage == 0:
        parameters = everything
    else:
        parameters = with_padding - of_modules + of_modules // n  # below stage 3 nothing is of_modules
    elements = {
        "parameters": parameters,
        "gradients": with_padding // n if stage >= 2 else with_padding,
        "optimizer": 2 * (sum(owned) if stage >= 1 else everything),
    }

    def sent(op: str, size: int) -> int:
        return ring_bytes(op, size * FP32, n)

    traffic = {"gradients": sum(sent("reduce_scatter" if stage else "all_reduce", size) for size in padded)}
    if stage:
        traffic["parameters"] = sum(
            sent("all_gather", size) * ((gathers or {}).get(group.module, 2) if group.module else 1)
            for group, size in zip(groups, padded)
        )
    flags = _slices(tensors, n)  # which parameters were used: one int32 each, all-reduced
    if native:
        traffic["control"] = 2 * (FP32 * tensors * (n - 1) // n)
    else:
        traffic["control"] = FP32 * (tensors - flags[rank] + (n - 1) * flags[rank]) if n > 1 else 0
    layers = [group.padded(n) for group in groups if group.module]
    if stage == 2:
        buckets = sum(pooled(padded))
    elif stage == 3:
        # One that is gathered, one that fills, one that is reduced; where there are parameters of both kinds, one of
        # whole parameters that fills meanwhile; and those gathered ahead. Each may have had the largest group in it.
        both = 0 < len(layers) < len(groups)
        ahead = min(len(layers), prefetch // min(layers)) if layers else 0
        buckets = (3 + both + ahead) * max(padded)
    else:
        buckets = 0
    return Prediction(
        memory={name: count * FP32 for name, count in elements.items()},
        counters=STEP_COUNTER * (len(owned) if stage else tensors),
        placeholders=FP32 * sum(bool(group.module) for group in groups),
        receive_buffers=0 if native else FP32 * (n - 1) * (max(padded) // n + flags[rank]),
        bucket_buffers=buckets * FP32,
        traffic=traffic,
        gathered=max(layers, default=0),
        padding=with_padding - everything,
        groups=padded,
    )


def pooled(sizes: list[int], steps: int = 3) -> list[int]:
    """Buffers that stage 2's pool holds once it no longer grows: one fills while another is reduced.

    A bucket takes the smallest free buffer that is large enough; if none is, a free one is replaced by a larger.

    Args:
        sizes: elements of the buckets in the order in which they fill.
        steps: how often all of them fill.
    """
    free: list[int] = []
    for _ in range(steps):
        reducing: int | None = None
        for size in sizes:
            fitting = [buffer for buffer in free if buffer >= size]
            if free:
                free.remove(min(fitting) if fitting else max(free))
            filling = min(fitting) if fitting else size
            if reducing is not None:  # this bucket is full, so the one before it has arrived
                free.append(reducing)
            reducing = filling
        free.append(reducing)
    return free


def _slices(numel: int, world_size: int) -> list[int]:
    """Lengths of the slices of an all-reduce: equal ones, the last ones shorter."""
    length = -(-numel // world_size)
    return [max(0, min(length, numel - rank * length)) for rank in range(world_size)]
