"""The draft tree's arrays: invariants, spines, positions, ancestor bits, and what candidates may hold."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ddtree.ops import Rows
from ddtree.ops.reference import visible
from ddtree.tree import (
    Candidates,
    DraftTree,
    accept,
    ancestor_words,
    build_reference,
    build_tree,
    chain_words,
    check_tree,
    clique_words,
    edge_candidates,
    factorised_candidates,
    positions,
    row_bucket,
    spine_nodes,
    spine_tree,
    unpack_words,
    with_spine,
    word_count,
)

CPU = torch.device("cpu")
BUDGETS = (1, 4, 15, 16, 64, 255)
ROWS = (1, 2, 8, 33, 63, 64, 65, 127, 128, 129, 200, 255, 256)
ANCHORS = torch.tensor([11, 0, 96])
VOCABULARY = 97


def draw_candidates(seed: int, *, depth: int = 6, ranks: int = 40, edges: bool = False) -> Candidates:
    """Candidates of three sequences over 97 tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits_RDV = 2 * torch.randn(3, depth, VOCABULARY, generator=generator)
    log_probs_RDK, tokens_RDK = logits_RDV.log_softmax(-1).topk(ranks, dim=-1)
    if not edges:
        return factorised_candidates(tokens_RDK, log_probs_RDK)
    edges_RDKK = 2 * torch.randn(3, depth, ranks, ranks, generator=generator)
    return edge_candidates(tokens_RDK, log_probs_RDK, edges_RDKK)


def draw_tree(seed: int, sizes: list[int], rows: int, horizon: int) -> DraftTree:
    """Trees of any shape, not only best-first ones: half of the nodes extend the newest, half hang anywhere."""
    rng = np.random.default_rng(seed)
    tokens, parents, depths = (np.zeros((len(sizes), rows), dtype=np.int64) for _ in range(3))
    scores = np.full((len(sizes), rows), -np.inf, dtype=np.float32)
    for r, size in enumerate(sizes):
        tokens[r, :size] = rng.permutation(size)
        scores[r, 0] = 0
        for node in range(1, size):
            open_nodes = np.flatnonzero(depths[r, :node] < horizon)
            parents[r, node] = open_nodes[-1] if rng.random() < 0.5 else rng.choice(open_nodes)
            depths[r, node] = depths[r, parents[r, node]] + 1
            scores[r, node] = scores[r, parents[r, node]] - rng.random()
    arrays = (torch.from_numpy(a) for a in (tokens, parents, depths, scores))
    tree = DraftTree(*arrays, torch.tensor(sizes), horizon)
    check_tree(tree)
    return tree


def ancestors(tree: DraftTree, r: int) -> torch.Tensor:
    """Which rows each row may see, by climbing from parent to parent. bool [N, N]."""
    sees_NN = torch.eye(tree.rows, dtype=torch.bool)
    for node in range(tree.rows):
        above = node
        while above != 0:
            above = int(tree.parents_RN[r, above])
            sees_NN[node, above] = True
    return sees_NN


def path_of(tree: DraftTree, r: int, node: int) -> tuple[int, ...]:
    """Tokens from below the root down to a node."""
    tokens: list[int] = []
    while node != 0:
        tokens.append(int(tree.tokens_RN[r, node]))
        node = int(tree.parents_RN[r, node])
    return tuple(reversed(tokens))


def chain_of(candidates: Candidates, r: int) -> tuple[list[int], list[np.float32]]:
    """The drafter's chain step by step: tokens, and summed log-probabilities in float32."""
    state, score = 0, np.float32(0)
    tokens, scores = [], []
    for depth in range(candidates.depth):
        score = score + candidates.log_probs_RDSK[r, depth, state, 0].numpy()
        if score == -np.inf:
            break
        tokens.append(int(candidates.tokens_RDSK[r, depth, state, 0]))
        scores.append(score)
        state = int(candidates.states_RDSK[r, depth, state, 0])
    return tokens, scores


