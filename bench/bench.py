"""Speed and memory of every rung, beside the floor, torch's own strategies and DeepSpeed.

    make bench                                      # about 10 minutes on 2 cores
    make bench ARGS="--shapes compute --variants floor,ddp,dp --rounds 9"
    make bench ARGS=--quick                         # one short round, to see that everything runs
    make bench ARGS=--markdown                      # measures nothing: prints the last report for README.md

Every round measures each contender once on each shape, one after the other, always in fresh processes, and starts
with another one: only one contender is alive at a time, so it has the machine and its memory for itself, and what
disturbs the machine for a while meets all of them alike. See ``measurement.py`` for what is measured and
``comparison.py`` for what is made of it. Writes ``report.json`` (after every round) and ``bench.png``.

Exit status: 0; 1 if losses disagree or one of our own rungs failed; 130 if interrupted. A goal that is missed is
in the report, but is no error.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

# first the repository: run as a script, this file would hide the package of the same name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.comparison import Result, Results, compare
from bench.contenders import CONTENDERS, DEFAULT_SHAPES, SHAPES, WORLD_SIZE
from bench.display import first_line, markdown, plot, print_report
from bench.forked_ranks import Failed, Template

DEEPSPEED = "0.19.8"
TIMEOUT = 300.0  # seconds for one measurement
MARKS = ("<!-- bench-table -->", "<!-- /bench-table -->")


def main(arguments: list[str] | None = None) -> int:
    """Measure, compare, write and print; returns the exit status."""
    options = _parse(arguments)
    console = Console()
    out = Path(options.out)
    if options.markdown:
        return _print_markdown(out / "report.json")
    results: Results = {shape: {name: Result() for name in options.variants} for shape in options.shapes}
    run = Run(options, results, console)
    interrupted = False
    with _terminable():
        try:
            run.measure_all()
        except KeyboardInterrupt:
            interrupted = True
            console.print("Interrupted; what was measured so far:")
    report = run.write(interrupted)
    print_report(report, console)
    if any(result.rounds for of_shape in results.values() for result in of_shape.values()):
        plot(report, out / "bench.png")
        console.print(f"Written: {out / 'report.json'}, {out / 'bench.png'}", highlight=False)
    if interrupted:
        return 130
    ours_failed = any(
        result.error and CONTENDERS[name].family == "zero_course"
        for of_shape in results.values()
        for name, result in of_shape.items()
    )
    return int(ours_failed or not all(check["ok"] for check in report["checks"]))


class Run:
    """The rounds, and the report on them.

    Args:
        options: the command line.
        results: filled in as measurements come.
        console: where to say how far it is.
    """

    def __init__(self, options: argparse.Namespace, results: Results, console: Console) -> None:
        self.options, self.results, self.console = options, results, console
        self.started = time.time()
        self.load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self.rounds_done = 0
        self.took: dict[tuple[str, str], list[float]] = {}  # seconds of each measurement, fork to end
        self._mark_missing()

    def measure_all(self) -> None:
        """All rounds. A contender that fails is not tried again; the others go on."""
        with (
            closing(Template("torch")) as plain,
            closing(Template("deepspeed")) as with_deepspeed,
            self._progress() as progress,
        ):
            task = progress.add_task("", total=None, left="")
            for number in range(1, self.options.rounds + 1):
                plan = self._plan(number)
                for position, (shape, name) in enumerate(plan):
                    ahead = plan[position:] + plan * (self.options.rounds - number)
                    self._show(progress, task, number, shape, name, ahead)
                    self._measure(
                        with_deepspeed if CONTENDERS[name].family == "deepspeed" else plain,
                        number,
                        shape,
                        name,
                    )
                self.rounds_done = number
                self.write(interrupted=number < self.options.rounds)

    def write(self, interrupted: bool) -> dict[str, Any]:
        """Write report.json, whole or not at all, and return what is in it."""
        report = {
            "interrupted": interrupted,
            "settings": {
                "processes": WORLD_SIZE,
                "rounds": self.options.rounds,
                "rounds_done": self.rounds_done,
                "warmup_steps": self.options.warmup,
                "steps": self.options.steps,
            },
            "machine": self._machine(),
            "notes": self._notes(),
            "seconds": time.time() - self.started,
            **compare(self.results),
        }
        out = Path(self.options.out)
        out.mkdir(parents=True, exist_ok=True)
        aside = out / "report.json.new"
        aside.write_text(json.dumps(report, indent=1) + "\n")
        aside.replace(out / "report.json")
        return report

    def _mark_missing(self) -> None:
        if _version("deepspeed") is None:
            reason = (
                f"DeepSpeed is not installed; `make bench` installs it (pip install deepspeed=={DEEPSPEED})"
            )
            for of_shape in self.results.values():
                for name, result in of_shape.items():
                    if CONTENDERS[name].family == "deepspeed":
                        result.missing = reason

    def _plan(self, number: int) -> list[tuple[str, str]]:
        """What to measure in this round: (shape, contender). Each round starts with another contender."""
        plan = []
        for shape, of_shape in self.results.items():
            names = list(of_shape)
            shift = (number - 1) * 5 % len(names)
            order = names[shift:] + names[:shift]
            plan += [
                (shape, name) for name in order if not of_shape[name].error and not of_shape[name].missing
            ]
        return plan

    def _measure(self, template: Template, number: int, shape: str, name: str) -> None:
        began = time.monotonic()
        result = self.results[shape][name]
        try:
            ranks = template.measure(
                TIMEOUT,
                contender=name,
                shape_name=shape,
                warmup=self.options.warmup,
                steps=self.options.steps,
            )
        except Failed as failure:
            result.error = str(failure)
            self._say(number, shape, name, f"FAILED: {first_line(result.error)}")
            return
        result.add(number, shape, ranks)
        self.took.setdefault((shape, name), []).append(time.monotonic() - began)
        values = result.rounds[number]
        said = (
            f"{values['tokens_per_second']:.0f} tokens/s, {values['cpu_seconds_per_step']:.3f} CPU s a step"
        )
        self._say(number, shape, name, said)

    # -- how far it is ---------------------------------------------------------------------------------------

    def _progress(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def _show(
        self,
        progress: Progress,
        task: Any,
        number: int,
        shape: str,
        name: str,
        ahead: list[tuple[str, str]],
    ) -> None:
        gone = time.time() - self.started
        known = [seconds for times in self.took.values() for seconds in times]
        text = ""
        total = None
        if known:
            typical = sum(known) / len(known)
            left = sum(sum(t) / len(t) if (t := self.took.get(cell)) else typical for cell in ahead)
            total = gone + left
            text = f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left"
        progress.update(
            task,
            description=f"round {number} of {self.options.rounds}, {shape}: {CONTENDERS[name].label}",
            completed=gone,
            total=total,
            left=text,
        )

    def _say(self, number: int, shape: str, name: str, text: str) -> None:
        """One line a measurement, where there is no progress bar; failures always."""
        if not self.console.is_terminal or text.startswith("FAILED"):
            self.console.print(f"round {number}, {shape}, {name}: {text}", highlight=False, markup=False)

    # -- where it ran ----------------------------------------------------------------------------------------

    def _machine(self) -> dict[str, Any]:
        return {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": _version("torch"),
            "deepspeed": _version("deepspeed"),
            "load_before": self.load_before,
        }

    def _notes(self) -> list[str]:
        notes = []
        if self.load_before is not None and self.load_before > 0.5:
            notes.append(
                f"the machine was busy with something else at the start (load {self.load_before:.1f}): tokens/s is "
                "noisy, CPU seconds less so"
            )
        installed = _version("deepspeed")
        if installed not in (None, DEEPSPEED):
            notes.append(f"DeepSpeed {installed} is installed; the goals were set against {DEEPSPEED}")
        return notes


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description="Speed and memory beside the floor, torch and DeepSpeed."
    )
    parser.add_argument(
        "--shapes", type=_names(SHAPES), default=list(DEFAULT_SHAPES), help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--variants", type=_names(CONTENDERS), default=list(CONTENDERS), help=f"of {', '.join(CONTENDERS)}"
    )
    parser.add_argument("--rounds", type=_positive, help="times that each is measured (5)")
    parser.add_argument("--steps", type=_positive, help="steps that the clock runs over (2)")
    parser.add_argument("--warmup", type=_positive, default=2, help="steps before (2)")
    parser.add_argument("--quick", action="store_true", help="one round of one step: does everything run?")
    parser.add_argument("--out", default="results/bench", help="folder for report.json and bench.png")
    parser.add_argument(
        "--markdown", action="store_true", help="print the report in --out for README.md; measure nothing"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (1 if options.quick else 5)
    options.steps = options.steps or (1 if options.quick else 2)
    return options


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown) or 'nothing'} is not among {', '.join(known)}"
            )
        return [name for name in known if name in names]

    return parse


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _print_markdown(path: Path) -> int:
    if not path.exists():
        print(f"there is no {path} yet; run `make bench` first", file=sys.stderr)
        return 1
    print(MARKS[0], markdown(json.loads(path.read_text())), MARKS[1], sep="\n")
    return 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM is an interruption like Ctrl-C."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
