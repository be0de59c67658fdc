"""The tables of the documents, made from the result files: `python benchmarks/tables.py` writes them.

A document holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between is made here, and a test compares.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

import tables_drafters as drafters
import tables_engines as engines
from tables_common import ROOT

DOCUMENTS = (
    "README.md",
    "docs/concepts/exactness.md",
    "docs/drafters.md",
    "docs/guides/evaluating.md",
    "docs/guides/serving.md",
    "docs/guides/sglang.md",
)
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "cpu_decode": engines.cpu_decode,
    "acceptance": lambda: drafters.acceptance("acceptance"),
    "acceptance_sampled": lambda: drafters.acceptance("acceptance_t1"),
    "parity": engines.parity,
    "training": drafters.training,
    "ablation": drafters.ablation,
    "edges": drafters.edges,
    "edge_cost": drafters.edge_cost,
    "packing": drafters.packing,
    "length": drafters.length,
    "verdict": drafters.verdict,
    "shape": drafters.shape,
    "round_cost": drafters.round_cost,
    "sglang_right": engines.sglang_right,
    "sglang_speed": engines.sglang_speed,
    "sglang_stages": engines.sglang_stages,
    "drafter_choice": drafters.drafter_choice,
    "serving": engines.serving,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """A document with every table made anew."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


if __name__ == "__main__":
    main()
