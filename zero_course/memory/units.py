"""Bytes and counts as people write them, kept exact.

GB is 1e9 bytes and GiB is 2^30 bytes, 7 % more; one of the commonest wrong numbers in this field is one printed
as the other. So nothing here guesses: a bare "40G" is refused, and what is printed carries its label.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
LARGEST = 10**24  # a sanity bound: no machine has it, and arithmetic on what is below it is exact
COUNT_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_NUMBER_AND_UNIT = re.compile(r"\s*([0-9][0-9_]*\.?[0-9_]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """Bytes from "40GB" (1e9), "40GiB" (2^30), "80e9" or a number; exact, never rounded.

    Raises:
        ValueError: a letter alone ("40G" may mean either), an unknown unit, a negative or fractional number of
            bytes.
    """
    units = {name.lower(): size for name, size in BYTE_UNITS.items()}
    number, unit = _split(text, "40GB, 40GiB or 40e9")
    if unit.lower() not in units:
        if unit.upper() in ("K", "M", "G", "T", "P"):
            either = f"{number}{unit.upper()}B (decimal) or {number}{unit.upper()}iB (binary)"
            raise ValueError(f"{text!r} may mean two sizes; write {either}")
        raise ValueError(f"{text!r}: unknown unit {unit!r}; use one of {', '.join(filter(None, BYTE_UNITS))}")
    return _whole(number * units[unit.lower()], text, "bytes")


def parse_count(text: str | int | float) -> int:
    """A number of things from "7B" (1e9), "350M", "7e9", "7_000_000" or a number; exact, never rounded.

    Raises:
        ValueError: an unknown unit, a negative or fractional count.
    """
    number, unit = _split(text, "7B, 350M or 7e9")
    if unit.upper() not in COUNT_UNITS:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; use one of K, M, B (1e9), T")
    return _whole(number * COUNT_UNITS[unit.upper()], text, "things")


def format_bytes(size: int, *, binary: bool = False, digits: int = 2) -> str:
    """``size`` bytes with its label: "40.00 GB" (1e9) or, with ``binary``, "37.25 GiB" (2^30)."""
    names = ("KiB", "MiB", "GiB", "TiB", "PiB") if binary else ("KB", "MB", "GB", "TB", "PB")
    return _scaled(size, [(name, BYTE_UNITS[name]) for name in names], " ", f"{size} B", digits)


def format_count(count: int, *, digits: int = 2) -> str:
    """``count`` in short, without idle zeros: "7B", "1.5B", "350M", "999"."""
    names = ("K", "M", "B", "T")
    return _scaled(count, [(name, COUNT_UNITS[name]) for name in names], "", str(count), digits, strip=True)


def _split(text: str | int | float, example: str) -> tuple[Decimal, str]:
    match = _NUMBER_AND_UNIT.fullmatch(str(text))
    if isinstance(text, bool) or match is None:
        raise ValueError(f"{text!r} is not a size; write it like {example}")
    try:
        return Decimal(match[1].replace("_", "")), match[2]
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a size; write it like {example}") from None


def _whole(value: Decimal, text: object, what: str) -> int:
    if value > LARGEST:
        raise ValueError(f"{text!r} is more than 1e24 {what}; is it a slip of the exponent?")
    if value != value.to_integral_value():
        raise ValueError(f"{text!r} is {value.normalize()} {what}, not a whole number")
    return int(value)


def _scaled(
    value: int, units: list[tuple[str, int]], gap: str, plain: str, digits: int, strip: bool = False
) -> str:
    if abs(value) < units[0][1]:
        return plain
    chosen = max(
        (unit for unit in units if round(abs(value) / unit[1], digits) >= 1), key=lambda unit: unit[1]
    )
    number = f"{value / chosen[1]:.{digits}f}"
    if strip and "." in number:
        number = number.rstrip("0").rstrip(".")
    return f"{number}{gap}{chosen[0]}"