def emitted(tree: DraftTree, choices_RN: torch.Tensor, r: int = 0) -> list[int]:
    """The tokens that a round puts out: the accepted ones below the root, then the bonus."""
    accepted = accept(tree, choices_RN)
    path = accepted.path_RP[r, : int(accepted.lengths_R[r])]
    return [*tree.tokens_RN[r, path[1:]].tolist(), int(accepted.bonus_R[r])]


def assert_trees_equal(left: DraftTree, right: DraftTree) -> None:
    for field in dataclasses.fields(DraftTree):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if field.name == "horizon":
            assert a == b
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert torch.equal(a, b), field.name


# Structure


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("build", [build_tree, build_reference])
def test_a_built_tree_keeps_every_invariant(build, budget):
    candidates = draw_candidates(budget)
    tree = build(candidates, ANCHORS, budget)
    check_tree(tree)
    assert tree.rows == budget + 1
    assert tree.sizes_R.tolist() == [budget + 1] * 3
    assert tree.horizon == 6
    assert torch.equal(tree.tokens_RN[:, 0], ANCHORS)
    assert (tree.scores_RN[:, 0] == 0).all()
    assert (tree.scores_RN.diff(dim=1) <= 0).all(), "best first"
    for r in range(3):
        for node in range(1, budget + 1):
            depth, parent = int(tree.depths_RN[r, node]), int(tree.parents_RN[r, node])
            offered = candidates.tokens_RDSK[r, depth - 1, 0] == tree.tokens_RN[r, node]
            step = candidates.log_probs_RDSK[r, depth - 1, 0, offered]
            assert tree.scores_RN[r, node] == tree.scores_RN[r, parent] + step


@pytest.mark.parametrize("budget", [0, *BUDGETS])
def test_arrays_have_the_promised_types(budget):
    candidates = draw_candidates(1)
    for tree in (build_tree(candidates, ANCHORS, budget), build_reference(candidates, ANCHORS, budget)):
        for array in (tree.tokens_RN, tree.parents_RN, tree.depths_RN, tree.sizes_R):
            assert array.dtype == torch.int64
        assert tree.scores_RN.dtype == torch.float32
        assert tree.tokens_RN.shape == tree.scores_RN.shape == (3, budget + 1)


def test_sequences_of_a_batch_have_their_own_sizes():
    log_probs_RDK = draw_candidates(2, depth=2, ranks=4).log_probs_RDSK[:, :, 0].clone()
    log_probs_RDK[0, :, 1:] = -torch.inf  # two nodes: a chain
    log_probs_RDK[1, 0] = -torch.inf  # nothing at all, for depth 2 has no parents
    tokens_RDK = torch.arange(4).expand(3, 2, 4)
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    for build in (build_tree, build_reference):
        tree = build(candidates, ANCHORS, 15)
        check_tree(tree)
        assert tree.sizes_R.tolist() == [3, 1, 16]
        assert tree.tokens_RN[0].tolist() == [11, 0, 0] + [0] * 13
        assert tree.parents_RN[0].tolist() == [0, 0, 1] + [0] * 13
        assert (tree.scores_RN == -torch.inf).equal(~tree.real_RN)
        assert (tree.tokens_RN[~tree.real_RN] == 0).all()


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(("depth", "ranks", "budget"), [(1, 2, 5), (3, 1, 4), (2, 3, 64), (4, 3, 255)])
def test_a_budget_beyond_the_candidates_leaves_padding(depth, ranks, budget, edges):
    candidates = draw_candidates(3, depth=depth, ranks=ranks, edges=edges)
    tree = build_tree(candidates, ANCHORS, budget)
    assert tree.sizes_R.tolist() == [sum(ranks**d for d in range(depth + 1))] * 3
    assert tree.rows == budget + 1
    assert_trees_equal(tree, build_reference(candidates, ANCHORS, budget))


def test_a_budget_beyond_the_candidates_takes_them_all():
    tree = build_tree(draw_candidates(3, depth=4, ranks=3), ANCHORS, 255)
    check_tree(tree)
    assert tree.sizes_R.tolist() == [1 + 3 + 9 + 27 + 81] * 3


