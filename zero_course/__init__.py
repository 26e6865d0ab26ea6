"""zero_course: DeepSpeed rebuilt from scratch, one idea a module, every byte predicted and measured.

Chapter N of the course explains module N of this package, and module N imports only what earlier chapters
built. ``import zero_course as zc`` gives the public face. A name is loaded when it is first used, so that the
command line answers before torch is imported.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "checkpoint": ["CheckpointError", "get_fp32_state_dict_from_zero_checkpoint"],
    "comm": [
        "CollectiveError",
        "Communicator",
        "default_device",
        "get_local_rank",
        "get_rank",
        "get_world_size",
        "init_distributed",
    ],
    "config": ["ConfigError"],
    "data_parallel": ["DataParallel"],
    "engine": ["Engine", "ShardedDataLoader", "TrainingDivergedError", "add_config_arguments", "initialize"],
    "ledger": ["Ledger"],
    "utils": ["safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"],
    "zero1": ["Zero1"],
    "zero2": ["Zero2"],
    "zero3": ["Zero3"],
}
_MODULES = ("memory", "utils", "zero")  # used as zc.zero.Init, zc.memory.advise, ...
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
