"""Predict: what training keeps in memory and sends over the wire, from the number of parameters alone.

Mixed-precision Adam keeps, for each parameter, a 16-bit weight (2 bytes), a 16-bit gradient (2) and the
optimizer's states in fp32: master weight, momentum, variance (K = 4 + 4 + 4 = 12). Data parallelism repeats all
16 bytes on every rank; ZeRO [arXiv 1910.02054, section 5] divides them by the N ranks, one class a stage:

    =======  ===================  ==================
    stage    bytes on each rank   elements sent
    =======  ===================  ==================
    0 (DP)   (4+K) P              2 P (N-1)/N
    1        4 P + K P/N          2 P (N-1)/N
    2        2 P + (2+K) P/N      2 P (N-1)/N
    3        (4+K) P/N            3 P (N-1)/N
    =======  ===================  ==================

What is counted differs from text to text (16, 18 or 20 bytes a parameter), so each figure here comes with its
preset, and the preset with its source. Activations and buffers are not model states: see
:mod:`.activations` and :mod:`.strategies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

STAGES = (0, 1, 2, 3)
STAGE_NAMES = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


@dataclass(frozen=True)
class Preset:
    """What one text counts as bytes a parameter.

    Attributes:
        name: what the command line calls it.
        parameter_bytes: the weight that computes.
        gradient_bytes: its gradient.
        optimizer_bytes: all that the update keeps (K), master weight included.
        master_bytes: the part of ``optimizer_bytes`` that is the master weight.
        source: where the count comes from.
        stage3_gradient_bytes: where the text counts gradients otherwise in stage 3.
        stage3_layer_bytes: bytes for each parameter of the largest layer that the text adds in stage 3.
    """

    name: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    master_bytes: int
    source: str
    stage3_gradient_bytes: int | None = None
    stage3_layer_bytes: int = 0

    @property
    def bytes_per_parameter(self) -> int:
        """All of it, on one rank alone."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def gradient_bytes_at(self, stage: int) -> int:
        """Bytes of a gradient as this text counts them in ``stage``."""
        if stage == 3 and self.stage3_gradient_bytes is not None:
            return self.stage3_gradient_bytes
        return self.gradient_bytes

    def __str__(self) -> str:
        parts = f"{self.parameter_bytes}+{self.gradient_bytes}+{self.optimizer_bytes}"
        return f"{self.name}: {self.bytes_per_parameter} B a parameter ({parts}), K = {self.optimizer_bytes}"


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("zero-paper", 2, 2, 12, 4, "ZeRO, arXiv 1910.02054, section 3.1"),
        Preset(
            "fp32", 4, 4, 8, 0, "plain fp32 Adam: weight, gradient, two moments (this course's CPU ladder)"
        ),
        Preset("megatron", 2, 4, 12, 4, "Megatron-LM with its default fp32 gradients: 18 bytes"),
        Preset(
            "deepspeed-docs",
            2,
            2,
            16,
            4,
            "DeepSpeed 0.19 estimators: ZeRO-2 2P+18P/N, ZeRO-3 18P/N + 4 x largest layer; the optimizer's 16"
            " hold an fp32 copy of the gradient (older pages print 4P+16P/N for ZeRO-2)",
            stage3_gradient_bytes=0,
            stage3_layer_bytes=4,
        ),
        Preset(
            "zero-infinity", 2, 2, 16, 4, "ZeRO-Infinity, arXiv 2104.07857: 20 bytes, fp32 gradient included"
        ),
    )
}


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of model states on one rank, by class; the classes are those of a rung's ``memory()``.

    Attributes:
        stage, world_size: what they are for.
        parameters, gradients: the weights that compute, and their gradients.
        master_weights: fp32 copies of the weights that the update works on (0 in plain fp32 training).
        optimizer: moments, and whatever else the update keeps.
        optimizer_bytes_per_parameter: K of the ZeRO paper, master weight included.
    """

    stage: int
    world_size: int
    parameters: int
    gradients: int
    master_weights: int
    optimizer: int
    optimizer_bytes_per_parameter: int

    @property
    def total(self) -> int:
        """All classes together."""
        return self.parameters + self.gradients + self.master_weights + self.optimizer

    def as_dict(self) -> dict[str, int]:
        """Class name to bytes."""
        names = ("parameters", "gradients", "master_weights", "optimizer")
        return {name: getattr(self, name) for name in names}


def model_state_bytes(
    parameters: int | float | Iterable[int],
    world_size: int,
    stage: int,
    *,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
    master_bytes: int | None = None,
    padded: bool = False,
) -> ModelStateBytes:
    """Bytes of model states on one rank [ZeRO, section 5].

    Args:
        parameters: number of parameters, or the sizes (elements) of the buckets they lie in. Each bucket is
            divided by itself: a rank owns ceil(size / N) of each.
        world_size: N, the ranks that share the states.
        stage: 0 (DP), 1, 2 or 3.
        parameter_bytes, gradient_bytes, optimizer_bytes: bytes a parameter; 2 + 2 + 12 by default, 4 + 4 + 8 for
            plain fp32 Adam.
        master_bytes: the part of ``optimizer_bytes`` that is the master weight; by default 4 when the weights
            have fewer than 4 bytes, else 0.
        padded: count what is whole in the padded size too, as buckets laid flat have it. Shards are padded
            either way.

    Returns:
        exact integers.

    Raises:
        ValueError: a stage other than 0 to 3, a world size below 1, a negative or fractional size.
    """
    _check(world_size, stage)
    if master_bytes is None:
        master_bytes = min(4, optimizer_bytes) if parameter_bytes < 4 else 0
    if not 0 <= master_bytes <= optimizer_bytes:
        raise ValueError(f"master_bytes {master_bytes} is not a part of optimizer_bytes {optimizer_bytes}")
    sizes = _sizes(parameters)
    shard = sum(-(-size // world_size) for size in sizes)
    whole = shard * world_size if padded else sum(sizes)
    return ModelStateBytes(
        stage=stage,
        world_size=world_size,
        parameters=parameter_bytes * (shard if stage >= 3 else whole),
        gradients=gradient_bytes * (shard if stage >= 2 else whole),
        master_weights=master_bytes * (shard if stage >= 1 else whole),
        optimizer=(optimizer_bytes - master_bytes) * (shard if stage >= 1 else whole),
        optimizer_bytes_per_parameter=optimizer_bytes,
    )


def preset_state_bytes(
    parameters: int | float | Iterable[int], world_size: int, stage: int, preset: str | Preset = "zero-paper"
) -> ModelStateBytes:
    """:func:`model_state_bytes` with the byte counts of a preset (without ``stage3_layer_bytes``)."""
    chosen = get_preset(preset)
    return model_state_bytes(
        parameters,
        world_size,
        stage,
        parameter_bytes=chosen.parameter_bytes,
        gradient_bytes=chosen.gradient_bytes_at(stage),
        optimizer_bytes=chosen.optimizer_bytes,
        master_bytes=chosen.master_bytes,
    )


def get_preset(preset: str | Preset) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: there is none; the text lists those that exist.
    """
    if isinstance(preset, Preset):
        return preset
    if preset not in PRESETS:
        raise ValueError(f"preset {preset!r} is not known; use one of {', '.join(PRESETS)}")
    return PRESETS[preset]


