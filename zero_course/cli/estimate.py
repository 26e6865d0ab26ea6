"""``zero-course estimate``: which strategy fits which hardware, with how much to spare, and why.

The figures are :func:`zero_course.memory.advise`'s; this file only reads options and prints a table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from zero_course.memory import Advice, Strategy

PIPE_WIDTH = 120  # columns of a table that goes to a file or a pipe


def _size(parse: str) -> Callable[[str], int]:
    """An option's parser that says why it refuses; the functions live where torch is imported, hence by name."""

    def parser(text: str) -> int:
        from zero_course.memory import units

        try:
            return getattr(units, parse)(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


_bytes = {"parser": _size("parse_bytes"), "metavar": "BYTES"}
_count = {"parser": _size("parse_count"), "metavar": "COUNT"}


def estimate(
    params: Annotated[int, typer.Option(help="Parameters of the model: 7B, 350M, 7e9.", **_count)],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")] = 8,
    gpu_memory: Annotated[
        int, typer.Option(help="Memory of one GPU: 40GB (1e9), 80GiB (2^30).", **_bytes)
    ] = "40GB",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of one host, which share its memory.")] = 8,
    cpu_memory: Annotated[
        int | None,
        typer.Option(help="Memory of one host, for offload; 128 GiB a GPU if not given.", **_bytes),
    ] = None,
    nvme: Annotated[
        int | None, typer.Option(help="NVMe of one host, for offload; none if not given.", **_bytes)
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, max=3, help="Show this ZeRO stage only (0 is DP).")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="What is counted: zero-paper, fp32, megatron, deepspeed-docs, zero-infinity.")
    ] = "zero-paper",
    tokens: Annotated[
        int, typer.Option(min=1, help="Batch x sequence of one micro-batch on one GPU.")
    ] = 4096,
    activations: Annotated[
        int | None,
        typer.Option(help="Activations on one GPU; else a GPT of this size, recomputed.", **_bytes),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model, with --hidden.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Its hidden size, with --layers.")] = None,
    vocabulary: Annotated[
        int, typer.Option(min=1, help="Its vocabulary, with --layers and --hidden.")
    ] = 50257,
    largest_layer: Annotated[
        int | None,
        typer.Option(help="Parameters that ZeRO-3 gathers at once; else from the shape.", **_count),
    ] = None,
    reduce_bucket_size: Annotated[int, typer.Option(help="Elements of a gradient bucket.", **_count)] = "5e8",
    reserve: Annotated[
        float, typer.Option(min=0, max=0.99, help="Part of a GPU that is never usable.")
    ] = 0.10,
    margin: Annotated[
        float, typer.Option(min=0, max=0.99, help="Part of a GPU to leave free besides.")
    ] = 0.10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON; sizes in bytes.")
    ] = False,
) -> None:
    """Which strategy fits: bytes on each GPU and host under DP, ZeRO-1, 2, 3, with and without offload.

    [bold]Examples[/bold]

    zero-course estimate --params 7e9 --gpus 8 --gpu-memory 40GB

    zero-course estimate --params 70B --gpus 64 --gpu-memory 80GB --cpu-memory 1TiB --nvme 8TB --stage 3

    zero-course estimate --params 1.3B --gpus 1 --gpu-memory 24GiB --preset megatron --json
    """
    from zero_course.memory import TransformerShape, advise

    if (layers is None) != (hidden is None):
        raise typer.BadParameter("--layers and --hidden go together")
    if layers is not None and activations is not None:
        raise typer.BadParameter(
            "--activations is a size; --layers and --hidden compute one: give one or the other"
        )
    shape = None
    if layers is not None and hidden is not None:
        shape = TransformerShape(layers, hidden, heads=max(1, hidden // 128), vocabulary=vocabulary)
    try:
        advice = advise(
            params,
            gpus,
            gpu_memory,
            gpus_per_node=gpus_per_node,
            cpu_memory=cpu_memory,
            nvme=nvme,
            activations=activations if shape is None else shape,
            tokens=tokens,
            largest_layer=largest_layer,
            preset=preset,
            reserve=reserve,
            margin=margin,
            reduce_bucket_size=reduce_bucket_size,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    shown = [strategy for strategy in advice.strategies if stage in (None, strategy.stage)]
    if as_json:
        typer.echo(json.dumps(_as_json(advice, shown), indent=2))
    else:
        _print(advice, shown)


def _as_json(advice: Advice, shown: list[Strategy]) -> dict[str, Any]:
    """Advice as plain data: every size in bytes, the recommended strategy by name."""
    data = asdict(advice)
    data["strategies"] = [
        {
            **asdict(strategy),
            "gpu_bytes": strategy.gpu_bytes,
            "fits": strategy.fits,
            "verdict": strategy.verdict,
        }
        for strategy in shown
    ]
    data["recommended"] = advice.recommended.name if advice.recommended else None
    return data


def _print(advice: Advice, shown: list[Strategy]) -> None:
    from rich.console import Console
    from rich.table import Table

    from zero_course.memory import format_bytes, format_count

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    gpus = f"{advice.gpus} GPU{'s' * (advice.gpus > 1)} of {format_bytes(advice.gpu_memory)}"
    title = f"{format_count(advice.parameters)} parameters on {gpus}"
    table = Table(title=title, caption="GB = 1e9 bytes on one GPU, host: on one host. * recommended")
    for name, alignment in (
        ("strategy", "left"),
        ("states", "right"),
        ("buffers", "right"),
        ("activations", "right"),
        ("GPU, GB", "right"),
        ("spare", "right"),
        ("host, GB", "right"),
        ("traffic", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=alignment, no_wrap=name != "")
    for strategy in shown:
        gpu = strategy.gpu
        buffers = gpu["communication_buffers"] + gpu["gathered_parameters"]
        states = strategy.gpu_bytes - buffers - gpu["activations"]
        recommended = strategy is advice.recommended
        color = "green" if strategy.roomy else "yellow" if strategy.fits else "red"
        table.add_row(
            ("* " if recommended else "  ") + strategy.name,
            *(
                _gb(size)
                for size in (states, buffers, gpu["activations"], strategy.gpu_bytes, strategy.gpu_spare)
            ),
            _gb(strategy.cpu_bytes),
            f"{strategy.traffic_ratio:.1f}x DP",
            f"[{color}]{strategy.verdict}[/{color}]",
            style="bold" if recommended else None,
        )
    console.print(table)
    console.print(advice.reason, highlight=False)
    for note in advice.notes:
        console.print(f"Note: {note}", highlight=False)
    console.print("Counted: " + "; ".join(advice.assumptions) + ".", style="dim", highlight=False)


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f}"
