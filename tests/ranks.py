"""Ranks for tests: processes that have met in a process group and run functions that tests hand them.

Starting a process that imports torch takes seconds; a test of a collective takes milliseconds. So the ranks of
each world size are started once, when first asked for, and kept for the whole pytest session:

    def summed(length):                          # module level: it is sent by name
        x = torch.full((length,), float(zc.get_rank()))
        zc.Communicator().all_reduce(x)
        return x

    def test_sum():
        for x in run_ranks(3, summed, 5):        # one result a rank, in rank order
            assert x.tolist() == [3.0] * 5

An exception in a rank is raised again in the test, with the rank and its traceback. A rank that dies, and
ranks that do not answer in time, are errors too, with the Python stack of every rank that was still busy;
after either, the next call gets fresh processes. Tests in which ranks are *meant* to die use
:func:`fresh_ranks`, which starts processes for one call only and reports how each one ended.

The ranks share this session's environment but for what `_environment` sets: one thread each, no GPU, a short
timeout for collectives. Each task starts from a random seed that differs between ranks, so that a forgotten
broadcast shows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = 30  # seconds until a collective gives up, by ZERO_COURSE_TIMEOUT
START_TIMEOUT = 120  # seconds for a process to import torch and join its group, on a busy machine
GRACE = 3.0  # seconds that the other ranks get to answer once one has failed
OUTPUT_TAIL = 6000  # characters of a rank's output kept in an error

_END = b"end"  # the task after which a rank ends
Reply = tuple[str, Any]  # ("result", value) | ("error", _Error) | ("died", exit code)


class RankFailure(RuntimeError):
    """A rank raised, died or did not answer; the text says which, with its traceback or stack."""


@dataclass
class Outcome:
    """How one process of :func:`fresh_ranks` ended.

    Attributes:
        rank: its rank.
        result: what the function returned, if it did.
        error: ``"ValueError: the message"`` if it raised, else ``None``.
        traceback: the remote traceback, if it raised.
        exit_code: the exit status; negative for a signal, as in :mod:`subprocess`.
        signal: name of the signal that ended it, e.g. ``"SIGKILL"``, else ``None``.
        hung: it had not ended when time was up, and was killed by :func:`fresh_ranks`.
        output: the end of what it wrote to stdout and stderr, together; with its stack, if it hung.
        seconds: from the start of the function to the end of the process.
    """

    rank: int
    result: Any = None
    error: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    hung: bool = False
    output: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """The function returned and the process ended by itself with status 0."""
        return self.error is None and self.exit_code == 0 and not self.hung


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 90.0) -> list[Any]:
    """Run ``fn(*args)`` on every rank of the pool of ``world_size`` and return the results in rank order.

    Args:
        world_size: number of ranks; 1 is a pool as well.
        fn: a module-level function (sent by name), or a ``functools.partial`` of one for keyword arguments.
        args: anything that can be pickled; each rank gets its own copy.
        timeout: seconds for all ranks to answer.

    Returns:
        one result a rank; tensors arrive as copies.

    Raises:
        RankFailure: a rank died or did not answer.
        Exception: what the first rank to fail raised, caused by a `RankFailure` that holds the rank and its
            traceback.
    """
    __tracebackhide__ = True  # pytest shows the test and the rank's traceback, not this file
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
        pool.start()
    try:
        return pool.run(fn, args, timeout)
    except BaseException:  # also KeyboardInterrupt: what the ranks are in the middle of is not known
        _pools.pop(world_size).close()
        raise


def fresh_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 90.0,
    env: dict[str, str] | None = None,
    init: bool = True,
) -> list[Outcome]:
    """Run ``fn(*args)`` on processes of its own, let them end as they will, and say how each one ended.

    Args:
        world_size: number of processes.
        fn: a module-level function, as in :func:`run_ranks`. It may kill its own process.
        args: anything that can be pickled.
        timeout: seconds until processes that have not ended are killed and marked as hung.
        env: environment variables on top of the usual ones, e.g. ``{"ZERO_COURSE_TIMEOUT": "5"}``.
        init: join the process group before ``fn`` (as the pool does); ``False`` leaves that to ``fn``.

    Returns:
        one `Outcome` a rank, in rank order. Failures are not raised: they are what the test is about.
    """
    pool = _Pool(world_size, env or {}, init)
    try:
        pool.start()
        return pool.run_to_the_end(fn, args, timeout)
    finally:
        pool.close()


def close_pools() -> None:
    """End all pools; for the end of the pytest session."""
    while _pools:
        _pools.popitem()[1].close()


# --- the parent's side -------------------------------------------------------------------------------------


@dataclass
class _Error:
    """An exception on its way from a rank to the test."""

    summary: str
    traceback: str
    pickled: bytes | None  # the exception itself, where it can be pickled


class _Process:
    """One rank's process, the pipe to it, and the file that collects its output."""

    def __init__(self, rank: int, environment: dict[str, str], init: bool) -> None:
        self.rank = rank
        self.output = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115 - closed in close()
        self.connection, theirs = Pipe()
        code = "import json, sys; sys.path[:0] = json.loads(sys.argv[3]); import ranks; ranks.serve()"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), str(int(init)), json.dumps(sys.path)],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.task_starts = 0

    def send(self, task: bytes) -> None:
        """Hand the rank a task, and mark where its output of this task begins."""
        self.task_starts = self.output.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):  # it is dead: its reply will say so
            self.connection.send_bytes(task)

    def reply(self) -> Reply:
        """What the rank sent; waits for it."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return "died", self.popen.wait()

    def tail(self) -> str:
        """The end of what the rank has written since its task began."""
        self.output.seek(self.task_starts)
        return self.output.read().decode(errors="replace")[-OUTPUT_TAIL:].strip()

    def ask_for_stack(self) -> None:
        """Have the process write its Python stacks to its output, even from inside a blocked call."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        self.popen.kill()
        self.popen.wait()
        self.output.close()


