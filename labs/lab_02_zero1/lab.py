"""Lab 02, ZeRO-1: the optimizer states in shards.

Trains the same GPT under data parallelism and under ZeRO-1 and checks, byte for byte, what ZeRO-1 promises: moments
divided by the ranks, not a byte more on the wire, and the same weights.
"""

from __future__ import annotations

from zero_course.lab import wire

if __name__ == "__main__":
    wire.enter_own_network()

from zero_course.lab import ladder, plots
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import STRATEGIES, Experiment
from zero_course.models import GPTConfig

STAGE = 1


def experiment(options: Options) -> Experiment:
    """An odd width, so that buckets need padding."""
    width = 99 if options.quick else 195
    model = GPTConfig(n_layer=2, n_head=3, d_model=width, block_size=32)
    return Experiment(model, steps=20, rows=2, bucket_size=12 * width**2, wire_steps=6)


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    plan = experiment(options)
    runs = ladder.train_stages(report, [0, STAGE], plan)
    expected = {stage: ladder.predictions(plan, stage, options.nproc) for stage in runs}
    ladder.check_memory(report, runs[STAGE], expected[STAGE])
    check_shares(report, plan.model.num_parameters(), runs, expected)
    ladder.check_traffic(report, runs[STAGE], expected[STAGE])
    report.check(
        "ZeRO-1 sends as much as DP, all ranks, padding included",
        sum(sum(run.traffic.values()) for run in runs[0]),
        sum(sum(run.traffic.values()) for run in runs[STAGE]),
        "bytes",
    )
    ladder.check_same_training(report, runs[0], runs[STAGE])
    ladder.check_own_formula(report, runs[STAGE], expected[STAGE])
    draw(report, runs, expected)
    report.cannot("CUDA: update time of a shard, overlap of all-gather and forward", "speed on GPUs only a GPU can show")


def check_shares(report: Report, parameters: int, runs: dict, expected: dict) -> None:
    """The moments of all ranks together are those of one rank under DP; padding is counted apart."""
    report.section = "Shares"
    together = sum(run.memory["optimizer"] for run in runs[STAGE])
    report.check("moments of all ranks together = moments under DP", runs[0][0].memory["optimizer"], together, "bytes")
    padding = (runs[STAGE][0].memory["parameters"] - 4 * parameters) // 4
    report.check("padding in the buckets", expected[STAGE][0].padding, padding, "elements")
    largest = max(run.memory["optimizer"] for run in runs[STAGE])
    shard = -(-runs[0][0].memory["optimizer"] // report.world_size)
    report.check(
        "largest shard of moments: 1/N and at most a slice's padding",
        shard + 8 * len(expected[STAGE][0].groups),
        largest,
        "bytes",
        relation="<=",
    )


def draw(report: Report, runs: dict, expected: dict) -> None:
    """Memory by class and traffic by purpose, predicted beside measured."""
    figure, (memory, traffic) = plots.new_figure(
        2, f"ZeRO-1 on {report.world_size} rank(s): the moments are divided, the traffic is not more", width=6.6
    )
    bars, sent = {}, {}
    for stage in runs:
        name = STRATEGIES[stage]
        predicted, measured = expected[stage][0], runs[stage][0]
        bars[f"{name}\npredicted"] = {**predicted.memory, "communication_buffers": predicted.buffers}
        bars[f"{name}\nmeasured"] = {key: measured.memory[key] for key in bars[f"{name}\npredicted"]}
        sent[f"{name}\npredicted"] = predicted.traffic
        sent[f"{name}\nmeasured"] = measured.traffic
    plots.stacked(memory, bars, label="kept between steps by rank 0")
    plots.stacked(traffic, sent, label="sent by rank 0 in a step")
    plots.save(figure, report.figure("zero1.png"))


if __name__ == "__main__":
    run_lab("lab_02_zero1", __file__, __doc__, run)
