"""The command line: ``zero-course estimate``, ``zero-course launch``, ``zero-course report``.

Each command is a file of its own and imports torch only once it runs, so that ``--help`` answers at once.
``python -m zero_course.cli`` is the same program.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .estimate import estimate
from .launch import launch
from .report import report


def _either_spelling(name: str) -> str:
    """``--num-gpus`` is ``--num_gpus``: DeepSpeed writes underscores, most programs write dashes."""
    return name.replace("-", "_")


app = typer.Typer(
    name="zero-course",
    help="DeepSpeed rebuilt from scratch: estimate what a model needs, launch its training, report on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _either_spelling},
)
app.command()(estimate)
# What follows the script belongs to the script, whatever it looks like.
app.command(context_settings={"allow_interspersed_args": False})(launch)
app.command()(report)


def _print_version(wanted: bool) -> None:
    if wanted:
        from zero_course import __version__

        typer.echo(f"zero-course {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """DeepSpeed rebuilt from scratch: estimate what a model needs, launch its training, report on this machine."""
