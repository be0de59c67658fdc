"""`ddtree data`: the target's own answers to prompts, for training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ddtree.cli.common import (
    DEVICE_OPTION,
    JSON_OPTION,
    THREADS_OPTION,
    cache_dir,
    counting,
    notes,
    print_json,
    use_threads,
)
from ddtree.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from ddtree.data.prompts import Prompt

__all__ = ["data"]


def data(
    out: Path = typer.Option(..., help="Folder for the shards and their card."),
    prompts: list[Path] = typer.Option([], help="JSONL file with a `prompt` on each line; may be repeated."),
    dataset: list[str] = typer.Option(
        [], help="Prompts of a hub's data set: ID, ID:SPLIT or ID:SPLIT:COLUMN; may be repeated."
    ),
    own: int = typer.Option(0, min=0, help="How many prompts the target writes itself, besides."),
    held_out: list[Path] = typer.Option([], help="JSONL file of prompts to stay away from; may be repeated."),
    model: str = typer.Option(DEFAULT_MODEL, help="The target: a known name, a hub id or a folder."),
    max_tokens: int = typer.Option(384, min=2, help="Longest answer."),
    max_length: int = typer.Option(1024, min=8, help="Longest prompt and answer together."),
    temperature: list[float] = typer.Option([0.0], min=0.0, help="One pass a temperature; may be repeated."),
    batch: int = typer.Option(64, min=1, help="Sequences decoded together."),
    seed: int = typer.Option(0, min=0, help="Of the sampling."),
    limit: int = typer.Option(0, min=0, help="Take only the first prompts of each file or set; 0 takes all."),
    skip_broken: bool = typer.Option(False, help="Leave broken lines out and count them."),
    device: str = DEVICE_OPTION,
    dtype: str = typer.Option("auto", help="auto, bfloat16 or float32."),
    part: str = typer.Option("1/1", help="Make the i-th of n parts, i/n, so that n processes share the work."),
    threads: int = THREADS_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Write the target's own answers to prompts, in shards that `ddtree train` reads. A second run goes on."""
    from ddtree.data.generate import AnswerPlan, answer_prompts, write_own_prompts
    from ddtree.data.hub_prompts import read_dataset
    from ddtree.data.prompts import HeldOut, read_prompts
    from ddtree.errors import ConfigError
    from ddtree.models.hub import locate
    from ddtree.models.load import load_target
    from ddtree.models.tokenizer import ChatTokenizer
    from ddtree.training.start import resolve_device, resolve_dtype

    if not prompts and not dataset and not own:
        raise ConfigError(
            "nothing to answer: give --prompts FILE or --dataset ID, or --own N for prompts of the target's own"
        )
    which, parts = _share(part)
    collected, left_out = _read(prompts, limit, skip_broken)
    for name in dataset:
        found = read_dataset(name)
        collected += found[:limit] if limit else found
    excluded = HeldOut(p.text for path in held_out for p in read_prompts(path)[0])
    where = resolve_device(device)
    local = locate(model, cache_dir=cache_dir())
    target = load_target(local.folder, resolve_dtype(dtype, where), where)
    use_threads(target, batch, threads)
    tokenizer = ChatTokenizer(local.folder)
    plans = [AnswerPlan(local.name, max_tokens, max_length, t, batch, seed=seed + which) for t in temperature]
    collected = collected[which::parts]
    report: dict[str, Any] = {
        "folder": str(out),
        "prompts": len(collected),
        "own_prompts": 0,
        "broken_lines": left_out,
        "passes": [],
    }
    if own:
        with notes.status(f"{model} writes {own // parts} prompts"):
            path = out / f"own-prompts-p{which}.jsonl"
            written = write_own_prompts(target, tokenizer, own // parts, plans[0], tokenizer.user_prefix(), path)
        notes.print(f"{len(written)} prompts of the target's own")
        collected += written
        report["own_prompts"] = len(written)
    for plan in plans:
        with counting(f"answers at temperature {plan.temperature:g}") as show:
            answers = tokens = 0
            for progress in answer_prompts(target, tokenizer, collected, out, plan, excluded, which):
                show(progress.done, progress.total)
                answers, tokens = progress.done, progress.tokens
        report["passes"].append({"temperature": plan.temperature, "answers": answers, "new_tokens": tokens})
        notes.print(f"temperature {plan.temperature:g}: {tokens:,} new tokens in {out}")
    if as_json:
        print_json(report)


def _read(paths: list[Path], limit: int, skip_broken: bool) -> tuple[list[Prompt], int]:
    """The prompts of all files, and how many broken lines were left out."""
    from ddtree.data.prompts import read_prompts

    collected: list[Prompt] = []
    left_out = 0
    for path in paths:
        found, broken = read_prompts(path, skip_broken)
        collected += found[:limit] if limit else found
        left_out += broken
        if broken:
            notes.print(f"{path.name}: {broken} broken lines left out")
    return collected, left_out


def _share(part: str) -> tuple[int, int]:
    from ddtree.errors import ConfigError

    pieces = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", part)
    if pieces and 1 <= int(pieces[1]) <= int(pieces[2]):
        return int(pieces[1]) - 1, int(pieces[2])
    raise ConfigError(f"--part must be i/n with 1 <= i <= n: got {part!r}")
