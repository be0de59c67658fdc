"""`ddtree doctor sglang` against the installed SGLang: it starts nothing and names what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddtree.cli.main import main
from ddtree.models.edges import EdgeNet, save_edges
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.diagnosis import Diagnosis
from ddtree.sglang_plugin.doctor import examine
from ddtree.sglang_plugin.memory import PAIR_BYTES
from tests.sglang import models

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("doctor")
    models.write_target(made / "target", "qwen3")
    models.write_drafter(made / "drafter")
    return made


def command(folder: Path, *options: str, drafter: str = "drafter", algorithm: str = "DDTREE") -> str:
    return " ".join(
        [
            f"python -m sglang.launch_server --model-path {folder / 'target'} --device cuda",
            f"--attention-backend triton --speculative-algorithm {algorithm}",
            f"--speculative-draft-model-path {folder / drafter} --context-length 512",
            *options,
        ]
    )


def states(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.check: finding.state for finding in diagnosis.findings}


def detail(diagnosis: Diagnosis, check: str) -> str:
    return next(finding.detail for finding in diagnosis.findings if finding.check == check)


def test_a_good_launch_gets_a_plan(folder: Path) -> None:
    diagnosis = examine(command(folder, "--speculative-ddtree-budget 64"), None, 80 * GIB)
    assert diagnosis.healthy
    assert set(states(diagnosis).values()) == {"ok"}
    assert "is_dflash() is True" in detail(diagnosis, "plugin")
    assert "65 rows a request" in detail(diagnosis, "launch command")
    assert "target layers [0, 2]" in detail(diagnosis, "drafter and target")
    assert diagnosis.plan is not None
    assert 0.8 < diagnosis.plan.fraction < 1
    weights = (folder / "target" / "model.safetensors").stat().st_size
    assert diagnosis.plan.weights == weights


def test_the_drafters_edges_are_found_and_have_their_place_in_the_plan(folder: Path) -> None:
    edged = models.write_drafter(folder / "edged")
    net = EdgeNet(models.HIDDEN, 6, 5)
    save_edges(edged, net)
    without = examine(command(folder, "--speculative-ddtree-budget 20"), None, 80 * GIB)
    found = examine(command(folder, "--speculative-ddtree-budget 20", drafter="edged"), None, 80 * GIB)
    assert "not used: no edges.safetensors" in detail(without, "edges")
    assert "is used" in detail(found, "edges")
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((edged / "config.json").read_text())
    unfetched = examine(command(folder, "--speculative-ddtree-budget 20", drafter="bare"), None, None)
    assert states(unfetched)["edges"] == "warning"
    assert "not known before the drafter's weights are here" in detail(unfetched, "edges")
    off = examine(command(folder, "--speculative-ddtree-mode off", drafter="edged"), None, None)
    assert "not used: this mode drafts nothing" in detail(off, "edges")
    assert found.plan is not None
    assert without.plan is not None
    number = 2  # bytes: SGLang halves float32 models unless told otherwise
    assert (without.plan.edges, found.plan.edges) == (0, (6 + 5) * models.VOCABULARY * number)
    assert found.plan.pairs == PAIR_BYTES * 48 * 7 * 20 * 20
    assert (without.plan.pairs, without.plan.logits) == (0, found.plan.logits)
    parts = found.plan.pairs + found.plan.edges + found.plan.drafter - without.plan.drafter
    assert without.plan.kv - found.plan.kv == parts


def test_too_large_a_fraction_is_named_with_one_that_works(folder: Path) -> None:
    diagnosis = examine(command(folder, "--mem-fraction-static 0.99"), None, 80 * GIB)
    assert states(diagnosis)["memory"] == "wrong"
    assert diagnosis.plan is not None
    assert f"--mem-fraction-static {diagnosis.plan.fraction:.2f} leaves" in detail(diagnosis, "memory")


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        (["--speculative-ddtree-budget 300"], {}, "budget must lie between 1 and 255"),
        (["--speculative-ddtree-mode off --speculative-ddtree-budget 4"], {}, "has no meaning in mode off"),
        (["--attention-backend fa3"], {}, "attention backend fa3 cannot verify trees"),
        (["--no-such-option"], {}, "SGLang does not understand the command: .*--no-such-option"),
        (["--context-length 4096"], {}, "SGLang refuses it: .*context_length"),
        ([], {"algorithm": "DFLASH"}, "speculative algorithm is DFLASH; give --speculative-algorithm DDTREE"),
    ],
)
def test_what_is_wrong_with_a_launch_is_said(
    folder: Path, options: list[str], changes: dict[str, str], message: str
) -> None:
    diagnosis = examine(command(folder, *options, **changes), None, 80 * GIB)
    assert not diagnosis.healthy
    assert re.search(message, detail(diagnosis, "launch command"))


def test_a_drafter_of_another_target_is_found(folder: Path) -> None:
    other = models.write_drafter(folder / "other")
    config = json.loads((other / "config.json").read_text())
    config |= {"hidden_size": 96, "num_target_layers": 36}
    config["dflash_config"]["mask_token_id"] = 9999
    (other / "config.json").write_text(json.dumps(config))
    diagnosis = examine(command(folder, drafter="other"), None, None)
    said = detail(diagnosis, "drafter and target")
    assert "hidden size is 96, the target's 64" in said
    assert "made for 36 layers, the target has 4" in said
    assert f"mask token 9999 is outside the vocabulary of {models.VOCABULARY}" in said


def test_a_plugin_that_sglang_may_not_load_is_found(folder: Path) -> None:
    diagnosis = examine(None, "another,third", None)
    assert "SGLANG_PLUGINS=another,third keeps ddtree out" in detail(diagnosis, "plugin")
    assert examine(None, "ddtree", None).healthy


def test_a_host_that_differs_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "differences", lambda: ["there is no cheese"])
    assert "there is no cheese" in detail(examine(None, None, None), "SGLang")
    monkeypatch.setattr(contract, "installed_version", lambda: None)
    assert "pip install sglang==" in detail(examine(None, None, None), "SGLang")


def test_the_verb_prints_json_and_ends_with_a_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_with(["doctor", "sglang", "--json", "--gpu-memory-gib", "80", "--launch", command(folder)], 0)
    facts = json.loads(capsys.readouterr().out)
    assert facts["healthy"] is True
    assert facts["memory"]["fitting"] >= 1
    main_with(["doctor", "sglang", "--launch", command(folder, "--speculative-ddtree-budget 300")], 3)
    assert "not ready: launch command" in capsys.readouterr().err
    main_with(["doctor", "vllm"], 2)


def main_with(arguments: list[str], code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code or 0) == code
