"""Documents agree with the result files, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = ROOT / "docs" / "reference" / "sglang.md"  # names files of SGLang, by their places there
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


@pytest.fixture(scope="module")
def tables(benchmark_module):
    return benchmark_module("tables")


def test_every_table_is_what_its_result_file_says(tables):
    for name in tables.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert tables.BLOCK.search(text), f"{name} holds no table"
        assert tables.filled(text) == text, f"{name} is out of date: run `python benchmarks/tables.py`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which is not there"


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path != HOST], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_named_in_code_style_exist(path):
    """`models/weights.py` and its like are named by their place in the package or in the project."""
    for name in re.findall(
        r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|toml|md|json|jsonl))`", path.read_text(encoding="utf-8")
    ):
        places = [ROOT / name, ROOT / "src" / "ddtree" / name, path.parent / name]
        assert any(place.exists() for place in places), f"{path.name} names {name}, which is not there"
