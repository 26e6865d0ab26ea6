"""The engine: a model, an optimizer, a data loader and a schedule, put together from a DeepSpeed config.

setup.py       ``initialize``: which rung, which optimizer, which schedule
engine.py      `Engine`: forward, backward, step
dataloader.py  each rank's share of a data set
report.py      what a run tells of itself
"""

from .dataloader import ShardedDataLoader
from .engine import MAX_SKIPPED_IN_A_ROW, Engine, TrainingDivergedError
from .setup import add_config_arguments, initialize

__all__ = [
    "MAX_SKIPPED_IN_A_ROW",
    "Engine",
    "ShardedDataLoader",
    "TrainingDivergedError",
    "add_config_arguments",
    "initialize",
]
