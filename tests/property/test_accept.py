"""The accept walk against a plain walk, and many rounds in a row against step-by-step decoding."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import (
    DraftTree,
    accept,
    ancestor_words,
    build_tree,
    check_tree,
    committed_tokens,
    cut,
    edge_candidates,
    factorised_candidates,
    positions,
    spine_nodes,
    unpack_words,
    with_spine,
)

VOCABULARY = 7  # small, so that equal tokens meet everywhere


def make_tree(nodes: list[list[tuple[int, int]]], rows: int, horizon: int) -> DraftTree:
    """Trees from (parent, token) of each node, the root's parent being 0."""
    tokens_RN, parents_RN, depths_RN = (torch.zeros(len(nodes), rows, dtype=torch.int64) for _ in range(3))
    scores_RN = torch.full((len(nodes), rows), -torch.inf)
    for r, tree in enumerate(nodes):
        for node, (parent, token) in enumerate(tree):
            tokens_RN[r, node], parents_RN[r, node] = token, parent
            depths_RN[r, node] = int(depths_RN[r, parent]) + 1 if node else 0
            scores_RN[r, node] = -float(depths_RN[r, node])
    sizes_R = torch.tensor([len(tree) for tree in nodes])
    tree = DraftTree(tokens_RN, parents_RN, depths_RN, scores_RN, sizes_R, horizon)
    check_tree(tree)
    return tree


def random_nodes(rng: np.random.Generator, size: int, horizon: int) -> list[tuple[int, int]]:
    """A random tree in which siblings differ and everything else repeats; fewer nodes if it fills up."""
    nodes, depths, taken = [(0, int(rng.integers(VOCABULARY)))], [0], set()
    for _ in range(20 * size):
        if len(nodes) == size:
            break
        parent = len(nodes) - 1 if rng.random() < 0.4 else int(rng.integers(len(nodes)))
        token = int(rng.integers(VOCABULARY))
        if depths[parent] < horizon and (parent, token) not in taken:
            taken.add((parent, token))
            nodes.append((parent, token))
            depths.append(depths[parent] + 1)
    return nodes


def random_choices(rng: np.random.Generator, tree: DraftTree) -> torch.Tensor:
    """The target often chooses a child that is there; after padding nodes stands whatever may stand there."""
    choices_RN = torch.from_numpy(rng.integers(0, VOCABULARY, tuple(tree.tokens_RN.shape)))
    for r, size in enumerate(tree.sizes_R.tolist()):
        for node in rng.permutation(np.arange(1, size)).tolist():
            if rng.random() < 0.8:
                choices_RN[r, tree.parents_RN[r, node]] = tree.tokens_RN[r, node]
    return choices_RN


def walk(
    tree: DraftTree, choices_RN: torch.Tensor, r: int, among_RN: torch.Tensor | None = None
) -> tuple[list[int], int]:
    """From the root to the child that the target chose, as long as there is one: path and bonus."""
    tokens, parents, choices = (a[r].tolist() for a in (tree.tokens_RN, tree.parents_RN, choices_RN))
    children = {
        (parents[node], tokens[node]): node
        for node in range(1, int(tree.sizes_R[r]))
        if among_RN is None or among_RN[r, node]
    }
    path = [0]
    while (path[-1], choices[path[-1]]) in children:
        path.append(children[path[-1], choices[path[-1]]])
    return path, choices[path[-1]]


