"""Saving: every rank writes its file, rank 0 the rest, and then the whole gets its name."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..comm import CollectiveError
from . import files
from .contents import (
    BUFFERS,
    PARAMETERS,
    aliases,
    group_settings,
    key_of,
    owned_keys,
    random_state,
    rank_file,
    saved_buffers,
    saved_parameters,
    split_state,
)
from .files import CheckpointError, on_every_rank

logger = logging.getLogger(__name__)

COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps", "skipped_in_a_row")


def save_checkpoint(
    engine: Any,
    save_dir: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
) -> bool:
    """Save model, optimizer, schedule, counters, random generators and the data loader's place.

    Every rank must call it; it returns when the checkpoint is complete. Gradients are not saved: in the middle
    of an accumulation the checkpoint is that of the last optimizer step, and the data loader's place with it.

    Args:
        engine: the engine.
        save_dir: the checkpoint directory, which all ranks see; made if need be.
        tag: name of this checkpoint in it; ``global_stepN`` by default. One of that name is replaced.
        client_state: rank 0's is saved and given back on loading: tensors, numbers, strings, containers of them.
        save_latest: let ``latest`` name it, so that it is loaded by default.

    Returns:
        True.

    Raises:
        CheckpointError: it could not be written (the disk is full, ...), or client_state could not be read back;
            nothing is left behind, and earlier checkpoints are as they were.
        CollectiveError: not every rank called it, or one has died.
    """
    comm = engine.comm
    try:
        tags = on_every_rank(comm, _choose_tag, engine, tag)
    except CollectiveError as error:
        raise CollectiveError(
            f"{error}\n  save_checkpoint is for every rank, not for rank 0 alone: each writes what it owns"
        ) from error
    tag = _agree(tags, engine.config.checkpoint.tag_validation, comm.rank)
    if engine.accumulated and comm.rank == 0:
        logger.warning(
            "save_checkpoint after %d of %d micro-batches of a step: their gradients are not saved; a run that "
            "resumes from here takes those micro-batches again",
            engine.accumulated,
            engine.gradient_accumulation_steps(),
        )
    directory = Path(save_dir)
    on_every_rank(comm, _begin, comm.rank, directory, tag)
    try:
        written = on_every_rank(comm, _write_own_file, engine, directory / f".{tag}.saving")
        on_every_rank(comm, _complete, engine, directory, tag, client_state or {}, written, save_latest)
    except CheckpointError:
        if comm.rank == 0:
            files.clean_up(directory, tag)
        raise
    return True


def _choose_tag(engine: Any, tag: str | None) -> str:
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not files.is_tag(tag):
        raise CheckpointError(
            f"tag {tag!r} cannot be the name of a folder; leave it out, or try 'global_step10'"
        )
    return tag


def _agree(tags: list[str], validation: str, rank: int) -> str:
    """Rank 0's tag, unless the config says that different ones are an error."""
    if len(set(tags)) > 1:
        text = f"ranks save under different tags: {', '.join(f'{r}: {t!r}' for r, t in enumerate(tags))}"
        if validation == "Fail":
            raise CheckpointError(
                f"{text}; give the same tag on every rank (checkpoint.tag_validation is Fail)"
            )
        if validation == "Warn" and rank == 0:
            logger.warning("%s; rank 0's is used", text)
    return tags[0]


def _begin(rank: int, directory: Path, tag: str) -> None:
    if rank == 0:
        files.begin(directory, tag)


