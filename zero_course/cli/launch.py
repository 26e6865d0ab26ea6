"""``zero-course launch``: start a script once for each rank, on this host or on several.

Options are spelled as DeepSpeed spells them. Rendezvous, the ranks' environment (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT) and restarts are torchrun's, whose agent runs inside this process; around it this file
adds what a person meets: how many ranks by default, a port that is never taken, which rank failed and how, and a
Ctrl-C that leaves nothing running. Several hosts are :mod:`.remote`'s.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shlex
import socket
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer

from .hosts import LaunchError, limit, read_hostfile, select

DEFAULT_PORT = 29500  # torch's and DeepSpeed's, for hosts that are started by hand and must agree
DEFAULT_CPU_RANKS = 2
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


def launch(
    script: Annotated[
        str, typer.Argument(help="Script that every rank runs (a module's name with --module).")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, passed on untouched whatever they look like.")
    ] = None,
    hostfile: Annotated[
        str | None,
        typer.Option(
            "--hostfile", "-H", metavar="FILE", help="'host slots=N' lines; hosts are started over ssh."
        ),
    ] = None,
    include: Annotated[
        str,
        typer.Option(
            "--include", "-i", metavar="SPEC", help="Only host1:0,1@host2 (slots 0, 1; all of host2)."
        ),
    ] = "",
    exclude: Annotated[
        str, typer.Option("--exclude", "-e", metavar="SPEC", help="All but these, written the same way.")
    ] = "",
    num_nodes: Annotated[
        int | None,
        typer.Option("--num_nodes", metavar="N", min=1, help="Hosts; the first N of the host file."),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            *("--num_gpus", "--num_accelerators"),
            metavar="N",
            min=1,
            help="Ranks on each host. Default: its GPUs, or 2 processes on the CPU if it has none.",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node_rank", metavar="R", min=0, help="Which host this is, started by hand."),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master_addr", metavar="ADDR", help="Address of host 0, where ranks meet.")
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master_port",
            metavar="PORT",
            min=1,
            max=65535,
            help="Its port. Default: a free one; 29500 by hand.",
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max_restarts", metavar="N", min=0, help="Start all ranks anew this often.")
    ] = 0,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run the script as 'python -m script'.")
    ] = False,
    ssh: Annotated[
        str | None,
        typer.Option(
            "--ssh",
            metavar="COMMAND",
            help="How to reach a host: 'ssh -p 2222', or with the host's place marked, 'ip netns exec {host} sh -c'.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry_run", help="Print the commands, start nothing.")] = False,
) -> None:
    """Start a script once for each rank: on this host, or on every host of a host file.

    Exits with the code of the rank that failed first, 128 + n if signal n ended it, 130 after Ctrl-C.

    [bold]Examples[/bold]

    zero-course launch train.py --deepspeed ds_config.json

    zero-course launch --num_gpus 4 train.py --steps 100

    zero-course launch --hostfile hosts --include 'worker-0@worker-1:0,2' train.py

    By hand, once on each host: zero-course launch --num_nodes 2 --node_rank 0 --master_addr worker-0 train.py
    """
    lifeline = os.environ.pop(LIFELINE, None) is not None
    try:
        if hostfile is not None and node_rank is not None:
            raise LaunchError(
                "--node_rank is for hosts started by hand; with --hostfile hosts are numbered as in it"
            )
        if (include or exclude) and (num_nodes is not None or num_gpus is not None):
            raise LaunchError(
                "--include and --exclude say which slots to use; leave out --num_nodes and --num_gpus"
            )
        job = Job(
            script,
            list(arguments or []),
            ranks=num_gpus or 1,
            master_addr=master_addr,
            master_port=master_port,
            max_restarts=max_restarts,
            module=module,
        )
        if hostfile is not None:
            pool = limit(select(read_hostfile(hostfile), include, exclude), num_nodes, num_gpus)
            from . import remote

            raise typer.Exit(remote.run(job, pool, ssh, dry_run))
        job = _on_this_host(job, num_nodes, num_gpus, node_rank, include, exclude)
        if dry_run:
            variables = [f"{name}={value}" for name, value in job.environment.items()]
            torchrun = [*variables, sys.executable, "-m", "torch.distributed.run", *job.torchrun_options()]
            typer.echo(shlex.join([*torchrun, "--", script, *job.arguments]))
            return
        _check_script(job)
        from . import agent

        raise typer.Exit(agent.run(job, lifeline=lifeline))
    except LaunchError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:  # before there were ranks; from then on it is the agent's
        raise typer.Exit(130) from None


def _on_this_host(
    job: Job, num_nodes: int | None, num_gpus: int | None, node_rank: int | None, include: str, exclude: str
) -> Job:
    """The job with this host's ranks, and its place among hosts that are started by hand."""
    nodes = num_nodes or 1
    if nodes > 1 and (node_rank is None or job.master_addr is None):
        example = f"--num_nodes {nodes} --node_rank 0 --master_addr ADDRESS_OF_HOST_0"
        raise LaunchError(
            f"--num_nodes {nodes} needs a --hostfile to start the hosts from here, or, started by hand on each host, "
            f"its --node_rank and the --master_addr: zero-course launch {example} {job.script}"
        )
    if (node_rank or 0) >= nodes:
        raise LaunchError(
            f"--node_rank {node_rank} is not below --num_nodes {nodes}; ranks of hosts begin at 0"
        )
    # While it waits for the other hosts torch would answer a Ctrl-C with a trace of C++ frames. It reads this once.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"} if "TORCH_CPP_LOG_LEVEL" not in os.environ else {}
    os.environ.update(quiet)
    import torch

    for name in quiet:
        del os.environ[name]  # the ranks shall speak
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = num_gpus or gpus or DEFAULT_CPU_RANKS
    environment = {}
    if include or exclude:
        slots = select(
            {"localhost": list(range(gpus or max(DEFAULT_CPU_RANKS, os.cpu_count() or 1)))}, include, exclude
        )
        ranks = len(slots["localhost"])
        if gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # slots count what the user left visible
            names = visible.split(",") if visible else [str(index) for index in range(gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[slot] for slot in slots["localhost"])
    if gpus and ranks > gpus:
        raise LaunchError(
            f"{ranks} ranks, but {gpus} GPU{'s are' if gpus > 1 else ' is'} visible, and NCCL takes one rank a GPU; "
            f"use --num_gpus {gpus}, or CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"
        )
    if ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = "1"
    own_address = None
    if nodes > 1:
        own_address, interface = route_to(str(job.master_addr))
        if interface and not gpus and "GLOO_SOCKET_IFNAME" not in os.environ:
            # Otherwise gloo takes what the host's own name resolves to, which may well be 127.0.1.1.
            environment["GLOO_SOCKET_IFNAME"] = interface
    if job.max_restarts:
        # Ranks that start again must not read addresses that their predecessors left in the agent's store.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return replace(
        job,
        ranks=ranks,
        nodes=nodes,
        node_rank=node_rank or 0,
        local_addr=own_address,
        environment=environment,
    )


