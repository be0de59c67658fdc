"""Flags on SGLang's command line, what they become, and launches that are refused before anything loads."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree.errors import ConfigError, DDTreeError, UnsupportedError
from ddtree.sglang_plugin.flags import flags_of, from_arguments
from ddtree.sglang_plugin.settings import Flags
from tests.sglang import models
from tests.sglang.host import DDTREE, Launch, ServerArgs


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
