"""The traffic ledger: one entry for each collective, with the bytes that were really moved.

A formula says what an algorithm *should* move. A library may move something else: gloo's reduce-scatter, for
one, sends as much as an all-reduce. So the ledger keeps two figures for each call, the payload (what the
caller handed over) and the wire bytes (what this rank sent, by the algorithm that ran), and the course
compares both with the formula and with the kernel's own interface counters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Entry:
    """One collective as one rank saw it.

    Attributes:
        op: name of the collective, e.g. ``"reduce_scatter"``.
        purpose: what it was for: ``"gradients"``, ``"parameters"``, ``"control"``, ``"setup"``, ...
        group: name of the process group.
        transport: ``"peer"`` (built from send and receive) or ``"native"`` (the library's own collective).
        payload_bytes: bytes of the whole vector the collective is about (input of a reduce-scatter, output
            of an all-gather).
        wire_bytes: bytes this rank sent to other ranks.
        site: ``file:line`` of the call, the first frame outside the package.
        started: seconds (``time.perf_counter``) at which the call was posted.
        finished: seconds at which it was known to be complete.
        seconds: time this rank spent inside the call: posting, waiting, summing. An overlapped collective
            has ``seconds`` much smaller than ``finished - started``.
    """

    op: str
    purpose: str
    group: str
    transport: str
    payload_bytes: int
    wire_bytes: int
    site: str
    started: float
    finished: float = float("nan")
    seconds: float = 0.0


class Ledger:
    """All collectives of one rank, in the order in which they were posted."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def select(self, purpose: str | None = None, op: str | None = None) -> Iterator[Entry]:
        """Entries with this purpose and op; ``None`` matches all."""
        for entry in self.entries:
            if purpose in (None, entry.purpose) and op in (None, entry.op):
                yield entry

    def wire_bytes(self, purpose: str | None = None, op: str | None = None) -> int:
        """Bytes this rank sent."""
        return sum(entry.wire_bytes for entry in self.select(purpose, op))

    def payload_bytes(self, purpose: str | None = None, op: str | None = None) -> int:
        """Bytes of the vectors that the collectives were about."""
        return sum(entry.payload_bytes for entry in self.select(purpose, op))

    def by_purpose(self) -> dict[str, int]:
        """Purpose → bytes this rank sent, in order of first use."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            totals[entry.purpose] = totals.get(entry.purpose, 0) + entry.wire_bytes
        return totals

    def clear(self) -> None:
        """Forget all entries."""
        self.entries.clear()

    def table(self) -> str:
        """The ledger summed by purpose and op, as text, for printing."""
        rows: dict[tuple[str, str], list[float]] = {}
        for entry in self.entries:
            row = rows.setdefault((entry.purpose, entry.op), [0, 0, 0, 0.0])
            row[0] += 1
            row[1] += entry.payload_bytes
            row[2] += entry.wire_bytes
            row[3] += entry.seconds
        head = f"{'purpose':<12} {'op':<15} {'calls':>6} {'payload bytes':>15} {'sent bytes':>15} {'ms':>9}"
        lines = [head]
        for (purpose, op), (calls, payload, wire, seconds) in rows.items():
            lines.append(
                f"{purpose:<12} {op:<15} {calls:>6} {payload:>15,} {wire:>15,} {seconds * 1e3:>9.2f}"
            )
        return "\n".join(lines)
