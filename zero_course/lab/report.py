"""Predicted against measured: a list of checks, printed as a table, written as report.json, ending in an exit code.

A check that cannot be made here (no GPU, no permission) is never left out in silence: it is listed as NOT RUN, with
the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import wire
from .processes import Interrupted, RankFailed, device_for

Value = int | float | str | bool
MISSED = 1  # exit code when a prediction is not met
FAILED = 2  # exit code when a rank failed
RELATIONS = {"=": "", "<=": "≤ ", ">=": "≥ "}
LOG_WIDTH = 120  # columns where there is no terminal to ask


@dataclass(frozen=True)
class Check:
    """One prediction and what was measured.

    Attributes:
        name: what is predicted.
        predicted, measured: numbers or words.
        unit: of both.
        tolerance: how far apart they may be, relative to what was predicted; 0 is exact.
        relation: ``"="``, or ``"<="`` and ``">="`` where the prediction is a bound for what is measured.
        section: heading under which it is printed.
    """

    name: str
    predicted: Value
    measured: Value
    unit: str
    tolerance: float = 0.0
    relation: str = "="
    section: str = ""

    @property
    def ok(self) -> bool:
        """Whether the prediction was met."""
        if isinstance(self.predicted, str) or isinstance(self.measured, str):
            return self.predicted == self.measured
        if not (math.isfinite(self.predicted) and math.isfinite(self.measured)):
            return False
        slack = self.tolerance * abs(self.predicted)
        above, below = self.measured - self.predicted, self.predicted - self.measured
        return (above <= slack or self.relation == ">=") and (below <= slack or self.relation == "<=")

    def as_dict(self) -> dict[str, Any]:
        """As it stands in report.json."""
        keys = ("name", "predicted", "measured", "unit", "tolerance", "relation", "section")
        return {**{key: getattr(self, key) for key in keys}, "ok": self.ok}


@dataclass
class Report:
    """The checks of one lab.

    Attributes:
        lab: its name.
        world_size: ranks.
        folder: where report.json and the figures go.
        device: ``"cpu"`` or ``"cuda"``; found by itself.
        checks, not_run, figures: what was added so far.
        measurements: name to anything that json can write: figures of interest that no check is about.
        extra: more top-level entries of report.json.
    """

    lab: str
    world_size: int
    folder: Path
    device: str = ""
    checks: list[Check] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    measurements: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: make_console(), repr=False)
    section: str = ""

    def __post_init__(self) -> None:
        self.device = self.device or device_for(self.world_size)
        self._started = time.perf_counter()
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in ("report.json", *(path.name for path in self.folder.glob("*.png"))):
            (self.folder / old).unlink(missing_ok=True)  # what is there afterwards is of this run

    def check(self, name: str, predicted: Value, measured: Value, unit: str, **how: Any) -> None:
        """Add a :class:`Check`; ``how`` is its tolerance and relation."""
        self.checks.append(Check(name, predicted, measured, unit, section=self.section, **how))

    def check_ranks(
        self, name: str, predicted: Sequence[Value], measured: Sequence[Value], unit: str, **how: Any
    ) -> None:
        """Add a check of one value for each rank; one line if all ranks agree in both."""
        if len(set(predicted)) == len(set(measured)) == 1:
            on_all = f"{name}, each rank" if len(predicted) > 1 else name
            self.check(on_all, predicted[0], measured[0], unit, **how)
            return
        for rank, (expected, found) in enumerate(zip(predicted, measured, strict=True)):
            self.check(f"{name}, rank {rank}", expected, found, unit, **how)

    def cannot(self, name: str, reason: str) -> None:
        """Add a check that is not made here, and why."""
        self.not_run.append({"name": name, "reason": reason})

    def figure(self, name: str) -> Path:
        """Path of a new figure."""
        self.figures.append(name)
        return self.folder / name

    @property
    def ranks(self) -> str:
        """How many, in words."""
        return f"{self.world_size} rank{'s' * (self.world_size > 1)}"

    @property
    def ok(self) -> bool:
        """Whether there are checks and all of them are met."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """What report.json holds."""
        return {
            "lab": self.lab,
            "ok": self.ok,
            "world_size": self.world_size,
            "device": self.device,
            **self.extra,
            "checks": [check.as_dict() for check in self.checks],
            "not_run": self.not_run,
            "figures": self.figures,
            "measurements": self.measurements,
            "seconds": round(time.perf_counter() - self._started, 1),
            "machine": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cpus": os.cpu_count(),
                "platform": platform.platform(),
            },
        }

    def finish(self, *, brief: bool = False) -> int:
        """Write report.json, print everything (or, if ``brief``, what was missed), and return the exit code."""
        path = self.folder / "report.json"
        aside = path.with_suffix(".json.tmp")
        aside.write_text(json.dumps(self.as_dict(), indent=2, allow_nan=False, default=_finite) + "\n")
        aside.replace(path)
        self._print_checks(missed_only=brief)
        for skipped in self.not_run:
            self.console.print(f"[yellow]NOT RUN[/] {escape(skipped['name'])}: {escape(skipped['reason'])}")
        missed = [check for check in self.checks if not check.ok]
        written = ", ".join([str(path), *(str(self.folder / name) for name in self.figures)])
        self.console.print(f"[dim]written: {escape(written)}[/]", soft_wrap=True)
        if missed or not self.checks:
            names = "; ".join(check.name for check in missed) or "no check was made"
            self.console.print(
                f"[bold red]{len(missed)} of {len(self.checks)} predictions not met[/]: {escape(names)}"
            )
            return MISSED
        self.console.print(f"[bold green]all {len(self.checks)} predictions met[/]")
        return 0

    def _print_checks(self, missed_only: bool) -> None:
        checks = [check for check in self.checks if not (missed_only and check.ok)]
        if checks:
            self.console.print(f"\n[bold]{self.lab}[/], {self.ranks} on {self.device}")
        for section in dict.fromkeys(check.section for check in checks):
            table = Table(
                title=section, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
            )
            table.add_column(
                "", min_width=min(60, self.console.width // 2)
            )  # the same in all tables, if it can be
            table.add_column("predicted", justify="right", min_width=16, no_wrap=True)
            table.add_column("measured", justify="right", min_width=14, no_wrap=True)
            table.add_column("", min_width=8, no_wrap=True)
            table.add_column("", min_width=6, no_wrap=True)
            for check in checks:
                if check.section == section:
                    verdict = "[green]ok[/]" if check.ok else "[bold red]MISSED[/]"
                    expected = RELATIONS[check.relation] + show(check.predicted)
                    if check.tolerance:
                        expected += (
                            f" ±{check.tolerance:.0%}"
                            if check.tolerance >= 0.01
                            else f" ±{check.tolerance:g}"
                        )
                    table.add_row(escape(check.name), expected, show(check.measured), check.unit, verdict)
            self.console.print(table)


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough for the tables in a log."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=LOG_WIDTH)


def show(value: Value) -> str:
    """A value for reading: integers with separators, others to a few digits."""
    if isinstance(value, (bool, str)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _finite(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} {value!r} has no place in report.json")


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line.

    Attributes:
        nproc: ranks.
        quick: smaller sizes, for tests.
        results: folder for results.
    """

    nproc: int
    quick: bool
    results: Path


