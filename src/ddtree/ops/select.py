"""The one place where a device is matched with the implementation of each op.

Models receive an `Ops` and call nothing else, so another set (kernels, or kernels whose arithmetic does not
depend on the number of rows) is one more choice here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.ops import dense, reference
from ddtree.ops.rows import Rows, View

__all__ = ["Ops", "reference_ops", "select_ops"]


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops that models are made of. What `mask` returns is the affair of `attend` alone.

    mask(rows, heads_per_group, dtype, view); attend(query_RNHd, key_RSGd, value_RSGd, mask) -> [R, N, H, d];
    rms_norm(x, weight, eps); rotate(x_RNHd, cos_RNe, sin_RNe); top_log_probs(logits_RDV, count) -> log-probs,
    token ids; ranked(scores, count) -> scores, token ids; best(logits) -> token ids.
    """

    mask: Callable[[Rows, int, torch.dtype, View], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    top_log_probs: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    ranked: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    best: Callable[[Tensor], Tensor]


def select_ops(device: torch.device) -> Ops:
    """The fastest ops that run on a device."""
    del device  # one implementation serves CPU and GPU so far
    return Ops(
        mask=dense.mask,
        attend=dense.attend,
        rms_norm=dense.rms_norm,
        rotate=dense.rotate,
        top_log_probs=reference.top_log_probs,
        ranked=reference.ranked,
        best=dense.best,
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
    )
