"""The fast ops equal their plain twins, and a pass over rows of several sequences keeps them apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ddtree.models.block import block_rows
from ddtree.models.target import TargetModel
from ddtree.ops import FULL_VIEW, View, reference, reference_ops, select_ops
from ddtree.tree import DraftTree, chain_words, clique_words, unpack_words
from tests.checkpoints import chain_rows, noise, prefilled, random_tree, tree_rows
from tests.toys import random_tokens, toy_drafter, toy_target

# Relative to results of order one: rounding of one operation, times the few that follow each other.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
VIEWS = [FULL_VIEW, View(window=3), View(causal=True), View(window=4, causal=True)]


def normal(*shape, seed, dtype=torch.float64):
    return noise(*shape, seed=seed).to(dtype)


def some_rows(kind):
    """Three sequences of different lengths with different trees, chains or blocks."""
    if kind == "tree":
        return tree_rows(random_tree([7, 1, 5], 7, seed=3), [9, 4, 0])
    if kind == "large tree":  # more than one word of bits
        return tree_rows(random_tree([100, 70, 64], 100, seed=4), [3, 0, 11])
    if kind == "chain":
        return chain_rows(torch.tensor(random_tokens(15, 5)).view(3, 5), [0, 6, 3])
    if kind == "anything":  # bits and positions that no tree has
        draw = torch.Generator().manual_seed(6)
        bits = torch.randint(2**7, (3, 7, 1), generator=draw) | (1 << torch.arange(7))[:, None]
        rows = some_rows("tree")
        shifted = rows.positions_RN + torch.randint(-2, 3, (3, 7), generator=draw)
        return dataclasses.replace(rows, words_RNW=bits, positions_RN=shifted)
    lengths_R = torch.tensor([6, 0, 3])
    return block_rows(torch.tensor([1, 2, 3]), lengths_R, block_size=6, mask_token_id=60, span=12)


KINDS = ["tree", "large tree", "chain", "block", "anything"]


def sees(rows, view, r, n, place):
    """Whether row n of sequence r sees a place: the definition, one pair at a time."""
    length, own = int(rows.lengths_R[r]), int(rows.positions_RN[r, n])
    if place < length:
        position = place
    elif place < length + rows.count:
        other = place - length
        if not unpack_words(rows.words_RNW, rows.count)[r, n, other]:
            return False
        position = int(rows.positions_RN[r, other])
    else:
        return False
    near = view.window is None or own - view.window < position < own + view.window
    return near and not (view.causal and position > own)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["tree", "chain", "block", "anything"])
def test_who_sees_what_is_as_defined(kind, view):
    rows = some_rows(kind)
    visible = reference.visible(rows, view)
    wanted = [
        [[sees(rows, view, r, n, place) for place in range(rows.span)] for n in range(rows.count)]
        for r in range(rows.tokens_RN.shape[0])
    ]
    assert visible.tolist() == wanted


def test_a_window_counts_the_row_itself_and_reaches_both_ways():
    rows = block_rows(torch.tensor([1]), torch.tensor([6]), block_size=6, mask_token_id=60, span=12)
    seen = [reference.visible(rows, view)[0, 2].nonzero()[:, 0].tolist() for view in VIEWS]
    # The row at position 8, in a block at 6 to 11.
    assert seen == [list(range(12)), [6, 7, 8, 9, 10], list(range(9)), [5, 6, 7, 8]]


@pytest.mark.parametrize("view", [FULL_VIEW, View(window=4, causal=True)])
def test_reference_attention_is_the_definition(view):
    rows = some_rows("tree")
    query = normal(3, 7, 4, 6, seed=1)
    key, value = normal(3, rows.span, 2, 6, seed=2), normal(3, rows.span, 2, 6, seed=3)
    found = reference.attend(query, key, value, reference.visible(rows, view))
    for r in range(3):
        for n in range(7):
            places = [place for place in range(rows.span) if sees(rows, view, r, n, place)]
            for h in range(4):
                scores = key[r, places, h // 2] @ query[r, n, h] / 6**0.5
                wanted = scores.softmax(0) @ value[r, places, h // 2]
                torch.testing.assert_close(found[r, n, h], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 4, 6])  # one, two and three for each key/value head
@pytest.mark.parametrize("kind", KINDS)
def test_dense_attention_equals_its_twin(kind, heads, dtype):
    rows, groups, dim = some_rows(kind), 2, 8
    query = normal(3, rows.count, heads, dim, seed=1, dtype=dtype)
    key = normal(3, rows.span, groups, dim, seed=2, dtype=dtype)
    value = normal(3, rows.span, groups, dim, seed=3, dtype=dtype)
    fast, plain = select_ops(torch.device("cpu")), reference_ops()
    for view in VIEWS:
        found, wanted = (
            ops.attend(query, key, value, ops.mask(rows, heads // groups, dtype, view)) for ops in (fast, plain)
        )
        assert found.dtype == wanted.dtype == dtype
        assert found.shape == wanted.shape == query.shape
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_norm_equals_its_twin(dtype):
    x, weight = normal(3, 5, 24, seed=1, dtype=dtype), normal(24, seed=2, dtype=dtype)
    x[0, 0] = 0  # eps alone keeps this row finite
    fast, plain = select_ops(torch.device("cpu")), reference_ops()
    found, wanted = fast.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6)
    assert found.dtype == wanted.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    wide = x.double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(wanted.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [2, 6, 8])
def test_dense_rotation_equals_its_twin_and_turns_pairs(rotary, dtype):
    x = normal(2, 5, 3, 8, seed=1, dtype=dtype)
    angle = normal(2, 5, rotary // 2, seed=2)
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1).to(dtype) for f in (torch.cos, torch.sin))
    fast, plain = select_ops(torch.device("cpu")), reference_ops()
    found, wanted = fast.rotate(x, cos, sin), plain.rotate(x, cos, sin)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=2 * TOLERANCE[dtype])
    # As complex numbers: dimension i is the real part, dimension i + rotary / 2 the imaginary one.
    pairs = torch.complex(x[..., : rotary // 2].double(), x[..., rotary // 2 : rotary].double())
    turned = pairs * torch.exp(1j * angle)[:, :, None]
    exact = torch.cat([turned.real, turned.imag, x[..., rotary:].double()], dim=-1)
    torch.testing.assert_close(wanted.double(), exact, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_log_probs_are_those_of_the_whole_vocabulary(dtype):
    logits = (4 * normal(2, 3, 40, seed=1)).to(dtype)
    logits[0, 0, 7] = 1e4  # exp of it would overflow
    logits[1, 2, 20:] = -torch.inf
    for ops in (select_ops(torch.device("cpu")), reference_ops()):
        for count in (1, 5, 40, 99):
            log_probs, tokens = ops.top_log_probs(logits, count)
            assert log_probs.dtype == torch.float32
            assert log_probs.shape == tokens.shape == (2, 3, min(count, 40))
            assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()
            exact = logits.double().log_softmax(dim=-1).gather(2, tokens)
            torch.testing.assert_close(log_probs.double(), exact, rtol=1e-5, atol=1e-5)
            left = logits.scatter(2, tokens, -torch.inf).amax(-1)
            assert (left <= logits.gather(2, tokens)[..., -1]).all(), "a better token was left out"
            assert all(len(set(row)) == len(row) for row in tokens.flatten(0, 1).tolist())


def test_probabilities_are_taken_in_float32_whatever_the_logits():
    """bfloat16 log-probabilities would tie siblings that differ, and sums over depths would drift."""
    logits = normal(1, 1, 1000, seed=1, dtype=torch.bfloat16)
    log_probs, _ = reference.top_log_probs(logits, 1000)
    assert float(log_probs.exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_norms_are_computed_wide():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # its squares overflow
    for ops in (select_ops(torch.device("cpu")), reference_ops()):
        out = ops.rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-3)


def test_what_nobody_sees_may_hold_nan():
    rows = tree_rows(random_tree([7, 1, 5], 7, seed=3), [9, 4, 0], span=20)
    query = normal(3, 7, 4, 6, seed=1)
    key, value = normal(3, 20, 2, 6, seed=2), normal(3, 20, 2, 6, seed=3)
    for view in VIEWS:
        visible = reference.visible(rows, view)
        clean = reference.attend(query, key, value, visible)
        unseen = ~visible.any(dim=1)
        assert unseen.any()
        poisoned = [torch.where(unseen[..., None, None], torch.nan, pool) for pool in (key, value)]
        assert torch.equal(reference.attend(query, *poisoned, visible), clean)
        assert clean.isfinite().all()


def test_what_only_padding_sees_may_hold_nan():
    rows = tree_rows(random_tree([7, 1, 5], 7, seed=3), [9, 4, 0])
    query = normal(3, 7, 4, 6, seed=1)
    key, value = normal(3, rows.span, 2, 6, seed=2), normal(3, rows.span, 2, 6, seed=3)
    visible = reference.visible(rows)
    clean = reference.attend(query, key, value, visible)
    by_real = (visible & rows.real_RN[..., None]).any(dim=1)
    poisoned = [torch.where(by_real[..., None, None], pool, torch.nan) for pool in (key, value)]
    found = reference.attend(query, *poisoned, visible)
    assert torch.equal(found[rows.real_RN], clean[rows.real_RN])


# Whole passes of a toy target: the ops together with the cache.


PROMPTS = [random_tokens(9, 1), random_tokens(4, 2), random_tokens(13, 3)]
SIZES = [7, 1, 5]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_each_tree_of_a_batch_equals_a_run_of_its_own(family):
    target = toy_target(family)
    tree = random_tree(SIZES, 8, seed=9)
    cache, lengths = prefilled(target, PROMPTS)
    together, features = target(tree_rows(tree, lengths), cache, (0, 2))
    for r, prompt in enumerate(PROMPTS):
        arrays = (tree.tokens_RN, tree.parents_RN, tree.depths_RN, tree.scores_RN, tree.sizes_R)
        alone = DraftTree(*(a[r : r + 1] for a in arrays), horizon=tree.horizon)
        own_cache, own_length = prefilled(target, [prompt])
        hidden, own_features = target(tree_rows(alone, own_length), own_cache, (0, 2))
        real = tree.real_RN[r]
        torch.testing.assert_close(together[r, real], hidden[0, real], rtol=0, atol=1e-11)
        torch.testing.assert_close(features[r, real], own_features[0, real], rtol=0, atol=1e-11)


@torch.inference_mode()
def test_sequences_of_a_batch_do_not_share_a_tree():
    """The same prompt thrice with three trees: equal roots, and nodes that depend on their own tree alone."""
    target = toy_target()
    cache, lengths = prefilled(target, [PROMPTS[0]] * 3)
    tree = random_tree([8, 8, 8], 8, seed=10)
    tree.tokens_RN[:, 0] = 5
    before, _ = target(tree_rows(tree, lengths), cache)
    assert torch.equal(before[0, 0], before[1, 0])
    tree.tokens_RN[1, 1:] = (tree.tokens_RN[1, 1:] + 7) % 60
    cache, lengths = prefilled(target, [PROMPTS[0]] * 3)
    after, _ = target(tree_rows(tree, lengths), cache)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@torch.inference_mode()
def test_a_larger_span_changes_nothing():
    """The host only knows a bound of the lengths; positions and visibility follow the device's."""
    target, (model, vocabulary) = toy_target(), toy_drafter(toy_target())
    tree = random_tree(SIZES, 8, seed=9)
    results = []
    for span in (21, 22, 29, 40):
        cache, lengths = prefilled(target, PROMPTS)
        for pool in (cache.keys, cache.values):  # what stands past the rows must not matter
            for r, length in enumerate(lengths):
                pool[:, r * 40 + length + 8 : (r + 1) * 40] = 1e3
        hidden, _ = target(tree_rows(tree, lengths, span), cache)
        results.append(hidden[tree.real_RN])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=1e-11)

    drafts = []
    for span in (12, 19, 30):
        context = model.new_cache(2, 30)
        context.keys[:], context.values[:] = 1e3, 1e3
        place = torch.arange(4).expand(2, -1)
        model.absorb(normal(2, 4, 48, seed=4), place, context.slots(place), context)
        rows = block_rows(torch.tensor([3, 4]), torch.tensor([4, 2]), 8, model.spec.mask_token_id, span)
        drafts.append(model(rows, vocabulary.embedding[rows.tokens_RN], context))
    for other in drafts[1:]:
        torch.testing.assert_close(other, drafts[0], rtol=0, atol=1e-11)


