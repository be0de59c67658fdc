"""`ddtree info` says what would run, and fetches nothing to find out."""

from __future__ import annotations

import json

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from ddtree import EngineConfig
from ddtree.cli.main import main
from ddtree.engine import hardware
from ddtree.engine.engine import BatchEngine
from ddtree.engine.hardware import choose_dtype
from ddtree.models import hub
from ddtree.models.load import load_drafter, load_target
from tests.checkpoints import target_config, target_tensors, write_drafter, write_folder
from tests.toys import toy_target


@pytest.fixture
def target(tmp_path):
    model = toy_target("llama")
    write_folder(tmp_path / "target", target_config(model), target_tensors(model))
    return tmp_path / "target"


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["info", "--json", *map(str, arguments)])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_with_its_drafter(target, tmp_path, capsys):
    facts = told(capsys, "--model", target, "--drafter", write_drafter(tmp_path / "drafter"))
    assert facts["model"].startswith("target (llama): 3 layers, hidden 24")
    assert facts["drafter"].startswith("drafter: 2 layers, blocks of 6")
    assert facts["mode"] == "tree"
    assert "missing" not in facts


def test_a_model_without_a_drafter(target, capsys):
    facts = told(capsys, "--model", target)
    assert "--mode off" in facts["drafter"]
    assert facts["mode"] == "off"


def test_nothing_is_fetched(target, capsys, monkeypatch):
    def offline(name, *, local_files_only=False, **_):
        assert local_files_only, f"{name} would be fetched"
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    assert told(capsys, "--model", "owner/target")["missing"]
    assert told(capsys, "--model", target, "--drafter", "owner/drafter")["missing"]


def test_the_memory_plan_is_that_of_an_engine(target, tmp_path, capsys):
    drafter = write_drafter(tmp_path / "drafter")
    told_plan = told(capsys, "--model", target, "--drafter", drafter)["memory"]
    dtype, device = choose_dtype(torch.device("cpu")).dtype, torch.device("cpu")
    loaded = load_target(target, dtype, device)
    engine = BatchEngine(loaded, load_drafter(drafter, loaded), EngineConfig(), lambda tokens: "")
    ours = engine.memory.lines()
    assert told_plan.keys() == ours.keys() == {"weights", "pages", "logits", "prefill", "free_after"}
    for what in ("weights", "pages", "logits", "prefill"):
        assert told_plan[what] == ours[what]
    assert told(capsys, "--model", target)["memory"]["logits"].endswith("for 1 x 1 rows")


def test_too_little_memory_is_a_fact_like_others(target, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "available_memory", lambda device: 10_000)
    assert "ask for a smaller max_context" in told(capsys, "--model", target)["memory"]["problem"]
