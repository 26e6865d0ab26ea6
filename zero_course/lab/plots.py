"""The figures of demo and labs: memory stacked by class, and a common look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

MIB = 2**20
COLOURS = {
    "parameters": "#4477aa",
    "gradients": "#ee6677",
    "optimizer": "#228833",
    "communication_buffers": "#ccbb44",
    "activations": "#66ccee",
    "control": "#777777",
}
LINES = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#ccbb44", "#66ccee")


def new_figure(
    panels: int = 1, title: str = "", *, width: float = 6.2, height: float = 4.4
) -> tuple[Figure, list[Axes]]:
    """A figure with ``panels`` side by side, sizes in inches of each. It needs no display."""
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)
    if title:
        figure.suptitle(title)
    for panel in axes[0]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_axisbelow(True)
    return figure, list(axes[0])


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG."""
    figure.savefig(path, dpi=120)


def stacked(panel: Axes, bars: Mapping[str, Mapping[str, int]], *, label: str, title: str = "") -> None:
    """Bars of bytes, stacked by class, in MiB.

    Args:
        panel: where to draw.
        bars: name of a bar → class → bytes; a bar whose name is empty leaves a gap.
        label: of the vertical axis, without unit.
        title: of the panel.
    """
    classes = list(dict.fromkeys(name for bar in bars.values() for name, size in bar.items() if size))
    largest = max((sum(bar.values()) for bar in bars.values()), default=0) or 1
    foot = [0.0] * len(bars)
    for name in classes:
        heights = [bar.get(name, 0) / MIB for bar in bars.values()]
        panel.bar(
            range(len(bars)),
            heights,
            bottom=foot,
            width=0.7,
            label=name.replace("_", " "),
            color=COLOURS.get(name),
        )
        for place, height in enumerate(heights):
            if height * MIB > 0.05 * largest:
                middle = foot[place] + height / 2
                panel.text(
                    place, middle, f"{height:.2f}", ha="center", va="center", fontsize=8, color="white"
                )
            foot[place] += height
    for place, height in enumerate(foot):
        panel.text(place, height, f"{height:.2f}", ha="center", va="bottom", fontsize=9, fontweight="bold")
    panel.set_xticks(range(len(bars)), list(bars))
    panel.set_ylabel(f"{label}, MiB (2^20 bytes)")
    panel.set_ylim(0, 1.25 * largest / MIB)  # room for the legend
    if title:
        panel.set_title(title, fontsize=10)
    panel.legend(fontsize=8, loc="upper center", ncols=2)


def steps(panel: Axes, curves: Mapping[str, Sequence[float]], *, styles: Sequence[str] = ("-",)) -> None:
    """Curves over the step number, each in a style of its own so that those on top of each other all show."""
    for number, (name, values) in enumerate(curves.items()):
        panel.plot(
            range(1, len(values) + 1),
            values,
            styles[number % len(styles)],
            color=LINES[number % len(LINES)],
            label=name,
            linewidth=1.2 + 1.6 * (len(curves) - 1 - number),
        )
    panel.set_xlabel("step")
    panel.legend(fontsize=9)