def zero_table(
    parameters: Sequence[float] = (7.5e9, 128e9, 1e12),
    world_sizes: Sequence[int] = (1, 4, 16, 64, 256, 1024),
    stages: Sequence[int] = (1, 2, 3),
) -> dict[tuple[int, int, int], int]:
    """Table 1 of the ZeRO paper: bytes a rank, by (parameters, world size, stage); K = 12.

    The paper prints GB = 1e9 bytes, some cells rounded, some cut: its 2218 is 2218.75.
    """
    return {
        (int(size), world_size, stage): model_state_bytes(size, world_size, stage).total
        for size in parameters
        for world_size in world_sizes
        for stage in stages
    }


def traffic_elements(
    parameters: int | float | Iterable[int], world_size: int, stage: int, *, micro_batches: int = 1
) -> int:
    """Elements one rank sends for one optimizer step [ZeRO, section 7].

    DP all-reduces gradients: 2P(N-1)/N. ZeRO-1 and ZeRO-2 reduce-scatter gradients and all-gather parameters:
    the same. ZeRO-3 gathers parameters twice, for forward and for backward: 3P(N-1)/N, 1.5 times as much at
    every N.

    Args:
        parameters: number of parameters, or the sizes of the buckets; each is padded to a multiple of N.
        world_size: N.
        stage: 0 to 3.
        micro_batches: forward-backward passes before the step. DP and ZeRO-1 add gradients up and communicate
            once; ZeRO-2 has no room for the sum of whole gradients and reduces each time; ZeRO-3 gathers each
            time as well.

    Raises:
        ValueError: as :func:`model_state_bytes`; ``micro_batches`` below 1.
    """
    _check(world_size, stage)
    if micro_batches < 1:
        raise ValueError(f"micro_batches {micro_batches} must be at least 1")
    shard = sum(-(-size // world_size) for size in _sizes(parameters))
    reductions = 1 if stage < 2 else micro_batches
    gathers = 1 if stage < 3 else 2 * micro_batches
    return (reductions + gathers) * (world_size - 1) * shard


def ring_bytes(
    op: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"], payload: int, world_size: int
) -> int:
    """Bytes one rank sends in a ring collective on ``payload`` bytes.

    All-reduce 2(N-1)/N S, the others (N-1)/N S, where S is the whole vector: the input of a reduce-scatter, the
    output of an all-gather. A payload that N does not divide is padded.

    Raises:
        ValueError: an op that is none of the four.
    """
    rounds = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
    if op not in rounds:
        raise ValueError(f"{op!r} is no ring collective; use one of {', '.join(rounds)}")
    _check(world_size, 0)
    return rounds[op] * (world_size - 1) * -(-payload // world_size)


def ring_seconds(
    op: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all"],
    payload: int,
    world_size: int,
    *,
    latency: float,
    bandwidth: float,
) -> float:
    """Seconds by the alpha-beta model: (messages) x ``latency`` (s) + (bytes sent) / ``bandwidth`` (bytes/s)."""
    messages = (2 if op == "all_reduce" else 1) * (world_size - 1)
    return messages * latency + ring_bytes(op, payload, world_size) / bandwidth


def _sizes(parameters: int | float | Iterable[int]) -> list[int]:
    """The sizes as integers, one for each bucket."""
    given = [parameters] if isinstance(parameters, (int, float)) else list(parameters)
    for size in given:
        if size < 0 or size != int(size):
            raise ValueError(f"a number of parameters must be a whole number, not {size!r}")
    return [int(size) for size in given]


def _check(world_size: int, stage: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size {world_size} must be at least 1")
    if stage not in STAGES:
        raise ValueError(f"stage {stage!r} is not 0 (DP), 1, 2 or 3")
