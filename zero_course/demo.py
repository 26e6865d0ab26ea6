"""The course in two minutes: one small GPT, trained on real text under each rung of the ladder.

    make demo                      or: python -m zero_course.demo --nproc 2

Trains on the reference of the Python language, byte by byte, on N processes: once with data parallelism, once with
each stage of ZeRO. All four see the same text from the same weights, so their losses are equal bit for bit; what
differs is what a rank keeps and what it sends, which is predicted by formula and then measured. Prints a table and a
sample of what the model writes; leaves report.json, the sample and plots in results/demo. Exits with 1 if a
prediction is not met, with 2 if a rank fails.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
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

ROWS = 16  # sequences in a joined batch, over all ranks
LAST = 20  # steps over which the loss at the end is averaged
CLASSES = ("parameters", "gradients", "optimizer", "communication_buffers")


def experiment(options: Options) -> Experiment:
    """What all strategies train: small enough for two cores, long enough to learn some English."""
    rows = max(1, ROWS // options.nproc)
    if options.quick:
        model = GPTConfig(n_layer=2, n_head=4, d_model=64, block_size=64)
        return Experiment(model, steps=30, rows=rows, bucket_size=50_000, threshold=1_000, learning_rate=3e-3)
    return Experiment(
        model=GPTConfig(n_layer=2, n_head=4, d_model=128, block_size=64),
        steps=400,
        rows=rows,
        bucket_size=66_000,  # elements: about the largest weight; a small model has large ones
        threshold=20_000,  # ZeRO-3 partitions the large weights and keeps what is small whole
        learning_rate=3e-3,
        warmup=40,
        betas=(0.9, 0.99),
        weight_decay=0.1,
    )


def run(report: Report, options: Options) -> None:
    """Train all strategies, check, and show."""
    plan = experiment(options)
    device = "a GPU each, over NCCL" if report.device == "cuda" else "the CPU, over gloo"
    report.console.print(
        f"A GPT of {plan.model.num_parameters():,} parameters, {plan.steps} steps on the Python language reference; "
        f"{report.ranks} on {device}",
        highlight=False,
    )
    runs = train_all(report, plan)
    expected = {name: ladder.predictions(plan, stage, options.nproc) for stage, name in enumerate(STRATEGIES)}
    for name in STRATEGIES:
        ladder.check_memory(report, runs[name], expected[name])
        report.section = f"Traffic of a step, {name}"
        for purpose in dict.fromkeys([*expected[name][0].traffic, *runs[name][0].traffic]):
            sent = [run.traffic.get(purpose, 0) for run in runs[name]]
            report.check_ranks(
                f"sent for {purpose}", [p.traffic.get(purpose, 0) for p in expected[name]], sent, "bytes"
            )
    for name in STRATEGIES[1:]:
        ladder.check_same_training(report, runs[STRATEGIES[0]], runs[name])
    report.extra["strategies"] = [summary(name, runs[name], expected[name]) for name in STRATEGIES]
    report.extra["losses"] = {name: joined_losses(runs[name]) for name in STRATEGIES}
    draw(report, runs, expected)
    rows = table_rows(runs, expected)
    show_table(report, rows)
    (report.folder / "table.md").write_text(markdown(rows))
    show_sample(report, plan, runs[STRATEGIES[-1]][0].weights)


def train_all(report: Report, plan: Experiment) -> dict[str, list[Run]]:
    """Each strategy on processes of its own, so that peak memory is its own; name → one Run for each rank."""
    runs: dict[str, list[Run]] = {}
    with ladder.progress_bar(report.console) as bar:
        tasks = {name: bar.add_task(name, total=plan.steps, note="", start=False) for name in STRATEGIES}
        for stage, name in enumerate(STRATEGIES):
            bar.start_task(tasks[name])
            bar.update(tasks[name], note="starting")

            def on_event(rank: int, event: dict[str, Any], task: Any = tasks[name]) -> None:
                bar.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}")

            runs[name] = run_ranks(report.world_size, train, stage, plan, on_event=on_event)
            bar.update(tasks[name], note=f"loss {loss_at_end(runs[name]):.3f}")
            bar.stop_task(tasks[name])
    return runs


def joined_losses(runs: Sequence[Run]) -> list[float]:
    """The loss of the joined batch at each step: the mean over the ranks."""
    return [statistics.fmean(losses) for losses in zip(*(run.losses for run in runs))]


def loss_at_end(runs: Sequence[Run]) -> float:
    """The mean of the last steps, since a single batch says little."""
    return statistics.fmean(joined_losses(runs)[-LAST:])


def summary(name: str, runs: Sequence[Run], expected: Sequence[Prediction]) -> dict[str, Any]:
    """A strategy as it stands in report.json; bytes are rank 0's unless they say otherwise."""
    mine, predicted = runs[0], expected[0]
    return {
        "name": name,
        "stage": mine.stage,
        "loss_start": joined_losses(runs)[0],
        "loss_end": loss_at_end(runs),
        "memory": {
            key: {
                "predicted": predicted.buffers if key == CLASSES[-1] else predicted.memory[key],
                "measured": size,
            }
            for key, size in mine.memory.items()
            if key in CLASSES
        },
        "sent_per_step": {
            purpose: {"predicted": size, "measured": mine.traffic.get(purpose, 0)}
            for purpose, size in predicted.traffic.items()
        },
        "all_live_bytes": mine.alive,
        "tokens_per_second": round(mine.tokens_per_second, 1),
        "peak_bytes_above_baseline": None if mine.peak is None else max(run.peak for run in runs),
    }


