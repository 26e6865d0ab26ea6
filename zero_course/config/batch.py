"""The batch rule: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x world size."""

from __future__ import annotations

from collections.abc import Mapping

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_LOADER = "The DataLoader's batch size is the micro-batch, train_micro_batch_size_per_gpu."


def solve_batch(given: Mapping[str, int], world_size: int) -> dict[str, int]:
    """All three batch sizes from those that are given.

    Any one follows from the other two; the total alone or the micro-batch alone means no accumulation.

    Args:
        given: some of the three keys, each > 0.
        world_size: number of data-parallel ranks.

    Raises:
        ValueError: the rule cannot be met; with all four numbers and a fix that works.
    """
    train, micro, steps = (given.get(key) for key in BATCH_KEYS)
    if train is None and micro is None:
        raise ValueError(
            "train_micro_batch_size_per_gpu: set it (samples that a rank takes at a time: the DataLoader's batch "
            f"size) or train_batch_size (samples of an optimizer step, world size {world_size} included); neither "
            'is set ("auto" counts only if the caller has a value for it)'
        )
    if train is None:
        steps = steps or 1
        train = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = train // (steps * world_size)
    elif steps is None:
        steps = train // (micro * world_size)
    if train != micro * steps * world_size:
        raise ValueError(_why_not(given, world_size))
    return dict(zip(BATCH_KEYS, (train, micro, steps)))


def _why_not(given: Mapping[str, int], world_size: int) -> str:
    train, micro, steps = (given.get(key) for key in BATCH_KEYS)
    named = [f"{key} {given.get(key, '(left out)')}" for key in BATCH_KEYS]
    product = f"{named[1]} x {named[2]} x world size {world_size}"
    unit = (micro or 1) * (steps or 1) * world_size
    if micro is None or steps is None:
        multiples = " or ".join(
            str(size) for size in (train // unit * unit, train // unit * unit + unit) if size
        )
        reason = f"{named[0]} cannot be {product}, as it is not a multiple of {unit}"
        return f"{reason}. Set train_batch_size to {multiples}. {_LOADER}"
    fixes = [f"train_batch_size to {unit}"]
    if train % (micro * world_size) == 0:
        fixes.append(f"gradient_accumulation_steps to {train // (micro * world_size)}")
    if train % (steps * world_size) == 0:
        fixes.append(f"train_micro_batch_size_per_gpu to {train // (steps * world_size)}")
    return f"{named[0]} != {product} = {unit}. Set {', or '.join(fixes)}; or leave train_batch_size out. {_LOADER}"