def describe(job: Job) -> str:
    """One line on what is about to run."""
    import torch

    where = "a GPU each" if torch.cuda.is_available() else "the CPU (no GPU; --num_gpus sets how many)"
    text = f"{job.ranks} rank{'s' * (job.ranks > 1)} on {where}"
    if job.nodes > 1:
        place = f"{job.master_addr}:{job.master_port or DEFAULT_PORT}"
        text = f"host {job.node_rank} of {job.nodes}: {text}, meeting at {place}"
    return ", ".join([text, *(f"{name}={value}" for name, value in job.environment.items())])


def _check_script(job: Job) -> None:
    if not job.module:
        if not os.path.exists(job.script):
            raise LaunchError(f"no script {job.script!r} in {os.getcwd()}")
        return
    sys.path.insert(0, os.getcwd())  # where `python -m` will look
    try:
        found = importlib.util.find_spec(job.script.split(".")[0]) is not None
    finally:
        sys.path.pop(0)
    if not found:
        raise LaunchError(
            f"no module {job.script!r}" + (", leave out --module" if Path(job.script).exists() else "")
        )


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


def say(text: str) -> None:
    """A line of the launcher's own, on standard error; standard output belongs to the script."""
    print(f"zero-course launch: {text}", file=sys.stderr, flush=True)
