"""The slot cache: a table changes nothing, accepted rows move in one go, and sequences keep to themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddtree.models.cache import CacheShape, SlotCache
from ddtree.tree import accept
from tests.checkpoints import chain_rows, noise, prefilled, random_tree, tree_rows
from tests.toys import random_tokens, toy_drafter, toy_target

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=4, sequences=3, capacity=10)
CPU = torch.device("cpu")
PROMPTS = [random_tokens(9, 1), random_tokens(4, 2), random_tokens(13, 3)]


def shuffled(sequences, capacity, seed=0):
    """A table that scatters every sequence over the whole pool."""
    order = torch.randperm(sequences * capacity, generator=torch.Generator().manual_seed(seed))
    return order.view(sequences, capacity)


def numbered(table_RS=None):
    """A cache whose cell at (layer, sequence, place) holds 100 * layer + 20 * sequence + place; values negated."""
    cache = SlotCache(SHAPE, torch.float64, CPU, table_RS)
    place_RS = torch.arange(SHAPE.capacity).expand(SHAPE.sequences, -1)
    sequence_R1 = torch.arange(SHAPE.sequences)[:, None]
    for layer in range(SHAPE.layers):
        number = (100 * layer + 20 * sequence_R1 + place_RS).double()[..., None, None].expand(-1, -1, 2, 4)
        cache.write(layer, cache.slots(place_RS), number, -number)
    return cache


def held(cache, layer):
    """The number in each place, after checking that a whole cell moved and that values went with keys."""
    keys, values = cache.read(layer, SHAPE.capacity)
    assert torch.equal(keys, -values)
    assert torch.equal(keys, keys[..., :1, :1].expand_as(keys))
    return (keys[..., 0, 0] - 100 * layer - 20 * torch.arange(SHAPE.sequences)[:, None]).long()


TABLES = [None, shuffled(3, 10)]
KEEPS = {
    # A path through a tree moves down; sources and targets overlap.
    "path": ([[0, 2, 5], [0, 1, 2], [0, 4, 7]], [[0, 1, 2]] * 3),
    # Each target is the next source: moving one by one downwards is fine, ...
    "shift down": ([[3, 4, 5]] * 3, [[2, 3, 4]] * 3),
    # ... upwards it would copy the first cell over all others.
    "shift up": ([[3, 4, 5]] * 3, [[4, 5, 6]] * 3),
    "swap": ([[7, 8, 9]] * 3, [[8, 7, 9]] * 3),
}


@pytest.mark.parametrize("table_RS", TABLES, ids=["identity", "shuffled"])
@pytest.mark.parametrize("case", KEEPS)
def test_keep_gathers_before_it_scatters(case, table_RS):
    cache = numbered(table_RS)
    source, target = (torch.tensor(places) for places in KEEPS[case])
    cache.keep(source, target, torch.ones_like(source, dtype=torch.bool))
    wanted = torch.arange(SHAPE.capacity).repeat(SHAPE.sequences, 1)
    wanted.scatter_(1, target, source)
    for layer in range(SHAPE.layers):
        assert torch.equal(held(cache, layer), wanted)


@pytest.mark.parametrize("table_RS", TABLES, ids=["identity", "shuffled"])
def test_keep_leaves_alone_what_is_not_real(table_RS):
    cache = numbered(table_RS)
    source = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7]])
    target = torch.tensor([[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    real = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    cache.keep(source, target, real)
    wanted = torch.arange(SHAPE.capacity).repeat(3, 1)
    wanted[0, :2] = torch.tensor([5, 6])
    wanted[2, 0], wanted[2, 2] = 5, 7
    for layer in range(SHAPE.layers):
        assert torch.equal(held(cache, layer), wanted)


@pytest.mark.parametrize("table_RS", TABLES, ids=["identity", "shuffled"])
def test_the_bin_takes_what_is_not_real_and_is_never_read(table_RS):
    cache = numbered(table_RS)
    places = torch.tensor([[0, 1], [0, 1], [0, 1]])
    real = torch.tensor([[True, False], [False, False], [False, True]])
    slots = cache.slots(places, real)
    assert (slots[~real] == SHAPE.sequences * SHAPE.capacity).all()
    assert (slots[real] < SHAPE.sequences * SHAPE.capacity).all()
    written = torch.full((3, 2, 2, 4), torch.nan, dtype=torch.float64)
    written[0, 0], written[2, 1] = 50.0, 51.0
    wanted = torch.arange(SHAPE.capacity).repeat(3, 1)
    wanted[0, 0], wanted[2, 1] = 50, 51 - 40
    cache.write(0, slots, written, -written)
    assert torch.equal(held(cache, 0), wanted)
    assert torch.equal(held(cache, 1), torch.arange(SHAPE.capacity).repeat(3, 1))


@pytest.mark.parametrize("span", [1, 4, 10])
def test_a_table_reads_what_the_identity_reads(span):
    plain, scattered = numbered(), numbered(shuffled(3, 10, seed=4))
    for layer in range(SHAPE.layers):
        for found, wanted in zip(scattered.read(layer, span), plain.read(layer, span), strict=True):
            assert found.shape == (3, span, 2, 4)
            assert torch.equal(found, wanted)
    assert not torch.equal(plain.keys, scattered.keys)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_tree_over_a_scattered_cache_equals_one_over_a_contiguous_cache(family, seed):
    """Prefill, verify a tree, keep a path, verify another tree: all with a table that scatters every place."""
    target = toy_target(family)
    outcomes = []
    for table_RS in (None, shuffled(3, 40, seed)):
        cache, lengths = prefilled(target, PROMPTS, capacity=40, table_RS=table_RS)
        first = random_tree([8, 5, 1], 8, seed=20)
        hidden, features = target(tree_rows(first, lengths), cache, (0, 2))
        source = torch.tensor([path_to_last_leaf(first, r) for r in range(3)])
        kept = torch.tensor([len(set(path)) for path in source.tolist()])
        offset = torch.arange(source.shape[1])
        starts = torch.tensor(lengths)[:, None]
        cache.keep(starts + source, starts + offset, offset < kept[:, None])
        lengths = [length + int(count) for length, count in zip(lengths, kept, strict=True)]
        again, _ = target(tree_rows(random_tree([8, 8, 8], 8, seed=21), lengths), cache)
        outcomes.append((hidden[first.real_RN], features[first.real_RN], again))
    for found, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def path_to_last_leaf(tree, r, places=7):
    """Node indices from the root to the last node of a tree, the last one repeated up to `places`."""
    node = int(tree.sizes_R[r]) - 1
    path = [node]
    while node:
        node = int(tree.parents_RN[r, node])
        path.insert(0, node)
    return path + [path[-1]] * (places - len(path))


@pytest.mark.parametrize("scattered", [False, True])
@torch.inference_mode()
def test_a_kept_path_continues_like_the_text_it_is(scattered):
    """After verifying and committing a branch, the cache holds what one pass over that text would leave."""
    target = toy_target()
    table_RS = shuffled(3, 40, seed=7) if scattered else None
    tree = random_tree([12, 9, 12], 12, seed=30)
    cache, lengths = prefilled(target, PROMPTS, table_RS=table_RS)
    target(tree_rows(tree, lengths), cache)
    paths = [path_to_last_leaf(tree, r) for r in range(3)]
    texts = []
    for r, prompt in enumerate(PROMPTS):
        path = sorted(set(paths[r]))
        assert path != list(range(len(path))), "the path must not be a prefix of the rows"
        texts.append(prompt + tree.tokens_RN[r, path].tolist())
    source, offset = torch.tensor(paths), torch.arange(7)
    counts = torch.tensor([len(text) - length for text, length in zip(texts, lengths, strict=True)])
    starts = torch.tensor(lengths)[:, None]
    cache.keep(starts + source, starts + offset, offset < counts[:, None])

    fresh, new_lengths = prefilled(target, texts)
    following = torch.tensor(random_tokens(9, 31)).view(3, 3)
    found, _ = target(chain_rows(following, new_lengths), cache)
    wanted, _ = target(chain_rows(following, new_lengths), fresh)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    for layer in range(3):
        for kept, whole in zip(cache.read(layer, 40), fresh.read(layer, 40), strict=True):
            for r, length in enumerate(new_lengths):
                torch.testing.assert_close(kept[r, :length], whole[r, :length], rtol=0, atol=1e-11)


def test_keep_takes_the_path_that_accept_returns():
    """The accept walk and the cache agree on what a path is: rows of the tree, the root first, then padding."""
    tree = random_tree([8, 6, 1], 8, seed=30)
    paths = [path_to_last_leaf(tree, r) for r in range(3)]
    choices = torch.full((3, 8), 60)  # no node's token
    for r, path in enumerate(paths):
        for parent, child in itertools.pairwise(dict.fromkeys(path)):
            choices[r, parent] = tree.tokens_RN[r, child]
    accepted = accept(tree, choices)
    cache = numbered()
    offset = torch.arange(accepted.path_RP.shape[1]).expand(3, -1)
    cache.keep(1 + accepted.path_RP, 1 + offset, offset < accepted.lengths_R[:, None])  # anchors at place 1
    for r, path in enumerate(paths):
        nodes = sorted(set(path))
        assert held(cache, 1)[r, 1 : 1 + len(nodes)].tolist() == [1 + node for node in nodes]
        assert held(cache, 1)[r, 1 + len(nodes) :].tolist() == list(range(1 + len(nodes), SHAPE.capacity))


def checksum(cache, owner_RS, r):
    """All cells of one sequence, as they are."""
    return torch.stack([cache.keys[:, owner_RS[r]], cache.values[:, owner_RS[r]]]).clone()


@pytest.mark.parametrize("scattered", [False, True])
@torch.inference_mode()
def test_sequences_do_not_touch_each_other(scattered):
    target, drafter = toy_target(), toy_drafter(toy_target())[0]
    table_RS = shuffled(3, 40, seed=2)
    owner_RS = table_RS if scattered else torch.arange(120).view(3, 40)
    cache, lengths = prefilled(target, PROMPTS, table_RS=table_RS if scattered else None)
    tree = random_tree([8, 8, 8], 8, seed=5)
    for active in range(3):
        others = [r for r in range(3) if r != active]
        before = {r: checksum(cache, owner_RS, r) for r in range(3)}
        rows = tree_rows(tree, lengths)
        rows.real_RN[others] = False
        target(rows, cache)
        source = torch.tensor([path_to_last_leaf(tree, r) for r in range(3)])
        starts, offset = torch.tensor(lengths)[:, None], torch.arange(7).expand(3, -1)
        cache.keep(starts + source, starts + offset, rows.real_RN[:, :7])
        for r in others:
            assert torch.equal(checksum(cache, owner_RS, r), before[r])
        assert not torch.equal(checksum(cache, owner_RS, active), before[active])

    context = drafter.new_cache(3, 40, table_RS if scattered else None)
    place = torch.arange(9).expand(3, -1)
    before = {r: checksum(context, owner_RS, r) for r in range(3)}
    only_first = torch.tensor([True, False, False])[:, None].expand(-1, 9)
    drafter.absorb(noise(3, 9, 48, seed=1), place, context.slots(place, only_first), context)
    assert not torch.equal(checksum(context, owner_RS, 0), before[0])
    for r in (1, 2):
        assert torch.equal(checksum(context, owner_RS, r), before[r])


@pytest.mark.parametrize("scattered", [False, True])
@torch.inference_mode()
def test_a_sequence_may_fill_its_last_place(scattered):
    """Rows that end exactly at the capacity give what they give in a roomier cache, and spill nowhere."""
    target = toy_target()
    tree = random_tree([8, 8, 8], 8, seed=5)
    outcomes = []
    for capacity in (21, 64):  # the longest prompt has 13 tokens
        table_RS = shuffled(3, capacity) if scattered else None
        cache, lengths = prefilled(target, PROMPTS, capacity, table_RS)
        hidden, _ = target(tree_rows(tree, lengths), cache)
        outcomes.append(hidden)
    torch.testing.assert_close(*outcomes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scattered", [False, True])
@torch.inference_mode()
def test_rows_past_the_capacity_are_refused(scattered):
    target = toy_target()
    cache, lengths = prefilled(target, PROMPTS, 20, shuffled(3, 20) if scattered else None)
    with pytest.raises((AssertionError, RuntimeError)):
        target(tree_rows(random_tree([8, 8, 8], 8, seed=5), lengths), cache)


@torch.inference_mode()
def test_rows_past_the_capacity_leave_the_next_sequence_alone():
    target = toy_target()
    cache, lengths = prefilled(target, [PROMPTS[2], PROMPTS[0]], 20)
    before = cache.keys[:, 20:29].clone()
    with pytest.raises((AssertionError, RuntimeError)):
        target(tree_rows(random_tree([8, 8], 8, seed=5), lengths), cache)
    assert torch.equal(cache.keys[:, 20:29], before)


def test_a_table_needs_a_slot_for_each_place():
    with pytest.raises(AssertionError, match="slot for each place"):
        SlotCache(SHAPE, torch.float32, CPU, torch.zeros(3, 9, dtype=torch.int64))


def test_dropped_sequences_leave_the_others_as_they_were():
    """What is kept moves to the front, cell for cell, and the bin stays out of everybody's way."""
    cache, before = numbered(), numbered()
    kept = torch.tensor([0, 2])
    cache.drop_others(kept)
    assert cache.shape.sequences == 2
    for layer in range(SHAPE.layers):
        for mine, theirs in zip(cache.read(layer, 7), before.read(layer, 7), strict=True):
            assert torch.equal(mine, theirs[kept])
    places = torch.tensor([[3], [4]])
    cell = torch.full((2, 1, 2, 4), 5.0, dtype=torch.float64)
    cache.write(0, cache.slots(places, torch.tensor([[True], [False]])), cell, -cell)
    now, then = cache.read(0, SHAPE.capacity)[0], before.read(0, SHAPE.capacity)[0][kept].clone()
    then[0, 3] = 5.0
    assert torch.equal(now, then)
