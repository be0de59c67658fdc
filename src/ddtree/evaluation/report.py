"""Measurements for people: rows once, then as a terminal table, Markdown or LaTeX.

A row is one task under one drafter and temperature, in one way of drafting (tree, shadow, uncoupled); its columns
are the chain and the budgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ddtree.evaluation.result import arms_in

__all__ = ["ReportRow", "budgets_in", "latex", "markdown", "report_rows", "terminal_table"]

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReportRow:
    """cells: (mean, low, high) of the chain (0) and of each budget."""

    drafter: str
    temperature: float
    task: str
    way: str
    cells: Mapping[int, tuple[float, float, float]]


def report_rows(documents: Iterable[Document]) -> list[ReportRow]:
    """All rows, in the documents' order."""
    rows: list[ReportRow] = []
    for document in documents:
        for task, found in document["tasks"].items():
            ways: dict[str, dict[int, tuple[float, float, float]]] = {}
            for name in arms_in(found):
                way, budget = _way(name)
                ways.setdefault(way, {})[budget] = (found[name]["mean"], *found[name]["interval"])
            title = f"{task} ({found['prompts']})"
            rows += [
                ReportRow(document["drafter"], document["temperature"], title, way, cells)
                for way, cells in ways.items()
            ]
    return rows


def terminal_table(documents: Sequence[Document]) -> Table:
    """Means with half the width of their intervals: a line for each arm, a column for each task."""
    tasks = list(dict.fromkeys(task for document in documents for task in document["tasks"]))
    names = len({document["drafter"] for document in documents}) > 1
    heats = len({document["temperature"] for document in documents}) > 1
    table = Table(title="Tokens per round, bonus included")
    for head in [*(["drafter"] if names else []), *(["T"] if heats else []), "draft"]:
        table.add_column(head, no_wrap=True)
    for task in tasks:
        table.add_column(task, justify="right")
    for document in documents:
        labels = [document["drafter"]] * names + [f"{document['temperature']:g}"] * heats
        found = [document["tasks"].get(task, {}) for task in tasks]
        for arm in dict.fromkeys(arm for task in found for arm in arms_in(task)):
            table.add_row(*labels, arm, *(_short(task.get(arm)) for task in found))
        table.add_section()
    return table


def markdown(documents: Sequence[Document]) -> str:
    """A report: acceptance, then per position, by context and calibration of each document."""
    rows = report_rows(documents)
    heads, budgets = _heads(rows), budgets_in(rows)
    lines = ["# Acceptance", "", *(_about(document) for document in documents), ""]
    lines += _table(
        [*heads, *map(_column, budgets)],
        ([*_labels(row, heads), *(_long(row.cells.get(budget)) for budget in budgets)] for row in rows),
        len(heads),
    )
    for document in documents:
        for task, found in document["tasks"].items():
            title = f"{document['drafter']}, temperature {document['temperature']:g}, {task}"
            lines += ["", f"## {title}", "", *_positions(found), "", *_contexts(found)]
            for kind, depths in found.get("calibration", {}).items():
                lines += ["", f"Calibration of the best guess of each depth, {kind}:", "", *_calibration(depths)]
    return "\n".join(lines) + "\n"


