"""The report as tables for the terminal and for README.md, and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .contenders import CONTENDERS

COLOURS = {"floor": "#9a9a9a", "torch": "#e8954a", "deepspeed": "#7a6fb0", "zero_course": "#1f7a8c"}
FAMILIES = {"floor": "floor", "torch": "torch", "deepspeed": "DeepSpeed", "zero_course": "zero_course"}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Tables of every shape, then the goals, the checks that failed and what was not run."""
    for shape in report["shapes"].values():
        console.print(_shape_table(shape), "")
    console.print(
        "tok/s: tokens a second; floor, x torch, x DS: over those without communication, and over those of torch's "
        "and DeepSpeed's own of the same stage; B/par: peak resident bytes a parameter.\n"
    )
    if report["goals"]:
        console.print(_goal_table(report["goals"]), "")
    for check in report["checks"]:
        if not check["ok"]:
            console.print(
                f"[bold red]FAILED[/] {check['name']}: {check['measured']:.6f} beside {check['predicted']:.6f}, "
                f"relative difference {check['difference']:.1e}"
            )
    passed = [check for check in report["checks"] if check["ok"]]
    if passed and len(passed) == len(report["checks"]):
        worst = max(check["difference"] for check in passed if "negative control" not in check["name"])
        console.print(f"Losses agree: largest relative difference {worst:.1e} (tolerance 1e-05).")
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in report["not_run"]:
        reasons.setdefault((entry["status"], entry["reason"]), []).append(entry["name"])
    for (status, reason), names in reasons.items():
        text = f"{', '.join(names)}: {first_line(reason)}"
        console.print(f"[yellow]{status.upper()}[/]", escape(text), highlight=False)
    for note in report["notes"]:
        console.print(f"[yellow]Note:[/] {note}", highlight=False)


