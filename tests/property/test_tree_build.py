"""Best-first trees are the trees they claim to be: batched builder, heap and brute force agree on every bit.

The canonical order of prefixes is (score descending, depth, the parent's own order, rank under the parent).
Most cases are full of exact ties, because that is where builders part ways.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import (
    Candidates,
    DraftTree,
    accept,
    build_reference,
    build_tree,
    check_tree,
    edge_candidates,
    factorised_candidates,
    spine_nodes,
    spine_tree,
    with_spine,
)
from tests.toys import top_candidates

KINDS = ("halves", "bfloat16", "units", "tenths", "noise", "flat", "edges", "tied edges", "states")
ARRAYS = ("tokens_RN", "parents_RN", "depths_RN", "scores_RN")


def random_candidates(rng: np.random.Generator, kind: str, sequences: int, depth: int, ranks: int) -> Candidates:
    """Candidates of one kind, some of them -inf; a third of all batches lose whole depths or tails."""
    vocabulary = ranks + int(rng.integers(0, 30))
    logits_RDV = rng.choice([0.5, 2.0, 6.0]) * rng.standard_normal((sequences, depth, vocabulary))
    if kind in ("halves", "tied edges"):
        logits_RDV = np.round(2 * logits_RDV) / 2
    if kind == "flat":
        logits_RDV = np.zeros_like(logits_RDV)
    if rng.random() < 0.3:
        logits_RDV[rng.random(logits_RDV.shape) < rng.random()] = -np.inf
    if kind in ("units", "tenths", "states"):
        step = 0.1 if kind == "tenths" else 0.5  # halves add up exactly, tenths round
        states = ranks if kind == "states" else 1
        units_RDSK = np.sort(rng.integers(0, 6, (sequences, depth, states, ranks)))
        log_probs_RDSK = torch.from_numpy(-units_RDSK * step).float()
        log_probs_RDSK[torch.from_numpy(units_RDSK == 5)] = -torch.inf
        order_RDSK = torch.from_numpy(rng.random(units_RDSK.shape).argsort(-1))
        tokens_RDSK = torch.from_numpy(rng.random((sequences, depth, 1, ranks)).argsort(-1))
        tokens_RDSK = tokens_RDSK.expand_as(order_RDSK).gather(-1, order_RDSK)
        states_RDSK = order_RDSK if kind == "states" else torch.zeros_like(order_RDSK)
        candidates = Candidates(tokens_RDSK, log_probs_RDSK, states_RDSK)
    else:
        log_probs_RDV = torch.from_numpy(logits_RDV).float().log_softmax(-1)
        if kind == "bfloat16":
            log_probs_RDV = log_probs_RDV.bfloat16()
        candidates = top_candidates(log_probs_RDV, ranks)
    if kind.endswith("edges"):
        edges_RDKK = rng.standard_normal((sequences, depth, ranks, ranks))
        if kind == "tied edges":
            edges_RDKK = np.round(edges_RDKK)
        plain = candidates
        candidates = edge_candidates(
            plain.tokens_RDSK[:, :, 0], plain.log_probs_RDSK[:, :, 0], torch.from_numpy(edges_RDKK)
        )
    if rng.random() < 0.3:
        cut = int(rng.integers(0, ranks))
        candidates.log_probs_RDSK[rng.integers(sequences), rng.integers(depth), :, cut:] = -torch.inf
    return candidates


def random_case(rng: np.random.Generator, kind: str, most_ranks: int = 64) -> tuple[Candidates, torch.Tensor, int]:
    """Candidates, anchors and a budget that the candidates can fill; small sizes as likely as large ones."""
    sequences, depth = int(rng.integers(1, 5)), int(rng.integers(1, 17))
    ranks = int(most_ranks ** rng.random())
    candidates = random_candidates(rng, kind, sequences, depth, ranks)
    budget = min(int(256 ** rng.random()), offered(depth, ranks))
    return candidates, torch.from_numpy(rng.integers(0, 99, sequences)), budget


def offered(depth: int, ranks: int) -> int:
    """How many prefixes there are, or any number past the largest budget."""
    return sum(ranks**d for d in range(1, depth + 1))


def assert_same(left: DraftTree, right: DraftTree, what: object) -> None:
    assert left.horizon == right.horizon
    assert torch.equal(left.sizes_R, right.sizes_R), what
    for name in ARRAYS:
        a, b = getattr(left, name), getattr(right, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (name, what)
        assert torch.equal(a, b), (name, what)
    assert torch.equal(left.scores_RN.signbit(), right.scores_RN.signbit()), what


def head(tree: DraftTree, budget: int) -> DraftTree:
    """The first nodes of a tree, as a tree."""
    cut = {name: getattr(tree, name)[:, : budget + 1] for name in ARRAYS}
    return dataclasses.replace(tree, **cut, sizes_R=tree.sizes_R.clamp(max=budget + 1))


def by_brute_force(candidates: Candidates, anchors_R: torch.Tensor, budget: int) -> DraftTree:
    """Every prefix there is, sorted in the canonical order, the best `budget` taken."""
    sequences, depth, _, ranks = candidates.tokens_RDSK.shape
    tree = DraftTree(
        *(torch.zeros(sequences, budget + 1, dtype=torch.int64) for _ in range(3)),
        torch.full((sequences, budget + 1), -torch.inf),
        torch.ones(sequences, dtype=torch.int64),
        depth,
    )
    for r in range(sequences):
        tokens, log_probs, states = (
            a[r].numpy() for a in (candidates.tokens_RDSK, candidates.log_probs_RDSK, candidates.states_RDSK)
        )
        prefixes = []  # (key, ranks, token, depth, score); a key orders prefixes of one depth by their parents
        for length in range(1, depth + 1):
            for path in itertools.product(range(ranks), repeat=length):
                state, score, key, token = 0, np.float32(0), (), 0
                for d, rank in enumerate(path):
                    score = score + log_probs[d, state, rank]
                    token = tokens[d, state, rank]
                    state = states[d, state, rank]
                    key = (-score, d + 1, key, rank)
                if score > -np.inf:
                    prefixes.append((key, path, token, length, score))
        prefixes.sort()
        nodes = {(): 0}
        tree.tokens_RN[r, 0], tree.scores_RN[r, 0] = anchors_R[r], 0
        for node, (_, path, token, length, score) in enumerate(prefixes[:budget], start=1):
            nodes[path] = node
            tree.tokens_RN[r, node], tree.depths_RN[r, node] = int(token), length
            tree.parents_RN[r, node] = nodes[path[:-1]]
            tree.scores_RN[r, node] = float(score)
        tree.sizes_R[r] = len(nodes)
    return tree


# The batched builder, the heap and brute force


@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("kind", KINDS)
def test_the_batched_builder_equals_the_heap(kind, seed):
    rng = np.random.default_rng([KINDS.index(kind), seed])
    for case in range(20):  # 2,520 in all
        # A ranking for each state leaves nothing to prune: keep most of these cases small.
        most_ranks = 64 if len(kind) < 6 or case == 0 else 16
        candidates, anchors_R, budget = random_case(rng, kind, most_ranks)
        tree = build_tree(candidates, anchors_R, budget)
        what = (case, budget, tuple(candidates.tokens_RDSK.shape))
        assert_same(tree, build_reference(candidates, anchors_R, budget), what)
        check_tree(tree)


@pytest.mark.parametrize("kind", ["units", "bfloat16", "states"])
def test_the_builders_agree_at_the_largest_sizes(kind):
    rng = np.random.default_rng(99)
    candidates = random_candidates(rng, kind, sequences=2, depth=16, ranks=64)
    for budget in (63, 64, 255):
        anchors_R = torch.tensor([1, 2])
        assert_same(
            build_tree(candidates, anchors_R, budget), build_reference(candidates, anchors_R, budget), budget
        )


def test_the_builders_agree_when_candidates_run_out():
    rng = np.random.default_rng(98)
    for case in range(60):
        depth, ranks = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        candidates = random_candidates(rng, KINDS[case % len(KINDS)], 2, depth, ranks)
        budget = offered(depth, ranks) + int(rng.integers(1, 20))
        anchors_R = torch.tensor([1, 2])
        assert_same(
            build_tree(candidates, anchors_R, budget), build_reference(candidates, anchors_R, budget), case
        )


@st.composite
def tied_cases(draw: st.DrawFn) -> tuple[Candidates, torch.Tensor, int]:
    """Small cases whose log-probabilities are multiples of one step, so that sums tie wherever they can."""
    depth, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    states = ranks if draw(st.booleans()) else 1
    step = draw(st.sampled_from([0.5, 0.1, 0.3]))
    missing = 7
    log_probs_DSK, order_DSK = [], []
    for _ in range(depth):
        levels = [
            sorted(draw(st.lists(st.integers(0, missing), min_size=ranks, max_size=ranks))) for _ in range(states)
        ]
        log_probs_DSK.append(
            [[-np.inf if unit == missing else -step * unit for unit in level] for level in levels]
        )
        order_DSK.append([draw(st.permutations(range(ranks))) for _ in range(states)])
    states_RDSK = torch.tensor([order_DSK])
    log_probs_RDSK = torch.tensor([log_probs_DSK], dtype=torch.float32)
    candidates = Candidates(states_RDSK + 10, log_probs_RDSK, states_RDSK if states > 1 else states_RDSK * 0)
    return candidates, torch.tensor([draw(st.integers(0, 99))]), draw(st.integers(1, offered(depth, ranks)))


@settings(max_examples=300, deadline=None)
@given(tied_cases())
def test_the_builders_equal_brute_force_where_sums_tie(case):
    expected = by_brute_force(*case)
    assert_same(build_reference(*case), expected, "heap")
    assert_same(build_tree(*case), expected, "batched")


@pytest.mark.parametrize("kind", KINDS)
def test_the_builders_equal_brute_force(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for case in range(8):
        depth, ranks = [(1, 9), (2, 6), (3, 4), (4, 3), (6, 2), (5, 1), (3, 5), (2, 12)][case]
        candidates = random_candidates(rng, kind, 2, depth, ranks)
        anchors_R = torch.from_numpy(rng.integers(0, 99, 2))
        budget = int(rng.integers(1, offered(depth, ranks) + 1))
        expected = by_brute_force(candidates, anchors_R, budget)
        assert_same(build_reference(candidates, anchors_R, budget), expected, case)
        assert_same(build_tree(candidates, anchors_R, budget), expected, case)


def test_ties_of_sums_go_by_depth_then_parent_then_rank():
    """Six prefixes sum to -1, each depth of them before the next; then all that sum to -2 in the same way."""
    tokens_RDK = torch.tensor([[[10, 11], [20, 21], [30, 31]]])
    log_probs_RDK = torch.tensor([[[-1.0, -1.0], [0.0, -1.0], [0.0, -1.0]]])
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    for build in (build_tree, build_reference, by_brute_force):
        tree = build(candidates, torch.tensor([5]), 12)
        assert tree.tokens_RN.tolist() == [[5, 10, 11, 20, 20, 30, 30, 21, 21, 31, 31, 30, 30]]
        assert tree.parents_RN.tolist() == [[0, 0, 0, 1, 2, 3, 4, 1, 2, 3, 4, 7, 8]]
        assert tree.depths_RN.tolist() == [[0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3, 3, 3]]


# Trees inside trees, and what trees are worth


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_nodes_of_a_tree_are_the_smaller_tree(kind):
    rng = np.random.default_rng([KINDS.index(kind), 7])
    for case in range(12):
        candidates, anchors_R, budget = random_case(rng, kind, most_ranks=24)
        whole = build_tree(candidates, anchors_R, budget)
        for smaller in {0, 1, budget // 2, budget - 1, int(rng.integers(0, budget + 1))}:
            assert_same(build_tree(candidates, anchors_R, smaller), head(whole, smaller), (case, budget, smaller))


def target_choices(tree: DraftTree, candidates: Candidates, agreement: float, seed: int) -> torch.Tensor:
    """What a target chooses after each node: a function of the path alone, often the drafter's own best."""
    choices_RN = torch.full_like(tree.tokens_RN, -1)
    for r in range(tree.sizes_R.shape[0]):
        nodes: list[tuple[tuple[int, ...], int]] = []  # path and state of each node
        for node in range(int(tree.sizes_R[r])):
            token, depth = int(tree.tokens_RN[r, node]), int(tree.depths_RN[r, node])
            path, state = ((token,), 0)
            if node:
                above, parent_state = nodes[int(tree.parents_RN[r, node])]
                offered_K = candidates.tokens_RDSK[r, depth - 1, parent_state].tolist()
                path = (*above, token)
                state = int(candidates.states_RDSK[r, depth - 1, parent_state, offered_K.index(token)])
            nodes.append((path, state))
            if depth < candidates.depth:
                draw = zlib.crc32(repr((seed, r, path)).encode()) / 2**32
                rank = 0 if draw < agreement else int(draw * 1e6) % min(4, candidates.tokens_RDSK.shape[3])
                choices_RN[r, node] = candidates.tokens_RDSK[r, depth, state, rank]
    return choices_RN