def assert_walks(
    tree: DraftTree, choices_RN: torch.Tensor, among_RN: torch.Tensor | None = None
) -> list[list[int]]:
    """`accept`, `cut` and `committed_tokens` agree with the plain walk on every sequence; returns the paths."""
    accepted = accept(tree, choices_RN, among_RN)
    tokens_RP = committed_tokens(tree, accepted)
    sequences = tree.tokens_RN.shape[0]
    assert accepted.path_RP.shape == (sequences, tree.horizon + 1)
    assert {a.dtype for a in (accepted.path_RP, accepted.lengths_R, accepted.bonus_R)} == {torch.int64}
    paths = []
    for r in range(sequences):
        path, bonus = walk(tree, choices_RN, r, among_RN)
        assert accepted.path_RP[r].tolist() == path + [0] * (tree.horizon + 1 - len(path))
        assert int(accepted.lengths_R[r]) == len(path)
        assert int(accepted.bonus_R[r]) == bonus
        committed = [int(tree.tokens_RN[r, node]) for node in path[1:]] + [bonus]
        assert tokens_RP[r].tolist() == committed + [0] * (tree.horizon + 1 - len(path))
        paths.append(path)
    if among_RN is not None:
        among_RN = among_RN.clone()
        among_RN[:, 0] = True
        shortened = cut(tree, accept(tree, choices_RN), among_RN)
        assert torch.equal(shortened.path_RP, accepted.path_RP)
        assert torch.equal(shortened.lengths_R, accepted.lengths_R)
        assert torch.equal(shortened.bonus_R, accepted.bonus_R)
    return paths


def emitted(tree: DraftTree, choices_RN: torch.Tensor, r: int = 0) -> list[int]:
    """The tokens that a round puts out: the accepted ones below the root, then the bonus."""
    accepted = accept(tree, choices_RN)
    path = accepted.path_RP[r, : int(accepted.lengths_R[r])]
    return [*tree.tokens_RN[r, path[1:]].tolist(), int(accepted.bonus_R[r])]


# One walk


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 33, 64, 65, 129])
def test_the_walk_equals_a_plain_walk(rows):
    rng = np.random.default_rng(rows)
    lengths, gaps = set(), 0
    for _ in range(24):  # 864 trees in all
        horizon = int(rng.integers(1, 17))
        nodes = [random_nodes(rng, size, horizon) for size in (rows, 1, int(rng.integers(1, rows + 1)), rows)]
        tree = make_tree(nodes, rows, horizon)
        choices_RN = random_choices(rng, tree)
        paths = assert_walks(tree, choices_RN)
        for r, path in enumerate(paths):
            lengths.add(len(path))
            gaps += any(node - before > 1 for before, node in itertools.pairwise(path))
            assert emitted(tree, choices_RN, r) == [int(choices_RN[r, node]) for node in path]
        assert_walks(tree, choices_RN, torch.from_numpy(rng.random((4, rows)) < 0.8))
    if rows > 8:
        assert gaps > 10
        assert lengths >= {1, 2, 3, 4, 5, 6}


@st.composite
def small_rounds(draw: st.DrawFn) -> tuple[DraftTree, torch.Tensor]:
    nodes = [(0, draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(0, 11))):
        child = (draw(st.integers(0, len(nodes) - 1)), draw(st.integers(0, 2)))
        if child not in nodes[1:]:
            nodes.append(child)
    rows = len(nodes) + draw(st.integers(0, 3))
    horizon = max(1, rows - 1)
    choices = draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    return make_tree([nodes], rows, horizon), torch.tensor([choices])


@settings(max_examples=300, deadline=None)
@given(small_rounds())
def test_the_walk_equals_a_plain_walk_on_small_trees(case):
    assert_walks(*case)


@pytest.mark.parametrize("depth", range(1, 20))
def test_a_deep_path_is_accepted_to_its_end_and_not_past_a_refusal(depth):
    tree = make_tree([[(max(node - 1, 0), node % 3) for node in range(depth + 1)]], depth + 3, depth)
    choices_RN = torch.full((1, depth + 3), -1)
    choices_RN[0, :depth] = tree.tokens_RN[0, 1 : depth + 1]
    assert assert_walks(tree, choices_RN) == [list(range(depth + 1))]
    for refused in range(1, depth + 1):
        changed_RN = choices_RN.clone()
        changed_RN[0, refused - 1] = 5
        assert assert_walks(tree, changed_RN) == [list(range(refused))]


