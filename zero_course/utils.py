"""Whole tensors for reading and debugging, at any stage: a parameter, its gradient, its optimizer state.

Under ZeRO a rank holds a part of each at most, and ``param.grad`` may be None although a gradient exists. These
accessors put the parts together on every rank. Each is a collective that moves about two copies of the tensor:
call it on every rank, for the same parameter, outside the hot path. Names as in ``deepspeed.utils``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from .data_parallel import DataParallel
from .zero import GatheredParameters

_rungs = WeakTensorKeyDictionary()  # parameter → a weak reference to the rung that trains it


def register(rung: DataParallel) -> None:
    """Let the accessors find the rung of these parameters; the engine does it for its own."""
    for param in rung.module.parameters():
        _rungs[param] = weakref.ref(rung)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The parameter's values, whole, as a float32 copy in its own shape."""
    with GatheredParameters(param), torch.no_grad():
        return param.detach().float().clone()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The parameter's averaged gradient, whole, in float32; None if it has none.

    There is one between ``engine.backward()`` of the last micro-batch of a step (in stages 2 and 3, of any) and
    ``engine.step()``, which takes it away; not for a parameter that is frozen or that no rank used.
    """
    return _assemble(param, lambda rung, key: key.grad)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's state of the parameter, whole, in float32; None if it has none (yet).

    Args:
        param: a parameter of the model.
        optim_state_key: the optimizer's name for it, e.g. ``"exp_avg"``, ``"exp_avg_sq"`` or
            ``"momentum_buffer"``; one that holds an element for each of the parameter's.

    Raises:
        KeyError: the optimizer keeps no such state; names what it keeps.
    """

    def state_of(rung: DataParallel, key: torch.Tensor) -> torch.Tensor | None:
        state = rung.optimizer.state.get(key) if rung.optimizer is not None else None
        if state and optim_state_key not in state:
            raise KeyError(f"the optimizer keeps {', '.join(map(repr, state))}, not {optim_state_key!r}")
        return state[optim_state_key] if state else None

    return _assemble(param, state_of)


def _assemble(
    param: torch.Tensor, find: Callable[[DataParallel, torch.Tensor], torch.Tensor | None]
) -> torch.Tensor | None:
    """What ``find`` returns for this rank's piece of the parameter, put together over all ranks."""
    reference = _rungs.get(param)
    rung = reference() if reference is not None else None
    if rung is None:
        raise ValueError(
            f"the tensor of shape {tuple(param.shape)} is no parameter of an engine; take it from "
            "engine.module.named_parameters()"
        )
    # one more element counts the ranks that have something, so that all agree whether there is anything
    whole = torch.zeros(param.numel() + 1, device=rung.comm.device)
    pieces = [(piece, values) for piece, values in rung.owned_pieces() if piece.slot.param is param]
    for piece, values in pieces:
        part = find(rung, param if rung.stage == 0 else values)
        if part is not None:
            whole[piece.start : piece.stop] = part.reshape(-1)
            whole[-1] = 1
    if rung.stage > 0:
        rung.comm.all_reduce(whole, purpose="setup")
    return whole[:-1].view(param.shape) if whole[-1] else None
