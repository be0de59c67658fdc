"""A draft tree in the terminal, with the committed path marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.text import Text
from rich.tree import Tree

from ddtree.engine.request import RoundRecord

__all__ = ["draw_tree", "most_branching"]

SHOWN_NODES = 40


def draw_tree(record: RoundRecord, decode: Callable[[Sequence[int]], str]) -> Tree:
    """The round's tree: each node's text and the probability of its whole path as the drafter saw it.

    Committed nodes are bold and carry a mark; of a large tree only the best nodes are shown, and all committed.
    """
    committed = set(record.path)
    shown = set(range(min(len(record.tokens), SHOWN_NODES))) | committed
    bonus = record.emitted[-1] if len(record.emitted) == len(record.path) else None
    branches: dict[int, Tree] = {}
    for node in sorted(shown):
        label = _label(record, node, decode, node in committed)
        branches[node] = Tree(label) if node == 0 else branches[record.parents[node]].add(label)
    if bonus is not None:
        text = Text(_quoted(decode([bonus])), style="bold cyan").append(
            "  chosen by the target itself", style="dim"
        )
        branches[record.path[-1]].add(text)
    hidden = len(record.tokens) - len(shown)
    if hidden:
        branches[0].add(Text(f"and {hidden} less probable nodes", style="dim"))
    return branches[0]


def most_branching(records: Sequence[RoundRecord]) -> RoundRecord | None:
    """The round that shows best what a tree is for: the longest path that leaves the drafter's first choices."""

    def gain(record: RoundRecord) -> tuple[bool, int]:
        return _leaves_the_spine(record), len(record.path)

    drafted = [record for record in records if len(record.tokens) > 1]
    return max(drafted, key=gain, default=None)


def _leaves_the_spine(record: RoundRecord) -> bool:
    """Whether a committed node is not its parent's best child. Children stand in best-first order."""
    first_child: dict[int, int] = {}
    for node in range(1, len(record.tokens)):
        first_child.setdefault(record.parents[node], node)
    return any(first_child[record.parents[node]] != node for node in record.path[1:])


def _label(record: RoundRecord, node: int, decode: Callable[[Sequence[int]], str], committed: bool) -> Text:
    text = _quoted(decode([record.tokens[node]]))
    if node == 0:
        return Text(text, style="bold").append("  anchor", style="dim")
    share = math.exp(record.scores[node])
    label = Text(("● " if committed else "○ ") + text, style="bold green" if committed else "")
    return label.append(f"  {share:.1%}", style="dim")


def _quoted(text: str) -> str:
    """Text with its spaces and line ends visible."""
    return "'" + text.replace("\n", "⏎").replace("\t", "⇥") + "'"
