"""Tasks by name, from files, from the hub where it can be reached; clear words where they cannot be had."""

from __future__ import annotations

import json
import sys
import types

import pytest

from ddtree.data.prompts import HeldOut
from ddtree.errors import ConfigError, DataError, DownloadError
from ddtree.evaluation import tasks
from ddtree.evaluation.tasks import KNOWN_TASKS, load_task


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("name", "count"), [("coding", 10), ("humaneval", 164), ("gsm8k", 256), ("mt-bench", 80), ("MT_bench", 80)]
)
def test_sets_that_are_here(name, count):
    task = load_task(name)
    assert len(task.prompts) == count
    assert task.name in KNOWN_TASKS
    assert all(prompt.text.strip() and prompt.license != "unknown" for prompt in task.prompts)


def test_the_own_tasks_are_nobody_elses():
    """Not one of them shares eight words in a row with a public set."""
    public = HeldOut(p.text for name in ("humaneval", "gsm8k", "mt-bench") for p in load_task(name).prompts)
    assert not [p.text for p in load_task("coding").prompts if public.touches(p.text)]


def test_a_file(tmp_path):
    path = jsonl(
        tmp_path / "mine.jsonl", {"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}, {"prompt": "six"}
    )
    task = load_task(path)
    assert (task.name, [p.text for p in task.prompts], task.repeated) == ("mine", ["one", "two", "six"], 1)
    assert [p.text for p in load_task(path, limit=2).prompts] == ["one", "two"]


def test_broken_lines_are_named_or_counted(tmp_path):
    path = jsonl(tmp_path / "mine.jsonl", {"prompt": "one"}, "{broken", {"text": "two"}, {"prompt": "six"})
    with pytest.raises(DataError, match="line 2"):
        load_task(path)
    task = load_task(path, skip_broken=True)
    assert ([p.text for p in task.prompts], task.broken) == (["one", "six"], 2)


def test_an_empty_file(tmp_path):
    with pytest.raises(DataError, match="no prompts"):
        load_task(jsonl(tmp_path / "mine.jsonl"))


def test_no_such_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_task(str(tmp_path / "none.jsonl"))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ConfigError, match=r"unknown task 'gms8k'.*gsm8k, mt-bench"):
        load_task("gms8k")


HUB_ROWS = {
    "mbpp": {"prompt": "Write a function."},
    "math-500": {"problem": "What is 1 + 1?"},
    "alpaca": {"instruction": "Sort these.", "input": "3 1 2"},
    "gsm8k": {"question": "How many?"},
    "mt-bench": {"prompt": ["First turn.", "Second turn."]},
    "humaneval": {"prompt": "def f():"},
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_from_the_hub(name, monkeypatch, tmp_path):
    """Every set that can be fetched knows where it is and which column holds the prompt."""
    asked = []

    def load_dataset(hub, config, *, split):
        asked.append((hub, config, split))
        return [HUB_ROWS[name] | {"more": i} for i in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(tasks, "CHECKOUT", tmp_path)
    task = load_task(name)
    text = {"alpaca": "Sort these.\n\n3 1 2", "mt-bench": "First turn."}.get(name)
    assert [p.text for p in task.prompts] == [text or next(iter(HUB_ROWS[name].values()))]
    assert task.repeated == 2
    assert asked == [(KNOWN_TASKS[name].hub, KNOWN_TASKS[name].config, KNOWN_TASKS[name].split)]


def test_out_of_reach(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DownloadError, match=r"mbpp.*no route to host\).*FILE.jsonl"):
        load_task("mbpp")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"alpaca.*pip install 'ddtree\[eval\]'"):
        load_task("alpaca")
