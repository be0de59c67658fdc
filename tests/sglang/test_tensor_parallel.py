"""Two tensor-parallel ranks of the real SGLang, over gloo: they draft, accept and say what one rank does.

The vocabulary is such that the second rank's half ends in padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.sglang import models
from tests.sglang.engines import said
from tests.sglang.test_edges import (
    COUNT,
    HEATS,
    PROMPT,
    Scene,
    Seen,
    committed,
    expected,
    launched,
    look,
    rounds,
    set_scene,
    watch,
)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return set_scene(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(scene: Scene) -> Seen:
    return watch(scene, "edged", "tree")


@pytest.fixture(scope="module")
def chained(scene: Scene) -> Seen:
    return watch(scene, "edged", "chain", tp_size=2)


@pytest.fixture(scope="module")
def ranks(scene: Scene, alone: Seen, chained: Seen) -> Iterator[Any]:
    """An engine of two ranks, each with half of the heads and of the vocabulary."""
    del alone, chained  # two engines of one process must not run at once
    with launched(scene, "edged", "tree", tp_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def together(scene: Scene, ranks: Any) -> Seen:
    return look(scene, ranks, "tree")


@contextmanager
def spoilt(scene: Scene, fault: str) -> Iterator[None]:
    (scene.rig / "fault").write_text(fault)
    try:
        yield
    finally:
        (scene.rig / "fault").unlink()


def test_two_ranks_commit_in_each_round_what_one_does(scene: Scene, alone: Seen, together: Seen) -> None:
    """And say what Hugging Face says, which is looked at while rounds are recorded."""
    assert committed(together.entries) == committed(alone.entries)
    assert committed(together.entries) == expected(scene, together.entries, "tree", scene.tables())[:-1]
    assert together.facts["edges"] is True


def test_chains_of_two_ranks_commit_what_the_embedded_engines_core_would(scene: Scene, chained: Seen) -> None:
    assert committed(chained.entries) == expected(scene, chained.entries, "chain", scene.tables())[:-1]


def test_a_drafter_split_in_two_says_what_the_whole_one_says(alone: Seen, together: Seen) -> None:
    for one, two in zip(alone.entries, together.entries, strict=True):
        assert (two["prefix"], two["anchor"]) == (one["prefix"], one["anchor"])
        states = torch.tensor(two["states"])
        torch.testing.assert_close(states, torch.tensor(one["states"]), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("heat", HEATS)
def test_a_seeded_answer_of_two_ranks_is_that_of_one(alone: Seen, together: Seen, heat: float) -> None:
    """In as many rounds: drafts are coupled to the noise of their own tokens, whichever rank holds them."""
    one, two = alone.sampled[heat], together.sampled[heat]
    assert two["output_ids"] == one["output_ids"]
    assert two["meta_info"]["spec_verify_ct"] == one["meta_info"]["spec_verify_ct"]


def test_requests_together_say_what_hugging_face_says(scene: Scene, ranks: Any) -> None:
    prompts = [[5, 6, 7, 8, 9], PROMPT, [20, 21]]
    answers = said(ranks, prompts, COUNT)
    assert [a["output_ids"] for a in answers] == [models.greedy(scene.target, p, COUNT) for p in prompts]


@pytest.mark.parametrize("fault", ["ranking", "edges", "choices"])
def test_the_first_rank_decides(scene: Scene, ranks: Any, together: Seen, fault: str) -> None:
    """The second rank comes to other candidates, edges or tokens, and nothing changes."""
    with spoilt(scene, fault):
        assert committed(rounds(scene, ranks)) == committed(together.entries)


def test_the_second_rank_would_decide_alike(scene: Scene, ranks: Any, together: Seen) -> None:
    """It merges the same candidates, and its edges' tables are whole."""
    with spoilt(scene, "second"):
        assert committed(rounds(scene, ranks)) == committed(together.entries)


def test_tokens_named_from_the_start_of_their_shard_would_be_seen(
    scene: Scene, ranks: Any, together: Seen
) -> None:
    with spoilt(scene, "local names"):
        assert len(rounds(scene, ranks)) > len(together.entries)
