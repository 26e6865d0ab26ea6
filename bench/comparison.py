"""From measurements to statements: medians with their spread, ratios taken round by round, losses, goals.

In each round every contender is measured once, and a ratio is formed within its round: what slowed the machine
for a minute slowed both sides. The median of these ratios is reported, with the smallest and the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import Any

from .contenders import CONTENDERS, SHAPES

METRICS = {  # name → (unit, True where more is better)
    "tokens_per_second": ("tokens/s", True),
    "cpu_seconds_per_step": ("s", False),
    "peak_bytes": ("bytes", False),
    "training_peak_bytes": ("bytes", False),
}
PEERS = {  # whom each of ours is measured against, besides the floor
    "dp": ("ddp", "deepspeed-0"),
    "zero1": ("zero-redundancy", "deepspeed-1"),
    "zero2": ("deepspeed-2",),
    "zero3": ("fsdp2", "deepspeed-3"),
}
SPEED_GOALS = {  # (ours, peer) → at least so many times its tokens/s
    ("dp", "ddp"): 1.0,
    ("zero1", "deepspeed-1"): 1.1,
    ("zero2", "deepspeed-2"): 1.1,
    ("zero3", "deepspeed-3"): 1.1,
    ("zero3", "fsdp2"): 1.0,
}
LOSS_TOLERANCE = 1e-5  # relative


@dataclass
class Result:
    """What is known of one contender on one shape.

    Attributes:
        rounds: number of the round → metric → value.
        losses: of the first round, one a step, the mean over ranks.
        worst_repeat: the largest relative difference between a later round's losses and these.
        error: why it was not measured any further.
        missing: why it was never tried.
    """

    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    worst_repeat: float = 0.0
    error: str | None = None
    missing: str | None = None

    def add(self, round_number: int, shape_name: str, ranks: Sequence[dict[str, Any]]) -> None:
        """Enter what the ranks reported: the slowest's time, the mean CPU time, the largest memory."""
        values = {
            "tokens_per_second": SHAPES[shape_name].tokens / max(rank["seconds"] for rank in ranks),
            "cpu_seconds_per_step": sum(rank["cpu_seconds"] for rank in ranks) / len(ranks),
        }
        for key in ("peak_bytes", "training_peak_bytes"):
            if all(rank[key] is not None for rank in ranks):
                values[key] = max(rank[key] for rank in ranks)
        self.rounds[round_number] = values
        losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks))]
        self.losses = self.losses or losses
        self.worst_repeat = max(self.worst_repeat, difference(losses, self.losses))

    @property
    def status(self) -> str:
        """``"ok"``, ``"failed"`` or ``"not run"``."""
        return "failed" if self.error else "not run" if self.missing else "ok"

    def values(self, metric: str) -> list[float]:
        """One value a round."""
        return [values[metric] for values in self.rounds.values() if metric in values]


Results = dict[str, dict[str, Result]]  # shape → contender → result


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Median, smallest and largest; None of nothing."""
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


def difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two courses of the loss."""
    pairs = list(zip(losses, reference, strict=True))
    return max((abs(a - b) / abs(b) if isfinite(a) else inf for a, b in pairs), default=0.0)


def ratios(results: dict[str, Result], ours: str, peer: str, metric: str) -> list[float]:
    """``metric`` of ours over that of the peer, one for each round in which both were measured."""
    mine, theirs = results[ours].rounds, results[peer].rounds
    both = [n for n in mine if n in theirs and metric in mine[n] and metric in theirs[n]]
    return [mine[n][metric] / theirs[n][metric] for n in both]


def compare(results: Results) -> dict[str, Any]:
    """Everything that the report says about the measurements: see ``shapes`` and ``checks`` of report.json."""
    shapes = {name: _shape_report(name, of_shape) for name, of_shape in results.items()}
    checks = [check for name, of_shape in results.items() for check in _loss_checks(name, of_shape)]
    goals = [goal for name, of_shape in results.items() for goal in _goals(name, of_shape)]
    not_run = [
        {"name": f"{shape} {name}", "status": result.status, "reason": result.error or result.missing}
        for shape, of_shape in results.items()
        for name, result in of_shape.items()
        if result.error or result.missing
    ]
    return {"shapes": shapes, "checks": checks, "goals": goals, "not_run": not_run}


