"""The one place where a device is matched with the implementation of each op.

Models receive an `Ops` and call nothing else, so another set (kernels, or kernels whose arithmetic does not
depend on the number of rows) is one more choice here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ddtree.ops import dense, reference
from ddtree.ops.rows import Rows, View
from ddtree.tree import ROW_BUCKETS, Candidates, DraftTree, build_tree

__all__ = ["Builder", "Ops", "check_builder", "reference_ops", "select_ops"]

logger = logging.getLogger(__name__)

Builder = Callable[[Candidates, Tensor, int], DraftTree]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops that models are made of. What `mask` returns is the affair of `attend` alone.

    mask(rows, heads_per_group, dtype, view); attend(query_RNHd, key_RSGd, value_RSGd, mask) -> [R, N, H, d];
    rms_norm(x, weight, eps); rotate(x_RNHd, cos_RNe, sin_RNe); top_log_probs(logits_RDV, count) -> log-probs,
    token ids; ranked(scores, count) -> scores, token ids; best(logits) -> token ids; build_tree(candidates,
    anchors_R, budget) -> trees.
    """

    mask: Callable[[Rows, int, torch.dtype, View], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    top_log_probs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    ranked: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    best: Callable[[Tensor], Tensor]
    build_tree: Builder


def select_ops(device: torch.device) -> Ops:
    """The fastest ops that run on a device."""
    return Ops(
        mask=dense.mask,
        attend=dense.attend,
        rms_norm=dense.rms_norm,
        rotate=dense.rotate,
        top_log_probs=reference.top_log_probs,
        ranked=reference.ranked,
        best=dense.best,
        build_tree=_tree_builder(device) if device.type == "cuda" else build_tree,
    )


def reference_ops() -> Ops:
    """The plain twins of all ops."""

    def mask(rows: Rows, heads_per_group: int, dtype: torch.dtype, view: View) -> Tensor:
        return reference.visible(rows, view)

    return Ops(
        mask=mask,
        attend=reference.attend,
        rms_norm=reference.rms_norm,
        rotate=reference.rotate,
        top_log_probs=reference.top_log_probs,
        ranked=reference.ranked,
        best=reference.best,
        build_tree=build_tree,
    )


@lru_cache(maxsize=16)
def _tree_builder(device: torch.device) -> Builder:
    """The kernel, where it builds trees as torch does; else torch, and a word in the log."""
    try:
        kernel: Builder = importlib.import_module("ddtree.ops.triton.tree").build_tree
        check_builder(kernel, device)
    except Exception as error:  # whatever an import, a compiler or a driver raises, there is another way
        logger.warning("draft trees on %s are built by torch, more slowly: %s", device, error, exc_info=True)
        return build_tree
    return kernel


def check_builder(kernel: Builder, device: torch.device) -> None:
    """Build some trees by a kernel and by torch, in every size that kernels are compiled for: scores with ties and
    with candidates that run out, which depend on the parent and which do not. ValueError when they differ."""
    generator = torch.Generator("cpu").manual_seed(0)
    anchors_R = torch.arange(3, device=device)
    # Where little is offered candidates run out before the budget does.
    least_R = torch.tensor([-4.0, -2.0, -1.0], device="cpu")
    for budget in (rows - 1 for rows in ROW_BUCKETS):
        for states in (1, 6):
            shape = (3, 7, states, 6)
            scores = torch.randn(shape, generator=generator, device="cpu").log_softmax(-1)
            scores = (2 * scores).round().div(2).sort(descending=True).values
            candidates = Candidates(
                torch.randint(1000, shape, generator=generator, device="cpu").to(device),
                scores.masked_fill(scores < least_R[:, None, None, None], -torch.inf).to(device),
                torch.randint(states, shape, generator=generator, device="cpu").to(device),
            )
            mine, other = (build(candidates, anchors_R, budget) for build in (kernel, build_tree))
            for name in ("tokens_RN", "parents_RN", "depths_RN", "scores_RN", "sizes_R"):
                if not torch.equal(getattr(mine, name), getattr(other, name)):
                    raise ValueError(f"the kernel's {name} differ from torch's at a budget of {budget}")
