"""Loading: check everything, then read the slices that this rank holds, whoever saved them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from . import files
from .contents import (
    BUFFERS,
    PARAMETERS,
    RANDOM,
    aliases,
    held_parameters,
    key_of,
    owned_keys,
    rank_file,
    saved_buffers,
    set_group,
    set_random_state,
    to_number,
)
from .files import CheckpointError, on_every_rank
from .saving import COUNTERS

logger = logging.getLogger(__name__)

FIRST_FILE = rank_file(0)


class Reader:
    """A checkpoint's tensors, read slice by slice from memory-mapped files.

    Args:
        folder: the checkpoint, whose files have been checked.
        metadata: its metadata.

    Raises:
        CheckpointError: the pieces in the files do not add up to whole parameters, or are not there as noted.
    """

    def __init__(self, folder: Path, metadata: Mapping[str, Any]) -> None:
        self.folder, self.metadata = folder, metadata
        self._open: dict[str, Any] = {}
        self._pieces: dict[str, list[tuple[int, int, str, list[str]]]] = {
            n: [] for n in metadata["parameters"]
        }
        for filename, entry in metadata["files"].items():
            for name, piece in entry.get("pieces", {}).items():
                place = (piece["start"], piece["stop"], filename, piece.get("state", []))
                self._pieces[name].append(place)
        for name, pieces in self._pieces.items():
            pieces.sort()
            self._check_pieces(name, pieces)
        for name, saved in metadata["buffers"].items():
            self._check_tensor(FIRST_FILE, f"{BUFFERS}/{name}", saved["shape"])

    def _check_pieces(self, name: str, pieces: list[tuple[int, int, str, list[str]]]) -> None:
        reached = 0
        for start, stop, filename, kinds in pieces:
            if start != reached:
                break
            reached = stop
            for kind in (PARAMETERS, *kinds):
                self._check_tensor(filename, key_of(kind, name, start), [stop - start])
        numel = torch.Size(self.metadata["parameters"][name]["shape"]).numel()
        if reached != numel:
            what = f"of the {numel} elements of {name!r} those from {reached} on are in no file"
            raise files.damaged(self.folder / files.METADATA, what)

    def _check_tensor(self, filename: str, key: str, shape: list[int]) -> None:
        handle, keys = self.file(filename)
        if key not in keys:
            raise files.damaged(self.folder / filename, f"it lacks {key!r}")
        found = list(handle.get_slice(key).get_shape())
        if found != shape:
            raise files.damaged(self.folder / filename, f"{key!r} has shape {found}, not {shape}")

    def file(self, filename: str) -> tuple[Any, set[str]]:
        """An open file and its keys."""
        if filename not in self._open:
            handle = safe_open(self.folder / filename, framework="pt")
            self._open[filename] = handle, set(handle.keys())
        return self._open[filename]

    def kinds(self, name: str) -> list[str]:
        """What the optimizer's state of a parameter consists of."""
        return self._pieces[name][0][3] if self._pieces[name] else []

    def read(self, kind: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements start..stop of a parameter's values or state, (stop - start,), on the CPU."""
        parts = []
        for first, last, filename, _ in self._pieces[name]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                piece = self.file(filename)[0].get_slice(key_of(kind, name, first))
                parts.append(piece[low - first : high - first])
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def whole(self, name: str) -> torch.Tensor:
        """All of a parameter, in its own shape, on the CPU."""
        saved = self.metadata["parameters"][name]
        shape = torch.Size(saved["shape"])
        if shape.numel() == 0:
            return torch.empty(shape, dtype=getattr(torch, saved["dtype"]))
        return self.read(PARAMETERS, name, 0, shape.numel()).view(shape)

    def buffer(self, name: str) -> torch.Tensor:
        """A buffer, on the CPU."""
        return self.file(FIRST_FILE)[0].get_tensor(f"{BUFFERS}/{name}")

    def random_state(self, rank: int) -> dict[str, torch.Tensor]:
        """What `contents.random_state` returned on a rank."""
        handle, keys = self.file(rank_file(rank))
        return {key: handle.get_tensor(key) for key in keys if key.startswith(f"{RANDOM}/")}


def load_checkpoint(
    engine: Any,
    load_dir: str | PathLike[str],
    tag: str | None = None,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from a checkpoint, whatever number of ranks and whatever stage it was saved with.

    Every rank must call it. Everything is checked before anything is changed. The parameter groups'
    hyper-parameters (lr, betas, ...) come from the checkpoint too. The random generators are set only on the
    number of ranks that saved them: each rank has its own.

    Args:
        engine: the engine, with the same model; its optimizer of the same class with the same groups.
        load_dir: the checkpoint directory.
        tag: which checkpoint; by default the one that ``latest`` names.
        load_optimizer_states: otherwise the optimizer stays as it is.
        load_lr_scheduler_states: otherwise the schedule stays as it is.
        load_module_only: only parameters and buffers.

    Returns:
        (the checkpoint's folder, client_state as it was saved); (None, None), with a warning, if no tag was
        given and nothing has been saved in load_dir yet.

    Raises:
        CheckpointError: no such checkpoint; a file is missing, truncated or damaged; the model or the optimizer
            is another. The engine is as it was.
    """
    comm = engine.comm
    found = on_every_rank(comm, lambda: files.find(Path(load_dir), tag) if comm.rank == 0 else None)[0]
    if found is None:
        if comm.rank == 0:
            logger.warning(
                "load_checkpoint: nothing to load, %s does not exist", Path(load_dir) / files.LATEST
            )
        return None, None
    folder = Path(found)
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    with_scheduler = load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None
    on_every_rank(
        comm, lambda: files.check_files(folder, files.read_metadata(folder), comm.rank, comm.world_size)
    )
    readers: list[Reader] = []  # an open file cannot be handed from rank to rank
    on_every_rank(comm, lambda: readers.append(Reader(folder, files.read_metadata(folder))))
    reader = readers[0]
    metadata = reader.metadata
    state = torch.load(folder / files.STATE, weights_only=True)

    def check() -> None:
        _check_model(engine.module, reader)
        if with_optimizer:
            _check_optimizer(engine.rung, metadata, folder)
        if with_scheduler:
            _check_scheduler(engine.lr_scheduler, state["lr_scheduler"], folder)
        if not load_module_only:
            _check_data(engine.training_dataloader, metadata["data"], folder)

    on_every_rank(comm, check)

    on_every_rank(comm, lambda: _load_module(engine, reader))
    if with_optimizer:
        on_every_rank(comm, lambda: _load_optimizer(engine.rung, reader))
    if not load_module_only:
        if with_scheduler and state["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state["lr_scheduler"]["state"])
        for name in COUNTERS:
            setattr(engine, name, metadata["engine"][name])
        if engine.training_dataloader is not None and metadata["data"] is not None:
            engine.training_dataloader.load_state_dict(metadata["data"])
        if metadata["world_size"] == comm.world_size:
            set_random_state(reader.random_state(comm.rank), comm.device)
        elif comm.rank == 0:
            logger.warning(
                "load_checkpoint: saved on %d ranks, loaded on %d: the random generators (dropout) start anew",
                metadata["world_size"],
                comm.world_size,
            )
    engine.forget_micro_batches()
    return str(folder), state["client_state"]


# -- before anything is changed ------------------------------------------------------------------------------


def _check_model(module: torch.nn.Module, reader: Reader) -> None:
    folder, metadata = reader.folder, reader.metadata
    for kind, own in (("parameters", dict(module.named_parameters())), ("buffers", saved_buffers(module))):
        saved, problems = metadata[kind], []
        for name, tensor in own.items():
            if name not in saved:
                tied = metadata["aliases"].get(name)
                reason = (
                    f"it is tied to {tied!r} there, and not in this model"
                    if tied
                    else "it is not in the checkpoint"
                )
                problems.append(f"{name!r}: {reason}")
                continue
            shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
            if (shape, dtype) != (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")):
                here = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                problems.append(f"{name!r}: {shape} {dtype} in the checkpoint, {here} in this model")
        ties = aliases(module)
        for name in saved.keys() - own.keys():
            reason = (
                f"tied to {ties[name]!r} in this model, and not there"
                if name in ties
                else "not in this model"
            )
            problems.append(f"{name!r}: in the checkpoint, but {reason}")
        if problems:
            more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(
                f"{folder}: is of another model; {len(problems)} of its {kind} differ. Nothing was loaded.\n  "
                + "\n  ".join(problems[:10])
                + more
            )


def _check_optimizer(rung: Any, metadata: Mapping[str, Any], folder: Path) -> None:
    way_out = (
        "Nothing was loaded. load_optimizer_states=False loads the weights and starts the optimizer anew"
    )
    saved, own = metadata["optimizer"], type(rung.optimizer).__name__
    if saved is None:
        raise CheckpointError(f"{folder}: was saved without an optimizer. {way_out}")
    if saved["class"] != own:
        raise CheckpointError(
            f"{folder}: has the state of {saved['class']}, this engine trains with {own}. {way_out}"
        )
    before, now = [group["parameters"] for group in saved["groups"]], rung.group_names()
    if len(before) != len(now):
        raise CheckpointError(
            f"{folder}: has {len(before)} parameter groups, this optimizer {len(now)}. {way_out}"
        )
    for number, (theirs, ours) in enumerate(zip(before, now, strict=True)):
        differing = sorted(set(theirs) ^ set(ours))
        if differing:
            where = "the checkpoint" if differing[0] in theirs else "this optimizer"
            raise CheckpointError(
                f"{folder}: parameter group {number} differs: {differing[0]!r} is in it in {where} only. {way_out}"
            )


def _check_scheduler(scheduler: Any, saved: Mapping[str, Any] | None, folder: Path) -> None:
    own = type(scheduler).__name__
    if saved is not None and saved["class"] != own:
        raise CheckpointError(
            f"{folder}: has the state of the schedule {saved['class']}, this engine has {own}. Nothing was loaded. "
            "load_lr_scheduler_states=False starts the schedule anew"
        )


def _check_data(loader: Any, saved: Mapping[str, Any] | None, folder: Path) -> None:
    if loader is not None and saved is not None and saved["length"] != len(loader.dataset):
        raise CheckpointError(
            f"{folder}: was saved in a data set of {saved['length']} samples, training_data has {len(loader.dataset)}. "
            "Nothing was loaded. Give the same data, or load_module_only=True"
        )


# -- changing the engine -------------------------------------------------------------------------------------


@torch.no_grad()
def _load_module(engine: Any, reader: Reader) -> None:
    engine.rung.release_prefetched()
    for name, start, values in held_parameters(engine.rung):
        if values.numel():
            values.copy_(reader.read(PARAMETERS, name, start, start + values.numel()).view(values.shape))
    for name, buffer in saved_buffers(engine.module).items():
        buffer.copy_(reader.buffer(name))


@torch.no_grad()
def _load_optimizer(rung: Any, reader: Reader) -> None:
    optimizer, metadata = rung.optimizer, reader.metadata
    group_of = {id(key): group for group in optimizer.param_groups for key in group["params"]}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for name, start, key in owned_keys(rung):
        group = group_of.get(id(key), {})
        numbers = metadata["parameters"][name]["numbers"]
        state = {kind: to_number(saved, key, group) for kind, saved in numbers.items()}
        for kind in reader.kinds(name):
            flat = reader.read(kind, name, start, start + key.numel())
            state[kind] = torch.empty_like(key, dtype=flat.dtype)
            state[kind].copy_(flat.view(key.shape))
        if key.numel() == 0:  # not in any file; some optimizers want to find what they made for it
            state = optimizer.state.get(key, {})
        if state:
            states[key] = state
    optimizer.state.clear()
    optimizer.state.update(states)
    for group, saved in zip(optimizer.param_groups, metadata["optimizer"]["groups"], strict=True):
        set_group(group, saved["settings"])