@pytest.mark.parametrize("kind", ["noise", "halves", "edges", "states"])
def test_a_tree_with_its_spine_never_accepts_less_than_the_spine(kind):
    """Step by step, and not on average; best first alone does fall behind the chain now and then."""
    rng = np.random.default_rng(KINDS.index(kind))
    behind = ahead = 0
    for case in range(40):
        candidates, anchors_R, budget = random_case(rng, kind, most_ranks=12)
        tree = build_tree(candidates, anchors_R, min(budget, 31))
        joined = with_spine(tree, candidates)
        check_tree(joined)
        empty = build_tree(candidates, anchors_R, 0)
        chain = with_spine(empty, candidates)
        lengths = [
            accept(each, target_choices(each, candidates, 0.8, case)).lengths_R for each in (tree, chain, joined)
        ]
        assert (lengths[2] >= lengths[1]).all()
        assert torch.equal(lengths[2], torch.maximum(lengths[0], lengths[1]))
        on_spine = accept(joined, target_choices(joined, candidates, 0.8, case), spine_nodes(joined, candidates))
        assert torch.equal(on_spine.lengths_R, lengths[1]), "the spine inside the tree accepts as the chain does"
        behind += int((lengths[0] < lengths[1]).sum())
        ahead += int((lengths[2] > lengths[1]).sum())
    assert behind > 0
    assert ahead > 0


