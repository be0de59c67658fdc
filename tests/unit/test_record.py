"""The log of a run: rows in a file, curves for TensorBoard."""

from __future__ import annotations

import json

import pytest

from ddtree.errors import StorageError
from ddtree.training.record import RunLog

ROWS = [
    {"step": 5, "loss": 2.5, "accuracy": [0.5, 0.25]},
    {"step": 10, "loss": 2.0, "accuracy": [0.75, 0.5]},
    {"step": 10, "chain": 1.5},
]


def test_rows_are_appended_and_become_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path / "run")
    for row in ROWS[:2]:
        log.write(row)
    RunLog(tmp_path / "run").write(ROWS[2])  # a resumed run
    lines = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS
    events = EventAccumulator(str(tmp_path / "run" / "events"))
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves == {
        "loss": [(5, 2.5), (10, 2.0)],
        "accuracy/position-1": [(5, 0.5), (10, 0.75)],
        "accuracy/position-2": [(5, 0.25), (10, 0.5)],
        "chain": [(10, 1.5)],
    }


def test_without_tensorboard_the_file_is_all(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    RunLog(tmp_path / "run").write(ROWS[0])
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["log.jsonl"]


def test_a_run_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match="run"):
        RunLog(tmp_path / "run")
