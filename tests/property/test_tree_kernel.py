"""The kernel that grows draft trees, under Triton's interpreter, against the builder that it stands in for."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import sys
import zlib

import numpy as np
import pytest
import torch

from ddtree.ops import select, select_ops
from ddtree.ops.select import check_builder
from ddtree.tree import Candidates, build_tree
from tests.property.test_tree_build import KINDS, assert_same, random_candidates, random_case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel():
    """Outputs that it does not write stay what no tree holds."""
    pytest.importorskip("triton")
    module = importlib.import_module("ddtree.ops.triton.tree")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN and the largest numbers
    yield module.build_tree
    torch.use_deterministic_algorithms(deterministic)


def check(kernel, candidates, budget):
    anchors_R = torch.arange(3, 3 + candidates.tokens_RDSK.shape[0])
    tree = kernel(candidates, anchors_R, budget)
    assert_same(tree, build_tree(candidates, anchors_R, budget), budget)
    return tree


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_grows_the_trees_of_torch(kernel, kind):
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    for _ in range(12):
        candidates, _, budget = random_case(rng, kind, most_ranks=16)
        check(kernel, candidates, budget)


@pytest.mark.parametrize("kind", ["noise", "tied edges"])
def test_large_trees(kernel, kind):
    candidates = random_candidates(np.random.default_rng(7), kind, 2, 15, 64)
    for budget in (64, 255):
        check(kernel, candidates, budget)


@pytest.mark.parametrize("budget", [0, 1, 6, 40])
def test_candidates_that_run_out(kernel, budget):
    """Two depths of two candidates are six nodes; where none is offered the root stands alone."""
    candidates = random_candidates(np.random.default_rng(1), "noise", 2, 2, 2)
    candidates.log_probs_RDSK.copy_(torch.tensor([-0.5, -1.0]))
    assert check(kernel, candidates, budget).sizes_R.tolist() == [1 + min(budget, 6)] * 2
    candidates.log_probs_RDSK.fill_(-torch.inf)
    assert check(kernel, candidates, budget).sizes_R.tolist() == [1, 1]


def test_views_are_read_as_what_they_show(kernel):
    """Candidates often are slices and expanded tensors."""
    whole = random_candidates(np.random.default_rng(2), "edges", 4, 5, 8)
    check(kernel, Candidates(*(getattr(whole, field.name)[::2, 1:] for field in dataclasses.fields(whole))), 9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_scores_that_do_not_fit_the_keys_are_left_to_torch(kernel, dtype):
    whole = random_candidates(np.random.default_rng(5), "edges", 2, 5, 8)
    check(kernel, dataclasses.replace(whole, log_probs_RDSK=whole.log_probs_RDSK.to(dtype)), 9)


def test_narrow_anchors_make_no_narrow_tree(kernel):
    candidates = random_candidates(np.random.default_rng(5), "edges", 2, 5, 8)
    anchors_R = torch.tensor([3, 4])
    assert_same(kernel(candidates, anchors_R.int(), 9), kernel(candidates, anchors_R, 9), 9)
    assert kernel(candidates, anchors_R.int(), 9).parents_RN.dtype == torch.int64
    with pytest.raises(AssertionError, match="one anchor for each sequence"):
        kernel(candidates, anchors_R[:1], 9)


@pytest.mark.parametrize("depth", [128, 129, 140])
def test_trees_too_deep_for_the_keys_are_built_by_torch(kernel, depth):
    candidates = random_candidates(np.random.default_rng(3), "units", 1, depth, 2)
    candidates.log_probs_RDSK.copy_(torch.tensor([-0.01, -torch.inf]))
    assert int(check(kernel, candidates, 200).depths_RN.max()) == depth


def wrong(candidates, anchors_R, budget):
    tree = build_tree(candidates, anchors_R, budget)
    return dataclasses.replace(tree, scores_RN=tree.scores_RN + 1)


def broken(candidates, anchors_R, budget):
    raise RuntimeError("no such instruction")


def test_a_kernel_is_used_where_it_agrees(kernel, caplog):
    """Also while models are made without memory, which is when ops are chosen."""
    with torch.device("meta"):
        assert select._tree_builder.__wrapped__(CPU) is kernel
    assert not caplog.records
    assert select_ops(CPU).build_tree is build_tree, "a CPU builds a tree faster than it launches"


@pytest.mark.parametrize(
    ("instead", "told"),
    [(wrong, "scores_RN differ from torch's at a budget of 7"), (broken, "no such instruction")],
)
def test_a_kernel_that_fails_is_not_used(kernel, monkeypatch, caplog, instead, told):
    monkeypatch.setattr("ddtree.ops.triton.tree.build_tree", instead)
    with caplog.at_level(logging.WARNING):
        assert select._tree_builder.__wrapped__(CPU) is build_tree
    assert told in caplog.text
    with pytest.raises((ValueError, RuntimeError), match=told):
        check_builder(instead, CPU)


def one_token(kernel):
    """Right where children do not depend on their parent."""

    def build(candidates, anchors_R, budget):
        first_RDSK = candidates.log_probs_RDSK[:, :, :1].expand_as(candidates.log_probs_RDSK)
        return kernel(dataclasses.replace(candidates, log_probs_RDSK=first_RDSK), anchors_R, budget)

    return build


def every_candidate(kernel):
    """Right where no candidate is missing."""

    def build(candidates, anchors_R, budget):
        there_RDSK = candidates.log_probs_RDSK.clamp(min=-100)
        return kernel(dataclasses.replace(candidates, log_probs_RDSK=there_RDSK), anchors_R, budget)

    return build


def small_trees(kernel):
    """Right but for the largest trees."""

    def build(candidates, anchors_R, budget):
        tree = kernel(candidates, anchors_R, budget)
        return dataclasses.replace(tree, depths_RN=tree.depths_RN + 1) if budget > 250 else tree

    return build


@pytest.mark.parametrize("fault", [one_token, every_candidate, small_trees])
def test_a_kernel_that_fails_in_one_case_is_found_out(fault):
    with pytest.raises(ValueError, match="differ from torch's"):
        check_builder(fault(build_tree), CPU)
    check_builder(build_tree, CPU)


def test_a_triton_that_cannot_be_imported_costs_speed_alone(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ddtree.ops.triton.tree", None)
    with caplog.at_level(logging.WARNING):
        assert select._tree_builder.__wrapped__(CPU) is build_tree
    assert "draft trees on cpu are built by torch" in caplog.text
