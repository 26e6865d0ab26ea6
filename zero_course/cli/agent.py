"""Run this host's ranks under torchrun's agent, and see that none outlives the launcher.

torchrun watches its ranks from Python; a signal that comes while it waits inside C++ (for a host that has not
come yet) would not be heard. So signals are read by a thread: the first asks for an orderly end, and if there is
no orderly end, or at a second Ctrl-C, the ranks are killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from .job import STOP_SIGNALS, Job, describe, exit_code, say

GRACE = 15.0  # seconds that ranks have to end after SIGTERM
# Run as each rank: have the kernel kill it when the launcher dies (PR_SET_PDEATHSIG = 1), then become the script.
TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


def run(job: Job, *, lifeline: bool = False) -> int:
    """Run all ranks of ``job`` on this host to their end.

    Args:
        job: this host's part.
        lifeline: end the ranks when standard input ends, because the host that started this one is gone.

    Returns:
        the exit code: 0, the code of the rank that failed first, 128 + n for signal n.
    """
    with _OrderlyEnd() as end:
        if lifeline:
            threading.Thread(target=_end_with_standard_input, daemon=True).start()
        os.environ.update(job.environment)
        say(describe(job))
        try:
            return _run(job, end)
        finally:
            _kill(_children())  # an agent that was interrupted twice may have left some


def _run(job: Job, end: _OrderlyEnd) -> int:
    try:
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except _Interrupted:
        return end.exit_code()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):  # what it would say is said by _report, but for restarts
            logging.getLogger(name).setLevel(logging.ERROR if job.max_restarts else logging.CRITICAL)
    try:
        arguments = torchrun.parse_args([*job.torchrun_options(), "--", job.script])
        arguments.training_script_args = (
            job.arguments
        )  # unparsed: torchrun would take --sig for its own option
        if sys.platform.startswith("linux"):
            _tie_to_this_process(arguments)
        if hasattr(arguments, "signals_to_handle"):
            arguments.signals_to_handle = (
                "SIGTERM"  # the others are _OrderlyEnd's, and reach ranks as SIGTERM
            )
        if hasattr(arguments, "shutdown_timeout"):
            arguments.shutdown_timeout = int(GRACE) - 5
        torchrun.run(arguments)
    except ChildFailedError as error:
        return end.exit_code() if end.signal is not None else _report(error, job.ranks)
    except (SignalException, _Interrupted):
        say(f"{signal.Signals(end.signal or signal.SIGTERM).name}: all ranks ended")
        return end.exit_code()
    except RuntimeError as error:  # of the rendezvous; a script's own errors are ChildFailedErrors
        if end.signal is not None:
            return end.exit_code()
        say(f"error: {_explain(error, job)}")
        return 1
    return 0


def _tie_to_this_process(arguments: Any) -> None:
    """Have ranks die with this process even if it is killed outright (kill -9, out of memory)."""
    script = [sys.executable, "-u", *(["-m"] if arguments.module else []), arguments.training_script]
    tied = ["-ISc", TIED, str(os.getpid())]
    arguments.training_script_args = [*tied, *script, *arguments.training_script_args]
    arguments.training_script, arguments.no_python, arguments.module = sys.executable, True, False


def _report(error: Any, ranks: int) -> int:
    """Say which rank failed first and how; return its exit code."""
    ended = -signal.SIGTERM  # what becomes of the others when one fails: not failures of their own
    failures = error.failures
    # Times are whole seconds. Within one, a rank that was killed is the cause and one that raised the consequence.
    order = sorted(failures, key=lambda rank: (failures[rank].timestamp, failures[rank].exitcode == ended,
                                               failures[rank].exitcode >= 0, rank))  # fmt: skip
    for rank in order:
        failure = failures[rank]
        if failure.exitcode >= 0:
            how = f"exit code {failure.exitcode}"
        else:
            name = signal.Signals(-failure.exitcode).name
            how = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        if rank == order[0] or failure.exitcode != ended:
            say(
                f"rank {rank} failed: {how} (local rank {failure.local_rank}, pid {failure.pid}, "
                f"{socket.gethostname()})"
            )
    if ranks > 1:
        say("the other ranks were ended")
    return exit_code(failures[order[0]].exitcode)


def _explain(error: RuntimeError, job: Job) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"port {job.master_port} is in use on this host; give another --master_port, or none for a free one"
    if job.nodes > 1:
        return f"the {job.nodes} hosts did not meet at {job.master_addr}:{job.master_port}: {text}"
    return text


class _Interrupted(Exception):
    """A signal came before torchrun could take it."""


class _OrderlyEnd:
    """Within this context a signal ends the ranks: the first in order, the second at once.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> _OrderlyEnd:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._raise_once) for number in STOP_SIGNALS}
        self._raised = False
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()

    def exit_code(self) -> int:
        """128 + n for signal n."""
        return 128 + (self.signal or signal.SIGTERM)

    def _raise_once(self, number: int, frame: Any) -> None:
        """In the main thread, as soon as it runs Python: what torchrun takes for SIGTERM."""
        self.signal = self.signal or number
        logging.disable(logging.WARNING)  # torchrun's account of who gets which signal
        if self._raised:
            return
        self._raised = True
        if "torch.distributed.elastic.multiprocessing.api" in sys.modules:
            from torch.distributed.elastic.multiprocessing.api import SignalException

            raise SignalException("interrupted", signal.SIGTERM)
        raise _Interrupted

    def _watch(self) -> None:
        """In a thread of its own: hears signals even while the main thread is inside C++."""
        number = self._next()
        if number is None:
            return
        self.signal = self.signal or number
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            second = self._next(timeout=2.0)
            if second in STOP_SIGNALS:
                say("second signal: killing all ranks")
                break
            if not _children():
                break  # nothing is running, and yet the main thread has not come back
        _kill(_children())
        sys.stdout.flush()
        os._exit(self.exit_code())

    def _next(self, timeout: float | None = None) -> int | None:
        """The next signal of interest; None after ``timeout`` seconds or when the context has ended."""
        self._reader.settimeout(timeout)
        while True:
            try:
                data = self._reader.recv(1)
            except TimeoutError:
                return None
            if not data:  # the context has ended: wait here for the process to end
                threading.Event().wait()
            if data[0] in STOP_SIGNALS:
                return data[0]


def _children() -> list[Any]:
    import psutil

    with contextlib.suppress(psutil.Error):
        alive = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive
    return []


def _kill(processes: list[Any]) -> None:
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _end_with_standard_input() -> None:
    """Wait for the end of standard input, then ask this process to end."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
