"""What labs 02 to 04 have in common: one rung beside data parallelism, every byte predicted and measured.

None of these checks is met by a plain, unsharded DataParallel in the place of the rung: its classes are whole, it
sends no parameters, and its buffers are others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..models import GPT
from . import wire
from .predict import Prediction, predict
from .processes import device_for, run_ranks
from .report import Report
from .training import STRATEGIES, TIED_GPT_GATHERS, Experiment, Run, train_jobs

WIRE_TOLERANCE = 0.01  # TCP/IP headers and acknowledgements


def blueprint(experiment: Experiment) -> GPT:
    """The model without memory: names and shapes only."""
    with torch.device("meta"):
        return GPT(experiment.model)


def predictions(experiment: Experiment, stage: int, world_size: int) -> list[Prediction]:
    """What each rank should keep and send."""
    model = blueprint(experiment)
    return [
        predict(
            model,
            stage,
            world_size,
            rank,
            bucket_size=experiment.bucket_size,
            threshold=experiment.threshold,
            prefetch=experiment.prefetch,
            native=world_size > 1 and device_for(world_size) == "cuda",
            gathers=TIED_GPT_GATHERS,
        )
        for rank in range(world_size)
    ]


def progress_bar(console: Console) -> Progress:
    """The bar that demo and labs show while ranks train."""
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def train_each(report: Report, jobs: Mapping[str, tuple[int, Experiment]]) -> dict[str, list[Run]]:
    """Train every job on the same ranks, one after the other, with progress bars.

    Args:
        report: whose ranks and console.
        jobs: name to stage and experiment.

    Returns:
        name to one Run for each rank.
    """
    with progress_bar(report.console) as bar:
        tasks = [bar.add_task(name, total=plan.steps, note="") for name, (_, plan) in jobs.items()]

        def on_event(rank: int, event: dict[str, float]) -> None:
            bar.update(tasks[event["job"]], completed=event["step"], note=f"loss {event['loss']:.3f}")

        by_rank = run_ranks(report.world_size, train_jobs, list(jobs.values()), on_event=on_event)
    return {name: [runs[number] for runs in by_rank] for number, name in enumerate(jobs)}


def check_memory(
    report: Report, runs: Sequence[Run], expected: Sequence[Prediction], label: str = ""
) -> None:
    """Bytes by class, and that nothing is alive beside them."""
    report.section = f"Memory of a rank between steps, {STRATEGIES[runs[0].stage]}{label}"
    for name in expected[0].memory:
        report.check_ranks(
            name, [p.memory[name] for p in expected], [run.memory[name] for run in runs], "bytes"
        )
    measured = [run.memory["communication_buffers"] for run in runs]
    if runs[0].stage < 3:
        report.check_ranks("communication buffers", [p.buffers for p in expected], measured, "bytes")
    else:
        report.check_ranks(
            "communication buffers", [p.buffers for p in expected], measured, "bytes", relation="<="
        )
    # The garbage collector's count of all tensors knows none of these classes.
    known = [p.states + m for p, m in zip(expected, measured)]
    report.check_ranks("all live tensors = states + buffers", known, [run.alive for run in runs], "bytes")


def check_traffic(
    report: Report, runs: Sequence[Run], expected: Sequence[Prediction], label: str = ""
) -> None:
    """Bytes sent by purpose, and what the interface saw."""
    report.section = f"Traffic of a step, {STRATEGIES[runs[0].stage]}{label}"
    for name in dict.fromkeys([*expected[0].traffic, *runs[0].traffic]):
        report.check_ranks(
            f"sent for {name}",
            [p.traffic.get(name, 0) for p in expected],
            [run.traffic.get(name, 0) for run in runs],
            "bytes",
        )
    total = sum(sum(p.traffic.values()) for p in expected)
    check_wire(report, "loopback interface, all ranks", total, runs[0].wire)


def check_wire(report: Report, name: str, expected: int, readings: Sequence[int]) -> None:
    """Bytes by the interface's counter; of several readings the least, since retransmissions only add."""
    if report.world_size == 1:
        report.cannot(name, "one rank sends nothing")
    elif report.device != "cpu":
        report.cannot(name, "NCCL goes over NVLink or shared memory, which no interface counts")
    elif wire.reason_outside() is not None:
        report.cannot(name, wire.reason_outside())
    else:
        report.check(name, expected, min(readings), "bytes", tolerance=WIRE_TOLERANCE)


def check_same_training(report: Report, base: Sequence[Run], runs: Sequence[Run]) -> None:
    """Losses and weights as under ``base``: bit for bit where sums are taken in rank order."""
    names = f"{STRATEGIES[runs[0].stage]} and {STRATEGIES[base[0].stage]}"
    report.section = f"The same training, {names}"
    steps = len(base[0].losses)
    exact = base[0].transport == "peer"
    if exact:
        different = sum(
            a != b for ours, theirs in zip(runs, base) for a, b in zip(ours.losses, theirs.losses)
        )
        report.check(f"losses that differ, {steps} steps, all ranks", 0, different, "losses")
        unequal = sum(
            int((value != base[0].weights[name]).sum()) for name, value in runs[0].weights.items()
        ) + (0 if runs[0].weights.keys() == base[0].weights.keys() else 1)
        report.check(f"weights that differ after {steps} steps", 0, unequal, "elements")
    else:  # the library adds in an order of its own
        apart = max(abs(a - b) / abs(b) for o, t in zip(runs, base) for a, b in zip(o.losses, t.losses))
        report.check("losses, relative difference", 1e-5, apart, "", relation="<=")
        far = max(float((v - base[0].weights[k]).abs().max()) for k, v in runs[0].weights.items())
        report.check("weights, absolute difference", 1e-4, far, "", relation="<=")
    report.check(
        "ranks that hold other weights than rank 0", 0, sum(r.digest != runs[0].digest for r in runs), "ranks"
    )
    report.check("the loss falls (last below first)", True, runs[0].losses[-1] < runs[0].losses[0], "")


def check_own_formula(report: Report, runs: Sequence[Run], expected: Sequence[Prediction]) -> None:
    """The rung's own predictions say the same as the lab's."""
    report.section = f"What {STRATEGIES[runs[0].stage]} predicts of itself"
    for title, ours, theirs in (
        ("predicted_memory()", [p.memory for p in expected], [run.own_memory for run in runs]),
        ("predicted_traffic()", [p.traffic for p in expected], [run.own_traffic for run in runs]),
    ):
        totals = [sum(figures.values()) for figures in ours]
        found = [sum(figures.get(name, 0) for name in want) for want, figures in zip(ours, theirs)]
        report.check_ranks(title, totals, found, "bytes")