class _Pool:
    """``world_size`` processes and the store through which they meet.

    The store lives here, in the parent, as torchrun's agent has it: no port can be taken by another process
    between choosing and using it, and the store outlives a killed rank 0.
    """

    def __init__(self, world_size: int, env: dict[str, str] | None = None, init: bool = True) -> None:
        self.world_size = world_size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[_Process] = []
        for rank in range(world_size):
            environment = _environment(rank, world_size, self.store.port) | (env or {})
            self.processes.append(_Process(rank, environment, init))

    def start(self) -> None:
        """Wait until every process has joined the group."""
        try:
            self._collect(START_TIMEOUT, "while starting")
        except BaseException:
            self.close()
            _pools.pop(self.world_size, None)
            raise

    def run(self, fn: Callable[..., Any], args: Sequence[Any], timeout: float) -> list[Any]:
        """One task, everywhere; see :func:`run_ranks`."""
        __tracebackhide__ = True
        task = _pack(fn, args)
        for process in self.processes:
            process.send(task)
        return self._collect(timeout, f"in {_name(fn)}")

    def _collect(self, timeout: float, where: str) -> list[Any]:
        """One reply from each rank, or an exception for the first that failed."""
        __tracebackhide__ = True
        replies: dict[int, Reply] = {}
        first_failure: int | None = None
        deadline = time.monotonic() + timeout
        while len(replies) < self.world_size:
            waiting = {p.connection: p for p in self.processes if p.rank not in replies}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for process in sorted((waiting[connection] for connection in ready), key=lambda p: p.rank):
                replies[process.rank] = process.reply()
                if replies[process.rank][0] != "result" and first_failure is None:
                    first_failure = process.rank
                    deadline = min(deadline, time.monotonic() + GRACE)
        if first_failure is None and len(replies) == self.world_size:
            return [replies[rank][1] for rank in range(self.world_size)]
        failure = RankFailure(self._describe(replies, first_failure, where, timeout))
        if first_failure is not None and replies[first_failure][0] == "error":
            error: _Error = replies[first_failure][1]
            if error.pickled is not None:
                raise pickle.loads(error.pickled) from failure
        raise failure

    def _describe(
        self, replies: dict[int, Reply], first_failure: int | None, where: str, timeout: float
    ) -> str:
        """All that is known about a failed task, the rank that failed first at the top."""
        busy = [process for process in self.processes if process.rank not in replies]
        for process in busy:
            process.ask_for_stack()
        if busy:
            time.sleep(0.5)  # for the stacks to be written
        parts = []
        if first_failure is None:
            missing = ", ".join(str(process.rank) for process in busy)
            parts.append(f"no answer from rank {missing} of {self.world_size} {where} within {timeout:g} s")
        order = [] if first_failure is None else [first_failure]
        for rank in order + [rank for rank in range(self.world_size) if rank not in order]:
            process = self.processes[rank]
            kind, value = replies.get(rank, ("busy", None))
            if kind == "error":
                parts.append(f"rank {rank} of {self.world_size} failed {where}:\n{value.traceback}")
            elif kind == "died":
                parts.append(f"rank {rank} of {self.world_size} {_ending(value)} {where}")
            elif kind == "busy":
                parts.append(f"rank {rank} of {self.world_size} was still busy {where}")
            if kind != "result" and process.tail():
                parts.append(f"rank {rank} wrote:\n{process.tail()}")
        return "\n".join(parts)

    def run_to_the_end(self, fn: Callable[..., Any], args: Sequence[Any], timeout: float) -> list[Outcome]:
        """One task, everywhere, after which the processes end; see :func:`fresh_ranks`."""
        task = _pack(fn, args)
        started = time.monotonic()
        for process in self.processes:
            process.send(task)
            process.send(_END)
        outcomes = [Outcome(rank) for rank in range(self.world_size)]
        open_connections = {process.connection: process for process in self.processes}
        while open_connections:
            ready = wait(list(open_connections), max(0.0, started + timeout - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                process = open_connections[connection]
                kind, value = process.reply()
                outcome = outcomes[process.rank]
                if kind == "died":  # every process ends so: with its pipe closed
                    outcome.exit_code = value
                    outcome.seconds = time.monotonic() - started
                    del open_connections[connection]
                elif kind == "error":
                    outcome.error, outcome.traceback = value.summary, value.traceback
                else:
                    outcome.result = value
        for process in open_connections.values():
            process.ask_for_stack()
        if open_connections:
            time.sleep(0.5)  # for the stacks to be written
        for process in open_connections.values():
            process.popen.kill()
            outcomes[process.rank].hung = True
            outcomes[process.rank].exit_code = process.popen.wait()
            outcomes[process.rank].seconds = time.monotonic() - started
        for process, outcome in zip(self.processes, outcomes):
            outcome.output = process.tail()
            if outcome.exit_code is not None and outcome.exit_code < 0:
                outcome.signal = signal.Signals(-outcome.exit_code).name
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.close()


_pools: dict[int, _Pool] = {}


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of one rank: this session's, and what torchrun would set."""
    environment = dict(os.environ)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ZERO_COURSE_TIMEOUT": str(COLLECTIVE_TIMEOUT),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _name(fn: Callable[..., Any]) -> str:
    return getattr(getattr(fn, "func", fn), "__qualname__", repr(fn))


def _pack(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    if "<locals>" in getattr(fn, "__qualname__", ""):
        raise TypeError(
            f"{_name(fn)} is a local function; ranks are sent functions by name: move it to module level"
        )
    return pickle.dumps((fn, tuple(args)))


def _ending(exit_code: int) -> str:
    return (
        f"was ended by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"exited with status {exit_code}"
    )


# --- the rank's side ---------------------------------------------------------------------------------------


def serve() -> None:
    """Main function of a rank's process: join the group, then run tasks until told to end.

    Arguments, from ``sys.argv``: the pipe's file descriptor; 1 to join the process group, else 0.
    """
    connection = Connection(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    try:
        if sys.argv[2] == "1":
            from zero_course.comm import init_distributed

            init_distributed()
        reply: Reply = ("result", None)
    except Exception as error:
        reply = ("error", _remember(error))
    connection.send_bytes(pickle.dumps(reply))
    if reply[0] == "error":
        sys.exit(1)
    threading.Thread(target=_receive, args=(connection, tasks), daemon=True).start()
    failed = False
    while (task := tasks.get()) != _END:
        message, raised = _perform(task)
        failed = failed or raised
        connection.send_bytes(message)
        gc.collect()  # models and hooks of one test must not live on into the next
    if failed:
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _perform(task: bytes) -> tuple[bytes, bool]:
    """Runs one task. Returns the reply, packed, and whether the task raised."""
    torch.manual_seed(1000 + int(os.environ["RANK"]))
    try:
        fn, args = pickle.loads(task)
        return pickle.dumps(("result", fn(*args))), False
    except BaseException as error:  # SystemExit and pytest's own exceptions too: the test gets to see it
        return pickle.dumps(("error", _remember(error))), True


def _receive(connection: Connection, tasks: queue.SimpleQueue[bytes]) -> None:
    """Passes tasks on to the main thread; ends the process, even in a blocked call, when pytest is gone."""
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(3)


def _remember(error: BaseException) -> _Error:
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # exceptions with arguments of their own often cannot be rebuilt; the text is kept
        pickled = None
    return _Error(summary, text, pickled)