def _shape_report(shape_name: str, results: dict[str, Result]) -> dict[str, Any]:
    shape = SHAPES[shape_name]
    contenders = {}
    for name, result in results.items():
        metrics = {metric: summary(result.values(metric)) for metric in METRICS}
        peak = metrics["peak_bytes"]
        contenders[name] = {
            "label": CONTENDERS[name].label,
            "status": result.status,
            "reason": result.error or result.missing,
            **metrics,
            "peak_bytes_per_parameter": peak and {k: v / shape.parameters for k, v in peak.items()},
            "rounds": {str(number): values for number, values in result.rounds.items()},
            "losses": result.losses,
        }
    compared = []
    for ours, peer in _pairs(results):
        for metric in METRICS:
            per_round = ratios(results, ours, peer, metric)
            if per_round:
                compared.append(
                    {"contender": ours, "peer": peer, "metric": metric, "per_round": per_round}
                    | summary(per_round)
                )
    return {
        "title": shape.title,
        "model": vars(shape.config),
        "parameters": shape.parameters,
        "micro_batch": shape.micro_batch,
        "sequence": shape.sequence,
        "tokens_per_step": shape.tokens,
        "contenders": contenders,
        "ratios": compared,
    }


def _pairs(results: dict[str, Result]) -> list[tuple[str, str]]:
    """Each of ours with its peers; everyone with the floor."""
    pairs = [(ours, peer) for ours, peers in PEERS.items() for peer in peers]
    pairs += [(name, "floor") for name in results if name != "floor"]
    return [(ours, peer) for ours, peer in pairs if ours in results and peer in results]


def _loss_checks(shape_name: str, results: dict[str, Result]) -> list[dict[str, Any]]:
    """All contenders that communicate train alike: the reference is torch's DDP where it ran.

    The floor's processes train apart from each other. That its losses differ shows that the check can fail.
    """
    trained = {name: result for name, result in results.items() if result.losses and name != "floor"}
    if not trained:
        return []
    reference = "ddp" if "ddp" in trained else next(iter(trained))
    checks = []
    for name, result in trained.items():
        off = max(difference(result.losses, trained[reference].losses), result.worst_repeat)
        checks.append(
            {
                "name": f"{shape_name}: losses of {name} are those of {reference} in every step and round",
                "predicted": trained[reference].losses[-1],
                "measured": result.losses[-1],
                "difference": off,
                "unit": "nats",
                "tolerance": LOSS_TOLERANCE,
                "ok": off <= LOSS_TOLERANCE,
            }
        )
    floor = results.get("floor")
    if floor is not None and floor.losses:
        off = difference(floor.losses, trained[reference].losses)
        checks.append(
            {
                "name": f"{shape_name}: losses without communication differ (negative control)",
                "predicted": trained[reference].losses[-1],
                "measured": floor.losses[-1],
                "difference": off,
                "unit": "nats",
                "tolerance": LOSS_TOLERANCE,
                "ok": off > LOSS_TOLERANCE,
            }
        )
    return checks


def _goals(shape_name: str, results: dict[str, Result]) -> list[dict[str, Any]]:
    """What the project set out to reach, and whether the median ratio does."""
    wanted = [(ours, peer, "tokens_per_second", least) for (ours, peer), least in SPEED_GOALS.items()]
    wanted += [
        (ours, peer, "peak_bytes", 1.0) for ours, peers in PEERS.items() if ours != "dp" for peer in peers
    ]
    goals = []
    for ours, peer, metric, bound in wanted:
        measured = summary(ratios(results, ours, peer, metric)) if {ours, peer} <= results.keys() else None
        if measured is not None:
            more = METRICS[metric][1]
            met = measured["median"] >= bound if more else measured["median"] < bound
            goals.append(
                {
                    "name": f"{shape_name}: {ours} over {peer}, {metric}",
                    "shape": shape_name,
                    "contender": ours,
                    "peer": peer,
                    "metric": metric,
                    "goal": f"{'>=' if more else '<'} {bound:g}",
                    "measured": measured,
                    "met": met,
                }
            )
    return goals
