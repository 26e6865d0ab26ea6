"""Gradients that are nan or infinite, and what becomes of the step.

A step whose gradient norm is nan or infinite is skipped on every rank (the norm is the same on all of them, so
all decide alike): the weights, the optimizer's state and the schedule stay as they are, a warning names the first
parameter concerned, and `MAX_SKIPPED_IN_A_ROW` such steps in a row are an error. DeepSpeed in fp32 takes such a
step, which destroys the weights.
"""

from __future__ import annotations

import torch

from ..data_parallel import DataParallel

MAX_SKIPPED_IN_A_ROW = 5


class TrainingDivergedError(ArithmeticError):
    """Too many steps in a row had gradients that are not finite."""


def first_parameter_not_finite(rung: DataParallel) -> str | None:
    """Name of the first parameter, in the model's order, whose gradient is not finite on some rank; a collective."""
    names = [name for name, _ in rung.module.named_parameters()]
    place = {name: i for i, name in enumerate(names)}
    mine = []
    for piece, values in rung.owned_pieces():
        gradient = piece.slot.param.grad if rung.stage == 0 else values.grad
        if gradient is not None and not torch.isfinite(gradient).all():
            mine.append(place[piece.name])
    everywhere = rung.comm.all_gather_object(min(mine, default=None), purpose="control")
    found = [i for i in everywhere if i is not None]
    return names[min(found)] if found else None


def why_skipped(norm: float, culprit: str | None) -> str:
    """The reason for a skipped step, as a part of a sentence."""
    if culprit is not None:
        return (
            f"the gradient norm is {norm}, and the first gradient that is not finite is that of {culprit!r}"
        )
    return f"the gradient norm is {norm}: each gradient is finite, but the sum of their squares is not"
