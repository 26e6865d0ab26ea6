"""What a rank holds of a model and its optimizer, and which of it is this rank's to save."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from ..data_parallel import DataParallel
from ..zero import bucket_of

PARAMETERS, BUFFERS, RANDOM = "parameters", "buffers", "random"  # kinds of tensors, besides the optimizer's
# An optimizer's state that is one number a parameter, even of a parameter that has one element itself.
ONE_NUMBER = {"step", "mu", "mu_product", "eta"}
# How an optimizer computes, not what: stays as the running engine has it.
IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}

Part = tuple[str, int, torch.Tensor]  # name of a parameter, its first element here, values (n,) or whole


def key_of(kind: str, name: str, start: int) -> str:
    """A piece's key in a safetensors file."""
    return f"{kind}/{name}/{start}"


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


# -- parameters ----------------------------------------------------------------------------------------------


def held_parameters(rung: DataParallel) -> Iterator[Part]:
    """Every parameter value in this rank's memory: whole parameters, and slices of partitioned ones."""
    for name, param in rung.module.named_parameters():
        bucket = bucket_of(param)
        if bucket is None:
            yield name, 0, param.data
            continue
        for piece in bucket.pieces(rung.comm.rank):
            if piece.slot.param is param:
                yield name, piece.start, piece.view(bucket.shard_values)


def saved_parameters(rung: DataParallel) -> Iterator[Part]:
    """Those that this rank saves: all ranks together save each element once."""
    first = rung.comm.rank == 0
    if rung.stage > 0:
        for piece, values in rung.owned_pieces():
            yield piece.name, piece.start, values
    trained = {slot.param for bucket in rung.buckets for slot in bucket.slots} if rung.stage > 0 else set()
    params = dict(rung.module.named_parameters())
    for name, start, values in held_parameters(rung):
        if params[name] not in trained and (first or bucket_of(params[name]) is not None):
            yield name, start, values


def aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers → the name under which they are saved."""
    found: dict[str, str] = {}
    for named in (module.named_parameters, module.named_buffers):
        first = {id(tensor): name for name, tensor in named()}
        found |= {n: first[id(t)] for n, t in named(remove_duplicate=False) if first[id(t)] != n}
    return found


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the module's state dict, each once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = buffer
    return found


# -- the optimizer -------------------------------------------------------------------------------------------


def owned_keys(rung: DataParallel) -> Iterator[tuple[str, int, nn.Parameter]]:
    """(name, first element, the tensor that the optimizer knows it by) of all that this rank's optimizer updates."""
    for piece, values in rung.owned_pieces():
        yield piece.name, piece.start, piece.slot.param if rung.stage == 0 else values


def split_state(
    name: str, key: nn.Parameter, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state of one piece, as (tensors with an element for each of the piece's, single numbers).

    A single number is kept as {"dtype": ..., "value": ...}; dtype is None for one of Python's own.

    Raises:
        ValueError: a state that is neither, and so cannot be cut to another number of ranks.
    """
    tensors, numbers = {}, {}
    for kind, value in state.items():
        if not isinstance(value, torch.Tensor):
            numbers[kind] = {"dtype": None, "value": value}
        elif value.dim() == 0 and (key.dim() > 0 or kind in ONE_NUMBER):
            numbers[kind] = {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
        elif value.shape == key.shape:
            tensors[kind] = value
        else:
            raise ValueError(
                f"the optimizer's state {kind!r} of {name!r} has shape {tuple(value.shape)}, the parameter's part has "
                f"{tuple(key.shape)}: a checkpoint takes one value for each element, or one number"
            )
    return tensors, numbers


def to_number(saved: Mapping[str, Any], key: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """What `split_state` made of a single number, as the optimizer has it."""
    if saved["dtype"] is None:
        return saved["value"]
    # as torch.optim.Optimizer.load_state_dict: fused kernels read the step from the parameter's device
    on_device = group.get("fused") or group.get("capturable")
    device = key.device if on_device else torch.device("cpu")
    return torch.tensor(saved["value"], dtype=getattr(torch, saved["dtype"]), device=device)


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's hyper-parameters, as JSON has them.

    Raises:
        ValueError: one that JSON cannot hold.
    """
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        settings = {}
        for name, value in group.items():
            if name == "params" or name in IMPLEMENTATION:
                continue
            settings[name] = value.tolist() if isinstance(value, torch.Tensor) else value
            try:
                json.dumps(settings[name])
            except TypeError as error:
                raise ValueError(
                    f"setting {name!r} of parameter group {number} cannot be saved: {error}"
                ) from error
        groups.append(settings)
    return groups


def set_group(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Put saved hyper-parameters into a group, in the types that it has."""
    for name, value in settings.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[name] = tuple(value) if isinstance(value, list) and not isinstance(present, list) else value


# -- random generators ---------------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch's, Python's and NumPy's generators, as tensors of bytes."""
    algorithm, keys, *rest = numpy.random.get_state()
    states = {
        "torch": torch.get_rng_state(),
        "python": _to_bytes(random.getstate()),
        "numpy": _to_bytes((algorithm, keys.tolist(), *rest)),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RANDOM}/{name}": state for name, state in states.items()}


def set_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Undo `random_state`, as far as ``states`` (by the same keys) goes."""
    torch.set_rng_state(states[f"{RANDOM}/torch"])
    version, values, following = _from_bytes(states[f"{RANDOM}/python"])
    random.setstate((version, tuple(values), following))
    algorithm, keys, *rest = _from_bytes(states[f"{RANDOM}/numpy"])
    numpy.random.set_state((algorithm, numpy.array(keys, dtype=numpy.uint32), *rest))
    if device.type == "cuda" and f"{RANDOM}/cuda" in states:
        torch.cuda.set_rng_state(states[f"{RANDOM}/cuda"], device)


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.tolist()))
