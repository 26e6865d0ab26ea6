"""``zero-course report``: what this machine has, and what of the course will and will not run on it.

DeepSpeed's ``ds_report`` in spirit. Where a flag would only be a guess the machine is asked: whether bf16
matrix products are usable on this CPU, for one, is measured in a fraction of a second.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from typing import Annotated, Any

import typer

LIBRARIES = (
    "torch",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "safetensors",
    "transformers",
    "deepspeed",
    "ipyparallel",
)
CPU_FEATURES = {
    "AVX2": "avx2",
    "FMA": "fma",
    "AVX-512": "avx512f",
    "AVX-512 bf16": "avx512_bf16",
    "AVX-512 fp16": "avx512_fp16",
    "AMX bf16": "amx_bf16",
    "AMX int8": "amx_int8",
    "NEON": "asimd",
    "SVE": "sve",
    "ARM bf16": "bf16",
}
COMPILERS = ("gcc", "g++", "clang++", "nvcc", "make", "ninja")
SLOW_BF16 = 4.0  # times fp32's seconds from which bf16 products are called slow


def report(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; sizes in bytes.")
    ] = False,
) -> None:
    """Versions, devices, compilers and backends of this machine, and what will and won't run on it.

    [bold]Examples[/bold]

    zero-course report

    zero-course report --json > results/machine.json
    """
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts)


def gather() -> dict[str, Any]:
    """Everything that ``zero-course report`` prints: sections of plain data, sizes in bytes."""
    facts: dict[str, Any] = {
        "versions": _versions(),
        "cpu": _cpu(),
        "memory": _memory(),
        "gpus": _gpus(),
        "backends": _backends(),
        "compilers": {name: _compiler(name) for name in COMPILERS},
    }
    facts["checks"] = _checks(facts)
    return facts


def _versions() -> dict[str, str | None]:
    from zero_course import __version__

    versions: dict[str, str | None] = {"zero_course": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    versions["system"] = platform.platform()
    return versions


def _cpu() -> dict[str, Any]:
    import torch

    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    present = set(flags[1].split()) if flags else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores": cores,
        "features": None
        if present is None
        else [name for name, flag in CPU_FEATURES.items() if flag in present],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "matmul_seconds": _matmul_seconds(),
    }


def _matmul_seconds(size: int = 128) -> dict[str, float]:
    """Best of a few products of two (size, size) matrices in each dtype."""
    import torch

    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(size, size, dtype=dtype)
        a @ a
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - started)
        seconds[str(dtype).removeprefix("torch.")] = best
    return seconds


def _memory() -> dict[str, int | None]:
    import psutil

    sizes: dict[str, int | None] = {
        "ram": psutil.virtual_memory().total,
        "ram_free": psutil.virtual_memory().available,
    }
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    sizes["container_limit"] = int(limit) if limit.isdigit() else None
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    sizes["shared_memory"] = shared.total if shared else None
    sizes["shared_memory_free"] = shared.free if shared else None
    return sizes


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "memory": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "bf16": torch.cuda.is_bf16_supported(),
            }
        )
    return gpus


def _backends() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    return {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available(),
        "mpi": available and dist.is_mpi_available(),
        "torch_cuda_build": torch.version.cuda,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _compiler(name: str) -> str | None:
    """The line of ``name --version`` that holds a version; None if there is no such command."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"{path} does not answer"
    lines = [line.strip() for line in run.stdout.splitlines() if re.search(r"\d+\.\d+", line)]
    # nvcc's first line with digits is its copyright; the release has a line of its own.
    return next((line for line in lines if "release" in line), lines[0] if lines else path)


