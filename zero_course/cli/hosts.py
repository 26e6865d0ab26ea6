"""Which hosts and slots a job runs on: the host file, ``--include`` and ``--exclude``, as DeepSpeed reads them.

A slot is a place for one rank: a GPU by its index, or just a process on a host without GPUs. Everything here is
text in, ``{host: slots}`` out, so it is tested without a network.
"""

from __future__ import annotations

import re
from pathlib import Path

Pool = dict[str, list[int]]  # host to its slots, in the order of the host file

_HOST_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")
_NODE_SPEC = re.compile(r"([^:@,\s]+)(?::(\d+(?:,\d+)*))?")


class LaunchError(ValueError):
    """A launch that cannot be: the text says what is wrong and what to write instead."""


def read_hostfile(path: str | Path) -> Pool:
    """Hosts and slots of a file of ``host slots=N`` lines; ``#`` begins a comment.

    Raises:
        LaunchError: no such file, a line of another form, a host named twice, no host at all; with the line.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise LaunchError(f"host file {str(path)!r}: {error.strerror}") from None
    pool: Pool = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HOST_LINE.fullmatch(content)
        if match is None:
            raise LaunchError(f"{path}, line {number}: expected 'host slots=N', found {content!r}")
        host, slots = match[1], int(match[2])
        if slots < 1:
            raise LaunchError(
                f"{path}, line {number}: {host} has no slots; remove the line or give at least 1"
            )
        if host in pool:
            raise LaunchError(f"{path}, line {number}: {host} is there already, in line {lines[host]}")
        pool[host], lines[host] = list(range(slots)), number
    if not pool:
        raise LaunchError(f"{path} names no host; it needs lines of the form 'host slots=N'")
    return pool


def parse_filter(text: str) -> dict[str, list[int] | None]:
    """``"host1:0,1@host2"`` as ``{"host1": [0, 1], "host2": None}``; None stands for all slots.

    Raises:
        LaunchError: a part that is not ``host`` or ``host:slot,slot``.
    """
    chosen: dict[str, list[int] | None] = {}
    for spec in text.split("@"):
        match = _NODE_SPEC.fullmatch(spec.strip())
        if match is None:
            raise LaunchError(f"{text!r}: {spec!r} is not host or host:slot,slot (join several with @)")
        host, slots = match[1], None if match[2] is None else [int(slot) for slot in match[2].split(",")]
        before = chosen.get(host, [])
        chosen[host] = None if slots is None or before is None else sorted({*before, *slots})
    return chosen


def select(pool: Pool, include: str = "", exclude: str = "") -> Pool:
    """The part of ``pool`` that ``--include`` names or ``--exclude`` leaves, in the order of the pool.

    Raises:
        LaunchError: both are given, a host or slot that the pool lacks, nothing left.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude cannot be combined; give the one that is shorter to write")
    if not include and not exclude:
        return pool
    named = parse_filter(include or exclude)
    for host, slots in named.items():
        if host not in pool:
            raise LaunchError(f"host {host!r} is not one of {', '.join(pool)}")
        for slot in slots or []:
            if slot not in pool[host]:
                raise LaunchError(f"{host} has slots {_ranges(pool[host])}, not {slot}")
    selected: Pool = {}
    for host, slots in pool.items():
        listed = (slots if named[host] is None else named[host]) if host in named else []
        kept = [slot for slot in slots if (slot in (listed or [])) == bool(include)]
        if kept:
            selected[host] = kept
    if not selected:
        raise LaunchError(f"--exclude {exclude!r} leaves no slot")
    return selected


def limit(pool: Pool, num_nodes: int | None, num_gpus: int | None) -> Pool:
    """The first ``num_nodes`` hosts of ``pool`` and the first ``num_gpus`` slots of each.

    Raises:
        LaunchError: there are fewer.
    """
    if num_nodes is not None and num_nodes > len(pool):
        raise LaunchError(f"--num_nodes {num_nodes}, but there are {len(pool)} hosts: {', '.join(pool)}")
    hosts = list(pool)[:num_nodes]
    for host in hosts:
        if num_gpus is not None and num_gpus > len(pool[host]):
            raise LaunchError(f"--num_gpus {num_gpus}, but {host} has {len(pool[host])} slots")
    return {host: pool[host][:num_gpus] for host in hosts}


def _ranges(slots: list[int]) -> str:
    if slots == list(range(slots[0], slots[-1] + 1)) and len(slots) > 1:
        return f"{slots[0]} to {slots[-1]}"
    return ", ".join(map(str, slots))
