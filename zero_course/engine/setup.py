"""``initialize``: from a model and a DeepSpeed config to an engine."""

from __future__ import annotations

import argparse
import inspect
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from ..comm import Communicator, init_distributed
from ..config import Config, build_optimizer_class, load_config
from ..data_parallel import DataParallel
from ..lr_schedules import build_scheduler
from ..zero import bucket_of
from ..zero1 import Zero1
from ..zero2 import Zero2
from ..zero3 import Zero3
from .dataloader import ShardedDataLoader
from .engine import Engine

logger = logging.getLogger(__name__)

RUNGS: dict[int, type[DataParallel]] = {0: DataParallel, 1: Zero1, 2: Zero2, 3: Zero3}
RUNG_KEYS = ("reduce_bucket_size", "overlap_comm")  # of zero_optimization, for every rung
STAGE_3_KEYS = ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")

# Each element's update depends on that element alone, so a slice of a parameter is updated as the whole would be.
ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip

OptimizerArgument = torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's arguments, for ``initialize(args=...)``.

    ``--deepspeed`` alone is DeepSpeed's switch; ``--deepspeed FILE`` names the config too, as Hugging Face has it.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the engine")
    group.add_argument(
        "--deepspeed",
        nargs="?",
        const=True,
        default=False,
        metavar="FILE",
        help="use the engine, with this config",
    )
    group.add_argument(
        "--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed JSON configuration"
    )
    return parser


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerArgument | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config_params: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> tuple[Engine, torch.optim.Optimizer | None, ShardedDataLoader | None, Any]:
    """Make an engine. Every rank calls it, with the same arguments.

    Args:
        args: the script's arguments; ``args.deepspeed_config`` (or ``--deepspeed FILE``) is used without ``config``.
        model: any module. It is moved to this rank's device; all ranks start from rank 0's weights.
        optimizer: instead of the config's: a torch optimizer over the model's parameters that has not stepped
            yet (it is taken over, and its parameter groups now hold what this rank updates), or a function from
            parameters to an optimizer.
        model_parameters: what the config's optimizer, or that function, is to train, as for a torch optimizer:
            parameters or parameter groups. By default all of the model's that require gradients.
        training_data: a data set with a length; gives the loader.
        lr_scheduler: instead of the config's: a schedule built on ``optimizer``, or a function from the
            optimizer to a schedule. The engine steps it.
        config: a DeepSpeed configuration: a dict or the path of a JSON file.
        mpu: DeepSpeed's model-parallel unit; not built.
        dist_init_required: join the job with ``torch.distributed``; False if you have done so. By default it is
            done where needed.
        collate_fn: makes a batch of a list of samples.
        config_params: DeepSpeed's older name for ``config``.

    Returns:
        engine, its optimizer (or None), the data loader (or None), the schedule (or None).

    Raises:
        ValueError: no model, no config or two, an optimizer that has stepped already, ranks with different models.
        ConfigError: the configuration is wrong; the message lists everything that is.
        NotImplementedError: mpu.
    """
    if model is None:
        raise ValueError("initialize: model is None; pass model=, a torch.nn.Module")
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize: model is a {type(model).__name__}, not a torch.nn.Module")
    if mpu is not None:
        raise NotImplementedError(
            "initialize: mpu (model parallelism) is not built in zero_course yet; leave it out"
        )
    if dist_init_required is not False:
        init_distributed()
    comm = Communicator()
    loaded = load_config(_choose_config(args, config, config_params), comm.world_size)
    if comm.rank == 0:
        for note in loaded.notes:
            logger.warning("config: %s", note)
        if loaded.dump_state:
            print(loaded.summary(), flush=True)
    if loaded.seed is not None:
        _seed(loaded.seed + comm.rank)  # other dropout masks on each rank
    if not any(bucket_of(param) is not None for param in model.parameters()):
        model.to(comm.device)
    rung = _build_rung(model, loaded, comm, optimizer, model_parameters)
    loader = None
    if training_data is not None:
        loader = ShardedDataLoader(
            training_data,
            loaded.train_micro_batch_size_per_gpu,
            comm.rank,
            comm.world_size,
            seed=loaded.seed or 0,
            drop_last=loaded.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    scheduler = _build_scheduler(loaded, rung.optimizer, lr_scheduler)
    engine = Engine(rung, loaded, scheduler, loader)
    return engine, engine.optimizer, loader, scheduler


def _choose_config(args: Any, config: Any, config_params: Any) -> Any:
    switch = getattr(args, "deepspeed", None)
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepspeed": switch if isinstance(switch, str) else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        raise ValueError(
            "initialize: no configuration; pass config= (a dict, or the path of a DeepSpeed JSON file), or args= "
            "with --deepspeed_config FILE (see add_config_arguments)"
        )
    if len(given) > 1:
        raise ValueError(
            f"initialize: the configuration is given {len(given)} times, by {', '.join(given)}; keep one"
        )
    return next(iter(given.values()))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