def live_places(cache, lengths, rows):
    """The pool without what this pass may write: the rows' own places, and the bin."""
    live = torch.ones(cache.keys.shape[1], dtype=torch.bool)
    live[-1] = False
    for r, length in enumerate(lengths):
        for n in range(rows.count):
            if rows.real_RN[r, n]:
                live[r * cache.shape.capacity + length + n] = False
    return live


@pytest.mark.parametrize("kind", ["tree", "chain"])
@torch.inference_mode()
def test_padding_writes_nowhere_and_reaches_no_real_row(kind):
    target = toy_target()
    if kind == "tree":
        rows = tree_rows(random_tree(SIZES, 8, seed=9), [9, 4, 13])
    else:
        real = torch.arange(8) < torch.tensor(SIZES)[:, None]
        rows = chain_rows(torch.tensor(random_tokens(24, 8)).view(3, 8), [9, 4, 13], real_RN=real)
    outcomes = []
    for shift in (0, 1, 17):
        padded = torch.where(rows.real_RN, rows.tokens_RN, (rows.tokens_RN + shift) % 60)
        cache, lengths = prefilled(target, PROMPTS)
        before = cache.keys.clone(), cache.values.clone()
        hidden, features = target(dataclasses.replace(rows, tokens_RN=padded), cache, (0, 1, 2))
        live = live_places(cache, lengths, rows)
        for pool, old in zip((cache.keys, cache.values), before, strict=True):
            assert torch.equal(pool[:, live], old[:, live]), "padding wrote to a live slot"
            assert not torch.equal(pool[:, ~live], old[:, ~live])
        outcomes.append((hidden[rows.real_RN], features[rows.real_RN], cache.keys[:, :-1], cache.values[:, :-1]))
    for outcome in outcomes[1:]:
        for found, wanted in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(found, wanted)