def broken(**changes) -> DraftTree:
    sound = DraftTree(
        tokens_RN=torch.tensor([[9, 4, 5, 6, 0]]),
        parents_RN=torch.tensor([[0, 0, 0, 1, 0]]),
        depths_RN=torch.tensor([[0, 1, 1, 2, 0]]),
        scores_RN=torch.tensor([[0.0, -0.5, -1.0, -1.5, -torch.inf]]),
        sizes_R=torch.tensor([4]),
        horizon=2,
    )
    check_tree(sound)
    return dataclasses.replace(
        sound, **{name: value if name == "horizon" else torch.tensor(value) for name, value in changes.items()}
    )


@pytest.mark.parametrize(
    "changes",
    [
        # A root that is missing, or not first, or not its own parent.
        {"sizes_R": [0], "parents_RN": [[0] * 5], "depths_RN": [[0] * 5]},
        {"parents_RN": [[1, 0, 0, 1, 0]]},
        {"depths_RN": [[1, 2, 2, 3, 0]], "horizon": 3},
        # More nodes than rows, and a tree deeper than it may be.
        {"sizes_R": [6], "parents_RN": [[0, 0, 0, 1, 2]], "depths_RN": [[0, 1, 1, 2, 2]]},
        {"horizon": 1},
        # A parent behind its child, and depths that belong to other parents.
        {"parents_RN": [[0, 2, 0, 2, 0]], "depths_RN": [[0, 2, 1, 2, 0]]},
        {"parents_RN": [[0, 0, 0, 0, 0]]},
        {"depths_RN": [[0, 1, 1, 1, 0]]},
        # Twins, and padding that hangs elsewhere.
        {"tokens_RN": [[9, 4, 4, 6, 0]]},
        {"parents_RN": [[0, 0, 0, 1, 1]]},
        {"depths_RN": [[0, 1, 1, 2, 1]]},
    ],
)
def test_check_tree_refuses_a_broken_tree(changes):
    with pytest.raises(AssertionError):
        check_tree(broken(**changes))


def test_rows_go_to_the_smallest_bucket_that_holds_them():
    buckets = (8, 16, 32, 64, 128, 256)
    for rows in range(1, 257):
        assert row_bucket(rows) == min(bucket for bucket in buckets if bucket >= rows)
    with pytest.raises(ValueError, match="257 rows"):
        row_bucket(257)


def test_positions_are_the_anchor_plus_the_depth():
    tree = draw_tree(4, [20, 1, 9], rows=20, horizon=5)
    starts_R = torch.tensor([0, 7, 40_000])
    for r, start in enumerate(starts_R.tolist()):
        for node in range(20):
            depth = len(path_of(tree, r, node)) if node < tree.sizes_R[r] else 0
            assert int(positions(tree, starts_R)[r, node]) == start + depth
    assert positions(tree, starts_R).dtype == torch.int64