def _shape_table(shape: dict[str, Any]) -> Table:
    table = Table(
        title=f"{shape['title']}: {shape['parameters'] / 1e6:.1f}M parameters, {shape['tokens_per_step']} tokens "
        "a step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("median of the rounds", no_wrap=True)
    for heading in (" tok/s", " spread", "floor", "CPU s", "B/par", "x torch", "x DS"):
        table.add_column(heading, justify="right", no_wrap=True)
    stage = None
    for name, row in shape["contenders"].items():
        contender = CONTENDERS[name]
        if contender.stage != stage:
            table.add_section()
            stage = contender.stage
        style = "bold" if contender.family == "zero_course" else ""
        speed, per_parameter = row["tokens_per_second"], row["peak_bytes_per_parameter"]
        if speed is None:
            table.add_row(row["label"], row["status"].upper(), style=style)
            continue
        table.add_row(
            row["label"],
            f"{speed['median']:.{_digits(speed)}f}",
            f"{speed['min']:.{_digits(speed)}f}..{speed['max']:.{_digits(speed)}f}",
            _ratio(shape, name, "floor"),
            f"{row['cpu_seconds_per_step']['median']:.3f}",
            f"{per_parameter['median']:.1f}" if per_parameter else "-",
            _peer_ratio(shape, name, "torch", spread=False),
            _peer_ratio(shape, name, "deepspeed", spread=False),
            style=style,
        )
    return table


def _goal_table(goals: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Goals: ratio to the peer, median (min .. max)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    for heading in ("shape", "ours", "peer", "of"):
        table.add_column(heading, no_wrap=True)
    for heading in ("goal", "measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met", justify="center")
    for goal in goals:
        met = "[green]yes[/]" if goal["met"] else "[red]no[/]"
        of = {"tokens_per_second": "tokens/s", "peak_bytes": "memory"}[goal["metric"]]
        table.add_row(
            goal["shape"],
            goal["contender"],
            goal["peer"],
            of,
            goal["goal"],
            _with_spread(goal["measured"], 2),
            met,
        )
    return table


def markdown(report: dict[str, Any]) -> str:
    """The report for README.md, between its bench-table marks."""
    machine = report["machine"]
    lines = []
    for shape in report["shapes"].values():
        lines += [
            f"**{shape['title'].capitalize()}**: GPT, {shape['model']['n_layer']} layers, width "
            f"{shape['model']['d_model']}, {shape['parameters'] / 1e6:.1f}M parameters, "
            f"{shape['tokens_per_step']} tokens a step",
            "",
            "| stage | | tokens/s | of the floor | CPU s/step | peak bytes/parameter | tokens/s over torch's | "
            "over DeepSpeed's |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, row in shape["contenders"].items():
            contender = CONTENDERS[name]
            stage = "" if contender.stage is None else contender.stage
            label = f"**{row['label']}**" if contender.family == "zero_course" else row["label"]
            if row["tokens_per_second"] is None:
                lines.append(f"| {stage} | {label} | {row['status'].upper()} | | | | | |")
                continue
            per_parameter = row["peak_bytes_per_parameter"]
            cells = [
                str(stage),
                label,
                _with_spread(row["tokens_per_second"], _digits(row["tokens_per_second"])),
                _ratio(shape, name, "floor"),
                f"{row['cpu_seconds_per_step']['median']:.3f}",
                f"{per_parameter['median']:.1f}" if per_parameter else "",
                _peer_ratio(shape, name, "torch"),
                _peer_ratio(shape, name, "deepspeed"),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines.append(
        f"Median (smallest .. largest) of {report['settings']['rounds_done']} rounds of "
        f"{report['settings']['steps']} steps; ratios are formed within a round. 2 processes of 1 thread, fp32, "
        f"gloo, {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}"
        + (f", DeepSpeed {machine['deepspeed']}" if machine["deepspeed"] else "")
        + ". Peak memory is resident memory above what was there before the model was built."
    )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars with their spread: a row a shape, a column each for tokens/s, CPU seconds and memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    columns = {
        "tokens_per_second": "tokens/s (more is better)",
        "cpu_seconds_per_step": "CPU seconds a step and rank (less is better)",
        "peak_bytes_per_parameter": "peak bytes a parameter (less is better)",
    }
    shapes = list(report["shapes"].values())
    longest = max(len(shape["contenders"]) for shape in shapes)
    figure, axes = pyplot.subplots(
        len(shapes),
        len(columns),
        figsize=(14, len(shapes) * (1.2 + 0.34 * longest)),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for shape, row in zip(shapes, axes):
        names = list(shape["contenders"])
        stages = [CONTENDERS[name].stage for name in names]
        gaps = [0, *(a != b for a, b in zip(stages, stages[1:]))]  # a little room between two stages
        positions = [i + 0.5 * sum(gaps[: i + 1]) for i in range(len(names))]
        for (metric, title), axis in zip(columns.items(), row):
            for position, name in zip(positions, names):
                found = shape["contenders"][name].get(metric)
                if found is None:
                    continue
                middle = found["median"]
                axis.barh(position, middle, color=COLOURS[CONTENDERS[name].family], height=0.75)
                spread = [[middle - found["min"]], [found["max"] - middle]]
                axis.errorbar(middle, position, xerr=spread, color="black", linewidth=1, capsize=2)
                digits = {"tokens_per_second": _digits(found), "cpu_seconds_per_step": 3}.get(metric, 1)
                axis.annotate(
                    f"{middle:.{digits}f}",
                    (found["max"], position),
                    xytext=(5, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axis.margins(x=0.16)
            axis.set_xlim(left=0)
            axis.set_title(title, fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_yticks(positions, [CONTENDERS[name].label for name in names])
        row[0].invert_yaxis()  # shared by the row
        parameters = f"{shape['parameters'] / 1e6:.1f}M parameters"
        row[0].set_ylabel(f"{shape['title']}\n{parameters}, {shape['tokens_per_step']} tokens a step")
    present = {CONTENDERS[name].family for shape in shapes for name in shape["contenders"]}
    figure.legend(
        handles=[Patch(color=COLOURS[key], label=label) for key, label in FAMILIES.items() if key in present],
        loc="outside lower center",
        ncols=len(present),
        frameon=False,
    )
    figure.suptitle("2 processes of 1 thread, fp32, gloo: median and spread of the rounds", fontsize=12)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def first_line(text: str) -> str:
    """The first line of an error; the report has the rest."""
    return text.splitlines()[0]


def _digits(speed: dict[str, float]) -> int:
    """Decimals that tokens/s are shown with."""
    return 0 if speed["median"] >= 100 else 1


def _with_spread(value: dict[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} .. {value['max']:.{digits}f})"


def _ratio(shape: dict[str, Any], ours: str, peer: str, metric: str = "tokens_per_second") -> str:
    for found in shape["ratios"]:
        if (found["contender"], found["peer"], found["metric"]) == (ours, peer, metric):
            return f"{found['median']:.2f}"
    return ""


def _peer_ratio(shape: dict[str, Any], ours: str, family: str, spread: bool = True) -> str:
    """tokens/s over those of the peer of that family."""
    for found in shape["ratios"]:
        same = (found["contender"], found["metric"]) == (ours, "tokens_per_second")
        if same and CONTENDERS[found["peer"]].family == family and CONTENDERS[ours].family == "zero_course":
            return _with_spread(found, 2) if spread else f"{found['median']:.2f}"
    return ""
