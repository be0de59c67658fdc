"""Plots of measurements and of training runs, each as PNG and SVG. The only module that imports matplotlib."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.report import ReportRow, budgets_in, report_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_plots", "plot_acceptance", "plot_positions", "plot_training", "read_log"]

PANEL_INCHES = (4.2, 3.4)


def check_plots() -> None:
    """ConfigError when there is nothing to draw with: better said before hours of measuring than after."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install 'ddtree[eval]', or pass --no-plots"
        ) from None


def plot_acceptance(documents: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Tokens per round against the budget, with intervals; the chain as a dashed line. One panel a task."""
    rows = report_rows(documents)
    panels: dict[str, list[ReportRow]] = {}
    for row in rows:
        if not row.way.startswith("shadow"):
            panels.setdefault(row.task, []).append(row)
    figure, axes = _panels(list(panels), "node budget", "tokens per round")
    for axis, found in zip(axes, panels.values(), strict=True):
        for color, row in enumerate(found):
            sizes = sorted(size for size in row.cells if size)
            means, lows, highs = zip(*(row.cells[size] for size in sizes), strict=True)
            axis.plot(sizes, means, marker="o", markersize=3, color=f"C{color}", label=_label(row))
            axis.fill_between(sizes, lows, highs, color=f"C{color}", alpha=0.15)
            if 0 in row.cells:
                axis.axhline(row.cells[0][0], color=f"C{color}", linestyle="--", linewidth=0.8)
        budgets = [size for size in budgets_in(found) if size]
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, labels=[str(size) for size in budgets])
        axis.legend(fontsize=7)
    return _saved(figure, folder / "acceptance")


def plot_positions(documents: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Share of rounds that accepted each draft position: the chain dashed, the largest tree solid, coupled."""
    tasks = list(dict.fromkeys(task for document in documents for task in document["tasks"]))
    figure, axes = _panels(tasks, "draft position", "share of rounds accepted")
    for axis, task in zip(axes, tasks, strict=True):
        for color, document in enumerate(documents):
            found = document["tasks"].get(task)
            if found is None:
                continue
            largest = max(
                (arm for arm in found if arm.startswith("tree-") and arm[5:].isdigit()), key=lambda a: int(a[5:])
            )
            for arm, style in (("chain", "--"), (largest, "-")):
                places = found[arm]["per_position"]
                words = f"{document['drafter']}, T = {document['temperature']:g}, {arm}"
                depths, shares = [p["depth"] for p in places], [p["share"] for p in places]
                axis.plot(depths, shares, style, color=f"C{color}", label=words)
        axis.set_ylim(0, 1)
        axis.legend(fontsize=7)
    return _saved(figure, folder / "positions")


def plot_training(runs: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> list[Path]:
    """Loss and held-out acceptance against the step, from the rows of runs' logs."""
    figure, (loss, accepted) = _panels(["training", "held out"], "step", "")
    loss.set_ylabel("loss")
    accepted.set_ylabel("tokens per round")
    for color, (name, rows) in enumerate(runs.items()):
        steps = [row for row in rows if "loss" in row]
        loss.plot([r["step"] for r in steps], [r["loss"] for r in steps], color=f"C{color}", label=name)
        checks = [row for row in rows if "chain" in row]
        for key, style in {key: "-" if key != "chain" else "--" for row in checks for key in _arms(row)}.items():
            seen = [row for row in checks if key in row]
            accepted.plot(
                [r["step"] for r in seen], [r[key] for r in seen], style, color=f"C{color}", label=f"{name}, {key}"
            )
    for axis in (loss, accepted):
        if axis.lines:
            axis.legend(fontsize=7)
    return _saved(figure, folder / "training")


def read_log(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's `log.jsonl`. DataError when there is none or a line is broken."""
    path = run / "log.jsonl" if run.is_dir() else run
    rows: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no log of a run ({error}); name the folder that `ddtree train` wrote") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        if not isinstance(row, dict) or "step" not in row:
            raise DataError(f"{path}, line {number}: a row of a training log has a step")
        rows.append(row)
    return rows


def _panels(titles: Sequence[str], x: str, y: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    axes = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
    return figure, axes


def _saved(figure: Figure, stem: Path) -> list[Path]:
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def _label(row: ReportRow) -> str:
    return f"{row.drafter}, T = {row.temperature:g}" + (", uncoupled" if "uncoupled" in row.way else "")


def _arms(row: Mapping[str, Any]) -> list[str]:
    return [key for key in row if key == "chain" or key.startswith("tree-")]
