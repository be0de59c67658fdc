"""Tables and plots say what the documents hold; what is missing for them is said before anything is measured."""

from __future__ import annotations

import io
import json
import re
import sys
import xml.etree.ElementTree as Xml
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from ddtree.cli.main import main
from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.arms import Round, arms_of
from ddtree.evaluation.bench import unique_names
from ddtree.evaluation.calibration import no_calibration
from ddtree.evaluation.files import write_reports
from ddtree.evaluation.offline import Measured
from ddtree.evaluation.plots import read_log
from ddtree.evaluation.report import latex, markdown, report_rows, terminal_table
from ddtree.evaluation.result import TaskFacts, arms_in, read_result, task_document


def document(drafter="new_one", temperature=0.0, **changes):
    """Two tasks; the chain commits 2 tokens a round and a tree of B nodes 2 + B / 16."""
    arms = arms_of((16, 64), temperature > 0, True)
    rounds = {
        arm.name: [(Round(70, 2 + arm.budget // 16, 1, max(arm.budget, 7), 7, 2.5),) * 3] * 4 for arm in arms
    }
    measured = Measured(rounds, {arm.coupled: no_calibration(7) for arm in arms})
    task = task_document(TaskFacts(4, {"repeated": 1}, 40, "0123456789abcdef"), measured, temperature > 0)
    return {
        "model": "m",
        "drafter": drafter,
        "method": "offline",
        "temperature": temperature,
        "seed": 0 if temperature else None,
        "coupling": 1.25 if temperature else None,
        "max_tokens": 64,
        "block_size": 8,
        "dtype": "float32",
        "device": "cpu",
        "tasks": {"maths": task, "code": task},
    } | changes


def test_arms_stand_beside_the_facts():
    assert arms_in(document()["tasks"]["maths"]) == ["chain", "tree-16", "tree-64", "shadow-16", "shadow-64"]


def test_rows():
    rows = report_rows([document(temperature=1.0)])
    assert [row.way for row in rows[:4]] == ["tree", "shadow", "tree, uncoupled", "shadow, uncoupled"]
    assert {row.task for row in rows} == {"maths (4)", "code (4)"}
    assert {budget: cell[0] for budget, cell in rows[0].cells.items()} == {0: 2.0, 16: 3.0, 64: 6.0}
    assert set(rows[1].cells) == {16, 64}


def shown(documents):
    console = Console(width=80, file=io.StringIO())
    console.print(terminal_table(documents))
    return console.file.getvalue()


def test_the_terminal_names_only_what_differs():
    one = shown([document()])
    assert re.search(r"tree-16 +│ 3.00 ± 0.00 │ 3.00 ± 0.00", one)
    assert "new_one" not in one
    several = shown([document(), document("old"), document(temperature=1.0)])
    assert "new_one" in several
    assert re.search(r"old +│ 0 +│ chain", several)
    assert "shadow-64-uncoupled" in several


def test_markdown():
    text = markdown([document()])
    lines = text.splitlines()
    assert "| task | draft | chain | 16 | 64 |" in lines
    assert "| maths (4) | tree | 2.00 [2.00, 2.00] | 3.00 [3.00, 3.00] | 6.00 [6.00, 6.00] |" in lines
    assert any("0123456789ab" in line and "64 new tokens" in line for line in lines)
    assert "Calibration of the best guess of each depth, greedy:" in lines
    assert "| 64 on | 2.00 | 3.00 | 6.00 |" in lines
    for line, below in pairwise(lines):
        if below.startswith("| ---") or below.startswith("| --:"):
            assert line.count("|") == below.count("|")


def test_latex():
    text = latex([document(), document("100%_old")])
    assert r"100\%\_old & maths (4) & tree & 2.00 [2.00, 2.00]" in text
    assert r"\begin{tabular}{lllrrr}" in text
    body = [line for line in text.splitlines() if line.endswith("\\\\")]
    assert len({line.count(" & ") for line in body}) == 1


def test_a_folder_of_results(tmp_path):
    pytest.importorskip("matplotlib")
    documents = [document(), document(temperature=1.0), document("run/step-4", method="online")]
    logs = {
        "run": [
            {"step": 1, "loss": 3.0},
            {"step": 2, "loss": 2.5},
            {"step": 2, "chain": 1.5, "tree-64": 2.5, "tokens": 9},
        ],
        "only steps": [{"step": 1, "loss": 3.0}],
    }
    write_reports(tmp_path / "out", documents, logs, plots=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    plots = {f"{name}.{kind}" for name in ("acceptance", "positions", "training") for kind in ("png", "svg")}
    results = {"eval-new_one-t0.json", "eval-new_one-t1.json", "eval-run-step-4-t0-online.json"}
    assert names == plots | results | {"report.md", "report.tex"}
    for name in plots:
        path = tmp_path / "out" / name
        if path.suffix == ".svg":
            assert len(list(Xml.parse(path).getroot().iter("{http://www.w3.org/2000/svg}path"))) > 10
        else:
            assert path.read_bytes().startswith(b"\x89PNG")
    assert read_result(tmp_path / "out" / "eval-new_one-t1.json") == json.loads(json.dumps(documents[1]))


def test_one_task_and_no_runs(tmp_path):
    pytest.importorskip("matplotlib")
    few = document()
    few["tasks"] = {"maths": few["tasks"]["maths"]}
    write_reports(tmp_path, [few], {}, plots=True)
    assert not (tmp_path / "training.png").exists()
    assert (tmp_path / "positions.svg").exists()


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    """Said before anything is loaded or measured: an end where plots were asked for, else measuring goes on."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for asked, goes_on in ((["--plots"], False), ([], True), (["--no-plots"], True)):
        with pytest.raises(SystemExit) as end:
            main(["eval", "--model", "no such model", "--out", str(tmp_path / "out"), *asked])
        told = " ".join(capsys.readouterr().err.split())
        assert ("pip install 'ddtree[eval]'" in told) == (asked != ["--no-plots"])
        assert ("no such model" in told) == goes_on, "the next thing that is wrong"
        assert end.value.code == 2
    write_reports(tmp_path / "out", [document()], {}, plots=False)
    assert (tmp_path / "out" / "report.md").exists()


def test_logs(tmp_path):
    log = tmp_path / "log.jsonl"
    with pytest.raises(DataError, match="no log of a run"):
        read_log(tmp_path)
    log.write_text('{"step": 1, "loss": 2}\n')
    assert read_log(tmp_path) == read_log(log) == [{"step": 1, "loss": 2}]
    log.write_text('{"step": 1}\n{"loss": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_log(tmp_path)
    log.write_text('{"step": 1}\n{"st')
    with pytest.raises(DataError, match="line 2"):
        read_log(tmp_path)


def test_names_of_drafters():
    assert unique_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert unique_names([Path("one/step-4"), Path("two/step-4"), Path("x")]) == ["one/step-4", "two/step-4", "x"]
    with pytest.raises(ConfigError, match="same name"):
        unique_names([Path("one/step-4"), Path("one/step-4")])
