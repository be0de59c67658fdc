"""What the modules of tables share: where results lie, what prompts are called, Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "SETS", "TASKS", "markdown", "result", "span"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SETS = {"gsm8k_test": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-bench, first turns"}
TASKS = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "mt-bench": "MT-bench, first turns",
    "coding": "own coding tasks",
}


def result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def span(figure: dict[str, float], digits: int = 2) -> str:
    """A figure with its interval."""
    return f"{figure['value']:.{digits}f} [{figure['low']:.{digits}f}, {figure['high']:.{digits}f}]"