@torch.inference_mode()
def test_padded_rows_change_no_real_row():
    """A bucket of more rows than there are nodes gives what the nodes alone give."""
    target = toy_target()
    small = random_tree([5, 5, 5], 5, seed=12)
    cache, lengths = prefilled(target, PROMPTS)
    wanted, _ = target(tree_rows(small, lengths), cache)
    for rows in (8, 16, 27):
        arrays = (small.tokens_RN, small.parents_RN, small.depths_RN, small.scores_RN)
        padded = [torch.nn.functional.pad(a, (0, rows - 5)) for a in arrays]
        cache, lengths = prefilled(target, PROMPTS)
        found, _ = target(tree_rows(DraftTree(*padded, small.sizes_R, small.horizon), lengths), cache)
        torch.testing.assert_close(found[:, :5], wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_models_on_reference_ops_equal_models_on_fast_ops(family):
    fast = toy_target(family)
    plain = TargetModel(fast.spec, reference_ops()).to(fast.dtype)
    plain.load_state_dict(fast.state_dict())
    plain.rope = fast.rope
    tree = random_tree(SIZES, 8, seed=9)
    found = []
    for target in (fast, plain):
        cache, lengths = prefilled(target, PROMPTS)
        hidden, _ = target(tree_rows(tree, lengths), cache)
        found.append(hidden[tree.real_RN])
    torch.testing.assert_close(*found, rtol=0, atol=1e-11)


def test_chains_and_cliques_of_many_words():
    cpu, square = torch.device("cpu"), torch.ones(130, 130, dtype=torch.bool)
    assert torch.equal(unpack_words(clique_words(2, 130, cpu), 130)[1], square)
    assert torch.equal(unpack_words(chain_words(2, 130, cpu), 130)[1], square.tril())
