"""The house keeps its plan: imports point down only, and only comm's transport talks to other ranks."""

from __future__ import annotations

import ast
import graphlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zero_course"

# From the ground up. A room is a module or a small package; it imports rooms of lower floors, and on the ground
# and the engine's floor also its neighbours, as long as that makes no circle.
FLOORS = [
    {"ledger", "transport", "watchdog", "comm", "flat", "memory", "config"},
    {"data_parallel"},
    {"zero1"},
    {"zero2"},
    {"zero3", "zero"},
    {"models", "data"},
    {"engine", "checkpoint", "monitor", "lr_schedules", "utils"},
    {"cli", "demo", "lab"},
]
FLOOR_OF = {room: number for number, floor in enumerate(FLOORS) for room in floor}
BY_THEMSELVES = {"models", "data"}  # know nothing of the engine, not even of its ground floor
THE_PUBLIC_FACE = "zero_course"  # zero_course/__init__.py, which the topmost floor may import

COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "P2POp",
}  # fmt: skip
# the same on a process group object, under names that no Communicator has
GROUP_COLLECTIVES = {
    "allgather", "_allgather_base", "allreduce", "alltoall", "alltoall_base", "_reduce_scatter_base",
}  # fmt: skip


def room_of(path: Path) -> str:
    """``zero_course/cli/launch.py`` → ``cli``; the package's own ``__init__.py`` → `THE_PUBLIC_FACE`."""
    first = path.relative_to(PACKAGE).parts[0]
    return THE_PUBLIC_FACE if first == "__init__.py" else first.removesuffix(".py")


def imported_rooms(source: str, path: Path) -> set[str]:
    """Rooms of the package that a file imports, anywhere in it, other than its own."""
    package = ["zero_course", *path.relative_to(PACKAGE).parts[:-1]]
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            # of `from . import a, b` the names are the rooms
            modules += [[*module, alias.name] for alias in node.names] if len(module) == 1 else [module]
    rooms = set()
    for module in modules:
        if module[0] == "zero_course":
            is_room = len(module) > 1 and (module[1] in FLOOR_OF or (PACKAGE / f"{module[1]}.py").exists())
            rooms.add(module[1] if is_room else THE_PUBLIC_FACE)
    return rooms - {room_of(path)}


def wrong_imports(source: str, path: Path) -> set[str]:
    """Rooms that a file imports and must not."""
    room = room_of(path)
    floor = FLOOR_OF[room]
    may_have_neighbours = floor in (FLOOR_OF["comm"], FLOOR_OF["zero3"], FLOOR_OF["engine"], FLOOR_OF["cli"])
    wrong = set()
    for other in imported_rooms(source, path):
        if other == THE_PUBLIC_FACE:
            allowed = floor == len(FLOORS) - 1
        elif room in BY_THEMSELVES:
            allowed = False
        else:
            allowed = FLOOR_OF[other] < floor or (FLOOR_OF[other] == floor and may_have_neighbours)
        if not allowed:
            wrong.add(other)
    return wrong


