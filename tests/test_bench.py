"""The bench: its statistics, its report and tables, and what it does when a contender dies or Ctrl-C comes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import bench
from bench.comparison import PEERS, SPEED_GOALS, Result, compare, difference, ratios, summary
from bench.contenders import CONTENDERS, SHAPES, batches
from bench.display import markdown, plot, print_report
from bench.forked_ranks import Failed, Template

ROOT = Path(__file__).resolve().parents[1]
LOSSES = [9.0, 8.5]


def reported(seconds, cpu=1.0, peak=1000, losses=LOSSES):
    """What a rank reports."""
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "losses": losses,
        "peak_bytes": peak,
        "training_peak_bytes": peak,
    }


def result_of(*seconds, **others):
    """A result of one round for each of ``seconds``."""
    result = Result()
    for number, value in enumerate(seconds, 1):
        result.add(number, "tiny", [reported(value, **others)] * 2)
    return result


def report_on(results):
    """A whole report, as the bench writes it."""
    return {
        "interrupted": False,
        "settings": {"rounds_done": 3, "steps": 2},
        "machine": {"cores": 2, "cpu": "a CPU", "torch": "2.13.0", "deepspeed": None},
        "notes": [],
        **compare(results),
    }


# -- statistics ----------------------------------------------------------------------------------------------


def test_a_result_takes_the_slowest_rank_and_the_largest_memory() -> None:
    result = Result()
    ranks = [reported(0.5, 1.0, 100, [2.0]), reported(0.25, 3.0, 300, [4.0])]
    result.add(1, "tiny", ranks)
    assert result.values("tokens_per_second") == [SHAPES["tiny"].tokens / 0.5]
    assert result.values("cpu_seconds_per_step") == [2.0]
    assert result.values("peak_bytes") == [300]
    assert result.losses == [3.0]


def test_memory_may_be_unknown() -> None:
    result = Result()
    result.add(1, "tiny", [reported(1.0, peak=None), reported(1.0, peak=None)])
    assert result.values("peak_bytes") == []
    report = report_on({"tiny": {"dp": result}})
    assert report["shapes"]["tiny"]["contenders"]["dp"]["peak_bytes_per_parameter"] is None
    print_report(report, Console(file=io.StringIO()))
    assert "zero_course DataParallel" in markdown(report)


def test_ratios_are_formed_within_a_round() -> None:
    # the machine was three times slower in round 2, and the peer is missing in round 3
    results = {"dp": result_of(1.0, 3.0, 1.0), "ddp": result_of(2.0, 6.0)}
    assert ratios(results, "dp", "ddp", "tokens_per_second") == pytest.approx([2.0, 2.0])
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert summary([]) is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([9.0, 8.5], 0.0), ([9.0, 8.585], 0.01), ([9.0, float("nan")], float("inf"))],
)
def test_difference_of_losses(losses, expected) -> None:
    assert difference(losses, LOSSES) == pytest.approx(expected)


def test_a_contender_that_trains_otherwise_fails_its_check() -> None:
    results = {
        "floor": result_of(1.0, losses=[9.0, 8.6]),
        "ddp": result_of(1.0),
        "dp": result_of(1.0),
        "zero1": result_of(1.0, losses=[9.0, 8.5 * (1 + 1.1e-5)]),
    }
    results["dp"].add(2, "tiny", [reported(1.0, losses=[9.0, 8.6])] * 2)  # not the same in every round
    ok = {check["name"].split()[3]: check["ok"] for check in compare({"tiny": results})["checks"][:3]}
    assert ok == {"ddp": True, "dp": False, "zero1": False}
    assert compare({"tiny": results})["checks"][3]["ok"]  # the negative control


def test_a_floor_that_trains_like_the_others_fails_the_negative_control() -> None:
    checks = compare({"tiny": {"floor": result_of(1.0), "ddp": result_of(1.0)}})["checks"]
    assert [check["ok"] for check in checks] == [True, False]


@pytest.mark.parametrize(("seconds", "met"), [(1.0, True), (1.2, False)])
def test_a_speed_goal_is_on_the_median_ratio(seconds, met) -> None:
    results = {"zero1": result_of(seconds, seconds, 9.0), "deepspeed-1": result_of(1.15, 1.15, 1.15)}
    goals = {goal["metric"]: goal for goal in compare({"tiny": results})["goals"]}
    assert goals["tokens_per_second"]["met"] is met
    assert goals["tokens_per_second"]["goal"] == ">= 1.1"
    assert goals["peak_bytes"]["met"] is False  # equal is not lower


def test_peers_are_of_the_same_stage() -> None:
    for ours, peers in PEERS.items():
        assert {CONTENDERS[name].stage for name in (ours, *peers)} == {CONTENDERS[ours].stage}
    assert all(peer in PEERS[ours] for ours, peer in SPEED_GOALS)


def test_batches_differ_between_ranks_and_not_between_calls() -> None:
    shape = SHAPES["tiny"]
    first, second, other = batches(shape, 0, 3), batches(shape, 0, 3), batches(shape, 1, 3)
    assert len(first) == 3
    assert first[0][0].shape == (shape.micro_batch, shape.sequence)
    assert (first[0][0][:, 1:] == first[0][1][:, :-1]).all()
    assert all((a == b).all() for one, two in zip(first, second) for a, b in zip(one, two))
    assert not (first[0][0] == other[0][0]).all()


# -- tables and plot -----------------------------------------------------------------------------------------


@pytest.fixture
def report():
    results = {name: result_of(0.04, 0.05, 0.03, peak=10**6) for name in CONTENDERS}
    results["fsdp2"].error = "rank 1 was killed by SIGKILL (out of memory?)\nand more"
    for name in ("deepspeed-0", "deepspeed-1"):
        results[name] = Result(missing="DeepSpeed is not installed")
    return report_on({"tiny": results})


def test_tables_fit_a_terminal_of_80_columns(report) -> None:
    text = io.StringIO()
    print_report(report, Console(file=text, width=80))
    shown = text.getvalue()
    assert "zero_course DataParallel" in shown
    assert "ZeroRedundancyOptimizer" in shown
    assert "NOT RUN tiny deepspeed-0, tiny deepspeed-1: DeepSpeed is not installed" in shown
    assert "FAILED tiny fsdp2: rank 1 was killed by SIGKILL" in shown
    assert "and more" not in shown
    assert "…" not in shown


def test_markdown_has_a_row_for_every_contender(report) -> None:
    text = markdown(report)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(CONTENDERS)
    assert {row.count("|") for row in rows} == {9}
    assert "| 0 | DeepSpeed stage 0 | NOT RUN |" in text
    assert "| 3 | **zero_course Zero3** | 1600 (1280 .. 2133) | 1.00 |" in text
    assert "torch 2.13.0." in text


def test_plot(report, tmp_path) -> None:
    plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


# -- processes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template():
    template = Template("torch")
    yield template
    template.close()


REQUEST = dict(shape_name="tiny", warmup=1)


def test_ranks_report(template) -> None:
    ranks = template.measure(60.0, contender="ddp", steps=2, **REQUEST)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["seconds"] > 0
        assert len(rank["losses"]) == 3
        if sys.platform == "linux":
            assert rank["peak_bytes"] >= 16 * SHAPES["tiny"].parameters  # parameters, gradients, moments
    assert ranks[0]["losses"] != ranks[1]["losses"]  # each has its own data


def test_a_failing_rank_is_an_error_with_its_cause(template) -> None:
    with pytest.raises(Failed, match="rank . failed: KeyError: 'no such thing'\nTraceback"):
        template.measure(60.0, contender="no such thing", steps=1, **REQUEST)
    assert template.measure(60.0, contender="floor", steps=1, **REQUEST)  # the next one works


def test_a_killed_rank_is_an_error_and_leaves_nothing_behind(template) -> None:
    template.measure(60.0, contender="floor", steps=1, **REQUEST)  # the template is there
    process = psutil.Process(template._process.pid)

    def kill_one() -> None:
        while len(process.children()) < 2:
            time.sleep(0.01)
        process.children()[1].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(Failed, match=r"rank 1 was killed by SIGKILL \(out of memory\?\)|rank 0 failed"):
        template.measure(60.0, contender="dp", steps=10**5, **REQUEST)
    killer.join()
    assert process.children() == []


def test_a_hanging_rank_is_given_up(template) -> None:
    with pytest.raises(Failed, match="no answer from rank 0, 1 within 2 s"):
        template.measure(2.0, contender="dp", steps=10**5, **REQUEST)


def test_a_killed_template_is_replaced(template) -> None:
    template.measure(60.0, contender="floor", steps=1, **REQUEST)
    os.kill(template._process.pid, signal.SIGKILL)
    with pytest.raises(Failed, match="killed by SIGKILL"):
        template.measure(60.0, contender="floor", steps=1, **REQUEST)
    assert template.measure(60.0, contender="floor", steps=1, **REQUEST)


def test_a_module_that_cannot_be_imported_is_an_error() -> None:
    template = Template("no_such_module")
    with pytest.raises(Failed, match="ModuleNotFoundError while importing: No module named 'no_such_module'"):
        template.measure(60.0, contender="floor", steps=1, **REQUEST)


# -- the whole -----------------------------------------------------------------------------------------------


def test_one_round_of_two_contenders(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_version", lambda package: None if package == "deepspeed" else "x")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal, with the progress bar
    arguments = ["--shapes", "tiny", "--variants", "dp,floor,deepspeed-0", "--quick", "--out", str(tmp_path)]
    assert bench.main(arguments) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is False
    assert report["settings"]["rounds_done"] == 1
    contenders = report["shapes"]["tiny"]["contenders"]
    assert list(contenders) == ["floor", "deepspeed-0", "dp"]
    assert [row["status"] for row in contenders.values()] == ["ok", "not run", "ok"]
    assert contenders["dp"]["tokens_per_second"]["median"] > 0
    assert [entry["name"] for entry in report["not_run"]] == ["tiny deepspeed-0"]
    assert all(check["ok"] for check in report["checks"])
    assert len(report["checks"]) == 2
    assert {(r["contender"], r["peer"]) for r in report["shapes"]["tiny"]["ratios"]} == {("dp", "floor")}
    assert (tmp_path / "bench.png").exists()
    shown = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out).split())
    assert "round 1 of 1, tiny: zero_course DataParallel" in shown
    assert "pip install deepspeed==0.19.8" in shown

    assert bench.main(["--markdown", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0], shown[-1]) == ("<!-- bench-table -->", "<!-- /bench-table -->")


def test_markdown_without_a_report_says_what_to_do(tmp_path, capsys) -> None:
    assert bench.main(["--markdown", "--out", str(tmp_path)]) == 1
    assert "run `make bench` first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "huge"], "huge is not among compute, communication, tiny"),
        (["--variants", "dp,zero9"], "zero9 is not among floor"),
        (["--rounds", "0"], "'0' is not a whole number above 0"),
    ],
)
def test_a_wrong_argument_names_the_right_ones(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_interruption_leaves_a_report_and_no_processes(tmp_path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "bench.py"), "--shapes", "tiny", "--variants", "floor,dp"]
    process = subprocess.Popen(
        [*command, "--rounds", "1000", "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("round 2, tiny, floor"):
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "Interrupted" in rest
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["interrupted"] is True
    assert "1" in report["shapes"]["tiny"]["contenders"]["dp"]["rounds"]
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_a_killed_bench_leaves_no_processes(tmp_path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "bench.py"), "--shapes", "tiny", "--variants", "dp"]
    process = subprocess.Popen(
        [*command, "--rounds", "9", "--steps", "100000", "--warmup", "1", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while len(children := parent.children(recursive=True)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 3  # the template and two ranks
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
