"""The ladder in two minutes: train a small GPT under DP, ZeRO-1, ZeRO-2 and ZeRO-3, predicted against measured.

Byte-level language modelling on the reference of the Python language, which is part of every Python: real text, no
download. Each strategy starts processes of its own and trains the same model on the same batches. So the losses must
be the same bit for bit, and what differs is what each rank keeps and sends, which must be what the formulas say.

examples:
  make demo                    2 processes
  NPROC=4 make demo            4 processes
  python -m zero_course.demo --nproc 3 --quick
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .data import decode, encode
from .lab import ladder, plots
from .lab.predict import Prediction
from .lab.processes import run_ranks
from .lab.report import Options, Report, guarded, parse
from .lab.training import STRATEGIES, Experiment, Run, train
from .models import GPT, GPTConfig

MIB = 2**20
CLASSES = ("parameters", "gradients", "optimizer")
PROMPT = "The "


def experiment(options: Options) -> Experiment:
    """Wide and shallow with a short memory: what learns most of English in a minute on a laptop.

    Buckets are small beside the model, so that stage 2's two do not outweigh the gradients it saves.
    """
    width, steps = (64, 12) if options.quick else (256, 300)
    model = GPTConfig(n_layer=2, n_head=8, d_model=width, block_size=32)
    return Experiment(
        model,
        steps=steps,
        rows=8,
        bucket_size=4 * width**2,
        threshold=4 * width,
        warmup=10,
        betas=(0.9, 0.99),
    )


class DemoReport(Report):
    """A lab's report, with each strategy's figures and losses beside the checks."""

    strategies: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """What report.json holds."""
        return {**super().as_dict(), "strategies": self.strategies}


def main(options: Options) -> int:
    """Train, check, draw, and return the exit code: 0 when every prediction was met."""
    report, plan = DemoReport("demo", options.nproc, options.results), experiment(options)
    report.console.print(
        f"A GPT of {plan.model.num_parameters():,} parameters on {report.ranks}, {plan.steps} steps of "
        f"{options.nproc * plan.rows} x {plan.model.block_size} bytes of text, four times"
    )
    runs: list[list[Run]] = []
    with ladder.progress_bar(report.console) as bar:
        for stage, name in enumerate(STRATEGIES):
            task = bar.add_task(name, total=plan.steps, note="starting")

            def on_event(rank: int, event: dict[str, float], task: int = task) -> None:
                bar.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}")

            runs.append(run_ranks(options.nproc, train, stage, plan, on_event=on_event))
    predicted = [ladder.predictions(plan, stage, options.nproc) for stage in range(len(STRATEGIES))]
    for ours, expected in zip(runs, predicted, strict=True):
        check(report, ours, expected)
        if ours is not runs[0]:
            ladder.check_same_training(report, runs[0], ours)
    report.strategies = {
        STRATEGIES[run[0].stage]: summary(run[0], expected[0])
        for run, expected in zip(runs, predicted, strict=True)
    }
    draw(report, runs)
    exit_code = report.finish()
    report.console.print(table(runs, predicted))
    sample = generate(runs[-1][0].weights, plan, 40 if options.quick else 320)
    report.console.print(
        Panel(Text(sample), title="text by the model that ZeRO-3 trained", title_align="left")
    )
    (options.results / "sample.txt").write_text(sample + "\n")
    return exit_code


def check(report: Report, runs: list[Run], expected: list[Prediction]) -> None:
    """Bytes kept by class and bytes sent by purpose, on every rank."""
    report.section = f"{STRATEGIES[runs[0].stage]}: what a rank keeps and sends in a step"
    for name in CLASSES:
        report.check_ranks(
            name, [p.memory[name] for p in expected], [run.memory[name] for run in runs], "bytes"
        )
    known = [p.states + run.memory["communication_buffers"] for p, run in zip(expected, runs, strict=True)]
    report.check_ranks("all live tensors = states + buffers", known, [run.alive for run in runs], "bytes")
    for purpose in dict.fromkeys([*expected[0].traffic, *runs[0].traffic]):
        sent = [p.traffic.get(purpose, 0) for p in expected]
        report.check_ranks(
            f"sent for {purpose}", sent, [run.traffic.get(purpose, 0) for run in runs], "bytes"
        )


def summary(run: Run, expected: Prediction) -> dict[str, Any]:
    """What report.json says of one strategy: rank 0's figures, in bytes."""
    return {
        "losses": run.losses,
        "predicted_memory": expected.memory,
        "memory": run.memory,
        "predicted_traffic": expected.traffic,
        "traffic": run.traffic,
        "tokens_per_second": round(run.tokens_per_second, 1),
        "peak_memory": run.peak,
    }


