"""Lab 04, ZeRO-3: the parameters too.

Trains the same GPT under data parallelism, ZeRO-2 and ZeRO-3 and checks, byte for byte, what ZeRO-3 promises:
everything divided by the ranks, one layer gathered at a time, half as much traffic again, the same weights; a model
built in shards that no rank could hold whole; and parameters read and edited while they are partitioned.
"""

from __future__ import annotations

from zero_course.lab import wire

if __name__ == "__main__":
    wire.enter_own_network()

from dataclasses import replace
from typing import Any

import torch

import zero_course as zc
from zero_course.comm import Communicator
from zero_course.lab import ladder, plots
from zero_course.lab.predict import FP32, Prediction, lay_out
from zero_course.lab.processes import Tell, run_ranks
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import (
    Batches,
    Experiment,
    Run,
    alive_bytes,
    make_rung,
    meter_of_everything,
    train_step,
)
from zero_course.memory import PeakMeter
from zero_course.models import GPT, GPTConfig

DEFAULT_THRESHOLD = 100_000  # elements: DeepSpeed's default stage3_param_persistence_threshold


def experiment(options: Options) -> Experiment:
    """An odd width, so that shards need padding; wide enough that some weights are above the default threshold."""
    width = 99 if options.quick else 195
    model = GPTConfig(n_layer=3, n_head=3, d_model=width, block_size=32)
    return Experiment(model, steps=20, rows=2, bucket_size=4 * width**2, wire_steps=6)


def everything(
    tell: Tell, plan: Experiment, ahead: Experiment, shape: GPTConfig
) -> dict[str, dict[str, Any]]:
    """All measurements but the training, on one rank; name to what was found."""
    return {
        "ZeRO-2": watch_step(2, plan),
        "ZeRO-3": watch_step(3, plan),
        "prefetching": watch_step(3, ahead),
        "building": build_in_shards(shape, seed=7),
    }


def watch_step(stage: int, plan: Experiment) -> dict[str, Any]:
    """One step under watch: the peak of all tensors, and what is gathered over time."""
    comm = Communicator()  # one of its own: its buffers are counted
    batches = Batches(plan, comm)
    before = alive_bytes()
    torch.manual_seed(plan.seed)
    rung = make_rung(stage, GPT(plan.model).to(comm.device), plan, comm)
    for step in range(3):  # pools and moments come into being, and the order of modules is learnt
        train_step(rung, batches.next(), plan.rate(step))
        rung.zero_grad()

    batch = batches.next()
    with meter_of_everything() as meter:
        train_step(rung, batch, plan.rate(3))
    rung.zero_grad()

    readable: list[
        int
    ] = []  # elements of parameters that have their values, at each module and each gradient
    gathered: list[int] = []  # the rung's own counter
    parameters = list(rung.module.parameters())

    def sample(*_: object) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            present = [p for p in parameters if p.untyped_storage().nbytes() > p.element_size()]
            readable.append(sum(p.numel() for p in present))
        gathered.append(getattr(rung, "gathered_elements", 0))

    for module in rung.module.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(sample)  # runs after the rung's own hook, which gathers
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(sample)
    rung(*batch).backward()
    return {
        "memory": rung.memory(),
        "peak": meter.peak - before,
        "readable": max(readable),
        "gathered": gathered,
        "window": getattr(rung, "window_elements", 0),
    }