def collective_calls(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a collective of torch.distributed in a piece of source."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if node.module.startswith("torch.distributed") and alias.name in COLLECTIVES | {"*"}:
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):  # a module by yet another name: d = torch.distributed
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = dotted(node.value, aliases)
            if value.startswith("torch"):
                aliases[node.targets[0].id] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = dotted(node, aliases)
            if (
                name.startswith("torch.distributed") and node.attr in COLLECTIVES
            ) or node.attr in GROUP_COLLECTIVES:
                yield node.lineno, name or node.attr


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """``dist.all_reduce`` → ``torch.distributed.all_reduce``; ``""`` for what is no chain of names."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, aliases)
        return f"{base}.{node.attr}" if base else ""
    return ""


def sources() -> Iterator[tuple[Path, str]]:
    """All Python of the engine, the labs and the chapters (a notebook's code cells as one source)."""
    for folder in ("zero_course", "labs", "chapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, path.read_text()
        for path in sorted((ROOT / folder).rglob("*.ipynb")):
            cells = json.loads(path.read_text())["cells"]
            lines = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
            yield (
                path,
                "\n".join(line for line in lines.split("\n") if not line.lstrip().startswith(("%", "!"))),
            )


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if room_of(path) != THE_PUBLIC_FACE)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in FLOOR_OF, (
        f"{room} has no place in the house yet: put it on a floor here and in CONTRIBUTING.md"
    )
    wrong = wrong_imports(path.read_text(), path)
    assert not wrong, f"{room} (floor {FLOOR_OF[room]}) must not import {', '.join(sorted(wrong))}"


def test_imports_make_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        graph.setdefault(room_of(path), set()).update(
            imported_rooms(path.read_text(), path) - {THE_PUBLIC_FACE}
        )
    graphlib.TopologicalSorter(graph).prepare()


def test_each_rung_builds_on_the_one_below() -> None:
    for lower, upper in [("data_parallel", "zero1"), ("zero1", "zero2"), ("zero2", "zero3")]:
        path = PACKAGE / f"{upper}.py"
        assert lower in imported_rooms(path.read_text(), path)


def test_only_the_transport_calls_collectives() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, source in sources()
        if path != PACKAGE / "transport.py"
        for line, name in collective_calls(source)
    ]
    assert not found, "use a zero_course.Communicator instead, whose ledger sees the call:\n" + "\n".join(
        found
    )


def test_the_check_sees_the_collectives_of_the_transport() -> None:
    names = {name.rsplit(".")[-1] for _, name in collective_calls((PACKAGE / "transport.py").read_text())}
    assert {"isend", "irecv", "all_reduce", "reduce_scatter_single"} <= names


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed\ntorch.distributed.isend(x, 1)",
        "from torch import distributed as d\nd.broadcast(x, 0)",
        "from torch.distributed import all_gather",
        "from torch.distributed.distributed_c10d import reduce_scatter_tensor as f",
        "import torch\nd = torch.distributed\nd.all_to_all_single(x, y)",
        "import torch.distributed as dist\ncall = dist.all_reduce\ncall(x)",
        "from torch.distributed import *",
        "def f(group, x):\n    group.allreduce([x])",
        "import torch.distributed.nn.functional as fn\nfn.all_reduce(x)",
    ],
)
def test_the_check_finds_a_collective(source: str) -> None:
    assert list(collective_calls(source))


@pytest.mark.parametrize(
    "source",
    [
        "comm.all_reduce(x)",
        "import zero_course as zc\nzc.Communicator().broadcast(x)",
        "import torch\ntorch.gather(x, 0, i)",
        "import torch\nx.scatter(0, i, y)",
        "import torch.distributed as dist\ndist.is_initialized()",
    ],
)
def test_the_check_lets_other_calls_pass(source: str) -> None:
    assert not list(collective_calls(source))


@pytest.mark.parametrize(
    ("source", "file", "wrong"),
    [
        ("from .zero1 import Zero1", "data_parallel.py", {"zero1"}),
        ("from . import zero3", "zero2.py", {"zero3"}),
        ("import zero_course.engine", "comm.py", {"engine"}),
        ("from zero_course import comm, engine", "zero1.py", {"engine"}),
        ("from zero_course.comm import get_rank", "models/gpt.py", {"comm"}),
        ("from ..engine import initialize", "models/gpt.py", {"engine"}),
        ("import zero_course as zc", "zero1.py", {"zero_course"}),
        ("def f():\n    from .cli import app", "engine.py", {"cli"}),
        ("from .comm import Communicator\nfrom .flat import Bucket", "data_parallel.py", set()),
        ("from .ledger import Ledger", "comm.py", set()),
        ("from ..engine import initialize\nfrom .launch import launch", "cli/__init__.py", set()),
        ("import zero_course as zc", "demo.py", set()),
    ],
)
def test_the_check_knows_up_from_down(source: str, file: str, wrong: set[str]) -> None:
    assert wrong_imports(source, PACKAGE / file) == wrong
