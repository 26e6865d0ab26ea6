"""What the other ranks were doing: turns a collective that hangs into an error that names the culprit.

A collective works when every rank calls the same one, on the same shape, in the same order. When one rank
does not, the others wait, and the network library only knows that time ran out. So each rank notes what it
posts and publishes its latest notes once a second in the key-value store through which the ranks met. A rank
whose collective fails reads its peers' notes and says who was elsewhere, and where.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch.distributed as dist

PUBLISH_EVERY = 1.0  # seconds between two looks at whether there is something new to publish
SILENT_AFTER = 4.0  # seconds without a sign of life after which a peer is taken for dead
REMEMBER = 16  # latest collectives kept for comparison


class Watchdog:
    """Publishes this rank's latest collectives and reads those of its peers.

    Args:
        store: the process group's key-value store.
        group: name of the group, a prefix for the keys.
        rank: this rank in the group.
        world_size: ranks in the group.
    """

    def __init__(self, store: dist.Store, group: str, rank: int, world_size: int) -> None:
        self.store = dist.PrefixStore(f"zero_course/watchdog/{group}", store)
        self.rank = rank
        self.world_size = world_size
        self.recent: deque[tuple[int, str, str]] = deque(maxlen=REMEMBER)
        self._lock = threading.Lock()
        self._beat = 0
        self._stop = threading.Event()
        self.publish()
        thread = threading.Thread(target=_publish_loop, args=(weakref.ref(self), self._stop), daemon=True)
        thread.start()
        atexit.register(_end, self._stop, thread)

    def note(self, number: int, fingerprint: str, site: str) -> None:
        """Remember that collective ``number`` was posted here as ``fingerprint``, from ``site``."""
        self.recent.append((number, fingerprint, site))

    def publish(self, status: str = "running") -> None:
        """Write this rank's latest notes to the store."""
        with self._lock:
            self._beat += 1
            notes = {"status": status, "beat": self._beat, "recent": list(self.recent)}
            self.store.set(str(self.rank), json.dumps(notes))

    def explain(self, number: int, fingerprint: str) -> list[str]:
        """One line for each peer that was not in collective ``number`` as this rank was.

        Waits a few seconds for peers that are failing at the same moment to publish.
        """
        try:
            self.publish("failed")
            return self._compare(number, fingerprint)
        except RuntimeError:
            return ["the store is gone with the process that held it: rank 0 or the launcher has ended"]

    def _compare(self, number: int, fingerprint: str) -> list[str]:
        first = {peer: self._read(peer) for peer in range(self.world_size) if peer != self.rank}
        verdicts: dict[int, str | None] = dict.fromkeys(first)
        deadline = time.monotonic() + SILENT_AFTER
        while None in verdicts.values() and time.monotonic() < deadline:
            for peer in first:
                if verdicts[peer] is None:
                    verdicts[peer] = self._verdict(self._read(peer), number, fingerprint)
            time.sleep(0.1)
        for peer in (peer for peer, verdict in verdicts.items() if verdict is None):
            notes = self._read(peer)
            if notes is None or notes["beat"] == first[peer]["beat"]:
                verdicts[peer] = f"has given no sign of life for {SILENT_AFTER:.0f} s (killed or stopped?)"
            elif not _called(notes, number):
                verdicts[peer] = "has not called it"
            else:
                continue
            verdicts[peer] += f"; {self._whereabouts(notes)}"
        return [f"rank {peer} {verdict}" for peer, verdict in verdicts.items() if verdict]

    def _read(self, peer: int) -> dict[str, Any] | None:
        with self._lock:
            return json.loads(self.store.get(str(peer))) if self.store.check([str(peer)]) else None

    @staticmethod
    def _whereabouts(notes: dict[str, Any] | None) -> str:
        if notes is None or not notes["recent"]:
            return "it has called no collective yet"
        number, fingerprint, site = notes["recent"][-1]
        return f"its latest is number {number}, {fingerprint}, at {site}"

    def _verdict(self, notes: dict[str, Any] | None, number: int, fingerprint: str) -> str | None:
        """What a peer did: ``""`` the same as this rank, and it failed too; ``None`` not known yet."""
        if notes is None:
            return None
        for other_number, other, site in notes["recent"]:
            if other_number == number and other != fingerprint:
                return f"called {other} instead, at {site}"
        if notes["status"] == "exited":
            return f"has left; {self._whereabouts(notes)}"
        # A peer in the same collective may be about to fail as well, or may just have died in it.
        return "" if notes["status"] == "failed" and _called(notes, number) else None


def _called(notes: dict[str, Any] | None, number: int) -> bool:
    return notes is not None and any(posted == number for posted, _, _ in notes["recent"])


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """At exit: a thread that is still in the store when the interpreter goes would abort the process."""
    stop.set()
    thread.join(timeout=5.0)


def _publish_loop(watchdog_ref: weakref.ref[Watchdog], stop: threading.Event) -> None:
    """Publishes until the watchdog is collected, the store is gone, or the interpreter ends."""
    while True:
        stopped = stop.wait(PUBLISH_EVERY)
        watchdog = watchdog_ref()
        if watchdog is None:
            return
        try:
            watchdog.publish("exited" if stopped else "running")
        except RuntimeError:
            return
        if stopped:
            return
        del watchdog