def _checks(facts: dict[str, Any]) -> list[dict[str, str]]:
    """What runs here: a list of {what, status, why}; status is "runs", "slow" or "NOT RUN"."""
    checks = []

    def check(what: str, runs: bool, why: str, otherwise: str = "NOT RUN") -> None:
        checks.append({"what": what, "status": "runs" if runs else otherwise, "why": why})

    gpus, backends, cpu = facts["gpus"], facts["backends"], facts["cpu"]
    if gpus:
        about_gpus = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}"
    elif backends["torch_cuda_build"] is None:
        about_gpus = f"this torch ({facts['versions']['torch']}) is a CPU build"
    elif backends["cuda_visible_devices"] in ("", "-1"):
        about_gpus = "CUDA_VISIBLE_DEVICES hides the GPUs"
    else:
        about_gpus = "torch.cuda.is_available() is False: no GPU, or no driver for it"
    check(
        "ranks as processes on the CPU, over gloo",
        backends["gloo"],
        "" if backends["gloo"] else "torch without gloo",
    )
    check("ranks on GPUs, over NCCL", bool(gpus) and backends["nccl"], about_gpus)
    check("CUDA speed, overlap and allocator checks", bool(gpus), about_gpus)
    if len(gpus) == 1:
        check("NCCL between GPUs", False, "one GPU: NCCL refuses two ranks on one")
    cores = cpu["cores"]
    why = f"{cores} core{'s' * (cores > 1)}; more ranks than cores take turns"
    check("2 ranks at full speed", cores >= 2, why, "slow")
    times = cpu["matmul_seconds"]
    ratio = times["bfloat16"] / times["float32"]
    check(
        "bf16 matrix products on the CPU",
        ratio < SLOW_BF16,
        f"{ratio:.1f}x the time of fp32, measured on 128x128"
        + ("" if ratio < SLOW_BF16 else ": compute in fp32"),
        "slow",
    )
    shared = facts["memory"]["shared_memory_free"]
    check("shared memory between ranks", bool(shared and shared >= 2**28), _shared_memory(shared))
    gxx, nvcc = facts["compilers"]["g++"], facts["compilers"]["nvcc"]
    check("C++ kernels, built here", bool(gxx), gxx or "no g++")
    check("CUDA kernels, built here", bool(nvcc), nvcc or "no nvcc")
    check(
        "several hosts from one command (ssh)",
        shutil.which("ssh") is not None,
        shutil.which("ssh") or "no ssh",
    )
    namespaces, why = _own_network()
    check("traffic against interface counters (own network namespace)", namespaces, why)
    linux = sys.platform.startswith("linux")
    check("resident memory and its peak (/proc)", linux, "" if linux else f"{sys.platform} has no /proc")
    found = importlib.util.find_spec("deepspeed") is not None
    check(
        "comparison with DeepSpeed itself",
        found,
        "" if found else "not installed: pip install 'zero_course[bench]'",
    )
    return checks


def _shared_memory(free: int | None) -> str:
    from zero_course.memory import format_bytes

    if free is None:
        return "no /dev/shm"
    return f"{format_bytes(free, binary=True)} free in /dev/shm" + (
        "" if free >= 2**28 else "; docker run --shm-size=2g gives more"
    )


def _own_network() -> tuple[bool, str]:
    """Whether a process may have a network namespace of its own."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return False, "no unshare command"
    try:
        run = subprocess.run(
            [unshare, "--net", "true"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return run.returncode == 0, "" if run.returncode == 0 else run.stderr.strip().splitlines()[-1]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zero_course.memory import format_bytes

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        console.print(Text(title, style="bold"))
        grid = Table.grid(padding=(0, 2))
        for name, value in rows:
            grid.add_row("  " + name, Text(value))
        console.print(grid)

    section("Versions", [(name, value or "not installed") for name, value in facts["versions"].items()])
    cpu, sizes = facts["cpu"], facts["memory"]
    features = (
        "unknown" if cpu["features"] is None else ", ".join(cpu["features"]) or "none of those asked for"
    )
    devices = [
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores usable"),
        ("CPU features", f"{features}; torch uses {cpu['torch_uses']}"),
    ]
    for name, size in sizes.items():
        devices.append((name.replace("_", " "), "none" if size is None else format_bytes(size, binary=True)))
    for index, gpu in enumerate(facts["gpus"]):
        about = f"{gpu['name']}, {format_bytes(gpu['memory'], binary=True)}, capability {gpu['capability']}"
        devices.append((f"GPU {index}", about))
    section("Devices", devices if facts["gpus"] else [*devices, ("GPU", "none")])
    backends = {
        name: str(value) if value is not None else "none" for name, value in facts["backends"].items()
    }
    section("Backends", [(name.replace("_", " "), value) for name, value in backends.items()])
    section("Compilers", [(name, value or "not found") for name, value in facts["compilers"].items()])
    console.print(Text("What runs here", style="bold"))
    colors = {"runs": "green", "slow": "yellow", "NOT RUN": "red"}
    grid = Table.grid(padding=(0, 2))
    for check in facts["checks"]:
        status = Text(check["status"], style=colors[check["status"]])
        grid.add_row("  " + check["what"], status, Text(check["why"]))
    console.print(grid)
