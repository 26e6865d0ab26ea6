"""The demo: its checks, its files, and how it ends when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from test_labs import ROOT, check_report, missed, run_script

from zero_course.lab.report import FAILED, MISSED

STRATEGIES = ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def test_the_demo_meets_all_predictions(tmp_path: Path) -> None:
    done = run_script(["-m", "zero_course.demo", "--nproc", "2", "--quick"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    folder = tmp_path / "results" / "demo"
    report = json.loads((folder / "report.json").read_text())
    check_report(report, 2, folder)
    assert not missed(report)
    assert report["figures"] == ["memory.png", "loss.png"]
    assert [strategy["name"] for strategy in report["strategies"]] == STRATEGIES
    losses = report["losses"]
    assert losses["DP"] == losses["ZeRO-1"] == losses["ZeRO-2"] == losses["ZeRO-3"]
    for strategy in report["strategies"]:
        assert strategy["loss_end"] < strategy["loss_start"]
        assert strategy["tokens_per_second"] > 0
        assert strategy["peak_bytes_above_baseline"] > 0
        assert {"parameters", "gradients", "optimizer", "communication_buffers"} <= strategy["memory"].keys()
        for figures in strategy["sent_per_step"].values():
            assert figures["predicted"] == figures["measured"]
    for name in STRATEGIES:
        assert name in done.stdout
        assert name in (folder / "table.md").read_text()
    assert (folder / "sample.txt").read_text().startswith("The ")
    assert report["sample"][:20] in done.stdout


def test_a_prediction_that_is_not_met_is_named(tmp_path: Path) -> None:
    patch = "import zero_course as zc; zc.Zero2 = zc.DataParallel"
    done = run_script(["-m", "zero_course.demo", "--quick", "--nproc", "1"], tmp_path, patch)
    assert done.returncode == MISSED
    report = json.loads((tmp_path / "results" / "demo" / "report.json").read_text())
    assert "between steps, ZeRO-2: communication buffers" in missed(report)
    assert "MISSED" in done.stdout


def test_a_rank_that_fails_is_shown(tmp_path: Path) -> None:
    patch = """
import os
import zero_course as zc
def broken(*args, **kwargs):
    raise RuntimeError(f"no ZeRO-1 today on rank {os.environ['RANK']}")
zc.Zero1 = broken
"""
    done = run_script(["-m", "zero_course.demo", "--quick", "--nproc", "1"], tmp_path, patch)
    assert done.returncode == FAILED
    assert "RuntimeError: no ZeRO-1 today on rank" in done.stderr
    assert not (tmp_path / "results" / "demo" / "report.json").exists()


def test_ctrl_c_ends_all_ranks_and_says_so_in_a_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    demo = subprocess.Popen(
        [sys.executable, "-m", "zero_course.demo"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        ranks: list[psutil.Process] = []
        deadline = time.monotonic() + 120
        while len(ranks) < 2 and time.monotonic() < deadline:
            children = psutil.Process(demo.pid).children(recursive=True)
            ranks = [child for child in children if "zero_course.lab.rank" in child.cmdline()]
            time.sleep(0.1)
        assert len(ranks) == 2
        time.sleep(1)
        os.killpg(demo.pid, signal.SIGINT)  # what a terminal does
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 130
    assert errors.strip().splitlines() == ["SIGINT: stopped, all ranks have ended"]
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
