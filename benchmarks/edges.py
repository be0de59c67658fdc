"""What edge correction costs a round on this machine.

    python benchmarks/edges.py --out benchmarks/results/edges.json

Medians of repeated calls with one thread: the edges of one round's candidates, the candidates rescored with them,
and the tree, beside a tree from candidates that are guessed independently.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from common import write_result

from ddtree import LLM
from ddtree.models.hub import locate
from ddtree.models.load import load_drafter
from ddtree.models.shipped import drafter_folder
from ddtree.tree import build_tree, edge_candidates, factorised_candidates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(dtype="bfloat16", device="cpu")
    target = llm.engine.target
    drafter = load_drafter(drafter_folder(None, locate(llm.name)), target)
    assert drafter.edges is not None, "the shipped drafter has edges"
    edges, depth, hidden = drafter.edges, drafter.model.spec.block_size - 1, target.spec.decoder.hidden
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for budget in options.budget:
        tokens_RDK = torch.randint(target.spec.vocab_size, (1, depth, budget), generator=generator)
        state_RDh = torch.randn(1, depth, hidden, generator=generator).bfloat16()
        log_probs_RDK = (3 * torch.randn(1, depth, budget, generator=generator)).log_softmax(-1)
        log_probs_RDK = log_probs_RDK.sort(descending=True).values
        anchors_R = torch.tensor([5])
        with torch.inference_mode():
            added_RDKK = edges(anchors_R, tokens_RDK, state_RDh)
            rescored = edge_candidates(tokens_RDK, log_probs_RDK, added_RDKK)
            plain = factorised_candidates(tokens_RDK, log_probs_RDK)
            calls = {
                "edges_ms": partial(edges, anchors_R, tokens_RDK, state_RDh),
                "rescore_ms": partial(edge_candidates, tokens_RDK, log_probs_RDK, added_RDKK),
                "tree_ms": partial(build_tree, rescored, anchors_R, budget),
                "tree_without_ms": partial(build_tree, plain, anchors_R, budget),
            }
            rows[str(budget)] = {name: timed(call, options.repeats) for name, call in calls.items()}
        print(budget, rows[str(budget)])
    write_result(options.out, {"drafter": llm.drafter_name, "depth": depth, "budgets": rows})


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, after some that do not count."""
    spent = []
    for repeat in range(repeats + 10):
        began = time.perf_counter()
        call()
        if repeat >= 10:
            spent.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(spent), 3)


if __name__ == "__main__":
    main()
