"""Lab 02, ZeRO-1: the optimizer states in shards.

Trains the same GPT under data parallelism and under ZeRO-1 and checks, byte for byte, what ZeRO-1 promises: moments
divided by the ranks, not a byte more on the wire, and the same weights.
"""

from __future__ import annotations

from zero_course.lab import wire

if __name__ == "__main__":
    wire.enter_own_network()

from zero_course.lab import ladder, plots
from zero_course.lab.predict import Prediction
from zero_course.lab.report import Options, Report, run_lab
from zero_course.lab.training import Experiment, Run
from zero_course.models import GPTConfig


def experiment(options: Options) -> Experiment:
    """An odd width, so that buckets need padding; about one bucket a layer."""
    width = 99 if options.quick else 195
    model = GPTConfig(n_layer=2, n_head=3, d_model=width, block_size=32)
    return Experiment(model, steps=20, rows=2, bucket_size=12 * width**2, wire_steps=6)


def run(report: Report, options: Options) -> None:
    """The whole lab."""
    plan, n = experiment(options), options.nproc
    runs = ladder.train_each(report, {"DP": (0, plan), "ZeRO-1": (1, plan)})
    expected = {"DP": ladder.predictions(plan, 0, n), "ZeRO-1": ladder.predictions(plan, 1, n)}
    dp, zero1 = runs["DP"], runs["ZeRO-1"]
    ladder.check_memory(report, zero1, expected["ZeRO-1"])
    check_shares(report, plan.model.num_parameters(), dp, zero1, expected["ZeRO-1"])
    ladder.check_traffic(report, zero1, expected["ZeRO-1"])
    report.check(
        "all ranks: as much as DP sends",
        sum(sum(run.traffic.values()) for run in dp),
        sum(sum(run.traffic.values()) for run in zero1),
        "bytes",
    )
    ladder.check_same_training(report, dp, zero1)
    ladder.check_own_formula(report, zero1, expected["ZeRO-1"])
    draw(report, runs, expected)
    report.cannot(
        "CUDA: speed of the update of a shard, all-gather hidden behind the next forward", "needs GPUs"
    )


def check_shares(
    report: Report, parameters: int, dp: list[Run], zero1: list[Run], expected: list[Prediction]
) -> None:
    """The moments of all ranks together are those of one rank under DP; padding belongs to nobody."""
    report.section = "Shares of the optimizer's moments, ZeRO-1"
    together = sum(run.memory["optimizer"] for run in zero1)
    report.check("all ranks together: as one rank under DP", dp[0].memory["optimizer"], together, "bytes")
    share = max(run.memory["optimizer"] for run in zero1) / dp[0].memory["optimizer"]
    report.check("largest share, of one rank's under DP", 1 / report.world_size, share, "", tolerance=1e-3)
    padding = zero1[0].memory["parameters"] // 4 - parameters
    report.check(
        "padding of the buckets to a multiple of the ranks", expected[0].padding, padding, "elements"
    )


def draw(report: Report, runs: dict[str, list[Run]], expected: dict[str, list[Prediction]]) -> None:
    """Memory by class and traffic by purpose, predicted beside measured."""
    title = f"ZeRO-1 on {report.ranks}: the moments are divided, the traffic is not more"
    figure, (memory, traffic) = plots.new_figure(2, title, width=6.6)
    bars, sent = {}, {}
    for name in runs:
        predicted, measured = expected[name][0], runs[name][0]
        bars[f"{name}\npredicted"] = {**predicted.memory, "communication_buffers": predicted.buffers}
        bars[f"{name}\nmeasured"] = {key: measured.memory[key] for key in bars[f"{name}\npredicted"]}
        sent[f"{name}\npredicted"] = predicted.traffic
        sent[f"{name}\nmeasured"] = measured.traffic
    plots.stacked(memory, bars, label="kept between steps by rank 0")
    plots.stacked(traffic, sent, label="sent by rank 0 in a step")
    plots.save(figure, report.figure("zero1.png"))


if __name__ == "__main__":
    run_lab("lab_02_zero1", __file__, __doc__, run)
