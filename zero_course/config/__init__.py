"""The configuration: DeepSpeed's JSON in, one checked, typed, frozen object out.

A learner must be able to bring a DeepSpeed JSON along, so every key that DeepSpeed 0.19 knows is known here, and
each is of one of four kinds. A *plain* key is built. A *later* key is not built yet: its default is accepted, any
other value is an error, because ignoring it would train something else than what was asked for. A *hint* changes
speed or memory in DeepSpeed but never a result: it is accepted, and noted where it is not the default. An *idle*
key only matters together with a later one, and is merely checked. A key that nobody knows is an error with the
nearest known key. All problems of a configuration are reported at once.

values.py      what one key may hold, and the four kinds
components.py  the optimizers and schedulers
schema.py      the sections, and `Config`, the whole
messages.py    what is wrong, in words
batch.py       train_batch_size = micro-batch x accumulation x world size
reading.py     files, old spellings, "auto"

Source of names, defaults and ranges: DeepSpeed's "Configuration JSON" page and, in 0.19.8, runtime/config.py,
runtime/zero/config.py, runtime/precision_config.py, runtime/lr_schedules.py and ops/adam.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from zero_course.config.batch import BATCH_KEYS, solve_batch
from zero_course.config.components import (
    OPTIMIZERS,
    OPTIMIZERS_LATER,
    SCHEDULERS,
    OptimizerConfig,
    SchedulerConfig,
)
from zero_course.config.messages import ConfigError, checked, nearest, suggestion
from zero_course.config.reading import modernise, read, resolve_auto
from zero_course.config.schema import Config, ZeroOptimization, hints_given
from zero_course.config.values import Section, shown

__all__ = [
    "Config",
    "ConfigError",
    "OptimizerConfig",
    "SchedulerConfig",
    "ZeroOptimization",
    "build_optimizer_class",
    "load_config",
]


def load_config(
    config: Mapping[str, Any] | str | os.PathLike,
    world_size: int,
    auto: Mapping[str, Any] | None = None,
    **more_auto: Any,
) -> Config:
    """Read, check and complete a DeepSpeed configuration.

    Args:
        config: the configuration as a dict (left unchanged), the path of a JSON file, or, as DeepSpeed's launcher
            passes it, a JSON text in URL-safe base64.
        world_size: number of data-parallel ranks, for the batch rule.
        auto: values for keys that the configuration leaves to "auto", by full path or by last name, e.g.
            `{"train_micro_batch_size_per_gpu": 4, "optimizer.params.lr": 1e-4}`; others are not looked at.
        **more_auto: the same, as keywords.

    Returns:
        The configuration with the batch sizes solved and every default filled in.

    Raises:
        ConfigError: naming every wrong key with its value, what is allowed, and what to do.
    """
    raw, source = read(config)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(source, [f"world_size: must be a whole number >= 1, got {shown(world_size)}"])
    problems: list[str] = []
    old_spellings = modernise(raw, problems)
    notes = list(old_spellings)
    origins = resolve_auto(raw, {**(auto or {}), **more_auto}, notes, problems)
    if "optimizer" in raw:
        raw["optimizer"] = _check_optimizer(raw["optimizer"], notes, problems)
    if "scheduler" in raw:
        raw["scheduler"] = _check_scheduler(raw["scheduler"], notes, problems)
    _fill_in_batch(raw, world_size, origins, problems)
    if all(isinstance(raw.get(key), dict) and raw[key].get("enabled") is True for key in ("fp16", "bf16")):
        problems.append("fp16.enabled and bf16.enabled: both are true; a model has one precision, choose one")
    loaded = checked(Config, raw, "", problems)
    if problems:
        raise ConfigError(source, problems, old_spellings)
    loaded._world_size, loaded._origins = world_size, origins
    loaded._notes = (*notes, *hints_given(loaded))
    return loaded


def build_optimizer_class(config: Config) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The torch optimizer class and its arguments, as the config's `optimizer` section asks.

    Adam and AdamW become torch.optim.AdamW (decoupled weight decay, arXiv 1711.05101), except Adam with
    adam_w_mode false, which becomes torch.optim.Adam (the decay is added to the gradient); SGD becomes
    torch.optim.SGD.

    Raises:
        ConfigError: there is no such section.
    """
    if config.optimizer is None:
        example = '{"type": "AdamW", "params": {"lr": 0.001}}'
        raise ConfigError(
            "config", [f"optimizer: is missing; add {example}, or pass an optimizer to initialize"]
        )
    return config.optimizer.torch_class()


