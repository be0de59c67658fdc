"""The plugin against the installed SGLang, without a model: registration, capabilities, names, refusals, hooks."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.plugins import load_plugins

from ddtree.errors import ConfigError, DDTreeError, UnsupportedError
from ddtree.sglang_plugin import contract, plugin
from ddtree.sglang_plugin.flags import flags_of, from_arguments
from ddtree.sglang_plugin.settings import Flags, resolve
from tests.sglang import models
from tests.unit import test_exports as exports

load_plugins()

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from sglang.srt.speculative import dflash_utils, spec_info, spec_registry  # noqa: E402

DDTREE = spec_info.SpeculativeAlgorithm.from_string("ddtree")
DFLASH = spec_info.SpeculativeAlgorithm.DFLASH
NONE = spec_info.SpeculativeAlgorithm.NONE
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


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("toys")
    return {
        "target": models.write_target(folder / "target", "qwen3"),
        "drafter": models.write_drafter(folder / "drafter"),
        "last_layer": models.write_drafter(folder / "last_layer", layer_ids=[0, 3]),
    }


@pytest.fixture(scope="module", autouse=True)
def configured(toys: dict[str, Path]) -> None:
    """This process is a plain server's scheduler, as far as SGLang's configuration knows."""
    from sglang.srt.runtime_context import publish

    publish(
        ServerArgs(model_path=str(toys["target"]), device="cpu", attention_backend="cpu_ref"), role="scheduler"
    )


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
    assert contract.installed_version() == contract.SUPPORTED
    assert contract.differences() == []


def test_every_place_that_asks_by_name_is_known() -> None:
    assert contract.name_tests_in(ROOT / "srt") == set(contract.NAME_TESTS)


@pytest.mark.parametrize(
    ("uses", "difference"),
    [
        (contract.Uses("sglang.srt.no_such_module", "f"), "there is no module sglang.srt.no_such_module"),
        (contract.Uses("sglang.srt.server_args", "ServerArgs.no_such"), "there is no sglang.srt.server_args.Ser"),
        (contract.Uses("sglang.srt.plugins", "load_plugins", ("speed",)), "load_plugins no longer takes speed"),
        (
            contract.Uses("sglang.srt.speculative.spec_tp_sync", "SpecTpSync.sync", ("site",)),
            "SpecTpSync.sync now needs values",
        ),
        (
            contract.Uses("sglang.srt.managers.utils", "GenerationBatchResult", attributes=("no_such",)),
            "GenerationBatchResult has no no_such",
        ),
    ],
)
def test_differences_are_named(uses: contract.Uses, difference: str) -> None:
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


# ---- flags


def parsed(*options: str) -> Any:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", *options]))


def test_flags_travel_with_sglangs_arguments() -> None:
    assert flags_of(parsed()) == Flags()
    args = parsed(
        "--speculative-algorithm=DDTREE",
        "--speculative-ddtree-budget=64",
        "--speculative-ddtree-mode=shadow-linear",
        "--no-speculative-ddtree-coupled",
        "--speculative-ddtree-allow-hybrid-unsafe",
    )
    expected = Flags(64, "shadow-linear", coupled=False, allow_hybrid_unsafe=True)
    assert flags_of(args) == expected
    assert flags_of(pickle.loads(pickle.dumps(args))) == expected


def test_both_spellings_of_the_draft_window() -> None:
    assert parsed("--speculative-draft-window-size=64").speculative_draft_window_size == 64
    assert parsed("--speculative-dflash-draft-window-size=64").speculative_draft_window_size == 64
    differing = argparse.Namespace(speculative_draft_window_size=64, speculative_dflash_draft_window_size=32)
    with pytest.raises(ConfigError, match=r"64 and its older spelling .* 32 differ; give one of them"):
        from_arguments(lambda cls, arguments: ServerArgs(model_path="m"), ServerArgs, differing)


class Launch:
    """A stand-in for what SGLang hands to `handle_server_args`: reads fall through, writes are kept."""

    def __init__(self, toys: dict[str, Path], flags: Flags, **fields: Any) -> None:
        from ddtree.sglang_plugin.flags import server_args

        drafter = fields.pop("drafter", toys["drafter"])
        self._args = server_args(
            flags,
            model_path=str(toys["target"]),
            speculative_draft_model_path=None if drafter is None else str(drafter),
            device=fields.pop("device", "cuda"),
            attention_backend=fields.pop("attention_backend", "triton"),
            **fields,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


def test_settling_writes_one_width_for_every_reader(toys: dict[str, Path]) -> None:
    launch = Launch(toys, Flags(budget=19))
    DDTREE.handle_server_args(launch)
    assert launch.speculative_num_draft_tokens == 20
    assert launch.speculative_dflash_block_size == 8  # the drafter's own
    assert (launch.speculative_num_steps, launch.speculative_eagle_topk) == (1, 1)
    assert launch.speculative_draft_attention_backend == "triton"
    assert launch.max_running_requests == 48
    wide = Launch(toys, Flags(budget=4), speculative_dflash_block_size=24)
    DDTREE.handle_server_args(wide)
    assert (wide.speculative_num_draft_tokens, wide.speculative_dflash_block_size) == (24, 24)


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        ({}, {"drafter": None}, "DDTREE needs a drafter; give one with --speculative-draft-model-path"),
        ({}, {"pp_size": 2}, "does not go with --pp-size above 1.*; use tensor parallelism"),
        ({}, {"enable_dp_attention": True}, "does not go with --enable-dp-attention.*behind a router"),
        ({}, {"disaggregation_mode": "prefill"}, "does not go with --disaggregation-mode"),
        ({}, {"attention_backend": "fa3"}, "fa3 cannot verify trees: its tree path .* --speculative-ddtree-mode"),
        ({"mode": "off", "budget": 3}, {}, "has no meaning in mode off"),
        ({}, {"speculative_draft_window_size": 4}, "window-size 4 is shorter than a draft block of 8"),
        ({"budget": 31}, {"speculative_num_draft_tokens": 16}, "contradicts mode tree"),
        (
            {"mode": "chain"},
            {"attention_backend": "torch_native"},
            "the drafter cannot run on attention backend torch_native; give --speculative-draft-attention-backend",
        ),
    ],
)
def test_launches_that_cannot_work_are_refused(
    toys: dict[str, Path], flags: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DDTREE.handle_server_args(Launch(toys, Flags(**flags), **fields))


def test_chains_run_on_backends_without_tree_masks(toys: dict[str, Path]) -> None:
    launch = Launch(toys, Flags(mode="chain"), attention_backend="fa3")
    DDTREE.handle_server_args(launch)
    assert launch.speculative_num_draft_tokens == 8


def test_a_layer_that_sglang_does_not_capture_is_an_error_at_launch(toys: dict[str, Path]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"target layers \[0, 3\].* does not capture that of the last one, 3"
    ):
        DDTREE.handle_server_args(Launch(toys, Flags(), drafter=toys["last_layer"]))


def test_other_drafter_families_are_refused_by_name(toys: dict[str, Path], tmp_path: Path) -> None:
    other = models.write_drafter(tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(
        text.replace('"mask_token_id"', '"selector_rank": 4, "selector_top_k": 8, "mask_token_id"')
    )
    with pytest.raises(DDTreeError, match=r"DFlash 2 drafter.*use --speculative-algorithm DFLASH"):
        DDTREE.handle_server_args(Launch(toys, Flags(), drafter=other))


def test_trees_on_sliding_windows_are_refused_and_chains_are_not(
    toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddtree.sglang_plugin import launch as settling

    original = settling.model_config_of

    def windowed(server_args: Any) -> Any:
        config = original(server_args)
        return SimpleNamespace(hf_text_config=config.hf_text_config, is_hybrid_swa=True)

    monkeypatch.setattr(settling, "model_config_of", windowed)
    monkeypatch.setattr(settling, "mambaish_config", lambda config: None)
    with pytest.raises(UnsupportedError, match=r"sliding-window layers.*use --speculative-ddtree-mode chain"):
        settling.settle(Launch(toys, Flags()))
    assert settling.settle(Launch(toys, Flags(mode="chain"))).mode == "chain"


def test_recurrent_targets_run_the_chain(toys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.sglang_plugin import launch as settling

    monkeypatch.setattr(settling, "mambaish_config", lambda config: object())
    launch = Launch(toys, Flags(budget=19))
    assert settling.settle(launch).mode == "chain"
    assert launch.speculative_num_draft_tokens == 8
    unsafe = Launch(toys, Flags(budget=19, allow_hybrid_unsafe=True))
    made = settling.settle(unsafe)
    assert (made.mode, unsafe.speculative_num_draft_tokens) == ("tree", 20)
    assert "siblings leak" in made.notices[0]


# ---- hooks


def published(**fields: Any) -> Any:
    """SGLang's process-wide configuration, with some fields of speculation, for the length of a block."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().override(**fields)


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
    assert {name for name in HookRegistry._patched if "ServerArgs" not in name} == {
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        "sglang.srt.speculative.dflash_utils.validate_dflash_request",
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        "sglang.srt.speculative.spec_utils.spec_need_hidden_states",
    }


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