def build_in_shards(shape: GPTConfig, seed: int) -> dict[str, Any]:
    """Build a model whole and under zero.Init, read and edit a partitioned parameter, train some steps."""
    comm = Communicator()
    with PeakMeter() as whole_meter:
        torch.manual_seed(seed)
        reference = GPT(shape)
    whole = {name: value.clone() for name, value in reference.state_dict().items()}
    del reference
    torch.manual_seed(seed + comm.rank)  # other values on other ranks: rank 0's must win
    with PeakMeter() as meter, zc.zero.Init(comm=comm, stage3_param_persistence_threshold=0):
        model = GPT(shape)
    plan = Experiment(shape, rows=1)
    rung = make_rung(3, model, plan, comm)
    built = rung.full_state_dict()
    weight = model.blocks[0].mlp.fc.weight
    before = built["blocks.0.mlp.fc.weight"]
    try:
        weight.sum()
        refused = False
    except RuntimeError:
        refused = True
    with zc.zero.GatheredParameters(weight):
        weight.data.add_(1.0)  # no modifier_rank: lost on leaving
    with zc.zero.GatheredParameters(weight):
        unchanged = int((weight.detach().cpu() != before).sum())
    with zc.zero.GatheredParameters(weight, modifier_rank=0):
        if comm.rank == 0:
            weight.data.mul_(2.0)
    with zc.zero.GatheredParameters(weight):
        edited = int((weight.detach().cpu() != 2 * before).sum())
    batches = Batches(plan, comm)
    batch = batches.next()
    losses = [train_step(rung, batch, 1e-3)]
    for _ in range(2):
        rung.zero_grad()
        losses.append(train_step(rung, batch, 1e-3))
    return {
        "whole_peak": whole_meter.peak,
        "peak": meter.peak,
        "timelines": (whole_meter.timeline, meter.timeline) if comm.rank == 0 else ([], []),
        "built_unequal": sum(int((built[name] != value).sum()) for name, value in whole.items()),
        "refused": refused,
        "unchanged": unchanged,
        "edited": edited,
        "falls": losses[-1] < losses[0],
    }


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    plan, n = experiment(options), options.nproc
    ahead = replace(plan, prefetch=8 * plan.model.d_model**2, wire_steps=0)
    mixed = replace(plan, threshold=DEFAULT_THRESHOLD // (4 if options.quick else 1))
    jobs = {
        "DP": (0, plan),
        "ZeRO-3": (3, plan),
        "ZeRO-3, prefetching": (3, ahead),
        "ZeRO-3, small ones whole": (3, mixed),
    }
    runs = ladder.train_each(report, jobs)
    expected = {name: ladder.predictions(settings, stage, n) for name, (stage, settings) in jobs.items()}
    shape = GPTConfig(n_layer=8, n_head=4, d_model=128 if options.quick else 256)
    found = run_ranks(n, everything, plan, ahead, shape)

    zero3 = runs["ZeRO-3"]
    ladder.check_memory(report, zero3, expected["ZeRO-3"])
    once = FP32 * (plan.model.num_parameters() + expected["ZeRO-3"][0].padding)
    for name in ("parameters", "gradients"):
        together = sum(run.memory[name] for run in zero3)
        report.check(f"{name} of all ranks together: the model once", once, together, "bytes")
    ladder.check_traffic(report, zero3, expected["ZeRO-3"])
    check_three_halves(report, plan.model, runs["DP"], zero3)
    small = "ZeRO-3, small ones whole"
    label = f", parameters up to {mixed.threshold:,} elements whole"
    ladder.check_memory(report, runs[small], expected[small], label)
    ladder.check_traffic(report, runs[small], expected[small], label)
    check_window(report, plan, ahead, found, ladder.predictions(plan, 2, n), expected["ZeRO-3"])
    ladder.check_same_training(report, runs["DP"], zero3)
    for name in ("ZeRO-3, prefetching", small):
        other = sum(a.losses != b.losses or a.digest != b.digest for a, b in zip(zero3, runs[name]))
        report.check(f"ranks with other losses or weights, {name.split(', ')[1]}", 0, other, "ranks")
    ladder.check_own_formula(report, zero3, expected["ZeRO-3"])
    check_building(report, shape, [rank["building"] for rank in found])
    draw(report, runs, found[0])
    report.cannot("CUDA: gathers on a stream of their own, hidden behind compute", "needs GPUs")
    report.cannot("CUDA: allocator peak with pooled buffers", "needs torch's CUDA allocator")


def check_three_halves(report: Report, shape: GPTConfig, dp: list[Run], zero3: list[Run]) -> None:
    """3Ψ instead of 2Ψ: gathered for forward, gathered for backward, gradients reduced."""
    whole = shape.num_parameters()
    token, position = shape.vocab_size * shape.d_model, shape.block_size * shape.d_model
    # The token table is gathered three times, being the output layer too; the position table in forward only.
    factor = (3 * whole + token - position) / (2 * whole)
    before, after = (
        sum(sent for run in runs for purpose, sent in run.traffic.items() if purpose != "control")
        for runs in (dp, zero3)
    )
    name = f"all ranks: {factor:.4f} of what DP sends"
    report.check(name, round(factor * before), after, "bytes", tolerance=1e-3)


def check_window(
    report: Report,
    plan: Experiment,
    ahead: Experiment,
    found: list[dict[str, Any]],
    zero2: list[Prediction],
    zero3: list[Prediction],
) -> None:
    """One layer at a time, or as far ahead as the prefetch size allows."""
    report.section = "The window of gathered parameters, ZeRO-3"
    n = report.world_size
    groups = lay_out(ladder.blueprint(plan), 3, n, plan.bucket_size)
    readable = [rank["ZeRO-3"]["readable"] for rank in found]
    report.check_ranks(
        "most that has values at any module or gradient",
        [max(g.numel for g in groups)] * n,
        readable,
        "elements",
    )
    largest = max(group.padded(n) for group in groups)
    most = [max(rank["ZeRO-3"]["gathered"]) for rank in found]
    report.check_ranks("most gathered: the largest layer", [largest] * n, most, "elements")
    most = [max(rank["prefetching"]["gathered"]) for rank in found]
    window = [largest + ahead.prefetch] * n
    report.check_ranks(
        f"most gathered, {ahead.prefetch:,} elements ahead", window, most, "elements", relation="<="
    )
    report.check_ranks("the same, and more than without", [largest + 1] * n, most, "elements", relation=">=")
    # Activations are the same, so the peaks within a step differ by what the two stages keep.
    kept = [
        two.states + two.buffers - three.states - rank["ZeRO-3"]["memory"]["communication_buffers"]
        for two, three, rank in zip(zero2, zero3, found)
    ]
    less = [rank["ZeRO-2"]["peak"] - rank["ZeRO-3"]["peak"] for rank in found]
    report.check_ranks("peak with activations, less in ZeRO-3 than in ZeRO-2", kept, less, "bytes")


def check_building(report: Report, shape: GPTConfig, built: list[dict[str, Any]]) -> None:
    """zero.Init: each layer is spread over the ranks as soon as it exists."""
    report.section = f"Building {shape.num_parameters():,} parameters under zero.Init"
    n = report.world_size
    with torch.device("meta"):
        groups = lay_out(GPT(shape), 3, n, 1)
    kept = peak = 0
    for group in reversed(groups):  # the order in which they are built
        kept += FP32 * (group.padded(n) // n + 1)  # the shard, and what stands for the rest
        peak = max(peak, kept + FP32 * group.numel)
    whole = FP32 * shape.num_parameters()
    report.check_ranks(
        "peak of the same model built whole", [whole] * n, [b["whole_peak"] for b in built], "bytes"
    )
    report.check_ranks(
        "peak: the shards so far and one layer", [peak] * n, [b["peak"] for b in built], "bytes"
    )
    name = "it fits where 60 % of the model would"
    if n > 1:
        report.check_ranks(name, [6 * whole // 10] * n, [b["peak"] for b in built], "bytes", relation="<=")
    else:
        report.cannot(name, "one rank alone holds the whole model")
    for name, key in (
        ("weights other than rank 0 alone would have built", "built_unequal"),
        ("weights changed by an edit that no rank is to make", "unchanged"),
        ("weights that miss the edit of rank 0", "edited"),
    ):
        report.check_ranks(name, [0] * n, [b[key] for b in built], "elements")
    report.check_ranks("refuses to be read while partitioned", [True] * n, [b["refused"] for b in built], "")
    report.check_ranks("its loss falls in three steps", [True] * n, [b["falls"] for b in built], "")


def draw(report: Report, runs: dict[str, list[Run]], found: dict[str, dict[str, Any]]) -> None:
    """Memory by class; what is gathered over a step; memory while a model is built."""
    classes = ("parameters", "gradients", "optimizer", "communication_buffers")
    figure, (bars, gathered, building) = plots.new_figure(3, f"ZeRO-3 on {report.ranks}", width=5.4)
    memory = {
        "DP": runs["DP"][0].memory,
        "ZeRO-2": found["ZeRO-2"]["memory"],
        "ZeRO-3": runs["ZeRO-3"][0].memory,
    }
    columns = {name: {c: sizes[c] for c in classes} for name, sizes in memory.items()}
    plots.stacked(bars, columns, label="kept by rank 0", title="Measured, by class")

    for number, (label, key) in enumerate((("on demand", "ZeRO-3"), ("prefetching", "prefetching"))):
        curve, colour = found[key]["gathered"], plots.LINES[number]
        gathered.step(
            range(len(curve)), [size / 1e6 for size in curve], where="mid", color=colour, label=label
        )
        window = found[key]["window"] / 1e6
        gathered.axhline(window, color=colour, linestyle=":", label=f"window, {label}")
    gathered.set_xlabel("modules of forward, then gradients of backward")
    gathered.set_ylabel("gathered parameters, million")
    gathered.set_ylim(0, 1.45 * found["prefetching"]["window"] / 1e6)
    gathered.set_title("Gathered within a step", fontsize=10)
    gathered.legend(fontsize=8, loc="upper center", ncols=2)

    for number, (label, timeline) in enumerate(
        zip(("built whole", "zero.Init"), found["building"]["timelines"])
    ):
        sizes = [size / plots.MIB for _, size in timeline]
        places = [place / max(1, len(sizes) - 1) for place in range(len(sizes))]
        building.plot(places, sizes, color=plots.LINES[number], label=label)
    building.set_xlabel("progress of building")
    building.set_ylabel("all tensors on rank 0, MiB (2^20 bytes)")
    building.set_ylim(bottom=0)
    building.set_title("Memory while a larger model is built", fontsize=10)
    building.legend(fontsize=9)
    plots.save(figure, report.figure("zero3.png"))


if __name__ == "__main__":
    run_lab("lab_04_zero3", __file__, __doc__, run)