# -- the rung and its optimizer ------------------------------------------------------------------------------


def _build_rung(
    model: nn.Module, config: Config, comm: Communicator, optimizer: OptimizerArgument | None, params: Any
) -> DataParallel:
    zero = config.zero_optimization
    # What the config leaves out keeps the rung's own default. DeepSpeed's, 5e8 elements, would make one bucket of
    # 2 GB in fp32 out of most models: no overlap, and more memory than the stage saves.
    keys = [key for key in RUNG_KEYS + STAGE_3_KEYS * (zero.stage == 3) if key in zero.model_fields_set]
    settings = {key: getattr(zero, key) for key in keys}
    arguments: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        params, optimizer = optimizer.param_groups, _taking_over(optimizer)
    elif optimizer is not None and not callable(optimizer):
        raise TypeError(
            f"initialize: optimizer is a {type(optimizer).__name__}; pass a torch optimizer, or a function from "
            "parameters to one"
        )
    elif optimizer is None and config.optimizer is not None:
        optimizer, arguments = build_optimizer_class(config)
        if comm.device.type == "cuda" and not {"fused", "foreach"} & arguments.keys():
            # On a CPU the fused kernels round a vector's last elements differently, so that where a parameter is
            # cut would show in the last bit: stages would no longer agree.
            arguments["fused"] = "fused" in inspect.signature(optimizer).parameters
    rung = RUNGS[zero.stage](model, optimizer, params=params, comm=comm, **settings, **arguments)
    if rung.optimizer is not None:
        _check_elementwise(rung.optimizer, config)
    return rung


def _taking_over(optimizer: torch.optim.Optimizer) -> Callable[..., torch.optim.Optimizer]:
    """Let the client's own optimizer object train the rung's parameter groups, so that schedules on it go on."""
    if optimizer.state:
        raise ValueError(
            f"initialize: the optimizer ({type(optimizer).__name__}) has state already, for whole parameters, which "
            "cannot be taken over; pass it before its first step, or a function that builds it: "
            f"optimizer=lambda params: torch.optim.{type(optimizer).__name__}(params, ...)"
        )

    def with_groups(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer.param_groups[:] = groups
        return optimizer

    return with_groups


def _check_elementwise(optimizer: Any, config: Config) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"initialize: optimizer() returned a {type(optimizer).__name__}, not a torch optimizer"
        )
    if config.zero_optimization.stage == 0 or isinstance(optimizer, ELEMENTWISE):
        return
    name = type(optimizer).__name__
    if isinstance(
        optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Adafactor, torch.optim.Muon)
    ):
        raise ValueError(
            f"initialize: {name} needs whole parameters, and ZeRO gives each rank a slice of them; use stage 0, or "
            "an elementwise optimizer such as AdamW"
        )
    if not config.zero_allow_untested_optimizer:
        raise ValueError(
            f"initialize: {name} is not known to update each element by itself, which ZeRO needs as each rank holds a "
            "slice of a parameter, laid flat. If it does, set zero_allow_untested_optimizer to true"
        )


def _build_scheduler(config: Config, optimizer: torch.optim.Optimizer | None, given: Any) -> Any:
    if given is None:
        if config.scheduler is not None and optimizer is None:
            raise ValueError("initialize: the config has a scheduler but no optimizer, and none was passed")
        return build_scheduler(config, optimizer)
    if optimizer is None:
        raise ValueError("initialize: lr_scheduler is given, but there is no optimizer for it")
    if not hasattr(given, "step"):
        return given(optimizer)
    if getattr(given, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"initialize: lr_scheduler ({type(given).__name__}) sets the rates of another optimizer than the engine's; "
            "pass the optimizer that it was built on, or a function: lr_scheduler=lambda optimizer: ..."
        )
    return given
