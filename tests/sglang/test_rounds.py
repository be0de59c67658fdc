"""Parts of a round that need SGLang's types but no engine: lengths under overlap, lost features, ranks, heads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.errors import UnsupportedError
from ddtree.models.edges import EdgeNet
from ddtree.sglang_plugin.settings import Flags, resolve


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


@pytest.mark.parametrize("edged", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
def test_one_rank_decides(greedy: bool, edged: bool) -> None:
    """Rank 1's hidden states, and with them its edges, differ, and its logits do in one token; without rank 0's
    word it would draft and accept something else."""
    from ddtree.ops import select_ops
    from ddtree.sglang_plugin.choices import Chooser
    from ddtree.sglang_plugin.edges import edge_tables
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
    edges = None
    if edged:
        torch.manual_seed(3)
        edges = edge_tables(EdgeNet(5, 4, 4), torch.randn(20, 5).__getitem__, 20)
    hidden = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(2 * 7, 20, generator=torch.Generator().manual_seed(2))

    def rank(sync: Any, skew: float) -> tuple[torch.Tensor, torch.Tensor]:
        own = DraftHead(
            SimpleNamespace(weight=head.weight + skew), 20, alone, draft, select_ops(torch.device("cpu"))
        )
        chooser = Chooser(own, edges, 20, settings, sync, None, False)
        turn = chooser.turn(info, torch.tensor([1, 2]), torch.tensor([4, 9]))
        anchors = torch.tensor([3, 3])
        candidates = chooser.candidates(anchors, hidden * (1 + skew), 6, turn)
        tree = plant(anchors, candidates, settings.plan, 7).tree
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
