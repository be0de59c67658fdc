"""The hooks around SGLang's functions: graphs, warm-up, requests, server info; other algorithms are left alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.speculative import dflash_utils, spec_info

from ddtree.errors import UnsupportedError
from ddtree.sglang_plugin import host
from ddtree.sglang_plugin.settings import Flags, resolve
from tests.sglang.host import DDTREE, DFLASH, NONE, Launch, ServerArgs, published

pytestmark = pytest.mark.usefixtures("configured")


@pytest.fixture
def serving() -> Any:
    """This process runs trees."""
    DDTREE.settings = resolve(Flags(budget=19), block_size=8, num_draft_tokens=None, hybrid=False)
    with published(
        speculative_algorithm="DDTREE", speculative_num_draft_tokens=20, speculative_dflash_block_size=8
    ):
        yield
    DDTREE.settings = None


def test_hooks_are_in_place() -> None:
    assert set(host.HOOKED) <= HookRegistry._patched


def test_a_hook_that_sglang_did_not_apply_stops_the_launch(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = host.HOOKED[4]
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {lost})
    with pytest.raises(UnsupportedError, match=f"did not apply ddtree's hooks to {lost}"):
        DDTREE.handle_server_args(Launch(toys, Flags()))
    with pytest.raises(UnsupportedError, match="would be wrong without them"):
        DDTREE.create_worker(ServerArgs(model_path="m", disable_overlap_schedule=True))


class TritonAttnBackend:
    """Its name is what SGLang looks at."""


@pytest.mark.usefixtures("serving")
def test_graphs_of_trees_are_captured_with_a_mask() -> None:
    policy = dflash_utils.resolve_dflash_verify_mask_policy
    assert policy(TritonAttnBackend()) == ("TritonAttnBackend", True)
    DDTREE.settings = resolve(Flags(mode="chain"), block_size=8, num_draft_tokens=None, hybrid=False)
    assert policy(TritonAttnBackend()) == ("TritonAttnBackend", False)


def test_graphs_of_other_algorithms_are_left_alone() -> None:
    with published(speculative_algorithm="DFLASH"):
        assert dflash_utils.resolve_dflash_verify_mask_policy(TritonAttnBackend())[1] is False


@pytest.mark.usefixtures("serving")
def test_warm_up_passes_are_as_wide_as_what_runs() -> None:
    mask = torch.ones(4, dtype=torch.bool)
    drafting = spec_info.create_dummy_verify_input(DDTREE, mask, 8, True)
    assert (drafting.draft_token_num, drafting.num_tokens_per_req, drafting.custom_mask) == (8, 8, None)
    verifying = spec_info.create_dummy_verify_input(DDTREE, mask, 20, False)
    assert (verifying.draft_token_num, verifying.num_tokens_per_req) == (20, 20)
    assert verifying.custom_mask is mask
    others = spec_info.create_dummy_verify_input(DFLASH, mask, 8, False)
    assert others.custom_mask is None


@pytest.mark.usefixtures("serving")
def test_rounds_hand_no_hidden_states_on() -> None:
    from sglang.srt.speculative.spec_utils import spec_need_hidden_states

    assert spec_need_hidden_states() is False


def request(**changes: Any) -> Any:
    params = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_new_tokens": 0}
    own = {"return_hidden_states": False, "return_sampling_mask": False, "custom_logit_processor": None}
    own |= {k: v for k, v in changes.items() if k in own}
    params |= {k: v for k, v in changes.items() if k in params}
    return SimpleNamespace(sampling_params=SimpleNamespace(**params), **own)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize(
    "unwanted",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"min_new_tokens": 4},
        {"custom_logit_processor": "a processor"},
        {"return_hidden_states": True},
        {"return_sampling_mask": True},
    ],
)
def test_requests_that_would_be_answered_wrong_are_refused_by_name(unwanted: dict[str, Any]) -> None:
    validate = dflash_utils.validate_dflash_request
    assert validate(request(), False) is None
    (name,) = unwanted
    assert f"DDTREE does not support {name}" in validate(request(**unwanted), False)
    with published(speculative_algorithm="DFLASH"):
        assert validate(request(**{k: v for k, v in unwanted.items() if "return" not in k}), False) is None


def test_server_info_names_mode_budget_and_notices() -> None:
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    from ddtree.sglang_plugin.status import Status

    settings = resolve(Flags(), block_size=16, num_draft_tokens=None, hybrid=True)
    worker = SimpleNamespace(describe=Status(settings).describe)
    scheduler = SimpleNamespace(
        spec_algorithm=DDTREE,
        draft_worker=worker,
        metrics_reporter=SimpleNamespace(spec_total_num_forward_ct=0, spec_total_num_accept_tokens=0),
    )
    controller = SchedulerInternalStateController(scheduler, record_step_time=False)
    controller._average_accept_length = lambda: None
    state: dict[str, Any] = {}
    controller._add_speculative(state)
    assert state["ddtree"]["mode"] == "chain"
    assert "recurrent layers" in state["ddtree"]["notices"][0]
    scheduler.spec_algorithm = NONE
    state.clear()
    controller._add_speculative(state)
    assert "ddtree" not in state