# ---- rounds


def test_positions_and_masks_follow_the_device_where_the_host_is_ahead() -> None:
    """Under overlap the host may know its reservation alone, which is ahead of what is committed."""
    from ddtree.sglang_plugin.window import open_window

    table = torch.arange(4 * 40, dtype=torch.int32).view(4, 40)
    rows, lengths, ahead = torch.tensor([2, 1]), torch.tensor([7, 11]), torch.tensor([30, 38], dtype=torch.int32)
    overlapped = SimpleNamespace(seq_lens=lengths, seq_lens_cpu=None, req_pool_indices=rows)
    window = open_window(overlapped, SimpleNamespace(nxt_kv_lens_cpu=ahead), table, 5)
    assert torch.equal(window.prefix_R, lengths)
    assert not window.exact
    assert window.slots_RN.tolist() == [list(range(80 + 7, 80 + 12)), list(range(40 + 11, 40 + 16))]
    known = SimpleNamespace(seq_lens=lengths, seq_lens_cpu=lengths.clone(), req_pool_indices=rows)
    exact = open_window(known, SimpleNamespace(nxt_kv_lens_cpu=ahead), table, 5)
    assert exact.exact
    assert torch.equal(exact.slots_RN, window.slots_RN)


def test_a_pass_without_features_stops_instead_of_drafting_from_stale_ones() -> None:
    from ddtree.sglang_plugin.trees import plain_rows
    from ddtree.sglang_plugin.verify import Verifier

    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=64))
    verifier = Verifier(SimpleNamespace(model_runner=runner), None, 12)  # type: ignore[arg-type]
    tree = plain_rows(torch.tensor([3, 4])).tree
    assert verifier._check(torch.zeros(2, 12), tree).shape == (2, 1, 12)
    padded = torch.zeros(5, 12)  # a graph's rows: those past the batch belong to nobody
    assert verifier._check(padded, tree).shape == (2, 1, 12)
    for hidden, found in ((None, 0), (torch.zeros(2, 6), 6)):
        with pytest.raises(UnsupportedError, match=f"features of width {found} instead of 12"):
            verifier._check(hidden, tree)