def test_a_path_may_leave_out_nodes():
    #         0
    #      1     2        2 is chosen, then 5
    #     3 4   5
    tree = make_tree([[(0, 6), (0, 1), (0, 2), (1, 3), (1, 5), (2, 5)]], rows=8, horizon=3)
    accepted = accept(tree, torch.tensor([[2, 5, 5, 0, 0, 4, 0, 0]]))
    assert accepted.path_RP.tolist() == [[0, 2, 5, 0]]
    assert accepted.lengths_R.tolist() == [3]
    assert accepted.bonus_R.tolist() == [4]


def test_equal_tokens_of_other_branches_do_not_count():
    #            0
    #        1:5    2:6     both have a child 5 and a child 6
    #      3:5 4:6 5:5 6:6
    tree = make_tree([[(0, 5), (0, 5), (0, 6), (1, 5), (1, 6), (2, 5), (2, 6)]], rows=7, horizon=2)
    for first, second in [(1, 3), (1, 4), (2, 5), (2, 6)]:
        choices_RN = torch.full((1, 7), 5)
        choices_RN[0, 0] = tree.tokens_RN[0, first]
        choices_RN[0, first] = tree.tokens_RN[0, second]
        choices_RN[0, 3 - first] = 11 - tree.tokens_RN[0, second]  # the other branch says the opposite
        assert assert_walks(tree, choices_RN) == [[0, first, second]]
    # The same token all the way down, and a branch of it that hangs elsewhere.
    tree = make_tree([[(0, 5), (0, 6), (1, 5), (2, 5), (0, 5), (4, 5)]], rows=6, horizon=4)
    assert assert_walks(tree, torch.full((1, 6), 5)) == [[0, 4, 5]]


def test_padding_is_never_accepted():
    """Padding looks like a child of the root with token 0, which the target may well choose."""
    tree = make_tree([[(0, 3), (0, 2)], [(0, 0)]], rows=4, horizon=2)
    assert assert_walks(tree, torch.zeros(2, 4, dtype=torch.int64)) == [[0], [0]]
    assert [emitted(tree, torch.zeros(2, 4, dtype=torch.int64), r) for r in range(2)] == [[0], [0]]
    everything_RN = torch.ones(2, 4, dtype=torch.bool)
    assert assert_walks(tree, torch.zeros(2, 4, dtype=torch.int64), everything_RN) == [[0], [0]]


def test_among_restricts_the_walk():
    tree = make_tree([[(0, 0), (0, 1), (0, 2), (1, 1), (2, 2), (3, 1)]] * 5, rows=6, horizon=3)
    choices_RN = torch.tensor([[1, 1, 1, 1, 1, 4]]).expand(5, 6)
    among_RN = torch.ones(5, 6, dtype=torch.bool)
    among_RN[1, 3] = False  # the walk ends before it, though its child is allowed
    among_RN[2, [2, 4]] = False  # not on the path
    among_RN[3] = False  # not even the root is named, but the root is committed already
    among_RN[4, 5] = False
    assert assert_walks(tree, choices_RN, among_RN) == [[0, 1, 3, 5], [0, 1], [0, 1, 3, 5], [0], [0, 1, 3]]
    assert accept(tree, choices_RN, among_RN).bonus_R.tolist() == [4, 1, 4, 1, 1]


def test_one_draw_of_the_target_decides_between_siblings():
    """What comes out after a node is the target's one draw there, whatever it drew for the siblings."""
    rng = np.random.default_rng(1)
    tree = make_tree([[(0, 6), (0, 1), (0, 3), (0, 4), (1, 2), (2, 2), (2, 5)]] * 4096, rows=8, horizon=2)
    choices_RN = torch.from_numpy(rng.integers(0, VOCABULARY, (4096, 8)))
    accepted = accept(tree, choices_RN)
    offered = {1: 1, 3: 2, 4: 3}
    for r, first in enumerate(choices_RN[:, 0].tolist()):
        assert int(accepted.path_RP[r, 1]) == offered.get(first, 0)
    redrawn_RN = torch.from_numpy(rng.integers(0, VOCABULARY, (4096, 8)))
    redrawn_RN[:, 0] = choices_RN[:, 0]
    again = accept(tree, redrawn_RN)
    assert torch.equal(again.path_RP[:, 1], accepted.path_RP[:, 1]), "siblings' own draws decide nothing above"
    assert not torch.equal(again.path_RP[:, 2], accepted.path_RP[:, 2])