def _write_own_file(engine: Any, folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Returns the file's name, its entry in the metadata, and the optimizer's single numbers by parameter."""
    rung, tensors, pieces = engine.rung, {}, {}
    for name, start, values in saved_parameters(rung):
        flat = values.detach().reshape(-1)
        if flat.numel():
            tensors[key_of(PARAMETERS, name, start)] = flat
            pieces[name] = {"start": start, "stop": start + flat.numel()}
    numbers: dict[str, Any] = {}
    for name, start, key in owned_keys(rung) if rung.optimizer is not None else ():
        moments, numbers[name] = split_state(name, key, rung.optimizer.state.get(key, {}))
        if name not in pieces:  # another rank saves it, or it has no elements
            continue
        for kind, values in moments.items():
            tensors[key_of(kind, name, start)] = values.detach().reshape(-1)
        pieces[name]["state"] = list(moments)
    if rung.comm.rank == 0:
        for name, buffer in saved_buffers(rung.module).items():
            tensors[f"{BUFFERS}/{name}"] = buffer.detach()
    tensors |= random_state(rung.comm.device)
    filename = rank_file(rung.comm.rank)
    return filename, {**files.write_tensors(folder / filename, tensors), "pieces": pieces}, numbers


def _complete(
    engine: Any,
    directory: Path,
    tag: str,
    client_state: Mapping[str, Any],
    written: list[tuple[str, dict[str, Any], dict[str, Any]]],
    save_latest: bool,
) -> None:
    """On rank 0: what is left to write, and the names."""
    if engine.comm.rank != 0:
        return
    folder = directory / f".{tag}.saving"
    for filename, entry, _ in written:
        if not (folder / filename).exists() or (folder / filename).stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{folder / filename}: another rank wrote it, but rank 0 does not see it; save_dir must be on a file "
                "system that all hosts share"
            )
    schedule, scheduler = None, engine.lr_scheduler
    if hasattr(scheduler, "state_dict"):
        schedule = {"class": type(scheduler).__name__, "state": scheduler.state_dict()}
    state = {"client_state": dict(client_state), "lr_scheduler": schedule}
    entries = {filename: entry for filename, entry, _ in written}
    entries[files.STATE] = files.write_file(folder / files.STATE, _to_bytes(state))
    files.write_metadata(folder, _metadata(engine, tag, entries, [numbers for _, _, numbers in written]))
    files.publish(folder, tag)
    if save_latest:
        files.point_latest_at(directory, tag)
    files.clean_up(directory, tag)


def _to_bytes(state: dict[str, Any]) -> bytes:
    """What torch.save makes of it, checked to be loadable without running anyone's code."""
    buffer = io.BytesIO()
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "client_state (or the schedule's state) holds something other than tensors, numbers, strings and "
            f"containers of them, and could not be loaded again: {str(error).strip().splitlines()[0]}"
        ) from error
    return buffer.getvalue()


def _metadata(
    engine: Any, tag: str, entries: dict[str, Any], numbers_by_rank: list[dict[str, Any]]
) -> dict[str, Any]:
    rung, optimizer = engine.rung, None
    numbers: dict[str, Any] = {}
    for of_rank in numbers_by_rank:
        numbers |= of_rank
    if rung.optimizer is not None:
        settings, names = group_settings(rung.optimizer), rung.group_names()
        groups = [{"settings": s, "parameters": n} for s, n in zip(settings, names, strict=True)]
        optimizer = {"class": type(rung.optimizer).__name__, "groups": groups}
    loader, data = engine.training_dataloader, None
    if loader is not None:
        data = engine.data_position if engine.accumulated else loader.state_dict()
    return {
        "format": files.FORMAT,
        "version": files.VERSION,
        "tag": tag,
        "stage": rung.stage,
        "world_size": rung.comm.world_size,
        "engine": {name: getattr(engine, name) for name in COUNTERS},
        "data": data,
        "optimizer": optimizer,
        "parameters": {
            name: {
                "shape": list(param.shape),
                "dtype": str(param.dtype).removeprefix("torch."),
                "numbers": numbers.get(name, {}),
            }
            for name, param in rung.module.named_parameters()
        },
        "buffers": {
            name: {"shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch.")}
            for name, buffer in saved_buffers(rung.module).items()
        },
        "aliases": aliases(rung.module),
        "files": entries,
    }
