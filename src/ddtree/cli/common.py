"""What all verbs share: consoles, progress, JSON output, opening a model, and common options."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ddtree.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from ddtree.engine.llm import LLM
    from ddtree.models.target import TargetModel

__all__ = [
    "BLOCK_OPTION",
    "BUDGET_OPTION",
    "DEVICE_OPTION",
    "DRAFTER_OPTION",
    "DTYPE_OPTION",
    "JSON_OPTION",
    "MODEL_OPTION",
    "MODE_OPTION",
    "THREADS_OPTION",
    "cache_dir",
    "counting",
    "fetching",
    "notes",
    "open_llm",
    "print_json",
    "settle_threads",
    "stages",
    "use_threads",
    "words",
]

LINE_EVERY_S = 30.0

# Answers go to standard output, everything about them to standard error.
words = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

MODEL_OPTION = typer.Option(DEFAULT_MODEL, help="A known name, a hub id or a folder.")
DRAFTER_OPTION = typer.Option(None, help="Drafter folder or hub id; the shipped one when not given.")
MODE_OPTION = typer.Option("tree", help="off, chain, tree or shadow.")
BUDGET_OPTION = typer.Option(None, help="Nodes of a draft tree; the device's default when not given.")
BLOCK_OPTION = typer.Option(None, help="Draft block, anchor included; the drafter's own when not given.")
DTYPE_OPTION = typer.Option("auto", help="auto, bfloat16, float16, float32 or float64.")
DEVICE_OPTION = typer.Option("auto", help="auto, cpu or cuda.")
JSON_OPTION = typer.Option(False, "--json", help="Print one JSON document on standard output instead.")
THREADS_OPTION = typer.Option(0, "--threads", min=0, help="CPU threads; 0 measures which number is fastest now.")

STAGES = {"wait": "another process is fetching it", "download": "fetching", "convert": "converting"}


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
    with stages() as report:
        yield lambda done, total: report(title, done, total)


def lines(clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """Progress as lines, one for each stage every `LINE_EVERY_S` seconds; what is over sooner says nothing."""
    began: dict[str, float] = {}
    told: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        now = clock()
        first = began.setdefault(stage, now)
        if done and now - told.get(stage, first) >= LINE_EVERY_S:
            told[stage] = now
            left_s = (now - first) / done * (total - done)
            notes.print(f"{stage}: {done:,} of {total:,}, {left_s / 60:.1f} min left", markup=False)

    return report


@contextmanager
def stages() -> Iterator[Any]:
    """Progress on standard error: call it with (stage, done, total). A bar for each stage on a terminal, else
    a line now and then."""
    if not notes.is_terminal:
        yield lines(time.monotonic)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def fetching(name: str) -> Iterator[Any]:
    """Progress of `locate` on standard error: a bar for each stage of getting a model onto this machine."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notes, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{name}: {STAGES.get(stage, stage)}", total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


def open_llm(
    model: str,
    *,
    drafter: str | None,
    dtype: str,
    device: str,
    mode: str,
    budget: int | None,
    block_size: int | None,
    max_context: int | None = None,
    prefix_cache: bool | None = None,
    max_sequences: int = 1,
) -> LLM:
    """A model ready to answer, with progress while it is fetched."""
    from ddtree.engine.config import EngineConfig

    config = EngineConfig(
        mode=mode,
        budget=budget,
        block_size=block_size,
        max_context=max_context,
        prefix_cache=prefix_cache,
        max_sequences=max_sequences,
    )
    from ddtree.engine.llm import LLM

    with fetching(model) as progress:
        return LLM(
            model,
            drafter=drafter,
            dtype=dtype,
            device=device,
            config=config,
            cache_dir=cache_dir(),
            progress=progress,
        )


def settle_threads(llm: LLM, asked: int) -> int:
    """Use as many threads as were asked for, or as are fastest now; returns the number."""
    return use_threads(llm.engine.target, llm.engine.plan.rows, asked)


def use_threads(target: TargetModel, rows: int, asked: int) -> int:
    """`settle_threads` for a target alone, in passes of so many rows."""
    import torch

    from ddtree.engine.hardware import choose_threads

    if target.device.type == "cpu":
        if not asked:
            decoder = target.spec.decoder
            found = choose_threads(decoder.hidden, decoder.intermediate, rows, target.dtype)
            asked = min(found, key=found.__getitem__)
        torch.set_num_threads(asked)
    return torch.get_num_threads()