# ---- tensor parallelism


class Rank0Says:
    """SGLang's broadcast, as rank 1 sees it: what rank 0 decided arrives in place."""

    def __init__(self, said: list[torch.Tensor]) -> None:
        self.said = said

    def sync(self, site: Any, values: torch.Tensor) -> torch.Tensor:
        return values.copy_(self.said.pop(0))


class Records:
    def __init__(self) -> None:
        self.said: list[torch.Tensor] = []

    def sync(self, site: Any, values: torch.Tensor) -> torch.Tensor:
        self.said.append(values.clone())
        return values


@pytest.mark.parametrize("greedy", [True, False])
def test_one_rank_decides(greedy: bool) -> None:
    """Rank 1's logits differ in one token; without rank 0's word it would draft and accept something else."""
    from ddtree.ops import select_ops
    from ddtree.sglang_plugin.choices import Chooser
    from ddtree.sglang_plugin.head import DraftHead
    from ddtree.sglang_plugin.trees import plant

    settings = resolve(Flags(budget=6), block_size=4, num_draft_tokens=None, hybrid=False)
    head = SimpleNamespace(weight=torch.randn(20, 5, generator=torch.Generator().manual_seed(0)))
    draft = SimpleNamespace(output_multiplier=1.0, final_logit_softcapping=None)
    alone = SimpleNamespace(world_size=1)
    info = SimpleNamespace(
        temperatures=torch.ones(2, 1),
        top_ks=torch.full((2,), 1 if greedy else 1 << 30),
        top_ps=torch.ones(2),
        min_ps=torch.zeros(2),
        need_top_k_sampling=greedy,
        need_top_p_sampling=False,
        need_min_p_sampling=False,
        is_all_greedy=greedy,
    )
    hidden = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(2 * 7, 20, generator=torch.Generator().manual_seed(2))

    def rank(sync: Any, skew: float) -> tuple[torch.Tensor, torch.Tensor]:
        own = DraftHead(
            SimpleNamespace(weight=head.weight + skew), 20, alone, draft, select_ops(torch.device("cpu"))
        )
        chooser = Chooser(own, 20, settings, sync, None, False)
        turn = chooser.turn(info, torch.tensor([1, 2]), torch.tensor([4, 9]))
        tokens, log_probs = chooser.candidates(hidden * (1 + skew), 6, turn)
        tree = plant(torch.tensor([3, 3]), tokens, log_probs, settings.plan, 7).tree
        changed = logits.clone()
        changed[:, 5] += 100 * skew
        return tree.tokens_RN, chooser.choices(changed, tree, turn)

    first = Records()
    tree_0, choices_0 = rank(first, 0.0)
    assert not torch.equal(rank(Records(), 1.0)[1], choices_0), "the ranks differ by themselves"
    tree_1, choices_1 = rank(Rank0Says(first.said), 1.0)
    assert torch.equal(tree_0, tree_1)
    assert torch.equal(choices_0, choices_1)