# Ancestor bits


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("horizon", [1, 2, 3, 4, 7, 8, 15, 16])
def test_words_are_the_ancestor_relation(rows, horizon):
    sizes = [rows, 1, (rows + 1) // 2]
    tree = draw_tree(rows * 100 + horizon, sizes, rows, horizon)
    words_RNW = ancestor_words(tree)
    assert words_RNW.shape == (3, rows, word_count(rows))
    dense_RNN = unpack_words(words_RNW, rows)
    for r, size in enumerate(sizes):
        assert torch.equal(dense_RNN[r], ancestors(tree, r))
        assert not dense_RNN[r, :size, size:].any(), "no node sees padding"
        for node in range(size, rows):
            assert dense_RNN[r, node].nonzero().flatten().tolist() == [0, node], "padding sees the root and itself"
    assert not unpack_words(words_RNW, 64 * word_count(rows))[..., rows:].any(), "no bit beyond the rows"


@pytest.mark.parametrize("depth", [*range(20), 31, 32, 33, 62, 63, 64, 65, 127, 128, 255])
def test_words_of_a_spine_are_those_of_a_chain(depth):
    tree = spine_tree(ANCHORS, torch.ones(3, depth, dtype=torch.int64), torch.zeros(3, depth))
    assert torch.equal(ancestor_words(tree), chain_words(3, depth + 1, CPU))
    assert torch.equal(unpack_words(ancestor_words(tree), depth + 1)[2], ancestors(tree, 2))


@pytest.mark.parametrize("rows", ROWS)
def test_words_of_chains_and_cliques(rows):
    ones_NN = torch.ones(rows, rows, dtype=torch.bool)
    for words, dense_NN in ((chain_words, ones_NN.tril()), (clique_words, ones_NN)):
        words_RNW = words(2, rows, CPU)
        assert words_RNW.dtype == torch.int64
        assert words_RNW.shape == (2, rows, word_count(rows))
        assert torch.equal(unpack_words(words_RNW, rows), dense_NN.expand(2, -1, -1))
        assert not unpack_words(words_RNW, 64 * word_count(rows))[..., rows:].any()


def test_bits_stand_where_the_words_say():
    assert [word_count(rows) for rows in (1, 63, 64, 65, 128, 129, 256)] == [1, 1, 1, 2, 2, 3, 4]
    chain_NW = chain_words(1, 130, CPU)[0]
    assert chain_NW[0].tolist() == [1, 0, 0]
    assert chain_NW[62].tolist() == [2**63 - 1, 0, 0]
    assert chain_NW[63].tolist() == [-1, 0, 0]
    assert chain_NW[64].tolist() == [-1, 1, 0]
    assert chain_NW[129].tolist() == [-1, -1, 3]


def test_a_row_of_the_pass_is_the_node_of_that_number():
    tree = draw_tree(5, [70, 1, 33], rows=70, horizon=6)
    lengths_R = torch.tensor([5, 0, 9])
    rows = Rows(tree.tokens_RN, positions(tree, lengths_R), lengths_R, ancestor_words(tree), span=9 + 70 + 4)
    sees_RNS = visible(rows)
    for r, length in enumerate(lengths_R.tolist()):
        expected_NS = torch.zeros(70, rows.span, dtype=torch.bool)
        expected_NS[:, :length] = True
        expected_NS[:, length : length + 70] = ancestors(tree, r)
        assert torch.equal(sees_RNS[r], expected_NS)


def test_the_choice_after_node_i_stands_at_i():
    tree = build_tree(draw_candidates(6), ANCHORS, 64)
    for node in range(65):
        choices_RN = torch.full((3, 65), -1)
        choices_RN[:, node] = 1000 + node  # what comes out last, if the walk ends here
        expected = []
        for r in range(3):
            above = node
            while above != 0:
                parent = int(tree.parents_RN[r, above])
                choices_RN[r, parent] = tree.tokens_RN[r, above]
                above = parent
            expected.append([*path_of(tree, r, node), 1000 + node])
        assert [emitted(tree, choices_RN, r) for r in range(3)] == expected


# Trees of the root alone, token 0, candidates that are none


def root_only_trees() -> list[DraftTree]:
    tokens_RDK = torch.tensor([[[0, 1], [0, 1]]])
    anchor_R = torch.tensor([7])
    nothing = torch.full((1, 2, 2), -torch.inf)
    trees = [spine_tree(anchor_R, torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0))]
    for log_probs_RDK, budget in ((nothing, 4), (nothing * torch.nan, 4), (torch.full((1, 2, 2), -0.7), 0)):
        candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
        trees += [build_tree(candidates, anchor_R, budget), build_reference(candidates, anchor_R, budget)]
        if budget:
            trees.append(with_spine(trees[-1], candidates))
    return trees


@pytest.mark.parametrize("tree", root_only_trees())
@pytest.mark.parametrize("choice", [0, 1, 7])
def test_a_tree_of_the_root_alone_yields_exactly_one_token(tree, choice):
    check_tree(tree)
    assert tree.sizes_R.tolist() == [1]
    assert unpack_words(ancestor_words(tree), tree.rows)[0, 0].nonzero().tolist() == [[0]]
    choices_RN = torch.full_like(tree.tokens_RN, choice)
    accepted = accept(tree, choices_RN)
    assert accepted.lengths_R.tolist() == [1]
    assert accepted.path_RP.tolist() == [[0] * (tree.horizon + 1)]
    assert emitted(tree, choices_RN) == [choice]


