"""Requests on their way, and the batch that those in the decoding phase form between two changes of its
members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddtree.engine.output import Output
from ddtree.engine.request import Completion, Gathering, Job, Piece
from ddtree.engine.scheduler import Track
from ddtree.errors import DDTreeError
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.history import History, joined_histories
from ddtree.speculation.plan import PLAIN, RoundPlan
from ddtree.speculation.protocols import Lengths
from ddtree.speculation.round import RoundState

__all__ = ["Batch", "Live", "regrouped"]


@dataclass(eq=False, slots=True)
class Live:
    """A request that has not ended. chooser and history are its own, whatever batch it is in; history is None
    until the first token is chosen. plan: of its next round."""

    job: Job
    track: Track
    output: Output
    chooser: Chooser
    gathering: Gathering
    on_piece: Callable[[Piece], None]
    on_end: Callable[[Completion | DDTreeError], None]
    history: History | None = None
    plan: RoundPlan = PLAIN

    def room(self, max_context: int) -> int:
        """How many tokens still fit into the context after the anchor."""
        return max_context - self.track.computed - 1


class Batch:
    """Members, in order, and where they stand. Padding stands behind them: it has no pages and says nothing."""

    def __init__(self, members: Sequence[Live], size: int, nobody: Chooser) -> None:
        self.members = tuple(members)
        self.padding = size - len(members)
        histories = [member.history for member in members if member.history is not None]
        assert len(histories) == len(members), "only requests with an anchor are decoded"
        if size == 1:
            self.chooser, history = members[0].chooser, histories[0]
        else:
            self.chooser = Chooser.joined([*(m.chooser for m in members), *[nobody] * self.padding])
            history = joined_histories([*histories, *[History(None, (None,))] * self.padding])
        device = nobody.device
        host = (*(member.track.computed for member in members), *[0] * self.padding)
        anchors = [*(member.track.tokens[-1] for member in members), *[0] * self.padding]
        lengths = Lengths(torch.tensor(host, device=device), host)
        self.state = RoundState(torch.tensor(anchors, device=device), lengths, history)

    def plans(self) -> tuple[RoundPlan, ...]:
        plans = [member.plan for member in self.members]
        return (*plans, *plans[-1:] * self.padding)

    def pages(self) -> list[list[int]]:
        return [*(member.track.pages for member in self.members), *[[] for _ in range(self.padding)]]

    def part(self) -> None:
        """Give every member its own history back, before another batch is formed."""
        for r, member in enumerate(self.members):
            member.history = self.state.history.of(r)


def regrouped(current: Batch | None, members: Sequence[Live], size: int, nobody: Chooser) -> Batch:
    """The batch of these members: the current one, unless somebody came or went. nobody: padding's chooser."""
    if current is not None:
        if list(current.members) == list(members):
            return current
        current.part()
    return Batch(members, size, nobody)
