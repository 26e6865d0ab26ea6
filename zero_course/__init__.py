"""zero_course: DeepSpeed rebuilt from scratch, one idea a module, every byte predicted and measured.

Chapter N of the course explains module N of this package, and module N imports only what earlier chapters
built. ``import zero_course as zc`` gives the public face.
"""

__version__ = "0.1.0"

from . import utils, zero
from .checkpoint import CheckpointError, get_fp32_state_dict_from_zero_checkpoint
from .comm import (
    CollectiveError,
    Communicator,
    default_device,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
)
from .config import ConfigError
from .data_parallel import DataParallel
from .engine import Engine, ShardedDataLoader, TrainingDivergedError, add_config_arguments, initialize
from .ledger import Ledger
from .utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "Communicator",
    "ConfigError",
    "DataParallel",
    "Engine",
    "Ledger",
    "ShardedDataLoader",
    "TrainingDivergedError",
    "Zero1",
    "Zero2",
    "Zero3",
    "add_config_arguments",
    "default_device",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "utils",
    "zero",
]
