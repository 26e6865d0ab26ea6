"""zero_course: DeepSpeed rebuilt from scratch, one idea a module, every byte predicted and measured.

Chapter N of the course explains module N of this package, and module N imports only what earlier chapters
built. ``import zero_course as zc`` gives the public face.
"""

__version__ = "0.1.0"

from . import zero
from .comm import (
    CollectiveError,
    Communicator,
    default_device,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
)
from .data_parallel import DataParallel
from .ledger import Ledger
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

__all__ = [
    "CollectiveError",
    "Communicator",
    "DataParallel",
    "Ledger",
    "Zero1",
    "Zero2",
    "Zero3",
    "default_device",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "zero",
]
