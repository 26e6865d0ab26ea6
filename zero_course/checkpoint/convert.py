"""One file with the whole model in fp32, from a checkpoint of any number of ranks; needs no ranks itself.

    python -m zero_course.checkpoint DIR model.safetensors [--tag global_step10]

Names as in DeepSpeed's ``zero_to_fp32``.
"""

from __future__ import annotations

import argparse
from os import PathLike
from pathlib import Path

import torch
from torch import nn

from . import files
from .files import CheckpointError
from .loading import Reader


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> dict[str, torch.Tensor]:
    """The whole model's state dict, floating-point tensors in float32, ready for ``model.load_state_dict``.

    Tied parameters are under each of their names, one tensor. All files are checked first.

    Args:
        checkpoint_dir: the checkpoint directory.
        tag: which checkpoint; by default the one that ``latest`` names.

    Raises:
        CheckpointError: no such checkpoint, or a file of it is missing, truncated or damaged.
    """
    directory = Path(checkpoint_dir)
    folder = files.find(directory, tag)
    if folder is None:
        raise CheckpointError(f"{directory / files.LATEST}: no such file; {files.others(directory)}")
    metadata = files.read_metadata(folder)
    files.check_files(folder, metadata)
    reader = Reader(folder, metadata)
    state = {name: _as_fp32(reader.whole(name)) for name in metadata["parameters"]}
    state |= {name: _as_fp32(reader.buffer(name)) for name in metadata["buffers"]}
    return state | {alias: state[name] for alias, name in metadata["aliases"].items() if name in state}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str], output_file: str | PathLike[str], tag: str | None = None
) -> None:
    """Write :func:`get_fp32_state_dict_from_zero_checkpoint`'s result to one file.

    Args:
        checkpoint_dir, tag: as there.
        output_file: one that ends in ``.safetensors`` is written as such, others by ``torch.save``.
    """
    files.write_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), Path(output_file))


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load a checkpoint into a model of this process, without an engine; returns the model."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag))
    return model


def _as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def main() -> None:
    """The command line; see the top of this file."""
    what = "Write a checkpoint's whole model, in fp32, to one file."
    parser = argparse.ArgumentParser(prog="python -m zero_course.checkpoint", description=what)
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_file")
    parser.add_argument("--tag", default=None, help="which checkpoint; by default the latest")
    arguments = parser.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            arguments.checkpoint_dir, arguments.output_file, arguments.tag
        )
    except CheckpointError as error:
        parser.exit(1, f"{error}\n")
