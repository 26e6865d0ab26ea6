"""Fresh processes for every measurement, without paying for their imports every time.

A template process imports torch (another one DeepSpeed, too) and then does nothing but fork: for each measurement
one child a rank, which measures, reports and ends. So a contender never meets what another left behind in caches,
allocators or hooks, its memory is its own, a crash harms nobody else, and only one contender is alive at a time,
on any machine that can hold that one. The fork is safe because the template never runs a kernel and has no
threads.

The template is in a session of its own: Ctrl-C reaches the bench alone, which then ends the template's whole
process group. When the bench is killed, the template's standard input ends, and it ends its children.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# torch itself imports some of these late, at the first use of an optimizer or of fully_shard
IMPORTED_BY_ALL = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "zero_course",
    "bench.measurement",
)
GRACE = 3.0  # seconds that a rank gets to report once another has failed


class Failed(RuntimeError):
    """A measurement that came to nothing; the text says why, with the end of what the ranks wrote."""


class Template:
    """The bench's end of a template process.

    Args:
        module: what the template imports before it forks: ``"torch"`` or ``"deepspeed"``.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._process: subprocess.Popen[bytes] | None = None

    def measure(self, timeout: float, **request: Any) -> list[dict[str, Any]]:
        """Take one measurement; ``request`` holds the arguments of :func:`.measurement.measure`.

        Returns:
            what each rank reported, in rank order.

        Raises:
            Failed: a rank raised, was killed, or did not end within ``timeout`` seconds.
        """
        if self._process is None:
            self._start()
        written = self._log.seek(0, os.SEEK_END)
        answer = self._ask({"timeout": timeout, **request})
        if "error" in answer:
            raise Failed(answer["error"] + self._tail(written))
        return answer["ranks"]

    def close(self) -> None:
        """End the template and whatever it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None

    def _start(self) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        environment["DS_ACCELERATOR"] = "cpu"
        environment["PYTHONWARNINGS"] = "ignore"
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.forked_ranks", self.module],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        ready = self._read()
        if "error" in ready:
            self.close()
            raise Failed(ready["error"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _read will say how it ended
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self.close()
        return {"error": f"the process that forks the ranks {_ending(code)}"}

    def _tail(self, start: int, limit: int = 2000) -> str:
        self._log.seek(start)
        text = self._log.read().decode(errors="replace").strip()[-limit:]
        return f"\nThe ranks wrote:\n{text}" if text else ""


# -- the template's side -------------------------------------------------------------------------------------


def main() -> None:
    """Import, then serve: a request a line on standard input, an answer a line on what was standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    try:
        for module in (sys.argv[1], *IMPORTED_BY_ALL):
            importlib.import_module(module)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__} while importing: {error}"}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    while line := sys.stdin.buffer.readline():
        answers.write(json.dumps(_fork_ranks(json.loads(line))) + "\n")


def _fork_ranks(request: dict[str, Any]) -> dict[str, Any]:
    from .contenders import WORLD_SIZE

    timeout = request.pop("timeout")
    deadline = time.monotonic() + timeout
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lines: dict[int, int] = {}  # what a rank reports on → its rank
        pids = []
        for rank in range(WORLD_SIZE):
            line, theirs = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, listener, theirs, timeout, request)
            os.close(theirs)
            lines[line] = rank
            pids.append(pid)
    reports: dict[int, dict[str, Any]] = {}
    ends: dict[int, int] = {}
    texts = dict.fromkeys(lines, b"")
    open_lines = set(lines)
    while open_lines:
        ready, _, _ = select.select([*open_lines, 0], [], [], max(0.0, deadline - time.monotonic()))
        if 0 in ready:  # the bench is gone
            os.killpg(0, signal.SIGKILL)
        if not ready:
            break
        for line in ready:
            text = os.read(line, 65536)
            texts[line] += text
            if text:
                continue
            open_lines.discard(line)
            rank = lines[line]
            ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            if ends[rank] == 0:
                reports[rank] = json.loads(texts[line])
            else:
                deadline = min(deadline, time.monotonic() + GRACE)
    late = [rank for rank in range(WORLD_SIZE) if rank not in ends]
    for rank in late:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    for line in lines:
        os.close(line)
    if len(reports) == WORLD_SIZE:
        return {"ranks": [reports[rank] for rank in range(WORLD_SIZE)]}
    for line, rank in lines.items():
        if ends.get(rank) == 1 and texts[line]:
            return {"error": f"rank {rank} failed: {json.loads(texts[line])['error']}"}
    for rank, code in ends.items():
        if code:
            return {"error": f"rank {rank} {_ending(code)}"}
    return {"error": f"no answer from rank {', '.join(map(str, late))} within {timeout:g} s"}


def _be_rank(rank: int, listener: socket.socket, line: int, timeout: float, request: dict[str, Any]) -> None:
    """What a forked child does; never returns."""
    code = 1
    try:
        import torch.distributed as dist

        from .measurement import measure, meet

        os.close(0)
        meet(rank, listener, timeout)
        report = measure(rank, **request)
        code = 0
    except BaseException as error:
        report = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc().strip()}"}
    with os.fdopen(line, "w") as stream:
        stream.write(json.dumps(report))
        stream.flush()
        if code == 0:
            dist.barrier()  # nobody leaves while another still needs the store
    os._exit(code)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


if __name__ == "__main__":
    main()
