"""The `ddtree` command: its verbs, and how errors end."""

from __future__ import annotations

import importlib.metadata
import sys

import typer

from ddtree.cli.chat import chat
from ddtree.cli.common import notes
from ddtree.cli.compare import compare
from ddtree.cli.data import data
from ddtree.cli.demo import demo
from ddtree.cli.doctor import doctor
from ddtree.cli.evaluate import evaluate
from ddtree.cli.export import export
from ddtree.cli.generate import generate
from ddtree.cli.info import info
from ddtree.cli.pull import pull
from ddtree.cli.serve import serve
from ddtree.cli.train import train
from ddtree.errors import DDTreeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="ddtree",
    help="Tree speculative decoding: the same text, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (demo, pull, generate, chat, serve, info, data, train, export, doctor):
    app.command()(verb)
app.command("eval")(evaluate)
app.command()(compare)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddtree {importlib.metadata.version('ddtree')}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Say which version this is."
    ),
) -> None:
    """Options before the verb."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every error that ddtree raises on purpose ends as one line and an exit code.

    Ctrl-C and wrong usage end inside typer, with exit codes 130 and 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        app(args=arguments, standalone_mode=True)
    except DDTreeError as error:
        if "--debug" in arguments:
            raise
        notes.print(f"ddtree: {error}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
