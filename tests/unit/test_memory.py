"""The memory plan: what is counted, what is made smaller when it does not fit, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.engine.hardware import available_memory
from ddtree.engine.memory import Footprint, plan_memory
from ddtree.engine.runner import footprint
from ddtree.errors import ConfigError
from ddtree.models.target import TargetModel
from ddtree.speculation.plan import fixed_plan
from tests.toys import VOCABULARY, toy_drafter, toy_target

FOOT = Footprint(weights=1000, place=10, logits_row=100, prefill_row=1)
TREE = fixed_plan("tree", 8, 16)


def plan(available, **changes):
    options = {"plan": TREE, "sequences": 4, "places": 60, "page_size": 16, "pages": None, "prefill_chunk": 50}
    return plan_memory(FOOT, available, **(options | changes))


def test_what_fits_stays_as_it_was_asked_for():
    found = plan(10**6)
    assert (found.pages, found.sequences, found.plan, found.notes) == (4 * 4, 4, TREE, ())
    assert found.page == 160
    assert found.cache == 2560
    assert found.logits == 4 * (17 + 7) * 100
    assert found.prefill == 50
    assert plan(10**6, pages=9).pages == 9


def test_what_does_not_fit_is_made_smaller_and_said():
    logits, prefill, whole = 9600, 50, 640
    assert plan(logits + prefill + 2560).notes == ()
    fewer = plan(logits + prefill + 2559)
    assert (fewer.pages, fewer.plan, fewer.sequences) == (15, TREE, 4)
    assert fewer.notes == ("15 pages instead of 16: more do not fit",)
    narrow = plan(logits + prefill + whole - 1)
    assert narrow.plan == fixed_plan("tree", 8, 8)
    assert "tree budget 8 instead of 16" in narrow.notes[0]
    least = plan((2 + 7) * 100 + prefill + whole)
    assert (least.plan.budget, least.sequences, least.pages) == (1, 1, 4)
    assert len(least.notes) == 2
    assert "1 sequences at once instead of 4" in least.notes[1]
    for one in (fewer, narrow, least):
        assert one.cache + one.logits + one.prefill <= one.available
        assert "reduced" in one.lines()
    with pytest.raises(ConfigError, match=r"one sequence of 60 places needs .* ask for a smaller max_context"):
        plan((2 + 7) * 100 + prefill + whole - 1)


def test_pages_that_hold_no_whole_sequence_are_refused():
    with pytest.raises(ConfigError, match="3 pages of 16 places hold less than one sequence of 60 places"):
        plan(10**6, pages=3)


def test_an_engine_takes_what_fits():
    """Its plan, its pages and its seats are those of the memory plan."""
    target = toy_target()
    foot = footprint(target, None, target.device, target.dtype)
    places = 64 + 256 + 1
    gib = (20 * foot.place * 16 + 8 * foot.logits_row + 512 * foot.prefill_row + places * foot.place) / 2**30
    config = EngineConfig(mode="off", max_context=64, max_sequences=8, memory_gib=gib)
    engine = BatchEngine(target, None, config, lambda tokens: "")
    assert engine.memory.pages < 8 * 21
    assert engine.blocks.total == engine.memory.pages == engine.runner.pools[0].keys.shape[1] - 2
    assert engine.memory.notes
    with pytest.raises(ConfigError, match="ask for a smaller max_context"):
        BatchEngine(target, None, EngineConfig(mode="off", memory_gib=1e-6), lambda tokens: "")


def test_a_footprint_is_what_the_models_hold():
    target = toy_target(vocabulary=VOCABULARY)
    drafter, _ = toy_drafter(target)
    found = footprint(target, drafter, target.device, torch.float64)
    held = sum(p.numel() for model in (target, drafter) for p in model.parameters())
    assert found.weights == 8 * held
    caches = [model.new_cache(1, 100) for model in (target, drafter)]
    per_place = sum((c.keys[:, :-1].numel() + c.values[:, :-1].numel()) * 8 for c in caches) / 100
    assert found.place == per_place
    with torch.device("meta"):
        laid_out = TargetModel(target.spec)
    assert footprint(laid_out, None, torch.device("cpu"), torch.float64).weights == 8 * sum(
        p.numel() for p in target.parameters()
    )


def test_this_machine_has_some_memory():
    assert 2**20 < available_memory(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must lie between 1 and 1024: got 0"),
        ({"page_size": 0}, "page_size must lie between 1 and 4096 places: got 0"),
        ({"memory_gib": 0.0}, "memory_gib must be above 0"),
        ({"memory_gib": float("nan")}, "memory_gib must be above 0"),
        ({"pages": 0}, "pages must be at least 1: got 0"),
    ],
)
def test_options_that_cannot_be_honoured(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)
