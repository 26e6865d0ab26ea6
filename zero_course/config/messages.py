"""What is wrong with a configuration, in words: the key's full path, what was given, what is allowed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from zero_course.config.components import OPTIMIZERS, SCHEDULERS
from zero_course.config.schema import Config
from zero_course.config.values import Section, shown


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        problems: one message for each thing that is wrong, each beginning with the full path of its key.
    """

    def __init__(self, source: str | os.PathLike, problems: Sequence[str], notes: Sequence[str] = ()):
        self.problems = list(problems)
        head = f"{source}:" if len(problems) == 1 else f"{source}, {len(problems)} problems:"
        remarks = [f"  (note: {note})" for note in notes]
        super().__init__("\n".join([head, *(f"  {problem}" for problem in problems), *remarks]))


def checked(model: type[Section], raw: Any, prefix: str, problems: list[str]) -> Any:
    """An instance of the model, or None with the reasons added to problems.

    Args:
        model: the section's class.
        raw: its JSON.
        prefix: the section's path, "" at the top level.
        problems: receives a message for each thing that is wrong.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as failure:
        problems += [_in_our_words(error, model, prefix) for error in failure.errors()]
        return None


_ALLOWED = {
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "model_type": "must be an object in braces, {...}",
}


def _in_our_words(error: Any, model: type[Section], prefix: str) -> str:
    location = [str(step) for step in error["loc"]]
    path = ".".join([*([prefix] if prefix else []), *location])
    given, kind = shown(error["input"]), error["type"]
    if kind == "extra_forbidden":
        for step in location[:-1]:
            model = model.model_fields[step].annotation
        return f"{path}: unknown key{suggestion(location[-1], model.model_fields, path.rpartition('.')[0])}"
    if kind == "missing":
        return f"{path}: is required"
    if kind == "not_built":
        return f"{path} = {given}: {error['msg']}"
    if kind == "literal_error":
        expected = error["ctx"]["expected"]
        near = nearest(str(error["input"]), expected.replace("'", "").replace(" or ", ", ").split(", "))
        maybe = f", did you mean '{near}'?" if near and isinstance(error["input"], str) else ""
        return f"{path}: must be {expected}, got {given}{maybe}"
    return f"{path}: {_ALLOWED.get(kind, error['msg'])}, got {given}"


def suggestion(key: str, known: Iterable[str], section: str) -> str:
    """What to write instead of an unknown key, as the end of a sentence.

    Args:
        key: the unknown key.
        known: the keys of its section.
        section: the section's path, "" at the top level.
    """
    if key == "max_grad_norm":
        return "; write the top-level key 'gradient_clipping' instead"
    elsewhere = _paths_by_name().get(key, set())
    if f"{section}.{key}" in elsewhere:
        return f"; {key} is a parameter of another {section.partition('.')[0]}"
    if len(elsewhere) == 1:
        return f"; it belongs at '{next(iter(elsewhere))}'"
    near = nearest(key, known)
    return f", did you mean '{near}'?" if near else f"; there is no such key in {section or 'DeepSpeed'}"


@lru_cache
def _paths_by_name() -> dict[str, set[str]]:
    """The last name of every key there is -> the paths that end in it."""
    found: dict[str, set[str]] = {}

    def walk(model: type[Section], prefix: str) -> None:
        for name, field in model.model_fields.items():
            found.setdefault(name, set()).add(f"{prefix}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                walk(field.annotation, f"{prefix}{name}.")

    walk(Config, "")
    for section, models in (("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)):
        for model in models.values():
            walk(model, f"{section}.params.")
    return found


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like this one, those that contain it first; None if there is nothing like it."""
    lower = {candidate.lower(): candidate for candidate in known}
    containing = [candidate for candidate in lower if len(word) > 3 and word.lower() in candidate]
    near = difflib.get_close_matches(
        word.lower(), containing or lower, n=1, cutoff=0.0 if containing else 0.6
    )
    return lower[near[0]] if near else None
