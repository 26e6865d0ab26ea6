"""Several hosts from one command: each host's launcher is started over ssh, and they end together.

For every host runs ``ssh HOST 'cd HERE && exec env ... python -m zero_course.cli launch --node_rank I ...'``. The
pipe to its standard input is a lifeline: when it closes, because this process closes it, dies or loses the
connection, the launcher at the other end ends its ranks. So a rank survives neither Ctrl-C here nor a crash here,
and a host that fails takes the others with it rather than leave them waiting.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import IO, Any

import typer

from .hosts import LaunchError, Pool
from .job import LIFELINE, STOP_SIGNALS, Job, exit_code, free_port, say

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15"
GRACE = 20.0  # seconds for a host's ranks to end once its lifeline is cut; a little more than agent.GRACE
EXPORTED = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "ZERO_COURSE_", "PYTHON", "HF_", "OMP_NUM_THREADS")


def run(job: Job, pool: Pool, ssh: str | None, dry_run: bool) -> int:
    """Run ``job`` on the hosts and slots of ``pool``.

    Args:
        job: the script and its options; ranks and node ranks are filled in from the pool.
        pool: hosts and their slots, in order of node rank.
        ssh: command that reaches a host; see :func:`command_for`.
        dry_run: print the commands, start nothing.

    Returns:
        the exit code: 0, that of the host that failed first, 128 + n for signal n.

    Raises:
        LaunchError: no address at which hosts can meet, a bad ``ssh``.
    """
    hosts = list(pool)
    master = job.master_addr or hosts[0]
    if len(hosts) > 1 and job.master_addr is None and hosts[0] in ("localhost", "127.0.0.1"):
        raise LaunchError(
            f"the first host is {hosts[0]!r}, which every host takes for itself; name it as the others see it, "
            "or give its address as --master_addr"
        )
    job = replace(job, nodes=len(hosts), master_addr=master, master_port=job.master_port or free_port())
    commands = {}
    for node_rank, (host, slots) in enumerate(pool.items()):
        commands[host] = command_for(replace(job, ranks=len(slots), node_rank=node_rank), host, slots, ssh)
    if dry_run:
        for command in commands.values():
            typer.echo(shlex.join(command))
        return 0
    say(f"{len(hosts)} hosts ({', '.join(hosts)}), meeting at {job.master_addr}:{job.master_port}")
    return _Hosts(commands).run()


def command_for(job: Job, host: str, slots: list[int], ssh: str | None) -> list[str]:
    """The command that starts ``job`` on ``host``.

    Args:
        job: that host's part.
        host: its name; this host itself is reached through a shell, unless ``ssh`` is given.
        slots: its slots; GPUs by index where they are not just the first ones.
        ssh: the words before the host's name, ``ssh`` with sensible options by default. With ``{host}`` in it, the
            name goes there. What is to be run follows as one word, for a shell.

    Raises:
        LaunchError: ``ssh`` is empty or its quotes do not match.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    variables[LIFELINE] = "1"
    if slots != list(range(len(slots))):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    words = [f"{name}={value}" for name, value in sorted(variables.items())]
    program = [sys.executable, "-m", "zero_course.cli", "launch", *job.launch_arguments()]
    what = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*words, *program])}"
    if ssh is None and host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()):
        return ["sh", "-c", what]
    try:
        reach = shlex.split(SSH if ssh is None else ssh)
    except ValueError as error:
        raise LaunchError(f"--ssh {ssh!r}: {error}") from None
    if not reach:
        raise LaunchError("--ssh is empty; leave it out for plain ssh")
    if any("{host}" in word for word in reach):
        return [*(word.replace("{host}", host) for word in reach), what]
    return [*reach, host, what]


class _Hosts:
    """The running hosts: their output goes through here, and they end together."""

    def __init__(self, commands: dict[str, list[str]]) -> None:
        self.commands = commands
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.readers: list[threading.Thread] = []
        self.signals: list[int] = []

    def run(self) -> int:
        """Start all, forward their output, wait for all; end all when one fails or a signal comes."""
        handlers = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        try:
            for host, command in self.commands.items():
                if not self.signals:
                    self._start(host, command)
            code = self._wait()
        finally:
            self._cut(kill=True)
            for reader in self.readers:
                reader.join(timeout=2)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.signals:
            say(f"{signal.Signals(self.signals[0]).name}: all hosts ended")
            return 128 + self.signals[0]
        return code

    def _note(self, number: int, frame: Any) -> None:
        self.signals.append(number)

    def _start(self, host: str, command: list[str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C here is ours to pass on, in order
            )
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]!r} for host {host}: {error.strerror}") from None
        self.processes[host] = process
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_forward, args=(host, source, target), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _wait(self) -> int:
        """Exit code of the first host that fails, 0 if none does."""
        failed, deadline = 0, None
        while True:
            codes = {host: process.poll() for host, process in self.processes.items()}
            if all(code is not None for code in codes.values()):
                break
            if not failed and not self.signals:
                for host, code in codes.items():
                    if code:
                        failed = exit_code(code)
                        say(f"host {host} failed with exit code {failed}; ending the others")
                        break
            if (failed or self.signals) and deadline is None:
                deadline = time.monotonic() + GRACE
                self._cut()
            if deadline is not None and (time.monotonic() > deadline or len(self.signals) > 1):
                self._cut(kill=True)
            time.sleep(0.05)
        return failed or next((exit_code(code) for code in codes.values() if code), 0)

    def _cut(self, kill: bool = False) -> None:
        """Close the lifelines; with ``kill``, kill what is still running at this end."""
        for process in self.processes.values():
            if process.stdin and not process.stdin.closed:
                process.stdin.close()
            if kill and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _forward(host: str, source: IO[bytes] | None, target: Any) -> None:
    """Copy lines to ``target``, each with its host before it."""
    for line in source or ():
        target.write(f"{host}: {line.decode(errors='replace').rstrip()}\n")
        target.flush()
