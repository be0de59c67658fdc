"""Draft blocks in training see what they see in serving, and nothing that comes after their anchor."""

from __future__ import annotations

import pytest
import torch

from ddtree.models.block import block_tokens, draft_hidden
from ddtree.ops import FULL_VIEW, View
from ddtree.training.attention import BlockLayout, block_masks, draft_blocks
from tests.toys import MASK, random_tokens, toy_drafter, toy_target

VIEWS = [FULL_VIEW, View(window=5), View(causal=True), View(window=5, causal=True)]


def hidden_of_blocks(model, vocabulary, tokens_T, features_TF, layout):
    ids = block_tokens(tokens_T[layout.anchors_A], layout.block_size, MASK)
    offsets = torch.arange(layout.block_size)
    positions = (layout.positions_T[layout.anchors_A][:, None] + offsets).flatten()
    masks = block_masks(layout, model.spec.views, fused=False)
    embedded = vocabulary.embedding[ids.flatten()]
    hidden = draft_blocks(model, features_TF, layout.positions_T, embedded, positions, masks)
    return hidden.view(-1, layout.block_size, hidden.shape[-1])


def two_examples(seed: int = 3):
    """Two examples of 20 and 17 tokens in one pack, with padding behind."""
    positions = torch.cat([torch.arange(20), torch.arange(17), torch.zeros(3, dtype=torch.int64)])
    example = torch.cat([torch.zeros(20), torch.ones(17), -torch.ones(3)]).long()
    tokens = torch.tensor(random_tokens(40, seed))
    features = torch.randn(40, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return positions, example, tokens, features


@pytest.mark.parametrize("view", VIEWS)
@torch.inference_mode()
def test_a_block_in_a_pack_equals_the_served_block(view):
    model, vocabulary = toy_drafter(toy_target(), view=view, block_size=6)
    positions, example, tokens, features = two_examples()
    anchors = torch.tensor([4, 5, 11, 19, 22, 30])
    trained = hidden_of_blocks(model, vocabulary, tokens, features, BlockLayout(positions, example, anchors, 6))
    for row, anchor in enumerate(anchors.tolist()):
        start = anchor - int(positions[anchor])
        served = draft_hidden(model, vocabulary, features[None, start:anchor], tokens[anchor : anchor + 1])
        torch.testing.assert_close(trained[row], served[0], rtol=1e-9, atol=1e-9)


@torch.inference_mode()
def test_nothing_after_an_anchor_reaches_its_block():
    model, vocabulary = toy_drafter(toy_target(), block_size=6)
    positions, example, tokens, features = two_examples()
    layout = BlockLayout(positions, example, torch.tensor([6, 8, 9, 25]), 6)
    before = hidden_of_blocks(model, vocabulary, tokens, features, layout)
    changed, altered = tokens.clone(), features.clone()
    changed[7:20] = (changed[7:20] + 1) % 50
    altered[6:20] += 1.0  # the anchor's own feature is not known when it is drafted from
    after = hidden_of_blocks(model, vocabulary, changed, altered, layout)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[3], after[3])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("view", VIEWS)
def test_tiles_cover_all_that_a_row_sees(view):
    generator = torch.Generator().manual_seed(5)
    lengths = [70, 300, 40, 130, 90]
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(10, dtype=torch.int64)])
    example = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((10,), -1)])
    anchors = torch.randperm(630, generator=generator)[:64].sort().values
    layout = BlockLayout(positions, example, anchors, 16)
    wide = View(window=40, causal=view.causal) if view.window else view
    dense = layout.dense(wide)[0, 0]
    rows, keys = dense.shape
    seen = dense.view(rows // 128, 128, keys // 128, 128).any(3).any(1)
    kept = layout.tiles(wide).to_dense()[0, 0].bool()
    assert not (seen & ~kept).any(), "a tile that some row sees is missing"
    assert kept.sum() < kept.numel() * 0.6, "tiles that no row sees should be skipped"
