"""What a single key may hold, and the four kinds of keys (see the package's docstring)."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError


def later(default: Any = None) -> Any:
    """A field that is known to DeepSpeed and not built here yet: nothing but its default is accepted."""
    return Field(default, json_schema_extra={"kind": "later"})


def dropped(default: Any = None) -> Any:
    """A `later` field that DeepSpeed itself has dropped in 0.19."""
    return Field(default, json_schema_extra={"kind": "dropped"})


def hint(default: Any, why: str) -> Any:
    """A field that never changes a result, and changes nothing at all here; `why` completes the note."""
    return Field(default, json_schema_extra={"kind": "hint", "why": why})


def idle(default: Any = None) -> Any:
    """A field that only matters together with a `later` one."""
    return Field(default, json_schema_extra={"kind": "idle"})


def kind(field: Any) -> str:
    """Which of "plain", "later", "dropped", "hint" and "idle" a pydantic field is."""
    return (field.json_schema_extra or {}).get("kind", "plain")


class Section(BaseModel):
    """One object of the JSON: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    @field_validator("*")
    @classmethod
    def _only_what_is_built(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if kind(field) not in ("later", "dropped") or value == field.default:
            return value
        if field.default is None and _asks_for_nothing(value):
            return value
        known = "known to DeepSpeed" if kind(field) == "later" else "dropped from DeepSpeed in 0.19"
        way_out = "remove it" if field.default is None else f"remove it or set it to {shown(field.default)}"
        text = f"{known}, not built in zero_course yet; {way_out}"
        raise PydanticCustomError("not_built", "{text}", {"text": text})


def _asks_for_nothing(value: Any) -> bool:
    """Whether a value that is not built is switched off: false, `{}`, `{"enabled": false, ...}`."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_asks_for_nothing(v) for v in value.values())
    return not value


def shown(value: Any) -> str:
    """A value as JSON would write it, cut to a line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fits(value: Any, least: float | None = None, below: float = math.inf) -> bool:
    """Whether a value is a finite number in [least, below); a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return (least is None or value >= least) and value < below


def _refuse(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{allowed}", {"allowed": f"must be {allowed}"})


def whole(least: int | None = None) -> BeforeValidator:
    """Accept a whole number >= least, also one written as 5e8 or 4.0; never a string or a bool."""

    def check(value: Any) -> int:
        if not _fits(value, least) or value != int(value):
            raise _refuse("a whole number" + ("" if least is None else f" >= {least}"))
        return int(value)

    return BeforeValidator(check)


def _number(least: float | None) -> BeforeValidator:
    def check(value: Any) -> float:
        if not _fits(value, least):
            raise _refuse("a finite number" + ("" if least is None else f" >= {least}"))
        return float(value)

    return BeforeValidator(check)


def _check_betas(value: Any) -> tuple[float, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != 2
        or not all(_fits(beta, 0, 1) for beta in value)
    ):
        raise _refuse("two numbers in [0, 1), such as [0.9, 0.999]")
    return tuple(float(beta) for beta in value)


def _check_per_group(value: Any) -> float | tuple[float, ...]:
    if _fits(value, 0):
        return float(value)
    if not isinstance(value, (list, tuple)) or not value or not all(_fits(v, 0) for v in value):
        raise _refuse("a finite number >= 0, or a list of them, one for each parameter group")
    return tuple(float(v) for v in value)


Integer = Annotated[int, whole()]
Count = Annotated[int, whole(0)]
Positive = Annotated[int, whole(1)]
LastIteration = Annotated[int, whole(-1)]
Real = Annotated[float, _number(None)]
NonNegative = Annotated[float, _number(0)]
Betas = Annotated[tuple[float, float], BeforeValidator(_check_betas)]
PerGroup = Annotated[float | tuple[float, ...], BeforeValidator(_check_per_group)]
# Hugging Face Accelerate writes infinity for "never".
Interval = Annotated[Positive | None, BeforeValidator(lambda value: None if value == math.inf else value)]
