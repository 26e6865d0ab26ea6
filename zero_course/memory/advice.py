"""Choose: which strategy fits the hardware, with how much to spare, and which one to take.

:mod:`.strategies` computes bytes and cost of DP, ZeRO-1, 2 and 3, each with and without offload. Of those that
fit and leave a margin, the one with the least cost a step wins (moving and updating states). Costs within 10 %
are equal: DP, ZeRO-1 and ZeRO-2 send the same bytes, and under offload the host's update outweighs ZeRO-3's extra
gather. Among equals the simplest wins that fills at most half of the GPU, so that the batch can grow; if none
does, the one with most room.

Nothing is looked up. On one host of 8 GPUs of 40 GB, with every default below, the answer changes at

    ===============  =========================================================
    up to 1.0B       DP
    1.0B to 2.9B     ZeRO-1
    2.9B to 7.2B     ZeRO-2
    7.2B to 12.2B    ZeRO-3
    12.2B to 68.4B   ZeRO-3 + optimizer on CPU; host memory ends it
    beyond           tensor and pipeline parallelism, on more GPUs
    ===============  =========================================================

The usual rule of thumb (under 1B DP or ZeRO-1, 1-7B ZeRO-2, 7-70B ZeRO-3 with offload, then TP and PP) comes out,
but in two places: ZeRO-1 is still comfortable up to 2.9B, and up to 12.2B ZeRO-3 needs no offload. A test searches
for these thresholds and holds this table to them.

The defaults, each an argument of :func:`advise`: 4096 tokens a GPU in a micro-batch, full recomputation of
activations in a GPT of that size; DeepSpeed's bucket sizes; 128 GiB of host memory a GPU. A tenth of a GPU is
taken as never usable (context, fragmentation): with it the largest ZeRO-1 model on 64 GPUs of 32 GB comes out as
6.2B, which is what the ZeRO paper measured, where the bare formula says 7.6B. Bandwidths only order the
strategies; they are round assumptions, not a prediction of your step time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .activations import TransformerShape, activation_bytes
from .formulas import Preset, get_preset
from .strategies import CPU_RESERVE, Bandwidths, Strategy, Workload
from .units import format_bytes

CPU_MEMORY_PER_GPU = 128 * 2**30
SAME_COST = 1.10  # costs within 10 % are equal

_SIZED_BY = {
    "communication_buffers": "reduce_bucket_size, twice with overlap_comm",
    "gathered_parameters": "stage3_max_live_parameters",
}


@dataclass(frozen=True)
class Advice:
    """What :func:`advise` found.

    Attributes:
        parameters, gpus, gpu_memory, gpus_per_node, cpu_memory, nvme: the question; bytes of one GPU and one host.
        preset: which bytes a parameter are counted.
        strategies: all of them, simplest first.
        recommended: the one to take, or None: tensor and pipeline parallelism are needed.
        minimum_gpus: where nothing fits, the number of such GPUs over which the states could be spread; None
            where no number is enough because one layer and its activations do not fit.
        reason: why, in words.
        notes: what might surprise, e.g. a higher stage that takes more memory than a lower one.
        assumptions: what was counted and what was assumed because it was not given.
    """

    parameters: int
    gpus: int
    gpu_memory: int
    gpus_per_node: int
    cpu_memory: int
    nvme: int
    preset: Preset
    strategies: list[Strategy]
    recommended: Strategy | None
    minimum_gpus: int | None
    reason: str
    notes: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Strategy:
        for strategy in self.strategies:
            if strategy.name == name:
                return strategy
        raise KeyError(f"{name!r}; there are {', '.join(strategy.name for strategy in self.strategies)}")

    def explain(self, first: str, second: str) -> str:
        """Why strategy ``first`` takes more GPU memory than ``second``, or less, class by class."""
        mine, other = self[first], self[second]
        parts = []
        for name in mine.gpu:
            difference = mine.gpu[name] - other.gpu[name]
            if difference:
                sized = f" (sized by {_SIZED_BY[name]})" if difference > 0 and name in _SIZED_BY else ""
                sign = "+" if difference > 0 else "-"
                parts.append(f"{name.replace('_', ' ')} {sign}{format_bytes(abs(difference))}{sized}")
        total = mine.gpu_bytes - other.gpu_bytes
        amount = f"{format_bytes(abs(total))} {'more' if total > 0 else 'less'}" if total else "as much"
        return f"{first} takes {amount} on a GPU {'than' if total else 'as'} {second}: {', '.join(parts) or 'all'}."

    def table(self) -> str:
        """All strategies as plain text, the recommended one marked with a star, and the reason."""
        lines = [f"  {'strategy':<28} {'GPU':>11} {'GPU spare':>12} {'host':>11} {'traffic':>8}  verdict"]
        for strategy in self.strategies:
            mark = "*" if strategy is self.recommended else " "
            lines.append(
                f"{mark} {strategy.name:<28} {format_bytes(strategy.gpu_bytes):>11} "
                f"{format_bytes(strategy.gpu_spare):>12} {format_bytes(strategy.cpu_bytes):>11} "
                f"{strategy.traffic_ratio:>7.2f}x  {strategy.verdict}"
            )
        return "\n".join([*lines, self.reason, *self.notes])


def advise(
    parameters: int | float,
    gpus: int,
    gpu_memory: int | float,
    *,
    gpus_per_node: int = 8,
    cpu_memory: int | float | None = None,
    nvme: int | float | None = None,
    activations: int | TransformerShape | None = None,
    tokens: int = 4096,
    largest_layer: int | None = None,
    preset: str | Preset = "zero-paper",
    reserve: float = 0.10,
    margin: float = 0.10,
    reduce_bucket_size: int | float = 5e8,
    overlap_comm: bool = True,
    stage3_max_live_parameters: int | float = 1e9,
    bandwidths: Bandwidths | None = None,
) -> Advice:
    """Which strategy fits, with how much to spare, and which to take. The module's text says how it decides.

    Args:
        parameters: number of parameters.
        gpus: ranks, all data-parallel.
        gpu_memory: bytes of one GPU.
        gpus_per_node: GPUs of one host, which share its memory.
        cpu_memory: bytes of one host; 128 GiB for each of its GPUs if not given.
        nvme: bytes of one host's NVMe; none if not given.
        activations: bytes on one GPU, or the model's shape to compute them from (full recomputation: each block's
            input in 16 bits, one block's own 34sbh, and logits in 16 and 32 bits); by default the shape of a GPT
            of this size.
        tokens: batch x sequence of one micro-batch on one GPU.
        largest_layer: parameters gathered at once in ZeRO-3; by default from the shape.
        preset: which bytes a parameter are counted, see ``PRESETS``.
        reserve: part of a GPU that is never usable.
        margin: part of a GPU that a recommended strategy leaves free besides.
        reduce_bucket_size: elements of a bucket in which ZeRO-2 and ZeRO-3 reduce gradients.
        overlap_comm: two buckets, one being filled while the other is reduced.
        stage3_max_live_parameters: elements that ZeRO-3 keeps gathered at most; the largest layer if that is more.
        bandwidths: what orders the strategies.

    Returns:
        the advice, every size in bytes.

    Raises:
        ValueError: a size below 1, a fraction outside [0, 1), an unknown preset.
    """
    for name, size in (
        ("parameters", parameters),
        ("gpus", gpus),
        ("gpu_memory", gpu_memory),
        ("gpus_per_node", gpus_per_node),
        ("tokens", tokens),
        ("reduce_bucket_size", reduce_bucket_size),
    ):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    for name, part in (("reserve", reserve), ("margin", margin)):
        if not 0 <= part < 1:
            raise ValueError(f"{name} is a part of a GPU: at least 0 and less than 1, not {part}")
    parameters, gpu_memory = int(parameters), int(gpu_memory)
    chosen = get_preset(preset)
    local = min(gpus, gpus_per_node)
    assumptions = [f"{chosen} ({chosen.source})"]
    if cpu_memory is None:
        cpu_memory = CPU_MEMORY_PER_GPU * local
        assumptions.append(
            f"host memory not given: 128 GiB a GPU, {format_bytes(cpu_memory, binary=True)} a host"
        )
    shape = activations if isinstance(activations, TransformerShape) else TransformerShape.of_size(parameters)
    if activations is None or activations is shape:
        whose = "a GPT of this size" if activations is None else "the given shape"
        activations = _recomputed_activations(shape, tokens)
        assumptions.append(
            f"activations {format_bytes(activations)} a GPU: {whose} ({shape.layers} layers of {shape.hidden}), "
            f"{tokens} tokens a micro-batch, full recomputation"
        )
    if largest_layer is None:
        largest_layer = min(parameters, shape.largest_layer)
    assumptions.append(f"{reserve:.0%} of a GPU's and {CPU_RESERVE:.0%} of a host's memory are never usable")
    workload = Workload(
        parameters=parameters,
        gpus=gpus,
        local=local,
        preset=chosen,
        activations=activations,
        bucket=min(parameters, int(reduce_bucket_size)),
        buckets=2 if overlap_comm else 1,
        window=max(largest_layer, min(parameters, int(stage3_max_live_parameters))),
        largest_layer=largest_layer,
        gpu_memory=gpu_memory,
        cpu_memory=int(cpu_memory),
        nvme=int(nvme or 0),
        reserve=reserve,
        margin=margin,
        bandwidths=bandwidths or Bandwidths(),
    )
    strategies = workload.strategies()
    recommended, reason = _choose(strategies, workload.usable)
    minimum_gpus = None
    if recommended is None:
        minimum_gpus = workload.minimum_gpus(gpus_per_node)
        reason = _beyond(strategies, workload, minimum_gpus)
    advice = Advice(
        parameters=parameters,
        gpus=gpus,
        gpu_memory=gpu_memory,
        gpus_per_node=gpus_per_node,
        cpu_memory=workload.cpu_memory,
        nvme=workload.nvme,
        preset=chosen,
        strategies=strategies,
        recommended=recommended,
        minimum_gpus=minimum_gpus,
        reason=reason,
        assumptions=assumptions,
    )
    for lower, higher in zip(strategies[:3], strategies[1:4]):
        if gpus > 1 and higher.gpu_bytes > lower.gpu_bytes:
            advice.notes.append(advice.explain(higher.name, lower.name))
    return advice


def _choose(strategies: list[Strategy], usable: int) -> tuple[Strategy | None, str]:
    """The cheapest with a margin; among equals the simplest that is comfortable, else the emptiest."""
    candidates = [strategy for strategy in strategies if strategy.roomy]
    if not candidates:
        return None, ""
    cheapest = min(strategy.seconds for strategy in candidates)
    equals = [strategy for strategy in candidates if strategy.seconds <= cheapest * SAME_COST]
    comfortable = [strategy for strategy in equals if strategy.gpu_bytes <= usable // 2]
    chosen = comfortable[0] if comfortable else max(equals, key=lambda strategy: strategy.gpu_spare)
    reason = [
        f"{chosen.name}: {format_bytes(chosen.gpu_bytes)} a GPU, {format_bytes(chosen.gpu_spare)} to spare."
    ]
    offloaded = chosen.offload_optimizer != "none"
    simpler = [s for s in strategies[:4] if not s.roomy and (s.stage < chosen.stage or offloaded)]
    for strategy in simpler:
        why = "leaves no margin" if strategy.fits else f"does not fit ({strategy.verdict})"
        reason.append(f"{strategy.name} {why}{' without offload' if offloaded else ''}.")
    others = [strategy.name for strategy in equals if strategy is not chosen]
    if others:
        why = "the simplest that fills at most half of the GPU" if comfortable else "the one with most room"
        reason.append(f"At the same cost as {' and '.join(others)}, this is {why}.")
    return chosen, " ".join(reason)


def _beyond(strategies: list[Strategy], workload: Workload, minimum_gpus: int | None) -> str:
    """Why no strategy is enough, and what would be."""
    tight = [strategy.name for strategy in strategies if strategy.fits]
    hardware = f"{workload.gpus} GPU{'s' * (workload.gpus > 1)} of {format_bytes(workload.gpu_memory)}"
    text = f"No strategy fits {hardware} with a margin"
    text += f" ({' and '.join(tight)}: nothing to spare)" if tight else ", even with offload"
    text += ". Tensor parallelism within a host and pipeline parallelism between hosts (TP and PP) are needed"
    if minimum_gpus is None:
        return f"{text}: one layer with its activations is too large for a GPU. Fewer tokens a micro-batch help too."
    return f"{text}, on {minimum_gpus} such GPUs or more, over which the states can be spread."


def _recomputed_activations(shape: TransformerShape, tokens: int) -> int:
    """Every block's input, one block in full with fused attention, and the logits, for ``tokens`` = s x b."""
    inputs = activation_bytes(1, tokens, shape.hidden, shape.heads, shape.layers, recompute="full")
    block = activation_bytes(1, tokens, shape.hidden, shape.heads, 1, recompute="selective")
    logits = tokens * shape.vocabulary * (2 + 4)
    return inputs + block + logits