def test_a_tree_without_its_metadata_emits_the_roots_choice_alone():
    """Nodes in heap order read as a chain would be wrong: with size 1 no node counts, whatever is left of them."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        whole = make_tree([random_nodes(rng, 20, 6) for _ in range(3)], rows=20, horizon=6)
        choices_RN = random_choices(rng, whole)
        ones_R, zeros_RN = torch.ones(3, dtype=torch.int64), torch.zeros(3, 20, dtype=torch.int64)
        for parents_RN in (zeros_RN, whole.parents_RN):
            for depths_RN in (zeros_RN, whole.depths_RN):
                tree = DraftTree(whole.tokens_RN, parents_RN, depths_RN, whole.scores_RN, ones_R, 6)
                assert assert_walks(tree, choices_RN) == [[0]] * 3
                for r in range(3):
                    assert emitted(tree, choices_RN, r) == [int(choices_RN[r, 0])]


@pytest.mark.parametrize("depths_too", [False, True])
def test_a_tree_without_its_parents_emits_nothing_that_the_whole_tree_would_not(depths_too):
    rng = np.random.default_rng(3)
    for _ in range(40):
        whole = make_tree([random_nodes(rng, 20, 6) for _ in range(3)], rows=20, horizon=6)
        choices_RN = random_choices(rng, whole)
        zeros_RN = torch.zeros_like(whole.parents_RN)
        depths_RN = zeros_RN if depths_too else whole.depths_RN
        tree = DraftTree(whole.tokens_RN, zeros_RN, depths_RN, whole.scores_RN, whole.sizes_R, 6)
        for r in range(3):
            right, said = emitted(whole, choices_RN, r), emitted(tree, choices_RN, r)
            assert said == right[: len(said)]


def test_a_star_emits_two_tokens_at_most():
    """All parents zero, and depths that say so: a sound tree, whose nodes are only children of the root."""
    tree = make_tree([[(0, 9)] + [(0, token) for token in range(VOCABULARY)]], rows=8, horizon=5)
    for first in range(VOCABULARY):
        choices_RN = torch.arange(8)[None] + 20
        choices_RN[0, 0] = first
        assert emitted(tree, choices_RN) == [first, 20 + first + 1]


# Many rounds


def next_token(text: list[int]) -> int:
    """The toy target: any change of any token or place before changes its answer."""
    return zlib.crc32(np.array(text, dtype="<i8").tobytes()) % VOCABULARY


def decoded(prompt: list[int], length: int) -> list[int]:
    text = list(prompt)
    while len(text) < length:
        text.append(next_token(text))
    return text


class SlotTarget:
    """A toy target that knows a sequence only through its slots, as a model knows it through its KV.

    The committed text is slots 0 to length - 1. Rows of a pass lie behind it, and each sees what its bits
    name, in the order of the positions; slots of nodes that were not accepted are poisoned.
    """

    def __init__(self, prompt: list[int]) -> None:
        self.length = len(prompt) - 1  # the anchor has no slot yet
        self.anchor = prompt[-1]
        self.slots = [*prompt[:-1], *[-1] * 600]

    def verify(self, tree: DraftTree, r: int) -> list[int]:
        sees_NN = unpack_words(ancestor_words(tree), tree.rows)[r]
        position_N = positions(tree, torch.full_like(tree.sizes_R, self.length))[r].tolist()
        self.slots[self.length : self.length + tree.rows] = tree.tokens_RN[r].tolist()
        choices = []
        for node in range(tree.rows):
            seen = sorted(sees_NN[node].nonzero().flatten().tolist(), key=position_N.__getitem__)
            if node < tree.sizes_R[r]:
                assert [position_N[row] for row in seen] == list(range(self.length, self.length + len(seen)))
            choices.append(next_token(self.slots[: self.length] + [self.slots[self.length + row] for row in seen]))
        return choices

    def commit(self, path: list[int], bonus: int) -> None:
        kept = [self.slots[self.length + node] for node in path]  # gather before scatter
        self.slots[self.length : self.length + len(kept)] = kept
        self.length += len(kept)
        self.slots[self.length :] = [-1] * (len(self.slots) - self.length)
        self.anchor = bonus

    @property
    def text(self) -> list[int]:
        return [*self.slots[: self.length], self.anchor]


def draft(rng: np.random.Generator, targets: list[SlotTarget], style: str) -> tuple[DraftTree, torch.Tensor]:
    """A tree for each sequence that holds the true continuation more often than not, at any rank.

    Returns the trees, and which of their nodes lie on the drafter's chain.
    """
    depth, ranks, budget = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.choice([0, 1, 4, 15, 31, 40]))
    tokens_RDK = np.stack([[rng.permutation(VOCABULARY)[:ranks] for _ in range(depth)] for _ in targets])
    for r, target in enumerate(targets):
        truth = decoded(target.text, len(target.text) + depth)[-depth:]
        for d, token in enumerate(truth):
            if token not in tokens_RDK[r, d] and rng.random() < 0.9:
                tokens_RDK[r, d, rng.integers(ranks)] = token
    logits_RDK = torch.from_numpy(rng.choice([0.3, 2.0]) * rng.standard_normal(tokens_RDK.shape))
    log_probs_RDK = logits_RDK.log_softmax(-1).sort(dim=-1, descending=True).values
    if style == "edges":
        edges_RDKK = torch.from_numpy(rng.standard_normal((len(targets), depth, ranks, ranks)))
        candidates = edge_candidates(torch.from_numpy(tokens_RDK), log_probs_RDK, edges_RDKK)
    else:
        candidates = factorised_candidates(torch.from_numpy(tokens_RDK), log_probs_RDK)
    anchors_R = torch.tensor([target.anchor for target in targets])
    tree = build_tree(candidates, anchors_R, budget)
    if style == "with spine":
        tree = with_spine(tree, candidates)
    check_tree(tree)
    return tree, spine_nodes(tree, candidates)


@pytest.mark.parametrize("style", ["factorised", "edges", "with spine"])
@pytest.mark.parametrize("seed", range(4))
def test_rounds_on_end_say_what_step_by_step_decoding_says(style, seed):
    rng = np.random.default_rng(seed)
    prompts = [[3], [1, 2, 3], [0, 0, 6, 5, 0]]
    targets = [SlotTarget(prompt) for prompt in prompts]
    gaps = off_spine = 0
    for _ in range(30):
        tree, spine_RN = draft(rng, targets, style)
        choices_RN = torch.tensor([target.verify(tree, r) for r, target in enumerate(targets)])
        paths = assert_walks(tree, choices_RN)
        for r, (target, path) in enumerate(zip(targets, paths, strict=True)):
            target.commit(path, int(choices_RN[r, path[-1]]))
            assert target.text == decoded(prompts[r], len(target.text))
            gaps += path != list(range(len(path)))
            off_spine += not spine_RN[r, path].all()
    assert gaps > 10, "paths that are no prefix of the tree"
    assert off_spine > 10, "paths that leave the drafter's chain"
    assert all(len(target.text) > len(prompt) + 45 for target, prompt in zip(targets, prompts, strict=True))


def test_a_chain_and_a_tree_and_no_draft_may_take_turns():
    """The way of drafting changes from round to round; the text never does."""
    rng = np.random.default_rng(9)
    target = SlotTarget([2, 4])
    for turn in range(48):
        tree, spine_RN = draft(rng, [target], ("factorised", "with spine", "edges")[turn % 3])
        choices_RN = torch.tensor([target.verify(tree, 0)])
        among_RN = (None, spine_RN, torch.zeros_like(spine_RN), spine_RN)[turn % 4]
        path = assert_walks(tree, choices_RN, among_RN)[0]
        target.commit(path, int(choices_RN[0, path[-1]]))
        assert target.text == decoded([2, 4], len(target.text))
    assert len(target.text) > 80