def test_a_horizon_clipped_to_nothing_leaves_the_root():
    candidates = factorised_candidates(torch.zeros(2, 0, 3, dtype=torch.int64), torch.zeros(2, 0, 3))
    tree = build_tree(candidates, torch.tensor([4, 0]), 0)
    assert_trees_equal(with_spine(tree, candidates), tree)
    assert spine_nodes(tree, candidates).tolist() == [[True], [True]]


@pytest.mark.parametrize("build", [build_tree, build_reference])
def test_token_zero_is_a_token_like_any_other(build):
    tokens_RDK = torch.tensor([[[0, 3], [0, 4], [5, 0]]])
    log_probs_RDK = torch.tensor([[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]]]).log()
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    tree = build(candidates, torch.tensor([0]), 4)
    check_tree(tree)
    assert tree.sizes_R.tolist() == [5]
    assert [path_of(tree, 0, node) for node in range(5)] == [(), (0,), (0, 0), (0, 0, 5), (0, 0, 0)]
    assert emitted(tree, torch.tensor([[0, 0, 0, 8, 0]])) == [0, 0, 0, 0]
    assert emitted(tree, torch.tensor([[0, 0, 5, 0, 8]])) == [0, 0, 5, 0]
    assert spine_nodes(tree, candidates).tolist() == [[True, True, True, True, False]]
    joined = with_spine(build(candidates, torch.tensor([0]), 1), candidates)
    assert [path_of(joined, 0, node) for node in range(4)] == [(), (0,), (0, 0), (0, 0, 5)]
    assert joined.sizes_R.tolist() == [4]


@pytest.mark.parametrize("hole", [torch.nan, -torch.inf])
def test_a_hole_among_the_candidates_is_never_chosen(hole):
    log_probs_RDK = torch.tensor([[[-0.1, -3.0, hole], [-0.2, hole, hole]]])
    tokens_RDK = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    for tree in (build_tree(candidates, torch.tensor([9]), 4), build_reference(candidates, torch.tensor([9]), 4)):
        check_tree(tree)
        assert tree.sizes_R.tolist() == [5]
        assert tree.tokens_RN.tolist() == [[9, 1, 4, 2, 4]]
        assert tree.parents_RN.tolist() == [[0, 0, 1, 0, 3]]
        assert not tree.scores_RN.isnan().any()
    log_probs_RDK[0, 1] = hole
    tree = build_tree(factorised_candidates(tokens_RDK, log_probs_RDK), torch.tensor([9]), 4)
    assert tree.tokens_RN.tolist() == [[9, 1, 2, 0, 0]]
    assert tree.sizes_R.tolist() == [3]


def test_rounding_cannot_lift_a_child_above_its_parent():
    log_probs_RDK = torch.tensor([[[1e-6, -0.5], [3e-7, -9.0], [1e-7, -9.0]]])
    candidates = factorised_candidates(torch.tensor([[[1, 2], [3, 4], [5, 6]]]), log_probs_RDK)
    assert (candidates.log_probs_RDSK <= 0).all()
    tree = build_tree(candidates, torch.tensor([9]), 4)
    assert tree.tokens_RN.tolist() == [[9, 1, 3, 5, 2]]
    assert tree.parents_RN.tolist() == [[0, 0, 1, 2, 0]]
    assert tree.scores_RN.tolist() == [[0.0, 0.0, 0.0, 0.0, -0.5]]


# Edge candidates


