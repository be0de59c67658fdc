"""What a drafter is fed: the block, and the features of the positions before its anchor, however they came."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ddtree.models.block import block_rows, block_tokens, draft_hidden, run_block
from ddtree.models.load import load_drafter
from ddtree.ops import FULL_VIEW, View
from tests.checkpoints import chain_rows, drafter_tensors, noise, plain_draft, write_drafter
from tests.toys import MASK, random_tokens, toy_drafter, toy_target

BLOCK, ANCHOR, WIDTH = 6, 7, 48
VIEWS = [FULL_VIEW, View(window=4), View(causal=True), View(window=4, causal=True)]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def drafter(view=FULL_VIEW, **changes):
    return toy_drafter(toy_target(), view=view, block_size=BLOCK, **changes)


def close(found, wanted, atol=1e-11):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def absorb(model, cache, features_RLF, starts, real_RL=None, shift=0):
    """Put features at places starts[r] and on, as positions of the same number plus `shift`."""
    place_RL = torch.tensor(starts)[:, None] + torch.arange(features_RLF.shape[1])
    model.absorb(features_RLF, place_RL + shift, cache.slots(place_RL, real_RL), cache)


def context_of(model, features_RLF, capacity=40):
    cache = model.new_cache(features_RLF.shape[0], capacity)
    absorb(model, cache, features_RLF, [0] * features_RLF.shape[0])
    return cache


def draft(model, vocabulary, cache, lengths, anchors=None, shift=0):
    """Logits of all rows of a block whose anchors stand at `lengths`. [R, b, V]."""
    lengths_R = torch.tensor(lengths)
    anchors_R = torch.tensor(anchors or [ANCHOR] * len(lengths))
    rows = block_rows(anchors_R, lengths_R, BLOCK, MASK, max(lengths) + BLOCK)
    rows = dataclasses.replace(rows, positions_RN=rows.positions_RN + shift)
    return vocabulary.logits(run_block(model, vocabulary, rows, cache))


def fresh(model, vocabulary, features_LF, anchor=ANCHOR):
    return vocabulary.logits(draft_hidden(model, vocabulary, features_LF[None], torch.tensor([anchor])))[0]


# The block.


def test_a_block_is_the_anchor_and_masks():
    """All masks, the anchor's place included, once cost a drafter three quarters of its acceptance."""
    tokens = block_tokens(torch.tensor([5, 0, 41]), 4, MASK)
    assert tokens.tolist() == [[5, MASK, MASK, MASK], [0, MASK, MASK, MASK], [41, MASK, MASK, MASK]]
    rows = block_rows(torch.tensor([5, 9]), torch.tensor([11, 3]), 4, MASK, 15)
    assert rows.tokens_RN.tolist() == [[5, MASK, MASK, MASK], [9, MASK, MASK, MASK]]
    assert rows.positions_RN.tolist() == [[11, 12, 13, 14], [3, 4, 5, 6]]
    assert rows.lengths_R.tolist() == [11, 3]


def test_the_anchor_reaches_every_row():
    model, vocabulary = drafter()
    features = noise(9, WIDTH, seed=1)
    one, other = (fresh(model, vocabulary, features, anchor) for anchor in (ANCHOR, ANCHOR + 1))
    assert ((one - other).abs().amax(-1) > 1e-3).all()


def test_rows_of_causal_layers_do_not_look_ahead():
    model, vocabulary = drafter(View(causal=True))
    cache = model.new_cache(1, 20)
    absorb(model, cache, noise(1, 9, WIDTH, seed=1), [0])
    before = draft(model, vocabulary, cache, [9])
    rows = block_rows(torch.tensor([ANCHOR]), torch.tensor([9]), BLOCK, MASK, 15)
    embedded = vocabulary.embedding[rows.tokens_RN].clone()
    embedded[0, 3] += 1.0
    after = vocabulary.logits(model(rows, embedded, cache))
    assert torch.equal(before[0, :3], after[0, :3])
    assert ((before - after)[0, 3:].abs().amax(-1) > 1e-6).all()


def test_a_golden_draft(tmp_path):
    """The served path against a plain drafter on the same features, the target's own."""
    target = toy_target()
    loaded = load_drafter(write_drafter(tmp_path), target)
    text = random_tokens(14, 3)
    rows = chain_rows(torch.tensor([text[:-1]]), [0])
    _, features = target(rows, target.new_cache(1, 13), loaded.model.spec.layer_ids)
    found = draft(loaded.model, loaded.vocabulary, context_of(loaded.model, features), [13], [text[-1]])
    wanted = plain_draft(
        drafter_tensors(), features[0], text[-1], target.embed_tokens.weight, target.lm_head.weight
    )
    close(found[0, 1:], wanted, atol=1e-9)