def table(runs: list[list[Run]], predicted: list[list[Prediction]]) -> Table:
    """One column for each strategy; where predicted and measured are the same number, it stands once, with a tick."""
    shown = Table(title="rank 0 of each strategy", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    shown.add_column("")
    for name in STRATEGIES:
        shown.add_column(name, justify="right")
    firsts = [run[0] for run in runs]
    expected = [prediction[0] for prediction in predicted]

    def both(wanted: int, found: int) -> str:
        return f"{found:,} ✓" if wanted == found else f"[red]{wanted:,} predicted, {found:,} measured[/]"

    shown.add_row("loss, first step", *(f"{run.losses[0]:.6f}" for run in firsts))
    shown.add_row("loss, last step", *(f"{run.losses[-1]:.6f}" for run in firsts))
    for name in CLASSES:
        cells = [both(p.memory[name], run.memory[name]) for p, run in zip(expected, firsts, strict=True)]
        shown.add_row(f"{name}, bytes", *cells)
    totals = [
        (sum(p.memory.values()), sum(run.memory[n] for n in CLASSES))
        for p, run in zip(expected, firsts, strict=True)
    ]
    shown.add_row("model states, bytes", *(both(*pair) for pair in totals), style="bold")
    sent = [
        (sum(p.traffic.values()), sum(run.traffic.values())) for p, run in zip(expected, firsts, strict=True)
    ]
    shown.add_row("sent per step, bytes", *(both(*pair) for pair in sent), style="bold")
    shown.add_row("buffers, bytes", *(f"{run.memory['communication_buffers']:,}" for run in firsts))
    peaks = ["unknown" if run.peak is None else f"{run.peak / MIB:.1f}" for run in firsts]
    shown.add_row("peak above start, MiB", *peaks)
    shown.add_row("tokens/s, all ranks", *(f"{run.tokens_per_second:,.0f}" for run in firsts))
    shown.caption = "✓ predicted = measured, to the byte"
    return shown


def draw(report: Report, runs: list[list[Run]]) -> None:
    """Memory for each strategy, stacked by class; the loss curves, one on top of the other."""
    figure, (panel,) = plots.new_figure(1, f"What a rank keeps, {report.ranks}", width=7.5)
    classes = (*CLASSES, "communication_buffers")
    bars = {STRATEGIES[run[0].stage]: {name: run[0].memory[name] for name in classes} for run in runs}
    plots.stacked(panel, bars, label="kept by rank 0 between steps")
    plots.save(figure, report.figure("memory.png"))
    figure, (panel,) = plots.new_figure(
        1, "Four strategies, one curve: the losses are equal bit for bit", width=7.5
    )
    curves = {STRATEGIES[run[0].stage]: run[0].losses for run in runs}
    plots.steps(panel, curves, styles=("-", "-", "--", ":"))
    panel.set_ylabel("loss of rank 0, nats per byte")
    plots.save(figure, report.figure("losses.png"))


def generate(weights: dict[str, torch.Tensor], plan: Experiment, length: int) -> str:
    """A continuation of a short prompt by the trained model, on the CPU."""
    model = GPT(plan.model)
    model.load_state_dict(weights)
    prompt = torch.tensor([list(encode(PROMPT))])
    dice = torch.Generator().manual_seed(0)
    tokens = model.eval().generate(prompt, length, temperature=0.7, top_k=30, generator=dice)
    return decode(tokens[0])


if __name__ == "__main__":
    chosen = parse(__doc__, Path("results/demo"))
    sys.exit(guarded(lambda: main(chosen)))