@pytest.mark.parametrize("kept", [0.3, 0.9, 1.0])
def test_edge_scores_follow_the_formula(kept):
    """q(child) exp(e) / (sum of q exp(e) + 1 - sum of q) for each parent, and the best child first."""
    rng = np.random.default_rng(8)
    q_RDK = kept * rng.dirichlet(np.ones(5), size=(3, 4))
    edges_RDKK = 2 * rng.standard_normal((3, 4, 5, 5))
    tokens_RDK = np.stack([rng.permutation(50)[:5] for _ in range(12)]).reshape(3, 4, 5)
    candidates = edge_candidates(*(torch.from_numpy(a) for a in (tokens_RDK, np.log(q_RDK), edges_RDKK)))
    assert candidates.tokens_RDSK.shape == (3, 4, 5, 5)
    assert candidates.log_probs_RDSK.dtype == torch.float32
    for r, depth, parent in np.ndindex(3, 4, 5):
        weight_K = q_RDK[r, depth] * np.exp(edges_RDKK[r, depth, parent])
        expected_K = weight_K / (weight_K.sum() + 1 - q_RDK[r, depth].sum())
        ranked_K = candidates.states_RDSK[r, depth, parent].numpy()
        assert sorted(ranked_K) == [0, 1, 2, 3, 4]
        assert candidates.tokens_RDSK[r, depth, parent].tolist() == tokens_RDK[r, depth, ranked_K].tolist()
        got_K = candidates.log_probs_RDSK[r, depth, parent].double().exp().numpy()
        np.testing.assert_allclose(got_K, expected_K[ranked_K], rtol=2e-5, atol=1e-7)
        assert (np.diff(got_K) <= 0).all()
        assert got_K.sum() <= 1 + 1e-5, "children together never outweigh their parent"


def test_edges_of_nothing_change_nothing():
    plain = draw_candidates(9, ranks=12)
    tokens_RDK, log_probs_RDK = plain.tokens_RDSK[:, :, 0], plain.log_probs_RDSK[:, :, 0]
    edged = edge_candidates(tokens_RDK, log_probs_RDK, torch.zeros(3, 6, 12, 12))
    assert torch.equal(edged.tokens_RDSK, plain.tokens_RDSK.expand(-1, -1, 12, -1))
    torch.testing.assert_close(edged.log_probs_RDSK, plain.log_probs_RDSK.expand(-1, -1, 12, -1))


def test_a_child_never_outweighs_its_parent():
    generator = torch.Generator().manual_seed(10)
    for strength in (0.0, 1.0, 10.0, 80.0):
        # The whole vocabulary is offered, so the mass outside is nothing, or a little less by rounding.
        log_probs_RDK = torch.randn(3, 5, 16, generator=generator).log_softmax(-1).sort(-1, descending=True).values
        edges_RDKK = strength * torch.randn(3, 5, 16, 16, generator=generator)
        candidates = edge_candidates(torch.arange(16).expand(3, 5, 16), log_probs_RDK + 1e-6, edges_RDKK)
        assert candidates.log_probs_RDSK.isfinite().all()
        assert (candidates.log_probs_RDSK <= 0).all()
        tree = build_tree(candidates, ANCHORS, 64)
        check_tree(tree)
        assert (tree.scores_RN <= tree.scores_RN.gather(1, tree.parents_RN)).all()


def test_the_first_depth_is_scored_from_the_anchor():
    tokens_RDK = torch.tensor([[[1, 2], [3, 4]]])
    log_probs_RDK = torch.tensor([[[0.5, 0.25], [0.5, 0.25]]]).log()
    edges_RDKK = torch.zeros(1, 2, 2, 2)
    edges_RDKK[0, 0, 0] = torch.tensor([0.0, 3.0])  # after the anchor 2 beats 1
    edges_RDKK[0, 0, 1] = 50.0  # no such parent
    edges_RDKK[0, 1, 1] = torch.tensor([0.0, 3.0])  # after 2, candidate 1 of its depth, 4 beats 3
    candidates = edge_candidates(tokens_RDK, log_probs_RDK, edges_RDKK)
    for build in (build_tree, build_reference):
        tree = build(candidates, torch.tensor([9]), 6)
        paths = [path_of(tree, 0, node) for node in range(7)]
        assert paths[:3] == [(), (2,), (2, 4)]
        assert paths.index((1, 3)) < paths.index((1, 4)), "after 1 the drafter's own order stands"


