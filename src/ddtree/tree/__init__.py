"""The draft tree: its arrays, builders, ancestor masks and accept walk. Needs torch, knows no models."""

from ddtree.tree.accept import Accepted, accept, committed_tokens, cut
from ddtree.tree.build import build_reference, build_tree
from ddtree.tree.candidates import Candidates, edge_candidates, factorised_candidates
from ddtree.tree.layout import (
    ancestor_words,
    chain_words,
    clique_words,
    positions,
    unpack_words,
    word_count,
)
from ddtree.tree.spine import best_chain, spine_nodes, spine_tree, with_spine
from ddtree.tree.structure import ROW_BUCKETS, DraftTree, check_tree, first_nodes, row_bucket

__all__ = [
    "ROW_BUCKETS",
    "Accepted",
    "Candidates",
    "DraftTree",
    "accept",
    "ancestor_words",
    "best_chain",
    "build_reference",
    "build_tree",
    "chain_words",
    "check_tree",
    "clique_words",
    "committed_tokens",
    "cut",
    "edge_candidates",
    "factorised_candidates",
    "first_nodes",
    "positions",
    "row_bucket",
    "spine_nodes",
    "spine_tree",
    "unpack_words",
    "with_spine",
    "word_count",
]