def test_heads_that_do_not_say_what_they_hold_are_refused() -> None:
    from ddtree.ops import select_ops
    from ddtree.sglang_plugin.head import DraftHead

    draft = SimpleNamespace(output_multiplier=1.0, final_logit_softcapping=None)
    ops = select_ops(torch.device("cpu"))
    tied = SimpleNamespace(weight=torch.zeros(24, 4))  # a plain embedding, padded
    assert DraftHead(tied, 20, SimpleNamespace(world_size=1), draft, ops).shard.size == 20
    with pytest.raises(UnsupportedError, match="use --tp-size 1"):
        DraftHead(tied, 20, SimpleNamespace(world_size=2), draft, ops)
    shards = SimpleNamespace(num_added_elements=0, org_vocab_start_index=10, num_org_elements=10)
    split = SimpleNamespace(weight=torch.zeros(12, 4), shard_indices=shards)
    assert DraftHead(split, 20, SimpleNamespace(world_size=2), draft, ops).shard == replace(
        DraftHead(split, 20, SimpleNamespace(world_size=1), draft, ops).shard, first=10, size=10
    )
    shards.num_added_elements = 3
    with pytest.raises(UnsupportedError, match="added vocabulary"):
        DraftHead(split, 20, SimpleNamespace(world_size=2), draft, ops)
    with pytest.raises(UnsupportedError, match="no lm_head"):
        DraftHead(None, 20, SimpleNamespace(world_size=1), draft, ops)
