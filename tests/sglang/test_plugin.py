"""The plugin against the installed SGLang, without a model: registration, capabilities, names, differences."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative import spec_info, spec_registry

from ddtree.sglang_plugin import contract, host, plugin
from tests.sglang.host import DDTREE, DFLASH, published
from tests.unit import test_exports as exports

ROOT = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])  # type: ignore[union-attr,index]


def capabilities() -> list[str]:
    """Every question without arguments that SGLang can ask an algorithm."""
    found = []
    for name, value in vars(spec_info.SpeculativeAlgorithm).items():
        if name.startswith("_") or not inspect.isfunction(value):
            continue
        if list(inspect.signature(value).parameters) == ["self"] and name != "get_platform_worker_cls":
            found.append(name)
    return found


OWN = [name for name in exports.MODULES if name.startswith("ddtree.sglang_plugin")]


@pytest.mark.parametrize("name", OWN)
def test_modules_offer_what_is_there_and_take_what_is_offered(name: str) -> None:
    exports.test_what_is_offered_is_there(name)
    exports.test_only_what_is_offered_is_taken(name)


pytestmark = pytest.mark.usefixtures("configured")


def test_the_algorithm_is_found_by_its_name() -> None:
    assert DDTREE.is_dflash()
    assert DDTREE.is_some()
    assert not DDTREE.is_none()


@pytest.mark.parametrize("question", capabilities())
def test_ddtree_answers_as_dflash_does(question: str) -> None:
    """Its infrastructure is DFLASH's: hidden states, pools, drafter, overlap. A forgotten answer is a broken
    server."""
    assert getattr(DDTREE, question)() == getattr(DFLASH, question)()


def test_the_questions_that_a_plugins_base_class_lacks_are_answered() -> None:
    asked = set(capabilities())
    assert {"is_dflash_family", "carries_draft_hidden_states", "need_topk"} <= asked
    assert contract.unanswered(spec_registry.CustomSpecAlgo, spec_info.SpeculativeAlgorithm) != []
    assert contract.unanswered(type(DDTREE), spec_info.SpeculativeAlgorithm) == []


def test_a_question_that_is_new_in_sglang_is_found() -> None:
    enumeration = type("Enumeration", (), {"is_dflash": lambda self: True, "wants_tea": lambda self: True})
    assert contract.unanswered(type(DDTREE), enumeration) == ["wants_tea"]


def test_the_scheduler_gets_a_future_map_and_two_widths() -> None:
    assert DDTREE.get_platform_worker_cls() is None
    pool = SimpleNamespace(req_to_token=torch.zeros(3, 8, dtype=torch.int32), size=2)
    assert DDTREE.create_future_map(torch.device("cpu"), pool).spec_algo is DDTREE
    with published(speculative_dflash_block_size=8, speculative_num_draft_tokens=32):
        assert DDTREE.get_num_tokens_per_req_for_target_verify(32, is_draft_worker=False) == 32
        assert DDTREE.get_num_tokens_per_req_for_target_verify(32, is_draft_worker=True) == 8


def test_sglang_is_as_ddtree_uses_it() -> None:
    assert contract.installed_version() == host.SUPPORTED
    assert contract.differences() == []


def test_every_place_that_asks_by_name_is_known() -> None:
    assert contract.name_tests_in(ROOT / "srt") == set(host.NAME_TESTS)


@pytest.mark.parametrize(
    ("uses", "difference"),
    [
        (host.Uses("sglang.srt.no_such_module", "f"), "there is no module sglang.srt.no_such_module"),
        (host.Uses("sglang.srt.server_args", "ServerArgs.no_such"), "there is no sglang.srt.server_args.Ser"),
        (host.Uses("sglang.srt.plugins", "load_plugins", ("speed",)), "load_plugins no longer takes speed"),
        (
            host.Uses("sglang.srt.speculative.spec_tp_sync", "SpecTpSync.sync", ("site",)),
            "SpecTpSync.sync now needs values",
        ),
        (
            host.Uses("sglang.srt.managers.utils", "GenerationBatchResult", attributes=("no_such",)),
            "GenerationBatchResult has no no_such",
        ),
    ],
)
def test_differences_are_named(uses: host.Uses, difference: str) -> None:
    (line,) = contract.differences([uses])
    assert difference in line


def test_a_host_that_differs_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "differences", lambda: ["there is no cheese"])
    with pytest.raises(SystemExit, match=r"there is no cheese.*Install sglang==0.5.23.*SGLANG_PLUGINS=none"):
        plugin.register()


def test_any_failure_of_the_plugin_stops_the_process_although_sglang_only_logs_it(tmp_path: Path) -> None:
    code = (
        "import ddtree.sglang_plugin.plugin as p\n"
        "def fail(): raise RuntimeError('broken on purpose')\n"
        "p._register = fail\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "went on" not in done.stdout
    assert "the plugin could not be registered: broken on purpose" in done.stderr
