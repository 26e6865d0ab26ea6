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
        notes = {"status": status, "at": time.time(), "recent": list(self.recent)}
        with self._lock:
            self.store.set(str(self.rank), json.dumps(notes))

    def explain(self, number: int, fingerprint: str) -> list[str]:
        """One line for each peer that was not in collective ``number`` as this rank was.

        Waits a few seconds for peers that are failing at the same moment to publish.
        """
        try:
            self.publish("failed")
        except RuntimeError:
            return ["the store is gone with the process that held it: rank 0 or the launcher has ended"]
        deadline = time.monotonic() + SILENT_AFTER + PUBLISH_EVERY
        verdicts: dict[int, str | None] = {}
        while time.monotonic() < deadline:
            try:
                for peer in range(self.world_size):
                    if peer != self.rank and verdicts.get(peer) is None:
                        verdicts[peer] = self._verdict(peer, number, fingerprint)
            except RuntimeError:
                return ["the store is gone with the process that held it: rank 0 or the launcher has ended"]
            if all(verdict is not None for verdict in verdicts.values()):
                break
            time.sleep(0.1)
        lines = []
        for peer, verdict in sorted(verdicts.items()):
            if verdict is None:
                verdict = f"has not called it; {self._whereabouts(self._read(peer))}"
            if verdict:
                lines.append(f"rank {peer} {verdict}")
        return lines

    def _read(self, peer: int) -> dict[str, Any] | None:
        with self._lock:
            return json.loads(self.store.get(str(peer))) if self.store.check([str(peer)]) else None

    @staticmethod
    def _whereabouts(notes: dict[str, Any] | None) -> str:
        if notes is None or not notes["recent"]:
            return "it has called no collective yet"
        number, fingerprint, site = notes["recent"][-1]
        return f"its latest is number {number}, {fingerprint}, at {site}"

    def _verdict(self, peer: int, number: int, fingerprint: str) -> str | None:
        """What peer did: ``""`` the same as this rank, ``None`` not known yet."""
        notes = self._read(peer)
        if notes is None:
            return None
        for other_number, other, site in notes["recent"]:
            if other_number == number and other != fingerprint:
                return f"called {other} instead, at {site}"
        if notes["status"] == "exited":
            return f"has left; {self._whereabouts(notes)}"
        silent = time.time() - notes["at"]
        if silent > SILENT_AFTER:
            return f"has given no sign of life for {silent:.0f} s (killed or stopped?); {self._whereabouts(notes)}"
        if any(other_number == number for other_number, _, _ in notes["recent"]):
            return ""
        return None


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