def table_rows(
    runs: dict[str, list[Run]], expected: dict[str, list[Prediction]]
) -> list[tuple[str, str, list[str]]]:
    """(quantity, predicted or measured, a cell for each strategy); rank 0's bytes, the largest peak."""
    first = {name: (expected[name][0], runs[name][0]) for name in runs}
    rows: list[tuple[str, str, list[str]]] = [
        ("loss at the start", "", [f"{joined_losses(runs[name])[0]:.4f}" for name in runs]),
        ("loss at the end", "", [f"{loss_at_end(runs[name]):.4f}" for name in runs]),
    ]
    for key in CLASSES:
        buffers = key == CLASSES[-1]
        predicted = [
            ("≤ " if buffers and m.stage == 3 else "") + f"{p.buffers if buffers else p.memory[key]:,}"
            for p, m in first.values()
        ]
        rows.append((f"{key.replace('_', ' ')}, bytes", "predicted", predicted))
        rows.append(("", "measured", [f"{m.memory[key]:,}" for _, m in first.values()]))
    for purpose in ("gradients", "parameters", "control"):
        predicted = [f"{p.traffic.get(purpose, 0):,}" for p, _ in first.values()]
        rows.append((f"sent in a step for {purpose}, bytes", "predicted", predicted))
        rows.append(("", "measured", [f"{m.traffic.get(purpose, 0):,}" for _, m in first.values()]))
    rows.append(
        ("tokens a second, all ranks", "measured", [f"{m.tokens_per_second:,.0f}" for _, m in first.values()])
    )
    peaks = [[run.peak for run in runs[name]] for name in runs]
    cells = ["?" if None in peak else f"{max(peak) / plots.MIB:.1f}" for peak in peaks]
    rows.append(("peak of a rank above its baseline, MiB", "measured", cells))
    return rows


def show_table(report: Report, rows: list[tuple[str, str, list[str]]]) -> None:
    """The table of all strategies."""
    table = Table(
        title="What a rank keeps and sends", title_style="bold", title_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("")
    table.add_column("")
    for name in STRATEGIES:
        table.add_column(name, justify="right", no_wrap=True)
    for quantity, kind, cells in rows:
        table.add_row(quantity, kind, *cells)
    report.console.print(table)


def markdown(rows: list[tuple[str, str, list[str]]]) -> str:
    """The same table as Markdown."""
    lines = [f"| | | {' | '.join(STRATEGIES)} |", f"|---|---|{'---:|' * len(STRATEGIES)}"]
    lines += [f"| {quantity} | {kind} | {' | '.join(cells)} |" for quantity, kind, cells in rows]
    return "\n".join(lines) + "\n"


def show_sample(report: Report, plan: Experiment, weights: dict[str, torch.Tensor]) -> None:
    """What the trained model writes."""
    model = GPT(plan.model)
    model.load_state_dict(weights)
    generator = torch.Generator().manual_seed(0)
    tokens = model.generate(encode("The ")[None], 400, temperature=0.6, generator=generator)
    text = decode(tokens[0])
    (report.folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
    report.extra["sample"] = text
    report.console.print(Panel(Text(text), title='what the model writes after "The "', title_align="left"))


def draw(report: Report, runs: dict[str, list[Run]], expected: dict[str, list[Prediction]]) -> None:
    """Memory and traffic, predicted beside measured; the four loss curves on top of each other."""
    figure, (memory, traffic) = plots.new_figure(
        2, f"One GPT under four strategies, {report.ranks}", width=7.6
    )
    bars, sent = {}, {}
    for name in runs:
        predicted, measured = expected[name][0], runs[name][0]
        bars[f"{name}\npredicted"] = {**predicted.memory, CLASSES[-1]: predicted.buffers}
        bars[f"{name}\nmeasured"] = {key: measured.memory[key] for key in CLASSES}
        sent[f"{name}\npredicted"] = predicted.traffic
        sent[f"{name}\nmeasured"] = measured.traffic
    plots.stacked(
        memory,
        bars,
        label="kept by rank 0",
        title="Memory between steps (ZeRO-3's buffers: a bound)",
    )
    plots.stacked(traffic, sent, label="sent by rank 0", title="Traffic of a step, by purpose")
    plots.save(figure, report.figure("memory.png"))

    figure, (panel,) = plots.new_figure(1, "The loss under four strategies: the same, bit for bit", width=8.0)
    width = max(1, len(runs[STRATEGIES[0]][0].losses) // 40)
    curves = {}
    for name in runs:
        losses = joined_losses(runs[name])
        curves[name] = [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]
    plots.steps(panel, curves, styles=("-", "--", "-.", ":"))
    panel.set_ylabel(f"cross-entropy, nats a byte (mean of {width} steps)")
    panel.grid(True, alpha=0.3)
    plots.save(figure, report.figure("loss.png"))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = parse(__doc__, Path("results/demo"), argv)

    def whole() -> int:
        report = Report("demo", options.nproc, options.results)
        run(report, options)
        return report.finish(brief=True)

    return guarded(whole)


if __name__ == "__main__":
    sys.exit(main())
