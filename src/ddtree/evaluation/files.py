"""A folder of results: one JSON file a document, the report in Markdown and LaTeX, and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.evaluation.plots import plot_acceptance, plot_positions, plot_training
from ddtree.evaluation.report import latex, markdown
from ddtree.models.storage import storage_error

__all__ = ["write_reports"]

Document = Mapping[str, Any]


def write_reports(
    folder: Path, documents: Sequence[Document], runs: Mapping[str, Sequence[Mapping[str, Any]]], plots: bool
) -> None:
    """Write everything into `folder`, each file whole. runs: rows of training logs by name, for their curves."""
    texts = {_name(document): json.dumps(document, allow_nan=False) + "\n" for document in documents}
    texts |= {"report.md": markdown(documents), "report.tex": latex(documents)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            partial = folder / f"{name}.part"
            partial.write_text(text, encoding="utf-8")
            partial.replace(folder / name)
        if plots:
            plot_acceptance(documents, folder)
            plot_positions(documents, folder)
            if runs:
                plot_training(runs, folder)
    except OSError as error:
        raise storage_error(error, folder, "", "--out") from error


def _name(document: Document) -> str:
    """`eval-DRAFTER-tT.json`; both methods may stand side by side."""
    drafter = re.sub(r"[^\w.-]+", "-", document["drafter"])
    method = "-online" if document["method"] == "online" else ""
    return f"eval-{drafter}-t{document['temperature']:g}{method}.json"
