"""What a run writes down: TensorBoard events, CSV files, lines on the console; from rank 0 alone."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import config, everything, train
from ranks import run_ranks

import zero_course as zc
from zero_course.config import load_config
from zero_course.engine import report
from zero_course.monitor import DEFAULT_OUTPUT, CSVMonitor, MonitorMaster, TensorBoardMonitor


def tensorboard_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def csv_rows(folder: Path) -> dict[str, list[list[str]]]:
    return {path.name: list(csv.reader(path.open())) for path in sorted(folder.glob("*.csv"))}


def monitored(folder: Path, *kinds: str, **more: Any) -> dict[str, Any]:
    section = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    return {**dict.fromkeys(kinds, section), **more}


def test_events_of_a_run(tmp_path: Path) -> None:
    settings = monitored(tmp_path, "tensorboard", "csv_monitor", accumulation=2, wall_clock_breakdown=True)
    engine = everything(1, **settings)
    losses = train(engine, 6)
    engine.reporter.monitor.close()
    events = tensorboard_events(tmp_path / "run")
    samples = [8, 16, 24]  # micro-batches of 4, two a step
    assert all(e[-1][0] == 24 for e in events.values())
    means = [(losses[i] + losses[i + 1]) / 2 for i in (0, 2, 4)]
    assert events["Train/Samples/train_loss"] == [(s, pytest.approx(m)) for s, m in zip(samples, means)]
    # WarmupLR's rates in the three steps: see lr_schedules
    rates = [0.0, 0.0, 2e-2 * math.log(2) / math.log(20)]
    assert events["Train/Samples/lr"] == [(s, pytest.approx(r)) for s, r in zip(samples, rates)]
    for (_, norm), (_, clipped) in zip(
        events["Train/Samples/grad_norm"], events["Train/Samples/grad_norm_clipped"], strict=True
    ):
        assert clipped == pytest.approx(min(norm, 0.5))
    assert len(events["Train/Samples/samples_per_second"]) == 2  # not of the first step
    assert all(value > 1e7 for _, value in events["Train/Samples/resident_bytes"])
    for phase in ("forward", "backward", "step"):
        assert all(value > 0 for _, value in events[f"Train/Samples/elapsed_time_ms_{phase}"])

    files = csv_rows(tmp_path / "run")
    assert files["Train_Samples_lr.csv"][0] == ["step", "lr"]
    assert {name.removesuffix(".csv").replace("_", "/", 2) for name in files} == set(events)
    for tag, values in events.items():
        rows = files[tag.replace("/", "_") + ".csv"][1:]
        assert [(int(step), pytest.approx(float(value), rel=1e-6)) for step, value in rows] == values


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    for count in (1, 2):
        monitor = CSVMonitor(str(tmp_path), "run")
        monitor.write_events([("Train/Samples/lr", 0.5, count)])
        monitor.close()
    assert csv_rows(tmp_path / "run") == {
        "Train_Samples_lr.csv": [["step", "lr"], ["1", "0.5"], ["2", "0.5"]]
    }


def test_events_are_on_disk_at_once(tmp_path: Path) -> None:
    """A run that is killed has written what it knew."""
    monitors = [CSVMonitor(str(tmp_path), "csv"), TensorBoardMonitor(str(tmp_path), "board")]
    for monitor in monitors:
        monitor.write_events([("a/b", 0.5, 1)])
    assert csv_rows(tmp_path / "csv")["a_b.csv"][1] == ["1", "0.5"]
    assert tensorboard_events(tmp_path / "board") == {"a/b": [(1, 0.5)]}
    for monitor in monitors:
        monitor.close()


def test_monitors_are_off_by_default_and_write_to_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not MonitorMaster(load_config(config(), 1)).enabled
    monkeypatch.chdir(tmp_path)
    master = MonitorMaster(load_config(config(csv_monitor={"enabled": True}), 1))
    assert master.enabled
    assert [path.name for path in (tmp_path / DEFAULT_OUTPUT).iterdir()] == ["DeepSpeedJobName"]


def on_two_ranks(folder: str) -> tuple[bool, float]:
    engine = everything(2, **monitored(Path(folder), "csv_monitor", "tensorboard"))
    engine.comm.ledger.clear()
    train(engine, 1)
    sent = engine.comm.ledger.wire_bytes()
    return engine.reporter.monitor.enabled, sent


def test_only_rank_0_writes(tmp_path: Path) -> None:
    (zero, sent), (one, _) = run_ranks(2, on_two_ranks, str(tmp_path))
    assert zero
    assert not one
    assert len(list((tmp_path / "run").glob("events*"))) == 1
    rows = csv_rows(tmp_path / "run")
    assert rows["Train_Samples_train_loss.csv"][1][0] == "8"  # samples of both ranks
    assert float(rows["Train_Samples_sent_bytes.csv"][1][1]) == sent > 0


def test_the_line_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    engine = everything(1, steps_per_print=2, memory_breakdown=True, wall_clock_breakdown=True)
    losses = train(engine, 4)
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in heads] == ["step 2", "step 4"]
    assert f"loss {losses[1]:.4f} | lr 0.000e+00 | grad norm " in heads[0]
    assert ", clipped to 0.5" in heads[0]
    assert re.search(r" [\d.]+ samples/s", heads[0])
    states = sum(engine.rung.memory().values())
    assert f"model states {zc.memory.format_bytes(states)} | resident " in heads[1]
    assert sum("time a step: forward " in line for line in lines) == 2
    assert sum("memory: parameters " in line for line in lines) == 2


def test_nothing_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    train(everything(1), 3)
    assert capsys.readouterr().out == ""


def test_a_skipped_step_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    engine = everything(0, steps_per_print=1)
    engine.backward(engine(torch.arange(4)).sum() * math.nan)
    engine.step()
    assert "grad norm nan (step skipped)" in capsys.readouterr().out


def test_tokens_per_second(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 1))
    engine = zc.initialize(model=model, config=config(0, steps_per_print=2))[0]
    for _ in range(2):
        engine.backward(engine(torch.zeros(4, 6, dtype=torch.long)).sum())
        engine.step()
    speeds = re.search(r"([\d.]+) samples/s \| ([\d.]+) tokens/s", capsys.readouterr().out)
    assert float(speeds[2]) == pytest.approx(6 * float(speeds[1]), rel=1e-2)


def test_the_configuration_on_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    everything(1, dump_state=True)
    assert re.search(r"zero_optimization.stage +1 +config", capsys.readouterr().out)


@pytest.mark.parametrize("logger", [{"prof_all": True}, {"prof_all": False, "prof_ops": ["reduce_scatter"]}])
def test_the_traffic_ledger_on_the_console(
    capsys: pytest.CaptureFixture[str], logger: dict[str, Any]
) -> None:
    engine = everything(1, steps_per_print=2, comms_logger={"enabled": True, "verbose": True, **logger})
    train(engine, 1)
    first = capsys.readouterr().out
    assert "comm: reduce_scatter | gradients | " in first
    assert ("comm: all_reduce" in first) == logger["prof_all"]
    assert "engines.py:" in first
    assert "payload bytes" not in first
    train(engine, 1)
    assert "payload bytes" in capsys.readouterr().out  # the table, every steps_per_print


def test_the_ledger_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LEDGER_ENTRIES", 20)
    engine = everything(2)
    train(engine, 20)
    assert len(engine.comm.ledger.entries) <= 20
    assert engine.comm.ledger.entries
