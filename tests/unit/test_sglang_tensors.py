"""Masks, candidates over vocabulary shards, rows, moves and draws of the SGLang plugin, without SGLang."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.ops import select_ops
from ddtree.sglang_plugin.backends import mask_layout, require_tree_backend
from ddtree.sglang_plugin.commit import canonical_moves
from ddtree.sglang_plugin.masks import MaskLayout, full_cells, pack_mask, tree_sees
from ddtree.sglang_plugin.proposal import Shard, merge_shards, shard_top
from ddtree.sglang_plugin.sampling import SamplingView, coupled, filtered_log_probs, keyed_draw, walk_choices
from ddtree.sglang_plugin.seeds import SeedTable, request_seed
from ddtree.sglang_plugin.trees import child_links, plain_rows, plant
from ddtree.speculation.noise import gumbel
from ddtree.speculation.plan import fixed_plan
from ddtree.tree import Accepted, DraftTree, accept, check_tree, factorised_candidates

OPS = select_ops(torch.device("cpu"))


def trees(sequences: int = 3, depth: int = 4, budget: int = 9, width: int = 12, seed: int = 0) -> DraftTree:
    """Different random trees over a vocabulary of 40, with padding rows."""
    logits = torch.randn(sequences, depth, 40, generator=torch.Generator().manual_seed(seed)) * 3
    log_probs, tokens = logits.log_softmax(-1).topk(budget, dim=-1)
    return plant(
        torch.arange(sequences),
        factorised_candidates(tokens, log_probs),
        fixed_plan("tree", depth + 1, budget),
        width,
    ).tree


def view(
    temperature: list[float], top_k: list[int], top_p: list[float], min_p: list[float], filters: bool = True
) -> SamplingView:
    columns = (torch.tensor(a)[:, None] for a in (temperature, top_k, top_p, min_p))
    return SamplingView(*columns, filters=filters, all_greedy=all(k <= 1 for k in top_k))


def test_full_masks_of_different_trees_lie_where_the_backend_reads_them() -> None:
    tree, prefix = trees(), torch.tensor([5, 0, 17])
    sees = tree_sees(tree)
    bounds = prefix + torch.tensor([3, 0, 9])  # the host may be ahead of the device
    flat = pack_mask(sees, prefix, MaskLayout.FULL, full_cells(bounds, tree.rows))
    start = 0
    for r, length in enumerate(prefix.tolist()):
        cells = tree.rows * (length + tree.rows)
        request = flat[start : start + cells].view(tree.rows, length + tree.rows)
        assert request[:, :length].all(), "every row sees what is committed"
        assert torch.equal(request[:, length:], sees[r])
        start += cells
    assert flat[start:].all()
    assert torch.equal(pack_mask(sees, prefix, MaskLayout.ROWS, 0), sees.flatten())


def test_rows_see_their_ancestors_alone() -> None:
    tree = trees()
    sees = tree_sees(tree)
    for r in range(3):
        for node in range(int(tree.sizes_R[r])):
            path, at = {node}, node
            while at:
                at = int(tree.parents_RN[r, at])
                path.add(at)
            assert set(sees[r, node].nonzero().flatten().tolist()) == path
        for padding in range(int(tree.sizes_R[r]), tree.rows):
            assert set(sees[r, padding].nonzero().flatten().tolist()) == {0, padding}


def test_padding_rows_are_never_accepted() -> None:
    tree = trees()
    # A target that says the token of padding rows, 0, after everything.
    accepted = accept(tree, torch.zeros_like(tree.tokens_RN))
    last = accepted.path_RP.gather(1, (accepted.lengths_R - 1)[:, None])[:, 0]
    assert (last < tree.sizes_R).all()


@pytest.mark.parametrize("padded", [0, 3])
def test_two_shards_rank_as_one(padded: int) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 30] = logits[:, 3]  # a tie across shards: the lower id is first
    one = shard_top(logits, Shard(0, 50), 12, OPS)
    whole = merge_shards(one.scores_MK[None], one.tokens_MK[None], one.norm_M[None], 12)
    # The second shard's last columns are padding, and would win if they were read.
    wide = torch.cat([logits[:, 27:], torch.full((6, padded), 99.0)], dim=1)
    halves = [shard_top(logits[:, :27], Shard(0, 27), 12, OPS), shard_top(wide, Shard(27, 23), 12, OPS)]
    merged = merge_shards(
        torch.stack([h.scores_MK for h in halves]),
        torch.stack([h.tokens_MK for h in halves]),
        torch.stack([h.norm_M for h in halves]),
        12,
    )
    assert torch.equal(merged[0], whole[0])
    torch.testing.assert_close(merged[1], whole[1])
    assert int(merged[0].max()) < 50
    torch.testing.assert_close(whole[1], logits.log_softmax(-1).gather(1, whole[0]))


def test_a_broken_drafter_drafts_nothing() -> None:
    broken = shard_top(torch.full((2, 8), torch.nan), Shard(0, 8), 4, OPS)
    tokens, log_probs = merge_shards(broken.scores_MK[None], broken.tokens_MK[None], broken.norm_M[None], 4)
    assert (log_probs == -torch.inf).all()
    drafted = plant(
        torch.tensor([7]), factorised_candidates(tokens[None], log_probs[None]), fixed_plan("tree", 3, 4), 6
    )
    assert drafted.tree.sizes_R.tolist() == [1]


@pytest.mark.parametrize("mode", ["tree", "chain", "shadow"])
def test_planted_rows_are_trees_of_the_graphs_width(mode: str) -> None:
    logits = torch.randn(2, 4, 40, generator=torch.Generator().manual_seed(2)) * 3
    log_probs, tokens = logits.log_softmax(-1).topk(9, dim=-1)
    drafted = plant(torch.tensor([1, 2]), factorised_candidates(tokens, log_probs), fixed_plan(mode, 5, 9), 20)
    check_tree(drafted.tree)
    assert drafted.tree.rows == 20
    if mode == "shadow":
        assert (drafted.spine_RN.sum(dim=1) == 5).all(), "the chain is inside"
    root = plain_rows(torch.tensor([4, 5])).tree
    assert (root.rows, root.tokens_RN.flatten().tolist()) == (1, [4, 5])


def test_the_chain_that_joins_a_tree_is_none_of_its_budget() -> None:
    """Tokens alike: the tree is three siblings, and the chain brings the three nodes behind the first."""
    tokens = torch.arange(9).expand(2, 4, 9)
    candidates = factorised_candidates(tokens, torch.full((2, 4, 9), -2.0))
    drafted = plant(torch.tensor([1, 2]), candidates, fixed_plan("shadow", 5, 3), 12)
    assert drafted.tree.sizes_R.tolist() == [7, 7]
    assert drafted.core_RN.nonzero()[:, 1].tolist() == [0, 1, 2, 3] * 2
    assert drafted.spine_RN.nonzero()[:, 1].tolist() == [0, 1, 4, 5, 6] * 2


def test_links_for_grammars_name_every_child_once() -> None:
    tree = trees()
    first, following = child_links(tree)
    for r in range(3):
        seen = []
        for node in range(tree.rows):
            child = int(first[r, node])
            while child != -1:
                assert int(tree.parents_RN[r, child]) == node
                seen.append(child)
                child = int(following[r, child])
        assert sorted(seen) == list(range(1, int(tree.sizes_R[r])))


def test_moves_bring_the_path_to_the_first_slots_and_touch_nothing_else() -> None:
    slots = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    accepted = Accepted(torch.tensor([[0, 2, 4], [0, 0, 0]]), torch.tensor([3, 1]), torch.tensor([1, 1]))
    targets, sources = canonical_moves(slots, accepted)
    pool = torch.arange(30)
    pool[targets] = pool[sources]
    assert pool[10:13].tolist() == [10, 12, 14]
    untouched = torch.ones(30, dtype=torch.bool)
    untouched[10:13] = False
    assert torch.equal(pool[untouched], torch.arange(30)[untouched])


def joint_filter(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """SGLang's order, one token at a time: top-k and top-p over the same distribution, then min-p of what is
    left."""
    kept, mass = set(), 0.0
    order = sorted(range(len(probs)), key=lambda t: -probs[t])
    for rank, token in enumerate(order):
        if rank < top_k and mass <= top_p and probs[token] >= min_p * probs[order[0]]:
            kept.add(token)
        mass += probs[token]
    return kept


def test_filters_are_sglangs() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3)) * 2
    settings = view([0.7, 1.0, 1.5, 1.0], [5, 1 << 30, 8, 1], [1.0, 0.8, 0.6, 1.0], [0.0, 0.0, 0.05, 0.0])
    kept = filtered_log_probs(logits, settings) > -torch.inf
    for r, (heat, k, p, floor) in enumerate(
        zip([0.7, 1.0, 1.5, 1.0], [5, 1 << 30, 8, 1], [1.0, 0.8, 0.6, 1.0], [0.0, 0.0, 0.05, 0.0], strict=True)
    ):
        probs = (logits[r] / heat).softmax(-1).tolist()
        assert set(kept[r].nonzero().flatten().tolist()) == joint_filter(probs, k, p, floor)


def test_a_greedy_request_beside_sampled_ones_gets_the_best_token() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    draw = keyed_draw(view([1.0, 1.0], [1, 1 << 30], [1.0, 1.0], [0.0, 0.0]), torch.tensor([8, 9]))
    tokens = [draw(logits, torch.tensor([p, p])) for p in range(50)]
    assert {int(t[0]) for t in tokens} == {int(logits[0].argmax())}
    assert len({int(t[1]) for t in tokens}) > 1


def test_draws_are_a_function_of_seed_and_position_alone() -> None:
    """Whatever the batch and the tree: what a request says equals plain step-by-step decoding."""
    vocabulary, table = 12, torch.randn(12, 12, generator=torch.Generator().manual_seed(5))
    settings = view([1.0] * 2, [1 << 30] * 2, [1.0] * 2, [0.0] * 2, filters=False)
    seeds, prefix = torch.tensor([3, 4]), torch.tensor([6, 9])
    log_probs, tokens = (
        torch.rand(2, 3, vocabulary, generator=torch.Generator().manual_seed(8)).log_softmax(-1).topk(9, dim=-1)
    )
    tree = plant(
        torch.tensor([1, 2]), factorised_candidates(tokens, log_probs), fixed_plan("tree", 4, 120), 121
    ).tree
    logits_RNV = table[tree.tokens_RN]  # a target whose next token depends on the last one alone
    draw = keyed_draw(settings, seeds)
    accepted = accept(tree, walk_choices(tree, logits_RNV, prefix, draw))
    assert int(accepted.lengths_R.max()) > 1, "a tree over half the vocabulary is accepted somewhere"
    for r in range(2):
        alone = keyed_draw(view([1.0], [1 << 30], [1.0], [0.0], filters=False), seeds[r : r + 1])
        last = int(tree.tokens_RN[r, 0])
        for place in range(int(accepted.lengths_R[r])):
            following = int(alone(table[last][None], prefix[r : r + 1] + place))
            expected = (
                table[last].double().log_softmax(-1)
                + gumbel(seeds[r : r + 1], prefix[r : r + 1, None] + place + 1, 12)[0, 0]
            ).argmax()
            assert following == int(expected)
            last = following
            if place + 1 < int(accepted.lengths_R[r]):
                assert int(tree.tokens_RN[r, accepted.path_RP[r, place + 1]]) == last
        assert int(accepted.bonus_R[r]) == last


def test_sampled_tokens_follow_the_target_whatever_was_drafted() -> None:
    """Chi-square over 20,000 requests: the second token, drafted by a drafter that is sure of the wrong one."""
    count, table = 20_000, torch.randn(6, 6, generator=torch.Generator().manual_seed(6))
    settings = view([1.0] * count, [1 << 30] * count, [1.0] * count, [0.0] * count, filters=False)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(7))
    tokens = torch.tensor([4, 2, 0]).expand(count, 1, 3)
    log_probs = torch.tensor([-0.01, -5.0, -6.0]).expand(count, 1, 3)
    tree = plant(
        torch.ones(count, dtype=torch.int64), factorised_candidates(tokens, log_probs), fixed_plan("tree", 2, 3), 4
    ).tree
    choices = walk_choices(
        tree, table[tree.tokens_RN], torch.zeros(count, dtype=torch.int64), keyed_draw(settings, seeds)
    )
    accepted = accept(tree, choices)
    first = choices[:, 0]
    both = accepted.lengths_R == 2
    pairs = torch.stack([first[both], accepted.bonus_R[both]])
    assert set(pairs[0].tolist()) == {0, 2, 4}
    statistic, freedom = 0.0, 0
    for token, row in [(None, table[1]), *((t, table[t]) for t in (0, 2, 4))]:
        seen = first if token is None else pairs[1][pairs[0] == token]
        expected = row.softmax(-1) * len(seen)
        statistic += float(((torch.bincount(seen, minlength=6) - expected) ** 2 / expected).sum())
        freedom += 5
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), statistic


def test_coupled_scores_leave_greedy_requests_alone() -> None:
    scores, noise = torch.randn(2, 8), torch.randn(2, 8)
    settings = view([1.0, 2.0], [1, 1 << 30], [1.0, 1.0], [0.0, 0.0])
    mixed = coupled(scores, noise, settings, 1.25)
    assert torch.equal(mixed[0], scores[0])
    torch.testing.assert_close(mixed[1], (scores[1] / 2 + noise[1]) / 1.25)
    torch.testing.assert_close(coupled(scores, None, settings, 1.25)[1], scores[1] / 2)


def test_seeds_follow_requests_through_the_pool() -> None:
    table = SeedTable(8, torch.device("cpu"))
    table.admit(torch.tensor([5, 2]), [2**63 + 1, 7])
    assert table.of(torch.tensor([2, 5])).tolist() == [7, -(2**63) + 1]
    assert request_seed(11, "a", 0) == 11
    assert request_seed(None, "a", 0) == request_seed(None, "a", 0)
    assert len({request_seed(None, name, seed) for name in "ab" for seed in (0, 1)}) == 4


def test_backends_that_run_rows_as_a_chain_are_refused_by_name() -> None:
    for name in ("triton", "flashinfer"):
        require_tree_backend(name)
        assert mask_layout(name) is MaskLayout.FULL
    for name in ("fa3", "trtllm_mha", "brand_new", None):
        with pytest.raises(ConfigError, match=f"attention backend {name} cannot verify trees: .* use --attention"):
            require_tree_backend(name)


def test_full_cells_are_enough_for_the_longest() -> None:
    bounds: Tensor = torch.tensor([7, 100])
    assert full_cells(bounds, 33) == 33 * (7 + 33) + 33 * (100 + 33)