# The context.


@pytest.mark.parametrize("view", VIEWS)
def test_the_context_ends_before_the_anchor(view):
    """Features at the anchor's position and past it may be in the cache; no block ever sees them."""
    model, vocabulary = drafter(view)
    features = noise(1, 12, WIDTH, seed=1)
    wanted = fresh(model, vocabulary, features[0, :9])

    def drafted(change=None):
        altered = features.clone()
        if change is not None:
            altered[:, change] += 1.0
        return draft(model, vocabulary, context_of(model, altered), [9])[0]

    close(drafted(), wanted)
    for position in (9, 10, 11):
        assert torch.equal(drafted(position), drafted())
    # Row k of the block stands at 9 + k; with a window of 4 position 8 is seen from rows 0 to 2.
    reached = (drafted(8) - wanted).abs().amax(-1) > 1e-6
    assert reached[:3].all()
    if view.window is None:
        assert reached.all()
    seen_first = (drafted(0) - wanted).abs().amax(-1) > 1e-6
    assert seen_first.tolist() == [view.window is None] * BLOCK


CHUNKS = {"one by one": [1] * 13, "in chunks": [5, 1, 4, 3], "all but one": [12, 1], "one first": [1, 12]}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CHUNKS)
def test_features_may_come_in_pieces(case, view):
    model, vocabulary = drafter(view)
    features = noise(1, 13, WIDTH, seed=2)
    cache, start = model.new_cache(1, 20), 0
    for count in CHUNKS[case]:
        absorb(model, cache, features[:, start : start + count], [start])
        start += count
    close(draft(model, vocabulary, cache, [13])[0], fresh(model, vocabulary, features[0]))


@pytest.mark.parametrize("view", VIEWS)
def test_rounds_leave_no_trace(view):
    """Draft, commit some, absorb their features over what the block left, draft again: each as from nothing."""
    model, vocabulary = drafter(view)
    features = noise(1, 30, WIDTH, seed=3)
    cache, length = context_of(model, features[:, :4]), 4
    for committed in (1, 6, 2, 1, 5, 3):
        anchor = 10 + committed
        found = draft(model, vocabulary, cache, [length], [anchor])[0]
        close(found, fresh(model, vocabulary, features[0, :length], anchor))
        absorb(model, cache, features[:, length : length + committed], [length])
        length += committed


def test_a_shorter_request_after_a_longer_one_starts_afresh():
    """Nothing of the request that held the cache before is read."""
    model, vocabulary = drafter()
    cache = context_of(model, noise(1, 30, WIDTH, seed=4))
    draft(model, vocabulary, cache, [30])
    second = noise(1, 5, WIDTH, seed=5)
    absorb(model, cache, second, [0])
    close(draft(model, vocabulary, cache, [5])[0], fresh(model, vocabulary, second[0]))


@pytest.mark.parametrize("view", VIEWS)
def test_sequences_of_a_batch_draft_alone(view):
    """Different lengths and anchors in one pass; padding features go nowhere."""
    model, vocabulary = drafter(view)
    lengths, anchors = [9, 4, 12], [3, 8, 1]
    features = noise(3, 12, WIDTH, seed=6)
    real = torch.arange(12) < torch.tensor(lengths)[:, None]
    for padding in (0.0, 1e3):
        cache = model.new_cache(3, 20)
        absorb(model, cache, torch.where(real[..., None], features, padding), [0, 0, 0], real)
        found = draft(model, vocabulary, cache, lengths, anchors)
        for r, (length, anchor) in enumerate(zip(lengths, anchors, strict=True)):
            close(found[r], fresh(model, vocabulary, features[r, :length], anchor))


