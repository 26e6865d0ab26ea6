"""A job as the launcher's parts hand it on: what one host runs, and the small things that all parts need."""

from __future__ import annotations

import random
import signal
import socket
import sys
from dataclasses import dataclass, field

from .hosts import LaunchError

DEFAULT_PORT = 29500  # torch's and DeepSpeed's, for hosts that are started by hand and must agree
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIFELINE = "ZERO_COURSE_LIFELINE"  # set by the host that started this one: end when standard input ends


@dataclass(frozen=True)
class Job:
    """One host's part of a job.

    Attributes:
        script, arguments: what every rank runs; a module's name with ``module``.
        ranks: processes on this host.
        nodes, node_rank: hosts in the job, and which of them this is.
        master_addr, master_port: where ranks meet; a free port of this host if the port is None.
        local_addr: this host's address as the others see it.
        max_restarts: how often all ranks are started anew after a failure. With several hosts, ranks then follow
            the hosts' addresses rather than their node ranks.
        module: run the script as ``python -m``.
        environment: variables to set for the ranks.
    """

    script: str
    arguments: list[str]
    ranks: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    max_restarts: int = 0
    module: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def torchrun_options(self) -> list[str]:
        """What stands between ``python -m torch.distributed.run`` and the script."""
        place = self.master_addr or "127.0.0.1"
        if self.nodes == 1 and self.master_port is None:
            # The agent's own store on a port that the kernel chooses: two launches can never clash.
            meeting = ["--standalone", "--local-addr", "127.0.0.1"]
        elif self.max_restarts:
            # Hosts that restart together must find each other again, which a static rendezvous cannot.
            meeting = [
                *("--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-id", "zero_course"),
                *("--rdzv-endpoint", f"{place}:{self.master_port or DEFAULT_PORT}"),
                *("--rdzv-conf", f"is_host={self.node_rank == 0}", "--local-addr", self.local_addr or place),
            ]
        else:
            meeting = [
                *("--nnodes", str(self.nodes), "--node-rank", str(self.node_rank)),
                *("--master-addr", place, "--master-port", str(self.master_port or DEFAULT_PORT)),
            ]
        options = ["--nproc-per-node", str(self.ranks), "--max-restarts", str(self.max_restarts)]
        return [*meeting, *options, *(["--module"] if self.module else [])]

    def launch_arguments(self) -> list[str]:
        """What follows ``zero-course launch`` when this part of the job is started by hand on its host."""
        return [
            *(
                "--num_nodes",
                str(self.nodes),
                "--node_rank",
                str(self.node_rank),
                "--num_gpus",
                str(self.ranks),
            ),
            *("--master_addr", str(self.master_addr), "--master_port", str(self.master_port)),
            *(["--max_restarts", str(self.max_restarts)] if self.max_restarts else []),
            *(["--module"] if self.module else []),
            self.script,
            *self.arguments,
        ]


def describe(job: Job) -> str:
    """One line on what is about to run."""
    import torch

    where = "a GPU each" if torch.cuda.is_available() else "the CPU (no GPU; --num_gpus sets how many)"
    text = f"{job.ranks} rank{'s' * (job.ranks > 1)} on {where}"
    if job.nodes > 1:
        place = f"{job.master_addr}:{job.master_port or DEFAULT_PORT}"
        text = f"host {job.node_rank} of {job.nodes}: {text}, meeting at {place}"
    return ", ".join([text, *(f"{name}={value}" for name, value in job.environment.items())])


def free_port() -> int:
    """A port that is free on this host, below the range from which the kernel gives out its own."""
    for port in random.SystemRandom().sample(range(20000, 30000), 50):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
    raise LaunchError("no free port between 20000 and 30000; give one as --master_port")


def route_to(address: str) -> tuple[str | None, str | None]:
    """This host's address and interface on the way to ``address``; None for what cannot be told."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # sends nothing, but chooses the route
            own = probe.getsockname()[0]
    except OSError:
        return None, None
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return own, name
    return own, None


def exit_code(code: int) -> int:
    """A process's exit code as a shell reports it: 128 + n where signal n ended it (-n to Python)."""
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    """A line of the launcher's own, on standard error; standard output belongs to the script."""
    print(f"zero-course launch: {text}", file=sys.stderr, flush=True)
