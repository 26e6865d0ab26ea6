"""Run a function once for each rank, as processes of this host, and bring the results home.

torchrun's agent (torch.distributed.run's own API) starts the ranks, sets RANK, WORLD_SIZE and where they meet, and
ends all of them when one fails. Around it this file adds a line to each rank, a Unix socket: the function and its
arguments go out on it; events (for progress bars), the result or the traceback come back. A rank whose line is cut
ends at once, so that nothing outlives a launcher that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

LINE = "ZERO_COURSE_LAB_LINE"  # path of the socket
LINE_KEY = "ZERO_COURSE_LAB_KEY"  # proves that a caller is one of our ranks
GRACE = 10.0  # seconds for what ended ranks have sent to be read
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Tell = Callable[[Any], None]


class RankFailed(RuntimeError):
    """A rank raised or was killed; the text says which, with its traceback."""


class Interrupted(Exception):
    """A signal asked for the end; all ranks have ended.

    Attributes:
        signal: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def device_for(world_size: int) -> str:
    """What the ranks run on: ``"cuda"`` if there is a GPU for each of them, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "cpu"


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, on_event: Callable[[int, Any], None] | None = None
) -> list[Any]:
    """Call ``fn(tell, *args)`` in ``world_size`` processes that have met, and return the results in rank order.

    Args:
        world_size: number of processes; one thread each on the CPU, one GPU each where there are enough.
        fn: a function at the top level of a module or of the script that is running. Its first argument,
            ``tell``, sends any picklable event to ``on_event``.
        args: anything that can be pickled.
        on_event: called in a thread of this process with (rank, event).

    Returns:
        one result a rank, which must be picklable.

    Raises:
        RankFailed: a rank raised or died; the others were ended.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; all ranks were ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_torchrun()
    with tempfile.TemporaryDirectory(prefix="zero_course_") as folder, _signals() as came:
        home = _Home(Path(folder) / "line", world_size, (_reference(fn), args), on_event)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            signals_to_handle="SIGTERM",
            shutdown_timeout=5,
        )
        try:
            with _environment(home.environment(device_for(world_size))):
                elastic_launch(config, sys.executable)("-m", "zero_course.lab.rank")
        except ChildFailedError as error:
            raise RankFailed(home.explain(error)) from None
        except SignalException:
            raise Interrupted(came[0] if came else signal.SIGTERM) from None
        finally:
            home.close()
    return [home.results[rank] for rank in range(world_size)]


class _Home:
    """The launcher's end of the lines."""

    def __init__(
        self, path: Path, world_size: int, task: Any, on_event: Callable[[int, Any], None] | None
    ) -> None:
        self.world_size, self.on_event = world_size, on_event
        self.results: dict[int, Any] = {}
        self.errors: dict[int, str] = {}  # in the order in which they came
        self._task = pickle.dumps(task)
        self._key = secrets.token_bytes(16)
        self._listener = Listener(str(path), "AF_UNIX", backlog=world_size, authkey=self._key)
        self._path = path
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def environment(self, device: str) -> dict[str, str]:
        """What the ranks find in their environment, besides what torchrun sets."""
        paths = os.pathsep.join(filter(None, sys.path))  # a rank finds the modules that we found
        variables = {LINE: str(self._path), LINE_KEY: self._key.hex(), "PYTHONPATH": paths}
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""  # fewer GPUs than ranks: all of them on the CPU
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
            if sys.platform == "linux":
                variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return variables

    def explain(self, failed: Any) -> str:
        """Which rank failed first, and how."""
        self._thread.join(timeout=GRACE)  # for what is still on its way
        killed = {rank: f.exitcode for rank, f in failed.failures.items() if f.exitcode < 0}
        murdered = [
            rank for rank, code in killed.items() if code != -signal.SIGTERM
        ]  # SIGTERM is the agent's
        if murdered:
            name = signal.Signals(-killed[murdered[0]]).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"rank {murdered[0]} was killed by {name}{hint}; the others were ended"
        if self.errors:
            rank = next(iter(self.errors))
            return f"rank {rank} failed; the others were ended\n{self.errors[rank]}"
        ended = ", ".join(f"rank {rank}: exit code {f.exitcode}" for rank, f in failed.failures.items())
        return f"ranks ended without a word ({ended})"

    def close(self) -> None:
        """Take what is still on its way, once the ranks have ended."""
        self._thread.join(timeout=GRACE)
        self._listener.close()

    def _serve(self) -> None:
        lines: dict[Connection, int] = {}
        with contextlib.suppress(OSError):  # closed by close()
            while len(lines) < self.world_size:
                line = self._listener.accept()
                lines[line] = line.recv()
                line.send_bytes(self._task)
                self._read([c for c in lines if c.poll()], lines)
        open_lines = set(lines)
        while open_lines:
            for line in wait(list(open_lines)):
                if not self._read([line], lines):
                    open_lines.discard(line)

    def _read(self, ready: list[Connection], ranks: dict[Connection, int]) -> bool:
        """Take one message from each line; False if one has ended."""
        for line in ready:
            try:
                kind, value = pickle.loads(line.recv_bytes())
            except (EOFError, OSError):
                return False
            rank = ranks[line]
            if kind == "result":
                self.results[rank] = value
            elif kind == "error":
                self.errors[rank] = value
            elif self.on_event is not None:
                self.on_event(rank, value)
        return True


def _reference(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """How a rank finds the function: ("module" or "file", its name or path, the function's name)."""
    if fn.__module__ != "__main__":
        return "module", fn.__module__, fn.__qualname__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:  # python -m
        return "module", spec.name, fn.__qualname__
    return "file", str(Path(main.__file__).resolve()), fn.__qualname__


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Within, the first signal makes torchrun end the ranks in order; the list then holds it."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    came: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) == 1:
            # ranks live in sessions of their own: they hear of Ctrl-C as SIGTERM, from the agent
            raise SignalException("interrupted", signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence_torchrun() -> None:
    """What torchrun would log about failures and signals is said in one line by us."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def connect() -> Connection:
    """A rank's end of its line, once it has said which rank it is."""
    line = Client(os.environ[LINE], "AF_UNIX", authkey=bytes.fromhex(os.environ[LINE_KEY]))
    line.send(int(os.environ["RANK"]))
    return line


def wait_for_end_of_line(line: Connection) -> None:
    """End this process as soon as the launcher is gone."""

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                line.recv_bytes()
        time.sleep(0.5)  # a result that is on its way is the better end
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
