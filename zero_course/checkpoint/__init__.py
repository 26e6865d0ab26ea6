"""Checkpoints: every rank writes what it owns, any other number of ranks reads what it needs.

    DIR/latest                  the newest tag, one line
    DIR/TAG/metadata.json       what is where: see below
    DIR/TAG/rank_00000.safetensors, rank_00001.safetensors, ...
    DIR/TAG/state.pt            the caller's client_state, and the schedule's state

A rank's file holds flat pieces under the key ``kind/NAME/START``: elements START.. of the parameter NAME (kind
``parameters``) or of its optimizer state (kind ``exp_avg``, ...), each element of the model in one file exactly.
Under plain data parallelism, where all ranks hold the same, rank 0 writes it. Beside them are rank 0's buffers
(``buffers/NAME``) and each rank's random generators (``random/...``). ``metadata.json`` has names, shapes and
dtypes, tied names, which piece is in which file, the optimizer's groups and step counters, the engine's counters,
the data loader's place, and every file's size and SHA-256 (its own at the end).

So a checkpoint knows nothing of stage and number of ranks but as a note: to load one, a rank reads the slices
that it will hold, through memory-mapped files, whoever wrote them.

Crash-safe: everything is written and flushed to disk in a hidden folder beside the final one, which gets its name
only when it is complete, and ``latest`` changes last (files.py). A process killed at any moment leaves the earlier
checkpoint loadable. Before anything is loaded all files are checked; an engine is never half loaded.

files.py     writing, naming, finding and checking files
contents.py  what a rank holds and what of it it saves
saving.py    `save_checkpoint`
loading.py   `load_checkpoint`
convert.py   one file with the whole fp32 model (DeepSpeed's zero_to_fp32): python -m zero_course.checkpoint
"""

from .convert import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from .files import CheckpointError, write_state_dict
from .loading import load_checkpoint
from .saving import save_checkpoint

__all__ = [
    "CheckpointError",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_checkpoint",
    "load_state_dict_from_zero_checkpoint",
    "save_checkpoint",
    "write_state_dict",
]