def _fill_in_batch(
    raw: dict[str, Any], world_size: int, origins: dict[str, str], problems: list[str]
) -> None:
    """Solve the batch rule in place, unless what is given is itself wrong and so reported with its key."""
    unknown = [key for key in raw if key not in Config.model_fields]
    if any(nearest(key, Config.model_fields) in BATCH_KEYS for key in unknown):
        return
    given = {key: raw[key] for key in BATCH_KEYS if key in raw}
    valid = checked(Config, given, "", [])
    if valid is None:
        return
    given = {key: getattr(valid, key) for key in given}
    try:
        solved = solve_batch(given, world_size)
    except ValueError as reason:
        problems.append(str(reason))
        return
    raw.update(solved)
    origins.update({key: "derived" for key in BATCH_KEYS if key not in given})


def _check_optimizer(raw: Any, notes: list[str], problems: list[str]) -> OptimizerConfig | None:
    """The `optimizer` section, checked; None with the reasons added to problems."""
    found = _find_type(raw, "optimizer", OPTIMIZERS, OPTIMIZERS_LATER, problems)
    if found is None:
        return None
    params = raw.get("params", {})
    if found != "SGD" and isinstance(params, dict):
        adamw = found == "AdamW" or params.get("adam_w_mode", True) is True
        if adamw and params.get("torch_adam") is True and "weight_decay" not in params:
            params = {**params, "weight_decay": 0.01}
            notes.append(
                "optimizer.params.weight_decay = 0.01: with torch_adam it is torch.optim.AdamW's default"
            )
        if found == "AdamW" and params.get("adam_w_mode") is False:
            notes.append(
                'optimizer.params.adam_w_mode = false: no effect here, AdamW is AdamW; use type "Adam"'
            )
    params = checked(OPTIMIZERS[found], params, "optimizer.params", problems)
    return None if params is None else OptimizerConfig(type=found, params=params)


def _check_scheduler(raw: Any, notes: list[str], problems: list[str]) -> SchedulerConfig | None:
    """The `scheduler` section, checked; None with the reasons added to problems."""
    found = _find_type(raw, "scheduler", SCHEDULERS, (), problems)
    if found is None:
        return None
    params = checked(SCHEDULERS[found], raw.get("params", {}), "scheduler.params", problems)
    if params is None:
        return None
    total = getattr(params, "total_num_steps", None)
    if total is not None and total < params.warmup_num_steps:
        notes.append(
            "scheduler.params: total_num_steps < warmup_num_steps, so the rate never reaches its maximum"
        )
    if getattr(params, "cycle_momentum", False):
        notes.append("scheduler.params.cycle_momentum = true: sets Adam's beta2 to 0.99 too, as in DeepSpeed")
    return SchedulerConfig(type=found, params=params)


def _find_type(
    raw: Any, name: str, models: dict[str, type[Section]], unbuilt: tuple[str, ...], problems: list[str]
) -> str | None:
    """The type's proper spelling, or None with the reason added to problems."""
    if not isinstance(raw, dict):
        problems.append(f'{name}: must be an object {{"type": ..., "params": {{...}}}}, got {shown(raw)}')
        return None
    known = ("type", "params", "legacy_fusion")
    problems += [
        f"{name}.{key}: unknown key{suggestion(key, known, name)}" for key in raw if key not in known
    ]
    given, allowed = raw.get("type"), ", ".join(models)
    if given is None:
        problems.append(f"{name}.type: is required, one of {allowed}")
        return None
    found = {known.lower(): known for known in (*models, *unbuilt)}.get(str(given).lower())
    if found in models:
        return found
    instance = f"or make the {name} in Python and pass it to initialize"
    if found in unbuilt:
        reason = f"known to DeepSpeed, not built in zero_course yet; set it to one of {allowed}, {instance}"
        problems.append(f"{name}.type = {shown(given)}: {reason}")
    else:
        near = nearest(str(given), (*models, *unbuilt))
        maybe = f", did you mean '{near}'?" if near else ""
        problems.append(f"{name}.type: must be one of {allowed}, got {shown(given)}{maybe} ({instance})")
    return None
