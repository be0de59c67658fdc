"""The memory plan: everything is accounted for, and each option moves the plan the way it moves a server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddtree.sglang_plugin.demand import _prefill_chunk
from ddtree.sglang_plugin.memory import Demand, plan_memory

GIB = 2**30
# Qwen3-8B in bfloat16 with a five-layer drafter, on one 80 GiB GPU.
QWEN = Demand(
    weights=16 * GIB,
    drafter=GIB,
    edges=0,
    pairs=0,
    kv_token=2 * 2 * 8 * 128 * (36 + 5),
    rows=32,
    horizon=15,
    vocab_size=151_936,
    hidden=4096,
    requests=48,
    context=32_768,
    prefill_chunk=8192,
    graph_batch=48,
)


def test_the_parts_add_up_to_less_than_the_gpu() -> None:
    plan = plan_memory(80 * GIB, replace(QWEN, edges=GIB, pairs=15 * 16 * 16))
    static = plan.weights + plan.drafter + plan.edges + plan.kv
    parts = static + plan.logits + plan.graph_indices + plan.masks + plan.pairs + plan.activations
    assert 0.97 * 80 * GIB < parts <= 0.98 * 80 * GIB, "no part is counted twice or left out"
    assert static - 80 * GIB / 100 <= plan.fraction * plan.total <= static
    assert plan.tokens * QWEN.kv_token <= plan.kv
    assert plan.works
    assert plan.fitting * (QWEN.context + 2 * QWEN.rows) <= plan.tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 65},
        {"requests": 96},
        {"context": 131_072},
        {"graph_batch": 160},
        {"weights": 60 * GIB},
        {"edges": GIB},
        {"pairs": 15 * 16 * 16},
        {"horizon": 31},
        {"prefill_chunk": 16_384},
    ],
)
def test_whatever_asks_for_more_leaves_less(changes: dict[str, int]) -> None:
    before, after = plan_memory(80 * GIB, QWEN), plan_memory(80 * GIB, replace(QWEN, **changes))
    assert after.tokens < before.tokens
    assert after.fitting < before.fitting or "weights" not in changes


def test_numbers_by_hand() -> None:
    """Two requests of three rows over five drafted depths, without graphs."""
    tiny = Demand(100, 10, 1, 7, 50, 3, 5, 11, 13, 2, 17, 4, 0)
    plan = plan_memory(4 * GIB, tiny)
    assert plan.logits == 4 * 11 * 2 * (3 + 5 + 5)
    assert plan.masks == 2 * 3 * (17 + 3)
    assert plan.pairs == 48 * 2 * 7
    assert plan.activations == 3 * GIB + 12 * 13 * (2 * 3), "rounds are wider than the prefill here"
    assert plan.fitting == plan.tokens // (17 + 2 * 3)


def test_index_tables_of_captured_graphs_grow_with_rows_and_context() -> None:
    """The one that kills servers: 65 rows x 48 requests x 131,072 positions x 8 bytes are three gibibytes."""
    plan = plan_memory(80 * GIB, replace(QWEN, rows=65, context=131_072))
    assert plan.graph_indices == 8 * 48 * 65 * 131_072
    assert plan_memory(80 * GIB, replace(QWEN, graph_batch=0)).graph_indices == 0


def test_a_gpu_that_is_too_small_is_said_to_be() -> None:
    plan = plan_memory(16 * GIB, QWEN)
    assert (plan.kv, plan.tokens, plan.works) == (0, 0, False)


@pytest.mark.parametrize(("given", "tokens"), [(None, 8192), (2048, 2048), (-1, 32_768)])
def test_prompts_that_are_not_cut_take_the_whole_context_at_once(given: int | None, tokens: int) -> None:
    arguments = SimpleNamespace(chunked_prefill_size=given, max_prefill_tokens=16_384)
    assert _prefill_chunk(arguments, 32_768) == tokens
