"""``zero-course launch``: start a script once for each rank, on this host or on several.

Options are spelled as DeepSpeed spells them; this file reads them. Rendezvous, the ranks' environment (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and restarts are torchrun's: its agent runs inside this process
(:mod:`.agent`), which adds what a person meets: a port that is never taken, which rank failed and how, and a Ctrl-C
that leaves nothing running. Several hosts are started by :mod:`.remote`.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .hosts import LaunchError, limit, read_hostfile, select
from .job import LIFELINE, Job, route_to, say

DEFAULT_CPU_RANKS = 2


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
