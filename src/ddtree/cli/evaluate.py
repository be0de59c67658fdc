"""`ddtree eval`: how far drafts are accepted, on which text, at which budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

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
from ddtree.cli.measuring import measured_offline, measured_online, read_budgets, read_tasks

__all__ = ["evaluate"]


def evaluate(
    more_tasks: list[str] = typer.Argument(None, help="More tasks.", metavar="[TASK]..."),
    task: list[str] = typer.Option(
        [], help="A known set, or a FILE.jsonl with a `prompt` on each line; repeatable."
    ),
    budget: str = typer.Option(
        None, help="Nodes of the trees, root not counted; 4,8,16,32,64,128,256 if not given."
    ),
    max_tokens: int = typer.Option(256, min=2, help="Longest answer."),
    limit: int = typer.Option(0, min=0, help="Take only the first prompts of each task; 0 takes all."),
    drafter: list[str] = typer.Option([], help="Folder or hub id; repeatable; else the shipped one."),
    model: str = MODEL_OPTION,
    temperature: list[float] = typer.Option([0.0], min=0.0, help="0 is greedy; repeatable."),
    seed: int = typer.Option(0, min=0, help="Of sampled answers."),
    coupling: float = typer.Option(1.25, min=0.1, max=100, help="Scale of coupled drafts when sampling."),
    online: bool = typer.Option(False, "--online/--offline", help="Run the engine itself, not known answers."),
    shadow: bool = typer.Option(True, help="Also what each tree would have accepted where the chain stands."),
    batch: int = typer.Option(0, min=0, help="Answers decoded together; 0 chooses by the device."),
    answers: Path = typer.Option(None, help="Folder where answers are kept; the cache's own when not given."),
    skip_broken: bool = typer.Option(False, help="Leave broken lines of a file out and count them."),
    dtype: str = DTYPE_OPTION,
    device: str = DEVICE_OPTION,
    threads: int = typer.Option(0, min=0, help="CPU threads; 0 leaves torch's own number."),
    out: Path = typer.Option(None, help="Folder for the results, the report (Markdown, LaTeX) and plots."),
    plots: bool = typer.Option(None, help="Draw plots into --out; where matplotlib is, when not given."),
    log: list[Path] = typer.Option([], help="Folder of a training run, for its curves in --out; repeatable."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Measure drafters: tokens per round of the chain and of trees, by task, draft position and context."""
    from ddtree.evaluation.bench import Plan
    from ddtree.models.hub import user_cache

    plots, runs = _opened(out, plots, log)
    budgets = read_budgets(budget, online)
    tasks = read_tasks([*task, *(more_tasks or [])] or ["coding"], limit, skip_broken)
    folder = answers or (cache_dir() or user_cache()) / "answers"
    if threads:
        import torch

        torch.set_num_threads(threads)
    plans = [
        Plan(budgets, max_tokens, heat, seed, coupling, shadow, batch, folder)
        for heat in dict.fromkeys(temperature)
    ]
    measure = measured_online if online else measured_offline
    with stages() as report:
        documents = measure(model, drafter or [None], dtype, device, tasks, plans, report)
    if out is not None:
        from ddtree.evaluation.files import write_reports

        write_reports(out, documents, runs, plots)
        notes.print(f"written to {out}", markup=False)
    if as_json:
        print_json(documents[0] if len(documents) == 1 else {"runs": documents})
        return
    from ddtree.evaluation.report import terminal_table

    words.print(terminal_table(documents))


def _opened(
    out: Path | None, plots: bool | None, logs: Sequence[Path]
) -> tuple[bool, dict[str, list[dict[str, Any]]]]:
    """What --out needs, checked before anything is measured: whether to draw, and the rows of each run's log."""
    from ddtree.errors import ConfigError
    from ddtree.evaluation.bench import unique_names
    from ddtree.evaluation.plots import check_plots, read_log

    if logs and (out is None or plots is False):
        raise ConfigError("--log draws a run's curves, so it needs --out and plots")
    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out} is a file; name a folder")
        try:
            check_plots()
        except ConfigError as error:
            if plots or logs:
                raise
            if plots is None:
                notes.print(f"no plots will be drawn: {error}", markup=False)
            plots = False
    folders = [(run.parent if run.is_file() else run).resolve() for run in logs]
    rows = {name: read_log(run) for name, run in zip(unique_names(folders), logs, strict=True)}
    return plots is not False, rows
