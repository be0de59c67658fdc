"""What DDTREE's flags become for SGLang, and which combinations are refused before anything loads."""

from __future__ import annotations

import pytest

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.settings import Flags, resolve
from ddtree.sglang_plugin.status import ALARM_ROUNDS, Status


def settings(block_size: int = 16, num_draft_tokens: int | None = None, hybrid: bool = False, **flags: object):
    return resolve(
        Flags(**flags),  # type: ignore[arg-type]
        block_size=block_size,
        num_draft_tokens=num_draft_tokens,
        hybrid=hybrid,
    )


@pytest.mark.parametrize(
    ("block_size", "flags", "mode", "budget", "width"),
    [
        (16, {}, "tree", 31, 32),
        (16, {"budget": 64}, "tree", 64, 65),
        (16, {"budget": 8}, "tree", 8, 16),  # the block is wider than the tree
        (40, {}, "tree", 39, 40),
        (16, {"mode": "chain"}, "chain", 15, 16),
        (16, {"mode": "shadow-linear", "budget": 31}, "shadow-linear", 31, 47),
        (16, {"mode": "off"}, "off", 0, 1),
    ],
)
def test_one_width_for_block_and_tree(block_size: int, flags: dict, mode: str, budget: int, width: int) -> None:
    made = settings(block_size, **flags)
    assert (made.mode, made.plan.budget, made.width) == (mode, budget, width)


@pytest.mark.parametrize("mode", ["tree", "chain", "shadow-linear", "off"])
@pytest.mark.parametrize("block_size", [2, 8, 16, 33])
def test_resolving_what_was_resolved_changes_nothing(mode: str, block_size: int) -> None:
    once = settings(block_size, mode=mode)
    assert settings(block_size, num_draft_tokens=once.width, mode=mode) == once


def test_rows_given_in_sglangs_own_words_become_the_budget() -> None:
    assert settings(8, num_draft_tokens=20).plan.budget == 19
    assert settings(8, num_draft_tokens=27, mode="shadow-linear").plan.budget == 19


@pytest.mark.parametrize(
    ("flags", "more", "message"),
    [
        ({"mode": "forest"}, {}, "must be one of tree, chain, shadow-linear, off: got 'forest'"),
        ({"budget": 0}, {}, "budget must lie between 1 and 255"),
        ({"budget": 256}, {}, "budget must lie between 1 and 255"),
        ({"mode": "chain", "budget": 8}, {}, "has no meaning in mode chain"),
        ({"mode": "off", "budget": 8}, {}, "has no meaning in mode off"),
        ({"budget": 31}, {"num_draft_tokens": 16}, "contradicts mode tree .* whose width is 32; leave it out"),
        ({"mode": "chain"}, {"num_draft_tokens": 32}, "contradicts mode chain"),
        ({}, {"block_size": 1}, "block size must lie between 2 and 256"),
    ],
)
def test_combinations_that_cannot_be_honoured(flags: dict, more: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**flags, **more)


@pytest.mark.parametrize("mode", ["tree", "shadow-linear"])
def test_recurrent_targets_run_the_chain_and_say_so(mode: str) -> None:
    made = settings(mode=mode, hybrid=True)
    assert (made.mode, made.width) == ("chain", 16)
    assert f"mode chain runs instead of {mode}" in made.notices[0]
    assert made.notices[0] in Status(made).describe()["notices"]


def test_recurrent_targets_run_trees_on_demand_loudly() -> None:
    made = settings(hybrid=True, allow_hybrid_unsafe=True)
    assert made.mode == "tree"
    assert "answers may differ from plain decoding" in made.notices[0]
    assert not settings(allow_hybrid_unsafe=True).notices


def test_status_counts_what_was_accepted() -> None:
    status = Status(settings())
    assert status.describe()["acceptance_length"] is None
    assert status.observe([0, 3]) is None
    facts = status.describe()
    assert (facts["rounds"], facts["acceptance_length"]) == (2, 2.5)
    assert facts["accepted_drafts"] == {"0": 1, "3": 1}


def test_status_raises_an_alarm_once_when_nothing_is_ever_accepted() -> None:
    status = Status(settings())
    warnings = [status.observe([0, 0]) for _ in range(ALARM_ROUNDS)]
    assert sum(warning is not None for warning in warnings) == 1
    assert warnings[ALARM_ROUNDS // 2 - 1] is not None
    assert status.observe([1, 0]) is None
    again = [status.observe([0]) for _ in range(ALARM_ROUNDS)]
    assert again[-1] is not None
    plain = Status(settings(mode="off"))
    assert not any(plain.observe([0] * 8) for _ in range(ALARM_ROUNDS))
