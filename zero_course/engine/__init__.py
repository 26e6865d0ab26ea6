"""The engine: a model, an optimizer, a data loader and a schedule, put together from a DeepSpeed config.

setup.py       ``initialize``: which rung, which optimizer, which schedule
engine.py      `Engine`: forward, backward, step, and when they act
guard.py       gradients that are not finite
face.py        figures and checkpoints, by DeepSpeed's names
dataloader.py  each rank's share of a data set
report.py      what a run tells of itself
"""

from .dataloader import ShardedDataLoader
from .engine import Engine
from .guard import MAX_SKIPPED_IN_A_ROW, TrainingDivergedError
from .setup import add_config_arguments, initialize

__all__ = [
    "MAX_SKIPPED_IN_A_ROW",
    "Engine",
    "ShardedDataLoader",
    "TrainingDivergedError",
    "add_config_arguments",
    "initialize",
]
