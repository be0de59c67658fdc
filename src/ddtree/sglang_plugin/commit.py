"""What a round leaves behind: the accepted path's keys and values in canonical slots, and the drafter's.

Gather before scatter: SGLang's move kernel loads all sources of a tile before it stores, and in a window every
source stands at or behind its target, and behind all targets before it, so larger moves in tiles are safe too.
Places past the path move slot 0, SGLang's sink, onto itself. Slots of rejected rows stay reserved and are written
again by the next round; nothing outside the request's own window is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.tree import Accepted

__all__ = ["canonical_moves", "compact"]


def canonical_moves(slots_RN: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Targets and sources, int64 [R * P] each, that bring the accepted path to the window's first slots."""
    place_P = torch.arange(accepted.path_RP.shape[1], device=slots_RN.device)
    on_path_RP = place_P < accepted.lengths_R[:, None]
    sources_RP = torch.where(on_path_RP, slots_RN.gather(1, accepted.path_RP), 0)
    targets_RP = torch.where(on_path_RP, slots_RN[:, : place_P.numel()], 0)
    return targets_RP.flatten(), sources_RP.flatten()


def compact(allocator: Any, slots_RN: Tensor, accepted: Accepted) -> None:
    """Move the target's keys and values of the accepted path."""
    targets_M, sources_M = canonical_moves(slots_RN, accepted)
    allocator.get_kvcache().move_kv_cache(targets_M, sources_M)
