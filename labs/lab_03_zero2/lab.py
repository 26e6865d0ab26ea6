"""Lab 03, ZeRO-2: the gradients too.

Trains the same GPT under data parallelism, ZeRO-1 and ZeRO-2 and checks, byte for byte, what ZeRO-2 promises:
gradients divided by the ranks, never a whole gradient alive, the same weights; and where it breaks its promise,
namely with a bucket as large as the model, that it takes exactly as much more as predicted.
"""

from __future__ import annotations

from zero_course.lab import wire

if __name__ == "__main__":
    wire.enter_own_network()

from dataclasses import replace
from typing import Any

import torch

from zero_course.comm import Communicator
from zero_course.lab import ladder, plots
from zero_course.lab.predict import FP32, Prediction
from zero_course.lab.processes import Tell, run_ranks
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import (
    STRATEGIES,
    Batches,
    Experiment,
    Run,
    alive_bytes,
    make_rung,
    meter_of_everything,
    train_step,
)
from zero_course.memory import live_bytes
from zero_course.models import GPT, GPTConfig


def experiment(options: Options) -> Experiment:
    """An odd width, so that buckets need padding; about three buckets a layer."""
    width = 99 if options.quick else 195
    model = GPTConfig(n_layer=3, n_head=3, d_model=width, block_size=32)
    return Experiment(model, steps=20, rows=2, bucket_size=4 * width**2, wire_steps=6)


def watch(tell: Tell, plan: Experiment) -> dict[int, dict[str, Any]]:
    """One step of ZeRO-1 and one of ZeRO-2 under watch, on one rank; stage to what was seen."""
    return {stage: watch_step(stage, plan) for stage in (1, 2)}


def watch_step(stage: int, plan: Experiment) -> dict[str, Any]:
    """What is alive over a step, activations included, and the whole gradients as each one arrives."""
    comm = Communicator()  # one of its own: its buffers are counted
    batches = Batches(plan, comm)
    before = alive_bytes()
    torch.manual_seed(plan.seed)
    rung = make_rung(stage, GPT(plan.model).to(comm.device), plan, comm)
    for step in range(3):  # pools and moments come into being
        train_step(rung, batches.next(), plan.rate(step))
        rung.zero_grad()
    between = alive_bytes() - before

    batch = batches.next()
    with meter_of_everything() as meter:
        train_step(rung, batch, plan.rate(3))
    rung.zero_grad()

    whole: list[int] = []  # bytes of whole gradients, as each one arrives
    parameters = list(rung.module.parameters())
    for param in parameters:  # runs after the rung's own hook
        param.register_post_accumulate_grad_hook(
            lambda _: whole.append(live_bytes(p.grad for p in parameters))
        )
    rung(*batch).backward()
    return {
        "between": between,
        "peak": meter.peak - before,
        "timeline": [(moment, size - before) for moment, size in meter.timeline] if comm.rank == 0 else [],
        "whole": whole,
    }


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    plan, n = experiment(options), options.nproc
    one_bucket = replace(plan, bucket_size=plan.model.num_parameters(), steps=4, wire_steps=0)
    jobs = {
        "DP": (0, plan),
        "ZeRO-1": (1, plan),
        "ZeRO-2": (2, plan),
        "ZeRO-1, one bucket": (1, one_bucket),
        "ZeRO-2, one bucket": (2, one_bucket),
    }
    runs = ladder.train_each(report, jobs)
    expected = {name: ladder.predictions(settings, stage, n) for name, (stage, settings) in jobs.items()}
    watched = run_ranks(n, watch, plan)

    zero2 = runs["ZeRO-2"]
    ladder.check_memory(report, zero2, expected["ZeRO-2"])
    together = sum(run.memory["gradients"] for run in zero2)
    report.check(
        "gradients of all ranks together: as under DP", runs["DP"][0].memory["gradients"], together, "bytes"
    )
    check_within_the_step(report, watched, expected)
    check_the_trap(report, runs, expected)
    ladder.check_traffic(report, zero2, expected["ZeRO-2"])
    ladder.check_same_training(report, runs["DP"], zero2)
    ladder.check_own_formula(report, zero2, expected["ZeRO-2"])
    draw(report, runs, watched[0])
    report.cannot(
        "CUDA: allocator peak and fragmentation as gradients are freed", "needs torch's CUDA allocator"
    )


def check_within_the_step(report: Report, watched: list[dict], expected: dict[str, list[Prediction]]) -> None:
    """ZeRO-2 keeps no whole gradient at any moment of backward."""
    report.section = "Within a step, ZeRO-2"
    gradients = len(watched[0][2]["whole"])
    most = [max(rank[2]["whole"]) for rank in watched]
    report.check_ranks(
        f"most bytes of .grad, seen as each of {gradients} arrives", [0] * len(most), most, "bytes"
    )
    pairs = list(zip(expected["ZeRO-1"], expected["ZeRO-2"]))
    report.check_ranks(
        "all live tensors before the step",
        [two.states + two.buffers for _, two in pairs],
        [rank[2]["between"] for rank in watched],
        "bytes",
    )
    # Activations and autograd's own copies are the same under both, so the peaks differ by what is kept.
    report.check_ranks(
        "peak with activations, less in ZeRO-2 than in ZeRO-1",
        [one.states + one.buffers - two.states - two.buffers for one, two in pairs],
        [rank[1]["peak"] - rank[2]["peak"] for rank in watched],
        "bytes",
    )


def check_the_trap(report: Report, runs: dict[str, list[Run]], expected: dict[str, list[Prediction]]) -> None:
    """With one bucket for everything ZeRO-2 keeps its buffer of whole gradients and the shard beside it."""
    report.section = "The trap: with a bucket as large as the model ZeRO-2 takes more than ZeRO-1"
    one, two = "ZeRO-1, one bucket", "ZeRO-2, one bucket"
    for name in (one, two):
        predicted = [p.states + p.buffers for p in expected[name]]
        report.check_ranks(f"{name}: all live tensors", predicted, [run.alive for run in runs[name]], "bytes")
    shard = FP32 * expected[two][0].groups[0] // report.world_size
    more = [b.alive - a.alive for a, b in zip(runs[one], runs[two])]
    report.check_ranks("ZeRO-2 takes more: the shard of gradients", [shard] * len(more), more, "bytes")


def draw(report: Report, runs: dict[str, list[Run]], watched: dict[int, dict[str, Any]]) -> None:
    """Memory by class with small buckets and with one; memory over a step."""
    classes = ("parameters", "gradients", "optimizer", "communication_buffers")
    figure, (bars, time) = plots.new_figure(2, f"ZeRO-2 on {report.ranks}", width=6.8)
    columns = {name.replace(", ", "\n"): {c: runs[name][0].memory[c] for c in classes} for name in runs}
    plots.stacked(
        bars, columns, label="kept by rank 0", title="Measured, by class: small buckets, and one for all"
    )
    for number, stage in enumerate(watched):
        timeline = watched[stage]["timeline"]
        last = timeline[-1][0]
        time.step(
            [moment / last for moment, _ in timeline],
            [size / plots.MIB for _, size in timeline],
            where="post",
            color=plots.LINES[number],
            label=STRATEGIES[stage],
        )
    time.set_xlabel("one step (forward, backward, update), part of its time")
    time.set_ylabel("all tensors on rank 0, MiB (2^20 bytes)")
    time.set_ylim(bottom=0)
    time.set_title("Over a step, activations included", fontsize=10)
    time.legend(fontsize=9)
    plots.save(figure, report.figure("zero2.png"))


if __name__ == "__main__":
    run_lab("lab_03_zero2", __file__, __doc__, run)
