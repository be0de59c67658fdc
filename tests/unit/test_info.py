"""`ddtree info` says what would run, and fetches nothing to find out."""

from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ddtree.cli.main import main
from ddtree.models import hub
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