def test_broken_edges_leave_a_sound_tree():
    plain = draw_candidates(11, ranks=4)
    edges_RDKK = torch.zeros(3, 6, 4, 4)
    edges_RDKK[0, 2] = torch.nan
    edges_RDKK[1, 1] = -torch.inf
    candidates = edge_candidates(plain.tokens_RDSK[:, :, 0], plain.log_probs_RDSK[:, :, 0], edges_RDKK)
    assert not candidates.log_probs_RDSK.isnan().any()
    for build in (build_tree, build_reference):
        tree = build(candidates, ANCHORS, 64)
        check_tree(tree)
        assert int(tree.depths_RN[0].max()) == 2
        assert int(tree.depths_RN[1].max()) == 1
        assert tree.sizes_R.tolist() == [1 + 4 + 16, 1 + 4, 65]


# Spines


def test_a_spine_is_a_chain_of_nodes():
    tokens_RD = torch.tensor([[4, 0, 4], [1, 2, 3]])
    log_probs_RD = torch.tensor([[-0.5, -0.25, -1.0], [0.0, -2.0, -0.5]])
    tree = spine_tree(torch.tensor([8, 0]), tokens_RD, log_probs_RD)
    check_tree(tree)
    assert tree.tokens_RN.tolist() == [[8, 4, 0, 4], [0, 1, 2, 3]]
    assert tree.parents_RN.tolist() == [[0, 0, 1, 2]] * 2
    assert tree.depths_RN.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.scores_RN.tolist() == [[0.0, -0.5, -0.75, -1.75], [0.0, 0.0, -2.0, -2.5]]
    assert tree.sizes_R.tolist() == [4, 4]
    assert (tree.horizon, tree.rows) == (3, 4)
    assert tree.real_RN.all()


def chain_twins(depth: int, log_probs_RD: torch.Tensor, seed: int) -> tuple[DraftTree, DraftTree]:
    """The chain, and the tree that is built when each depth has one candidate."""
    generator = torch.Generator().manual_seed(seed)
    tokens_RD = torch.randint(0, VOCABULARY, (3, depth), generator=generator)
    candidates = factorised_candidates(tokens_RD[..., None], log_probs_RD[..., None])
    return spine_tree(ANCHORS, tokens_RD, log_probs_RD), build_tree(candidates, ANCHORS, depth)


@pytest.mark.parametrize("depth", [1, 2, 3, 7, 15, 16])
def test_a_tree_that_is_a_spine_is_the_chain(depth):
    generator = torch.Generator().manual_seed(depth)
    exact_RD = -torch.randint(0, 64, (3, depth), generator=generator) / 16  # sums without rounding
    chain, tree = chain_twins(depth, exact_RD, depth)
    assert_trees_equal(chain, tree)
    assert torch.equal(ancestor_words(tree), ancestor_words(chain))


def test_a_tree_that_is_a_spine_has_the_scores_of_the_chain():
    for seed in range(20):
        log_probs_RD = -torch.rand(3, 15, generator=torch.Generator().manual_seed(seed))
        assert_trees_equal(*chain_twins(15, log_probs_RD, seed))


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 4, 15, 64])
def test_a_tree_joined_with_the_spine_holds_both(budget, edges):
    candidates = draw_candidates(20 + budget, depth=9, ranks=7, edges=edges)
    tree = build_tree(candidates, ANCHORS, budget)
    joined = with_spine(tree, candidates)
    check_tree(joined)
    assert (joined.rows, joined.horizon) == (budget + 1 + 9, 9)
    on_RN = spine_nodes(joined, candidates)
    for r in range(3):
        chain, sums = chain_of(candidates, r)
        assert len(chain) == 9
        size, whole = int(tree.sizes_R[r]), int(joined.sizes_R[r])
        for name in ("tokens_RN", "parents_RN", "depths_RN", "scores_RN"):
            assert torch.equal(getattr(joined, name)[r, :size], getattr(tree, name)[r, :size]), name
        paths = [path_of(joined, r, node) for node in range(whole)]
        prefixes = [tuple(chain[:n]) for n in range(10)]
        assert len(set(paths)) == whole
        assert set(paths) == set(paths[:size]) | set(prefixes), "nothing but the tree and the spine"
        assert joined.depths_RN[r, size:whole].tolist() == list(range(10 - (whole - size), 10)), "deepest last"
        for depth, score in enumerate(sums, start=1):
            assert joined.scores_RN[r, paths.index(prefixes[depth])].numpy() == score
        expected_on = [path in prefixes for path in paths] + [False] * (joined.rows - whole)
        assert on_RN[r].tolist() == expected_on
        assert spine_nodes(tree, candidates)[r].tolist() == expected_on[: budget + 1]