def latex(documents: Sequence[Document]) -> str:
    """The acceptance table as a LaTeX tabular (package booktabs)."""
    rows = report_rows(documents)
    heads, budgets = _heads(rows), budgets_in(rows)
    lines = [
        "\\begin{tabular}{" + "l" * len(heads) + "r" * len(budgets) + "}",
        "\\toprule",
        " & ".join([*heads, *map(_column, budgets)]) + " \\\\",
        "\\midrule",
    ]
    for row in rows:
        labels = (_escaped(label) for label in _labels(row, heads))
        cells = (_long(row.cells.get(budget)) for budget in budgets)
        lines.append(" & ".join([*labels, *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def budgets_in(rows: Iterable[ReportRow]) -> list[int]:
    """Every column of some rows: 0 for the chain, then the budgets."""
    return sorted({budget for row in rows for budget in row.cells})


def _way(arm: str) -> tuple[str, int]:
    """`tree-64-uncoupled` is (`tree, uncoupled`, 64); a chain stands in column 0 of the trees' row."""
    parts = arm.split("-")
    mode = "tree" if parts[0] == "chain" else parts[0]
    budget = next((int(part) for part in parts if part.isdigit()), 0)
    return (f"{mode}, uncoupled" if parts[-1] == "uncoupled" else mode), budget


def _heads(rows: Sequence[ReportRow]) -> list[str]:
    """Label columns: drafter and temperature only where there are several."""
    heads = ["task", "draft"]
    if len({row.temperature for row in rows}) > 1:
        heads.insert(0, "T")
    if len({row.drafter for row in rows}) > 1:
        heads.insert(0, "drafter")
    return heads


def _labels(row: ReportRow, heads: Sequence[str]) -> list[str]:
    values = {"drafter": row.drafter, "T": f"{row.temperature:g}", "task": row.task, "draft": row.way}
    return [values[head] for head in heads]


def _column(budget: int) -> str:
    return str(budget) if budget else "chain"


def _short(arm: Mapping[str, Any] | None) -> str:
    if arm is None:
        return ""
    low, high = arm["interval"]
    return f"{arm['mean']:.2f} ± {(high - low) / 2:.2f}"


def _long(cell: tuple[float, float, float] | None) -> str:
    return "" if cell is None else f"{cell[0]:.2f} [{cell[1]:.2f}, {cell[2]:.2f}]"


def _about(document: Document) -> str:
    hashes = ", ".join(f"{name} {task['prompt_hash'][:12]}" for name, task in document["tasks"].items())
    how = f"coupling {document['coupling']:g}, seed {document['seed']}" if document["temperature"] else "greedy"
    return (
        f"- {document['drafter']} for {document['model']}: {document['method']}, temperature "
        f"{document['temperature']:g} ({how}), {document['max_tokens']} new tokens, {document['dtype']} on "
        f"{document['device']}, blocks of {document['block_size']}; prompts {hashes}"
    )


def _positions(task: Mapping[str, Any]) -> list[str]:
    """Share of rounds that accepted each draft position, for the chain and every tree."""
    arms = [arm for arm in arms_in(task) if not arm.startswith("shadow")]
    deepest = max((len(task[arm]["per_position"]) for arm in arms), default=0)
    rows = (
        [str(depth), *(_share(task[arm]["per_position"], depth) for arm in arms)]
        for depth in range(1, deepest + 1)
    )
    return ["Share of rounds in which a draft position was accepted:", "", *_table(["depth", *arms], rows, 0)]


def _share(positions: Sequence[Mapping[str, Any]], depth: int) -> str:
    return f"{positions[depth - 1]['share']:.3f}" if depth <= len(positions) else ""


def _contexts(task: Mapping[str, Any]) -> list[str]:
    arms = [arm for arm in arms_in(task) if not arm.startswith("shadow")]
    spans = sorted({one["from"] for arm in arms for one in task[arm]["by_context"]})
    found = {(arm, one["from"]): one for arm in arms for one in task[arm]["by_context"]}
    rows = ([f"{first} on", *(_mean(found.get((arm, first))) for arm in arms)] for first in spans)
    return ["Tokens per round by the positions before the anchor:", "", *_table(["context", *arms], rows, 0)]


def _mean(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else f"{one['mean']:.2f}"


def _calibration(depths: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = (
        [str(d["depth"]), str(d["count"]), *(f"{d[key]:.3f}" for key in ("predicted", "observed", "error"))]
        for d in depths
    )
    return _table(["depth", "guesses", "predicted", "observed", "error"], rows, 0)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], labels: int) -> list[str]:
    """A Markdown table whose first `labels` columns stand on the left."""
    rule = ["---"] * labels + ["--:"] * (len(header) - labels)
    return ["| " + " | ".join(line) + " |" for line in (header, rule, *rows)]


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "_&%#$" else letter for letter in text)
