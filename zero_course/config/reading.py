"""From what the caller gave to a plain dict in today's spelling, with nothing left to "auto"."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zero_course.config.batch import BATCH_KEYS
from zero_course.config.messages import ConfigError
from zero_course.config.schema import ZeroOptimization
from zero_course.config.values import shown


def read(config: Mapping[str, Any] | str | os.PathLike) -> tuple[dict[str, Any], str]:
    """The configuration as a new dict without nulls, and the name that error messages call it by.

    Raises:
        ConfigError: there is no such file, it is not JSON (file, line and column are named), or a key is in it twice.
    """
    if isinstance(config, Mapping):
        return _without_nulls(config), "config"
    if not isinstance(config, (str, os.PathLike)):
        kind = type(config).__name__
        raise ConfigError(
            "config", [f"must be a dict or the path of a JSON file, got {kind} {shown(config)}"]
        )
    path = os.path.abspath(config)
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8-sig") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(path, [f"cannot be read: {error}"]) from error
        return _without_nulls(_parse(text, path)), path
    text = _from_base64(config) if isinstance(config, str) else ""
    if text.lstrip().startswith("{"):
        return _without_nulls(_parse(text, "base64 config")), "base64 config"
    if isinstance(config, str) and config.lstrip().startswith("{"):
        raise ConfigError("config", ["is JSON text; pass the path of a file, or json.loads(text)"])
    raise ConfigError(path, ["is a directory, not a JSON file" if os.path.isdir(path) else "no such file"])


def _from_base64(text: str) -> str:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _parse(text: str, source: str) -> dict[str, Any]:
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            if key in section:
                twice.append(f"{key}: is written twice, {shown(section[key])} and {shown(value)}; keep one")
            section[key] = value
        return section

    try:
        raw = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        lines = text.splitlines() or [""]
        line = lines[min(error.lineno, len(lines)) - 1].strip() or "(nothing there)"
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(source, [f"{where}: not JSON, {error.msg}: {line[:80]}"]) from error
    if twice:
        raise ConfigError(source, twice)
    if not isinstance(raw, dict):
        raise ConfigError(source, [f"must hold one object in braces, {{...}}, got {shown(raw)}"])
    return raw


def _without_nulls(node: Any) -> Any:
    """A copy in which a null is as good as a key left out."""
    if isinstance(node, Mapping):
        return {str(key): _without_nulls(value) for key, value in node.items() if value is not None}
    return node


def modernise(raw: dict[str, Any], problems: list[str]) -> list[str]:
    """Rewrite, in place, the spellings of earlier DeepSpeed versions.

    Returns:
        A note for each.
    """
    notes: list[str] = []

    def move(
        section: dict[str, Any], prefix: str, old: str, new: str, convert: Callable = lambda value: value
    ) -> None:
        if old not in section:
            return
        value = convert(section.pop(old))
        if new in section:
            problems.append(
                f"{prefix}{old}: is the old spelling of {prefix}{new}, and both are given; keep {new}"
            )
        else:
            section[new] = value
            notes.append(f"{prefix}{old} is read as {prefix}{new} = {shown(value)}")

    def device(offload: Any) -> dict[str, Any]:
        return {"device": ("cpu" if offload else "none") if isinstance(offload, bool) else offload}

    move(raw, "", "bfloat16", "bf16")
    zero = raw.get("zero_optimization")
    if isinstance(zero, bool):
        notes.append(f"zero_optimization = {shown(zero)} is read as stage {int(zero)}")
        zero = raw["zero_optimization"] = {"stage": int(zero)}
        if "allgather_size" in raw:
            zero["allgather_bucket_size"] = raw.pop("allgather_size")
            notes.append("allgather_size is read as zero_optimization.allgather_bucket_size")
    if isinstance(zero, dict):
        prefix = "zero_optimization."
        move(
            zero,
            prefix,
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
        )
        for new in ZeroOptimization.model_fields:
            if new.startswith("stage3_"):
                move(zero, prefix, new.removeprefix("stage3_"), new)
        move(zero, prefix, "cpu_offload", "offload_optimizer", device)
        move(zero, prefix, "cpu_offload_param", "offload_param", device)
        if "cpu_offload_use_pin_memory" in zero:
            del zero["cpu_offload_use_pin_memory"]
            notes.append("zero_optimization.cpu_offload_use_pin_memory: an old spelling, no effect")
    return notes


# Keys whose real values include the word "auto".
_AUTO_IS_A_VALUE = {"pipeline.stages", "data_types.keep_in_fp32_modules"}
# Keys that have no default worth guessing; so is everything in scheduler but warmup_min_lr and warmup_max_lr.
_AUTO_NEEDS_A_VALUE = {"optimizer.type", "optimizer.params.lr", "zero_optimization.stage"}


def resolve_auto(
    raw: dict[str, Any], values: Mapping[str, Any], notes: list[str], problems: list[str]
) -> dict[str, str]:
    """Replace, in place, each "auto" by the caller's value, or else by what Hugging Face or DeepSpeed would take.

    Those are: for a batch size, nothing, so that it follows from the batch rule; for warmup_min_lr 0 and for
    warmup_max_lr the optimizer's lr; for most others the default.

    Returns:
        path -> "auto" for what was filled in.
    """
    origins: dict[str, str] = {}
    # By path, so that the optimizer's rate is there when the scheduler asks for it.
    for path, section, key in sorted(_autos(raw, ""), key=lambda found: found[0]):
        del section[key]
        value = values.get(path, values.get(key))
        if value is None and path == "scheduler.params.warmup_min_lr":
            value = 0.0
        if value is None and path == "scheduler.params.warmup_max_lr":
            value = _learning_rate(raw)
        if value is not None:
            section[key] = value
            origins[path] = "auto"
        elif path in _AUTO_NEEDS_A_VALUE or path.startswith("scheduler."):
            reason = 'is "auto" and the caller has no value for it; write one'
            problems.append(f'{path}: {reason}, or pass load_config(..., auto={{"{path}": value}})')
        elif path not in BATCH_KEYS:
            notes.append(f'{path} = "auto": the caller has no value for it, so the default stands')
    return origins


def _autos(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    for key, value in section.items():
        path = f"{prefix}{key}"
        if isinstance(value, str) and value == "auto" and path not in _AUTO_IS_A_VALUE:
            yield path, section, key
        elif isinstance(value, dict):
            yield from _autos(value, f"{path}.")


def _learning_rate(raw: dict[str, Any]) -> Any:
    optimizer = raw.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    return params.get("lr") if isinstance(params, dict) else None
