"""A checkpoint's files: written so that a crash at any moment does no harm, and checked before they are used.

What makes it safe is an order, and that renaming is atomic:

    1  .TAG.saving/...   written, each file flushed to disk
    2  TAG → .TAG.replaced        only where TAG exists already
    3  .TAG.saving → TAG          from here on the new checkpoint counts
    4  latest            written aside, flushed, renamed
    5  .TAG.replaced     removed

A crash before 3 leaves the earlier checkpoints as they were; between 2 and 3 the one that was to be replaced is
found under its other name (`find`); after 3 the new one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..comm import Communicator

LATEST = "latest"
METADATA = "metadata.json"
STATE = "state.pt"
FORMAT, VERSION = "zero_course checkpoint", 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded; the message names the file and what to do."""


def on_every_rank(comm: Communicator, action: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``action(*args)`` on every rank; if it fails on one, fail on all.

    Returns:
        The results of all ranks (picklable), in rank order.

    Raises:
        CheckpointError: with the message of each rank that failed.
    """
    result, error = None, None
    try:
        result = action(*args)
    except Exception as caught:
        error = caught
    text = None if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointError):
        text = f"{type(error).__name__}: {error}"
    outcomes = comm.all_gather_object((result, text), purpose="checkpoint")
    failed: dict[str, list[str]] = {}
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            failed.setdefault(message, []).append(str(rank))
    if failed:
        lines = [f"{message} (on rank {', '.join(ranks)})" for message, ranks in failed.items()]
        raise CheckpointError("\n".join(lines)) from error
    return [value for value, _ in outcomes]


# -- writing -------------------------------------------------------------------------------------------------


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write and flush to disk. Returns the file's entry for the metadata: bytes and sha256."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write a safetensors file and flush it to disk. Returns its entry for the metadata: bytes and sha256."""
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_metadata(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write ``metadata.json``, which ends with its own SHA-256."""
    text = json.dumps({**metadata, "sha256": _own_sha256(metadata)}, indent=1)
    write_file(folder / METADATA, text.encode())


def write_state_dict(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a state dict: safetensors if the name ends so (tied tensors are then written twice), else torch.save.

    It is written aside and renamed, so that a crash leaves no half a file under this name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.saving")
    if path.suffix == ".safetensors":
        save_file({key: tensor.detach().cpu().clone() for key, tensor in state.items()}, aside)
    else:
        torch.save(dict(state), aside)
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- naming --------------------------------------------------------------------------------------------------


def is_tag(tag: str) -> bool:
    """Whether a tag can be the name of a folder in the checkpoint directory."""
    return (
        bool(tag)
        and tag.isprintable()
        and tag != LATEST
        and not tag.startswith(".")
        and Path(tag).name == tag
    )


def begin(directory: Path, tag: str) -> Path:
    """An empty hidden folder to write the checkpoint in; what an earlier, killed attempt left is put right."""
    directory.mkdir(parents=True, exist_ok=True)
    clean_up(directory, tag)
    folder = directory / f".{tag}.saving"
    folder.mkdir()
    return folder


def publish(folder: Path, tag: str) -> None:
    """Give a complete folder its name: steps 2 and 3."""
    directory = folder.parent
    final = directory / tag
    flush_folder(folder)
    if final.exists():
        os.rename(final, directory / f".{tag}.replaced")
    os.rename(folder, final)
    flush_folder(directory)


def point_latest_at(directory: Path, tag: str) -> None:
    """Let ``latest`` name this tag: step 4."""
    aside = directory / f".{LATEST}.saving"
    write_file(aside, tag.encode())
    os.replace(aside, directory / LATEST)
    flush_folder(directory)


def clean_up(directory: Path, tag: str) -> None:
    """Remove what was replaced (step 5), or what could not be completed."""
    final, replaced = directory / tag, directory / f".{tag}.replaced"
    if replaced.exists() and not final.exists():
        os.rename(replaced, final)
    shutil.rmtree(replaced, ignore_errors=True)
    shutil.rmtree(directory / f".{tag}.saving", ignore_errors=True)


# -- finding and checking ------------------------------------------------------------------------------------


def find(directory: Path, tag: str | None) -> Path | None:
    """The folder of a checkpoint.

    Args:
        directory: the checkpoint directory.
        tag: which one; None for the one that ``latest`` names.

    Returns:
        The folder; None if no tag was given and there is no ``latest``.

    Raises:
        CheckpointError: there is no such checkpoint; names those that there are.
    """
    source = "you asked for"
    if tag is None:
        if not (directory / LATEST).exists():
            return None
        tag = (directory / LATEST).read_text(errors="replace").strip()
        source = f"{directory / LATEST} names"
    folders = (directory / tag, directory / f".{tag}.replaced") if is_tag(tag) else ()
    for folder in folders:
        if (folder / METADATA).exists():
            return folder
    raise CheckpointError(f"{directory / tag}: no such checkpoint, which {source}; {others(directory)}")


def others(directory: Path, but: str = "") -> str:
    """Which checkpoints a directory has, as the end of a sentence."""
    tags = sorted(path.parent.name for path in directory.glob(f"*/{METADATA}"))
    tags = [tag for tag in tags if tag != but and not tag.startswith(".")]
    if not tags:
        return f"there is no {'other' if but else ''} checkpoint in {directory}".replace("  ", " ")
    return f"{directory} has {', '.join(tags)}: load one of these with tag=..."


def read_metadata(folder: Path) -> dict[str, Any]:
    """The checked contents of ``metadata.json``.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    path = folder / METADATA
    try:
        metadata = json.loads(path.read_text())
        found = metadata.pop("sha256")
        known = (metadata["format"], metadata["version"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    if known != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: is {known[0]} version {known[1]}; this program reads {FORMAT} version {VERSION}"
        )
    if found != _own_sha256(metadata):
        raise damaged(path, "its contents do not have the SHA-256 at its end")
    return metadata


def check_files(folder: Path, metadata: Mapping[str, Any], share: int = 0, shares: int = 1) -> None:
    """Check that all files are there with the right size, and the contents of every ``shares``-th of them.

    Args:
        folder: the checkpoint.
        metadata: its metadata.
        share, shares: which files' contents to check; N ranks read each file once between them.

    Raises:
        CheckpointError: names the first file that is missing, truncated or damaged.
    """
    for number, (name, entry) in enumerate(metadata["files"].items()):
        path = folder / name
        if not path.exists():
            raise damaged(path, "it is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise damaged(path, f"it has {size} bytes, {entry['bytes']} were written")
        if number % shares == share and sha256_of(path) != entry["sha256"]:
            raise damaged(path, "its contents are not what was written (another SHA-256)")


def damaged(path: Path, what: str) -> CheckpointError:
    """The error for a file that cannot be used."""
    folder = path.parent
    advice = others(folder.parent, but=folder.name)
    return CheckpointError(
        f"{path}: {what}. Nothing was loaded. Bring the file back, or use another checkpoint: {advice}"
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    digest, block = hashlib.sha256(), bytearray(2**20)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
    return digest.hexdigest()


def _own_sha256(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()
