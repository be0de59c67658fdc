"""Paged caches: what a contiguous cache holds, wherever the pages lie; nothing outside a sequence's own pages."""

from __future__ import annotations

import random

import pytest
import torch

from ddtree.models.pages import PagedCache, PageTable
from tests.checkpoints import chain_rows, random_tree, tree_rows
from tests.toys import random_tokens, toy_target

CPU = torch.device("cpu")
PROMPTS = [random_tokens(9, 1), random_tokens(4, 2), random_tokens(13, 3)]
PAGE = 4


def new_cache(pages=30, sequences=3, places=40):
    table = PageTable(pages, PAGE, sequences, places, CPU)
    return PagedCache(2, 2, 4, torch.float64, table), table


def numbers(places_RN):
    """Cells whose every entry is the number of their place, and of their sequence as hundreds."""
    sequence_R1 = 100 * torch.arange(places_RN.shape[0])[:, None]
    return (sequence_R1 + places_RN).double()[..., None, None].expand(-1, -1, 2, 4)


LAYOUTS = {
    "consecutive": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
    "scattered": [[7, 2, 29], [11, 3, 0], [28, 27, 1]],
    "shared beginning": [[7, 2, 29], [7, 3, 0], [7, 2, 1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read(layout):
    cache, table = new_cache()
    table.seat(LAYOUTS[layout])
    # The places of a shared page are its first owner's.
    first = 0 if layout != "shared beginning" else 8
    place_RN = torch.arange(first, 12).expand(3, -1)
    cache.write(1, cache.slots(place_RN), numbers(place_RN), -numbers(place_RN))
    keys, values = cache.read(1, 12)
    assert torch.equal(keys[:, first:], numbers(place_RN))
    assert torch.equal(values, -keys)
    assert not cache.keys[0].any(), "other layers are untouched"
    if first:
        assert torch.equal(keys[0, :4], keys[1, :4])


def test_places_without_a_page_read_nothing_and_write_nowhere():
    cache, table = new_cache()
    table.seat([[5, 6], [], [9]])
    place_RN = torch.arange(12).expand(3, -1)
    cache.write(0, cache.slots(place_RN), numbers(place_RN) + 1, numbers(place_RN))
    keys, _ = cache.read(0, 12)
    assert torch.equal(keys[0, :8], numbers(place_RN)[0, :8] + 1)
    assert not keys[0, 8:].any()
    assert not keys[1].any()
    assert not keys[2, 4:].any()
    touched = {page for page in range(30) if cache.keys[0, page].any()}
    assert touched == {5, 6, 9}
    # Padding writes nowhere either, wherever it stands.
    cache.write(
        0,
        cache.slots(torch.tensor([[1000]] * 3), torch.zeros(3, 1, dtype=torch.bool)),
        numbers(place_RN[:, :1]),
        numbers(place_RN[:, :1]),
    )
    assert {page for page in range(30) if cache.keys[0, page].any()} == touched


def test_the_only_sequence_reads_a_view_where_its_pages_are_consecutive():
    cache, table = new_cache()
    table.seat([[4, 5, 6]])
    keys, _ = cache.read(0, 10)
    assert keys.data_ptr() == cache.keys[0, 4].data_ptr()
    assert cache.capacity == 12
    table.seat([[4, 6, 5]])
    assert cache.read(0, 10)[0].data_ptr() != cache.keys[0, 4].data_ptr()
    assert cache.capacity == 40


def test_a_row_of_the_table_forgets_its_last_sequence():
    _, table = new_cache()
    table.seat([[1, 2, 3], [4, 5, 6]])
    buffer = table.pages_RP.data_ptr()
    table.seat([[1, 2, 3], [9]])
    assert table.pages_RP[1].tolist() == [9] + [30] * 9
    assert table.pages_RP[0].tolist() == [1, 2, 3] + [30] * 7
    assert table.pages_RP.data_ptr() == buffer, "graphs will read it from there"


@pytest.mark.parametrize("layout", ["consecutive", "scattered"])
def test_keep_gathers_before_it_scatters(layout):
    cache, table = new_cache()
    table.seat(LAYOUTS[layout])
    place_RN = torch.arange(12).expand(3, -1)
    for layer in range(2):
        cache.write(layer, cache.slots(place_RN), numbers(place_RN), numbers(place_RN))
    source, target = torch.tensor([[3, 5, 9], [4, 5, 6], [8, 10, 11]]), torch.tensor([[3, 4, 5]] * 3)
    real = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    cache.keep(source, target, real)
    wanted = place_RN.clone()
    wanted[0, 3:6] = torch.tensor([3, 5, 9])
    wanted[1, 3] = 4
    wanted[2, 3:5] = torch.tensor([8, 10])
    for layer in range(2):
        assert torch.equal(cache.read(layer, 12)[0], numbers(wanted))


def test_clean_pages_are_zero():
    cache, _ = new_cache()
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    cache.clear([3, 17])
    for pool in (cache.keys, cache.values):
        assert not pool[:, [3, 17]].any()
        assert pool[:, [2, 4, 16]].isnan().all()


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_a_tree_over_pages_equals_one_over_a_contiguous_cache(seed):
    """Prompts of different lengths in one pass, then a tree of its own for each; pages in any order."""
    target = toy_target("llama")
    draw = random.Random(seed)
    order = draw.sample(range(30), 30)
    table = PageTable(30, PAGE, 3, 40, CPU)
    table.seat([order[:10], order[10:20], order[20:]])
    outcomes = []
    for cache in (target.new_cache(3, 40), target.new_paged_cache(table)):
        lengths = [len(prompt) for prompt in PROMPTS]
        longest = max(lengths)
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in PROMPTS])
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        target(chain_rows(tokens, [0, 0, 0], real), cache, (0,))
        tree = random_tree([8, 5, 1], 8, seed=seed)
        hidden, features = target(tree_rows(tree, lengths), cache, (0, 2))
        outcomes.append([a[tree.real_RN] for a in (hidden, features)])
    for plain, paged in zip(*outcomes, strict=True):
        torch.testing.assert_close(paged, plain, rtol=0, atol=1e-12)
