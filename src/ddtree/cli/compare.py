"""`ddtree compare`: which of two drafters is better, paired over the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from ddtree.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MODEL_OPTION,
    cache_dir,
    notes,
    print_json,
    stages,
    words,
)
from ddtree.cli.measuring import measured_offline, read_budgets, read_tasks

if TYPE_CHECKING:
    from ddtree.evaluation.compare import Comparison

__all__ = ["compare"]

SHIPPED = "shipped"


def compare(
    a: str = typer.Argument(..., metavar="A", help="A result of `ddtree eval`, a drafter's folder, or `shipped`."),
    b: str = typer.Argument(..., metavar="B", help="The same kind of thing."),
    arm: str = typer.Option(None, help="What the verdict is about; tree-64, or the largest tree, when not given."),
    task: list[str] = typer.Option([], help="For drafters: tasks to measure them on, as in `ddtree eval`."),
    budget: str = typer.Option("16,64", help="For drafters: nodes of the trees."),
    max_tokens: int = typer.Option(256, min=2, help="For drafters: longest answer."),
    limit: int = typer.Option(0, min=0, help="For drafters: only the first prompts of each task; 0 takes all."),
    temperature: float = typer.Option(0.0, min=0.0, help="For drafters: 0 is greedy."),
    answers: Path = typer.Option(None, help="For drafters: folder where answers are kept."),
    model: str = MODEL_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say whether B is better than A, by how much, and where it is not; drafters are measured first, offline."""
    from ddtree.engine.config import EngineConfig
    from ddtree.errors import ConfigError
    from ddtree.evaluation.bench import Plan
    from ddtree.evaluation.compare import common_arms
    from ddtree.evaluation.compare import compare as paired
    from ddtree.evaluation.result import read_result
    from ddtree.models.hub import user_cache

    drafters = [one for one in (a, b) if one == SHIPPED or (Path(one) / "config.json").is_file()]
    if len(drafters) == 1:
        raise ConfigError(
            f"{drafters[0]} is a drafter and the other is not; compare two drafters, or two results of ddtree eval"
        )
    if drafters:
        plan = Plan(
            read_budgets(budget, online=False),
            max_tokens=max_tokens,
            temperature=temperature,
            seed=0,
            coupling=EngineConfig().coupling or 1.0,
            shadow=False,
            batch=0,
            answers=answers or (cache_dir() or user_cache()) / "answers",
        )
        asked = [None if one == SHIPPED else one for one in (a, b)]
        with stages() as report:
            tasks = read_tasks(task or ["coding"], limit, skip_broken=False)
            first, second = measured_offline(model, asked, dtype, device, tasks, [plan], report)
    else:
        first, second = read_result(Path(a)), read_result(Path(b))
    names = (first["drafter"], second["drafter"])
    if names[0] == names[1]:
        names = ("A", "B")
        notes.print(f"A is {a}, B is {b}", markup=False)
    chosen = paired(first, second, names, arm)
    every = [paired(first, second, names, one) for one in common_arms(first, second)]
    if as_json:
        print_json(_document(chosen, every, (first, second)))
        return
    words.print(_table(every))
    words.print(f"{chosen.verdict} ({chosen.arm})", markup=False)


def _table(every: list[Comparison]) -> Table:
    from ddtree.evaluation.compare import percent

    shown = [one for one in every if not one.arm.startswith("shadow")]
    table = Table(title=f"{shown[0].b} against {shown[0].a}: tokens per round")
    table.add_column("draft", no_wrap=True)
    for task in (*shown[0].tasks, "overall"):
        table.add_column(task, justify="right")
    for one in shown:
        ratios = (*one.tasks.values(), one.overall)
        table.add_row(one.arm, *(percent(ratio, signed=True) for ratio in ratios))
    return table


def _document(
    chosen: Comparison, every: list[Comparison], documents: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> dict[str, Any]:
    def ratio(found: Any) -> dict[str, Any]:
        return {"ratio": found.value, "interval": [found.low, found.high]}

    return {
        "a": chosen.a,
        "b": chosen.b,
        "arm": chosen.arm,
        "measured": [one.get("provenance") for one in documents],
        "verdict": chosen.verdict,
        "arms": {
            one.arm: {
                "overall": ratio(one.overall),
                "tasks": {task: ratio(found) for task, found in one.tasks.items()},
            }
            for one in every
        },
    }