def parse(description: str, results: Path, argv: Sequence[str] | None = None) -> Options:
    """The command line of demo and labs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--nproc", type=_positive, default=2, metavar="N", help="number of ranks (default: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes: the same checks, less to see")
    parser.add_argument(
        "--results",
        type=Path,
        default=results,
        metavar="DIR",
        help="where report.json and figures go (%(default)s)",
    )
    return Options(**vars(parser.parse_args(argv)))


def guarded(main: Callable[[], int]) -> int:
    """Run ``main``; what goes wrong for a reason outside of it is told in a line. Returns the exit code."""
    console = make_console(stderr=True)
    try:
        return main()
    except Interrupted as stop:
        console.print(f"{stop}: stopped, all ranks have ended")
        return 128 + stop.signal
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except RankFailed as failure:
        console.print(f"[bold red]error:[/] {escape(str(failure))}", soft_wrap=True, highlight=False)
        return FAILED


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} ranks; at least 1 is needed")
    return number


def run_lab(name: str, script: str, description: str, experiment: Callable[[Report, Options], None]) -> None:
    """The main program of a lab: parse the command line, do the experiment, report, exit.

    Args:
        name: e.g. ``"lab_02_zero1"``; results go to results/lab_02 beside the folder of labs.
        script: the lab's ``__file__``.
        description: what ``--help`` says.
        experiment: fills the report.
    """
    root = Path(script).resolve().parents[2]
    options = parse(description, root / "results" / "_".join(name.split("_")[:2]))

    def main() -> int:
        if wire.reason_outside() is None:
            wire.bring_loopback_up()
        report = Report(name, options.nproc, options.results)
        experiment(report, options)
        return report.finish()

    sys.exit(guarded(main))