def test_a_context_behind_a_table_drafts_the_same():
    model, vocabulary = drafter()
    lengths, features = [9, 4], noise(2, 9, WIDTH, seed=7)
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    table = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(2, 20)
    drafts = []
    for cache in (model.new_cache(2, 20), model.new_cache(2, 20, table)):
        absorb(model, cache, features, [0, 0], real)
        drafts.append(draft(model, vocabulary, cache, lengths))
    close(*drafts)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_block_writes_its_own_places_alone(scattered):
    """Not the context, nor what a neighbour keeps: a block once ran into pages that others shared."""
    model, vocabulary = drafter()
    owner = torch.arange(40).view(2, 20)
    if scattered:
        owner = torch.randperm(40, generator=torch.Generator().manual_seed(1)).view(2, 20)
    cache = model.new_cache(2, 20, owner if scattered else None)
    absorb(model, cache, noise(2, 20, WIDTH, seed=7), [0, 0])
    before = cache.keys.clone(), cache.values.clone()
    draft(model, vocabulary, cache, [14, 3])  # the first block ends at the last place
    written = torch.cat([owner[0, 14:20], owner[1, 3:9]]).sort().values
    for pool, old in zip((cache.keys, cache.values), before, strict=True):
        changed = (pool != old).flatten(2).any(-1)
        for layer in range(2):
            assert changed[layer].nonzero()[:, 0].tolist() == written.tolist()


# Windows over long contexts.

WINDOWED = [View(window=8), View(window=8, causal=True)]


@pytest.mark.parametrize("view", WINDOWED)
def test_a_long_context_equals_its_visible_rows(view):
    """A window of 8 over 40 positions, at every length on the way: what the last 7 rows alone give.

    The anchor is the eighth row of its own window. Rope is relative, so the rows may stand at 0 to 6; its
    float32 angles round differently there.
    """
    model, vocabulary = drafter(view)
    features = noise(1, 40, WIDTH, seed=8)
    cache = model.new_cache(1, 50)
    for length in range(1, 41):
        absorb(model, cache, features[:, length - 1 : length], [length - 1])
        found = draft(model, vocabulary, cache, [length])[0]
        visible = features[0, max(length - 7, 0) : length]
        close(found, fresh(model, vocabulary, visible), atol=1e-4)
        if length > 7:
            fewer = fresh(model, vocabulary, visible[1:])
            assert not torch.allclose(found[0], fewer[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("view", WINDOWED)
def test_hidden_rows_may_hold_anything(view):
    """Rows past the window do not count at all, exactly: no trace of them is left in the softmax."""
    model, vocabulary = drafter(view)
    features = noise(1, 40, WIDTH, seed=8)
    wanted = draft(model, vocabulary, context_of(model, features, 50), [40])
    features[:, :33] = 1e3 * noise(1, 33, WIDTH, seed=9)
    assert torch.equal(draft(model, vocabulary, context_of(model, features, 50), [40]), wanted)
    features[:, 33] = 0.0
    changed = draft(model, vocabulary, context_of(model, features, 50), [40])
    assert not torch.allclose(changed, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("view", WINDOWED)
@pytest.mark.parametrize("shift", [1, 100, 2000])
def test_positions_may_be_rebased(view, shift):
    """A constant added to all positions changes no draft, so a window far out may be drafted near the origin.

    Places move along, because a committed place holds the position of its number; what lies before is hidden.
    """
    model, vocabulary = drafter(view)
    features = noise(1, 7, WIDTH, seed=10)
    near = draft(model, vocabulary, context_of(model, features), [7])
    cache = model.new_cache(1, shift + 20)
    absorb(model, cache, noise(1, shift, WIDTH, seed=11), [0])
    absorb(model, cache, features, [shift])
    far = draft(model, vocabulary, cache, [shift + 7])
    # Angles are float32: 2,000 radians are known to 1e-4.
    close(far, near, atol=2e-3 if shift == 2000 else 1e-4)
    assert not torch.allclose(far, draft(model, vocabulary, cache, [shift + 6]), rtol=0, atol=1e-2)


@pytest.mark.parametrize("shift", [1, 100, 2000])
def test_rope_is_relative_without_windows(shift):
    """The same cached rows at other positions: a rotation applied to queries alone, or twice, would show."""
    model, vocabulary = drafter()
    features = noise(1, 20, WIDTH, seed=10)
    near = draft(model, vocabulary, context_of(model, features), [20])
    cache = model.new_cache(1, 40)
    absorb(model, cache, features, [0], shift=shift)
    close(draft(model, vocabulary, cache, [20], shift=shift), near, atol=2e-3 if shift == 2000 else 1e-4)
    assert not torch.allclose(draft(model, vocabulary, cache, [20], shift=shift + 1), near, rtol=0, atol=1e-3)
