"""The labs: all predictions are met on a sound engine, and a broken one is caught."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_course as zc
from zero_course.flat import BufferPool
from zero_course.lab import wire
from zero_course.lab.ladder import check_wire
from zero_course.lab.predict import pooled
from zero_course.lab.processes import RankFailed, Tell, run_ranks
from zero_course.lab.report import MISSED, Check, Report

ROOT = Path(__file__).resolve().parent.parent
LABS = ("lab_00_memory_wall", "lab_01_data_parallel", "lab_02_zero1", "lab_03_zero2", "lab_04_zero3")
CHECK_KEYS = {"name", "predicted", "measured", "unit", "tolerance", "ok"}


def run_script(
    arguments: list[str], folder: Path, patch: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments``; ``patch`` is run first in every process, the ranks included."""
    (folder / "sitecustomize.py").write_text(patch)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    environment.pop(wire.INSIDE, None)
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=170
    )


def run_lab(
    name: str, ranks: int, folder: Path, patch: str = "", **env: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a lab at its small size; returns how it ended and its report."""
    results = folder / "results"
    script = str(ROOT / "labs" / name / "lab.py")
    done = run_script(
        [script, "--nproc", str(ranks), "--quick", "--results", str(results)], folder, patch, **env
    )
    report = json.loads((results / "report.json").read_text()) if (results / "report.json").exists() else {}
    return done, report


def check_report(report: dict[str, Any], ranks: int, folder: Path) -> None:
    """What every report.json has, and that its figures are there."""
    assert report["world_size"] == ranks
    assert report["device"] == "cpu"
    assert report["checks"]
    for check in report["checks"]:
        assert check.keys() >= CHECK_KEYS
        assert type(check["ok"]) is bool
    for skipped in report["not_run"]:
        assert skipped["name"]
        assert skipped["reason"]
    assert report["figures"]
    for figure in report["figures"]:
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")
        assert (folder / figure).stat().st_size > 10_000


def missed(report: dict[str, Any]) -> str:
    """The names of the checks that were not met, with their sections."""
    return "\n".join(f"{check['section']}: {check['name']}" for check in report["checks"] if not check["ok"])


@pytest.mark.parametrize(
    ("lab", "ranks"),
    [*((lab, 2) for lab in LABS), ("lab_04_zero3", 1), ("lab_02_zero1", 3)],
)
def test_all_predictions_are_met(lab: str, ranks: int, tmp_path: Path) -> None:
    done, report = run_lab(lab, ranks, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["lab"] == lab
    check_report(report, ranks, tmp_path / "results")
    assert report["ok"]
    assert not missed(report)
    assert f"all {len(report['checks'])} predictions met" in done.stdout


BREAK = {
    "no division by N, and a reduction for each micro-batch": (
        "lab_01_data_parallel",
        """
import contextlib
from zero_course.comm import Communicator
from zero_course.data_parallel import DataParallel
whole = Communicator.all_reduce
Communicator.all_reduce = lambda self, tensor, average=False, **how: whole(self, tensor, **how)
DataParallel.no_sync = lambda self: contextlib.nullcontext()
""",
        [
            "1 micro-batch: off one process's, joined batch",
            "4 micro-batches: sent, each rank",
            "4 micro-batches: all-reduces, each rank",
        ],
    ),
    "plain data parallelism as ZeRO-1": (
        "lab_02_zero1",
        "import zero_course as zc; zc.Zero1 = zc.DataParallel",
        ["ZeRO-1: optimizer", "ZeRO-1: all live tensors", "ZeRO-1: sent for parameters", "largest share"],
    ),
    "plain data parallelism as ZeRO-2": (
        "lab_03_zero2",
        "import zero_course as zc; zc.Zero2 = zc.DataParallel",
        [
            "ZeRO-2: gradients",
            "most bytes of .grad",
            "peak with activations",
            "takes more: the shard of gradients",
        ],
    ),
    "plain data parallelism as ZeRO-3": (
        "lab_04_zero3",
        """
import zero_course as zc
class Whole(zc.DataParallel):
    def __init__(self, *args, stage3_prefetch_bucket_size=0, stage3_param_persistence_threshold=0, **others):
        super().__init__(*args, **others)
zc.Zero3 = Whole
""",
        None,  # it cannot even train what zero.Init has partitioned
    ),
    "parameters that stay gathered": (
        "lab_04_zero3",
        "from zero_course.zero3 import Zero3; Zero3._release = lambda self, bucket: None",
        None,  # the window refuses
    ),
}


@pytest.mark.parametrize("how", BREAK)
def test_a_broken_rung_is_caught(how: str, tmp_path: Path) -> None:
    lab, patch, names = BREAK[how]
    done, report = run_lab(lab, 2, tmp_path, patch)
    assert done.returncode != 0
    if names is not None:
        assert done.returncode == MISSED, done.stdout + done.stderr
        assert "predictions not met" in done.stdout
        for name in names:
            assert name in missed(report)


def test_gloos_own_reduce_scatter_is_caught(tmp_path: Path) -> None:
    done, report = run_lab("lab_02_zero1", 2, tmp_path, ZERO_COURSE_TRANSPORT="native")
    assert done.returncode == MISSED
    (measured,) = {
        c["measured"] / c["predicted"] for c in report["checks"] if "sent for gradients" in c["name"]
    }
    assert measured == 2


def test_without_a_network_of_its_own_the_counters_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(wire.INSIDE, "to be undone")
    monkeypatch.delenv(wire.INSIDE)
    monkeypatch.setattr(wire.shutil, "which", lambda name: None)
    wire.enter_own_network()
    report = Report("anything", 2, tmp_path, device="cpu")
    check_wire(report, "loopback", 100, [])
    assert report.checks == []
    ((skipped,),) = [report.not_run]
    assert "unshare" in skipped["reason"]


def test_help_says_what_a_lab_is_about(tmp_path: Path) -> None:
    for lab in LABS:
        done = run_script([str(ROOT / "labs" / lab / "lab.py"), "--help"], tmp_path)
        assert done.returncode == 0
        assert "--nproc" in done.stdout
        assert "--nproc 0" not in done.stdout
        assert (ROOT / "labs" / lab / "README.md").exists()


# -- what labs are made of -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (Check("exact", 5, 5, "bytes"), True),
        (Check("exact", 5, 6, "bytes"), False),
        (Check("tolerance", 100, 101, "bytes", tolerance=0.01), True),
        (Check("tolerance", 100, 102, "bytes", tolerance=0.01), False),
        (Check("tolerance", 100, 98, "bytes", tolerance=0.01), False),
        (Check("at most", 5, 4, "bytes", relation="<="), True),
        (Check("at most", 5, 6, "bytes", relation="<="), False),
        (Check("at least", 5, 6, "bytes", relation=">="), True),
        (Check("at least", 5, 4, "bytes", relation=">="), False),
        (Check("words", "ZeRO-2", "ZeRO-2", ""), True),
        (Check("words", "ZeRO-2", "DP", ""), False),
        (Check("not a number", 0.0, float("nan"), ""), False),
        (Check("infinite", 0.0, float("inf"), "", relation=">="), False),
    ],
)
def test_when_a_check_is_met(check: Check, ok: bool) -> None:
    assert check.ok is ok


def test_a_report_without_checks_is_no_success(tmp_path: Path) -> None:
    assert Report("empty", 1, tmp_path).finish() == MISSED


def test_a_report_holds_nothing_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    (tmp_path / "old.png").write_bytes(b"")
    Report("new", 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_ranks_that_differ_get_a_line_each(tmp_path: Path) -> None:
    report = Report("ranks", 2, tmp_path)
    report.check_ranks("same", [1, 1], [1, 1], "bytes")
    report.check_ranks("different", [1, 2], [1, 3], "bytes")
    assert [(check.name, check.ok) for check in report.checks] == [
        ("same, each rank", True),
        ("different, rank 0", True),
        ("different, rank 1", False),
    ]


@pytest.mark.parametrize(
    "sizes", [[5], [5, 5, 5], [3, 8, 2, 9], [9, 2, 8, 3, 7], [1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2]]
)
def test_the_formula_of_pooled_buckets_is_what_the_pool_does(sizes: list[int]) -> None:
    pool, reducing = BufferPool(), None
    for _ in range(3):
        for size in sizes:
            filling = pool.take(size, torch.float32, torch.device("cpu"))
            if reducing is not None:
                pool.give_back(reducing)
            reducing = filling
        pool.give_back(reducing)
        reducing = None
    assert sorted(pooled(sizes)) == sorted(buffer.numel() for buffer in pool.buffers)


def summed(tell: Tell, value: int) -> tuple[int, float]:
    x = torch.full((3,), float(value + zc.get_rank()))
    zc.Communicator().all_reduce(x)
    tell("summed")
    return zc.get_rank(), x.sum().item()


def fails_on_one(tell: Tell, how: str) -> None:
    if zc.get_rank() == 1:
        if how == "raises":
            raise ValueError("this rank does not like it")
        os.kill(os.getpid(), signal.SIGKILL)
    zc.Communicator().barrier()


def test_ranks_bring_their_results_home_in_order() -> None:
    events: list[tuple[int, str]] = []
    results = run_ranks(3, summed, 1, on_event=lambda rank, event: events.append((rank, event)))
    assert results == [(0, 18.0), (1, 18.0), (2, 18.0)]
    assert sorted(events) == [(0, "summed"), (1, "summed"), (2, "summed")]


@pytest.mark.parametrize(
    ("how", "text"),
    [("raises", "ValueError: this rank does not like it"), ("is killed", "killed by SIGKILL")],
)
def test_a_rank_that_fails_is_named(how: str, text: str) -> None:
    with pytest.raises(RankFailed, match=text) as failure:
        run_ranks(2, fails_on_one, how)
    assert str(failure.value).startswith("rank 1")
