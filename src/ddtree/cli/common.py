"""What all verbs share: consoles, progress, JSON output, and the options that mean the same everywhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["JSON_OPTION", "cache_dir", "counting", "notes", "print_json", "words"]

# Answers go to standard output, everything about them to standard error.
words = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

JSON_OPTION = typer.Option(False, "--json", help="Print one JSON document on standard output instead.")


def cache_dir() -> Path | None:
    """Where models are kept: DDTREE_CACHE, or None for the user's cache folder."""
    value = os.environ.get("DDTREE_CACHE")
    return Path(value) if value else None


def print_json(document: Any) -> None:
    """One JSON document on standard output. NaN and infinities are not JSON: they are an error here."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def counting(title: str) -> Iterator[Any]:
    """A progress bar on standard error that counts items: call it with (done, total)."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