@pytest.mark.parametrize("depth", range(1, 20))
def test_a_branch_beside_the_spine_is_not_on_it_for_all_its_tokens(depth):
    tokens_RDK = torch.stack([torch.arange(depth), torch.arange(depth) + 50], dim=-1)[None]
    log_probs_RDK = torch.full((1, depth, 2), -torch.inf)
    log_probs_RDK[..., 0] = -0.1
    log_probs_RDK[:, 0, 1] = -0.2  # the only fork: below it both branches hold the same tokens
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    tree = build_tree(candidates, torch.tensor([9]), 2 * depth)
    assert tree.sizes_R.tolist() == [2 * depth + 1]
    expected = [path_of(tree, 0, node)[:1] != (50,) for node in range(tree.rows)]
    assert expected.count(True) == depth + 1
    assert spine_nodes(tree, candidates)[0].tolist() == expected


def test_a_spine_that_is_inside_already_adds_nothing():
    candidates = draw_candidates(30, depth=3, ranks=5)
    tree = build_tree(candidates, ANCHORS, 100)
    joined = with_spine(tree, candidates)
    assert torch.equal(joined.sizes_R, tree.sizes_R)
    assert torch.equal(joined.tokens_RN[:, : tree.rows], tree.tokens_RN)
    assert (joined.scores_RN[:, tree.rows :] == -torch.inf).all()
    assert spine_nodes(joined, candidates).sum(dim=1).tolist() == [4, 4, 4]


def test_a_spine_ends_where_its_candidates_end():
    tokens_RDK = torch.tensor([[5, 6], [7, 8], [9, 1]]).expand(3, 3, 2)
    log_probs_RDK = torch.tensor([-0.1, -0.2]).repeat(3, 3, 1)
    log_probs_RDK[0, 1] = -torch.inf
    log_probs_RDK[1, 0] = torch.nan
    candidates = factorised_candidates(tokens_RDK, log_probs_RDK)
    for budget in (0, 1, 2, 6):
        joined = with_spine(build_tree(candidates, ANCHORS, budget), candidates)
        check_tree(joined)
        for r in range(3):
            chain, _ = chain_of(candidates, r)
            on = spine_nodes(joined, candidates)[r].nonzero().flatten().tolist()
            assert [path_of(joined, r, node) for node in on] == [tuple(chain[:n]) for n in range(len(chain) + 1)]
        assert spine_nodes(joined, candidates).sum(dim=1).tolist() == [2, 1, 4]


def test_spines_are_joined_in_the_padding_of_each_sequence():
    candidates = draw_candidates(31, depth=4, ranks=3)
    log_probs_RDSK = candidates.log_probs_RDSK.clone()
    log_probs_RDSK[0, :, :, 1:] = -torch.inf
    log_probs_RDSK[1, 0] = -torch.inf
    candidates = dataclasses.replace(candidates, log_probs_RDSK=log_probs_RDSK)
    tree = build_tree(candidates, ANCHORS, 2)
    assert tree.sizes_R.tolist() == [3, 1, 3]
    joined = with_spine(tree, candidates)
    check_tree(joined)
    assert joined.sizes_R[:2].tolist() == [5, 1]
    assert joined.tokens_RN[0].tolist() == [11, *chain_of(candidates, 0)[0], 0, 0]
    assert (joined.scores_RN == -torch.inf).equal(~joined.real_RN)
