"""Records of rounds, for whoever wants to see the trees."""

from __future__ import annotations

from ddtree.engine.output import Emitted
from ddtree.engine.request import RoundRecord
from ddtree.speculation.plan import RoundPlan
from ddtree.speculation.round import RoundOutcome

__all__ = ["round_record"]


def round_record(plan: RoundPlan, outcome: RoundOutcome, r: int, emitted: Emitted) -> RoundRecord:
    """Sequence r's part in a round: the real nodes of its tree, and what became of them."""
    tree = outcome.tree
    size = int(tree.sizes_R[r])
    tokens, parents, depths = (
        tuple(a[r, :size].tolist()) for a in (tree.tokens_RN, tree.parents_RN, tree.depths_RN)
    )
    return RoundRecord(
        mode=plan.mode,
        tokens=tokens,
        parents=parents,
        depths=depths,
        scores=tuple(tree.scores_RN[r, :size].tolist()),
        path=tuple(outcome.accepted.path_RP[r, : int(outcome.accepted.lengths_R[r])].tolist()),
        emitted=emitted.token_ids,
        would_commit=outcome.would_accept[r],
    )