def test_a_joined_root_is_the_spine_tree():
    candidates = random_candidates(np.random.default_rng(3), "units", 2, 7, 5)
    candidates.log_probs_RDSK[..., 0] = -0.5
    anchors_R = torch.tensor([4, 9])
    joined = with_spine(build_tree(candidates, anchors_R, 0), candidates)
    chain = spine_tree(anchors_R, candidates.tokens_RDSK[:, :, 0, 0], candidates.log_probs_RDSK[:, :, 0, 0])
    assert_same(joined, chain, "chain")


@pytest.mark.parametrize("kind", ["noise", "flat", "edges", "tied edges"])
def test_no_tree_of_the_size_is_worth_more(kind):
    """Expected acceptance is the sum of the path probabilities: no prefix-closed tree beats the built one."""
    rng = np.random.default_rng([KINDS.index(kind), 5])
    for case in range(12):
        depth, ranks, budget = int(rng.integers(2, 7)), int(rng.integers(2, 8)), int(rng.integers(1, 40))
        candidates = random_candidates(rng, kind, 1, depth, ranks)
        tree = build_tree(candidates, torch.tensor([0]), min(budget, offered(depth, ranks)))
        size = int(tree.sizes_R[0])
        worth = float(tree.scores_RN[0, :size].double().exp().sum())
        log_probs, states = candidates.log_probs_RDSK[0].double().numpy(), candidates.states_RDSK[0].numpy()
        for greed in (0.0, 1.0, 4.0, 16.0):
            assert random_worth(rng, log_probs, states, size, greed) <= worth * (1 + 1e-5), (case, greed)


def random_worth(
    rng: np.random.Generator, log_probs: np.ndarray, states: np.ndarray, size: int, greed: float
) -> float:
    """The worth of a random prefix-closed tree, the likelier prefixes preferred as `greed` grows."""
    frontier: list[tuple[int, int, float]] = [(0, 0, 0.0)]  # depth, state, score
    worth = 0.0
    for _ in range(size):
        score = np.array([node[2] for node in frontier])
        weight = np.exp(greed * (score - score.max()))
        depth, state, path_score = frontier.pop(int(rng.choice(len(frontier), p=weight / weight.sum())))
        worth += float(np.exp(path_score))
        if depth < len(log_probs):
            for rank, step in enumerate(log_probs[depth, state]):
                if step > -np.inf:
                    frontier.append((depth + 1, int(states[depth, state, rank]), path_score + float(step)))
    return worth
