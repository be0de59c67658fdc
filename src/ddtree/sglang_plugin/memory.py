"""A memory plan for DDTREE on one GPU: what stands where, and which fraction, context and request count fit.

SGLang splits a GPU in two: `mem_fraction_static` of it holds weights and the KV pool, the rest holds everything
else. Trees make the rest larger: logits of N rows a request, masks, and index tables of captured graphs, which
grow with requests x rows x context. When the rest is too small the server dies at start, in the middle of
capturing graphs, with a message that suggests the opposite of what would help. The sums follow the buffers that
SGLang 0.5.23 allocates; all are bytes, on one rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PAIR_BYTES", "Demand", "Plan", "plan_memory"]

RUNTIME = 3 * 2**30  # CUDA context, libraries' workspaces, allocator slack: what a bare server was seen to need
ACTIVATION_BYTES = 12  # bytes of activations for each hidden value of a prefill chunk, in half precision
PAIR_BYTES = 48  # of a rescored pair: edge, score, rank and token, each before and after they are sorted
SAFETY = 0.98  # of the GPU; the rest is lost to fragments


@dataclass(frozen=True, slots=True)
class Demand:
    """What a launch asks of one GPU.

    weights, drafter: bytes of both models. edges: bytes of the tables of the drafter's edge correction, and pairs:
    of candidates that it rescores in a round of one request; 0 without. kv_token: bytes of one token in target and
    drafter together. rows: rows verified for each request. horizon: drafted depths. requests, context:
    `--max-running-requests` and `--context-length`. graph_batch: the largest batch that graphs are captured for, 0
    without graphs.
    """

    weights: int
    drafter: int
    edges: int
    pairs: int
    kv_token: int
    rows: int
    horizon: int
    vocab_size: int
    hidden: int
    requests: int
    context: int
    prefill_chunk: int
    graph_batch: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a GPU's memory goes. fraction: what to pass as `--mem-fraction-static`. fitting: requests of the whole
    context that the KV pool holds at once. graph_indices: the largest table of captured graphs, for the note on
    it."""

    total: int
    weights: int
    drafter: int
    edges: int
    kv: int
    logits: int
    graph_indices: int
    masks: int
    pairs: int
    activations: int
    fraction: float
    tokens: int
    fitting: int

    @property
    def works(self) -> bool:
        """Whether one request of the whole context fits at all."""
        return self.fitting >= 1


def plan_memory(total: int, demand: Demand) -> Plan:
    """The plan for a GPU of `total` bytes."""
    batch = max(demand.requests, 1)
    # float32 logits of the target's rows, of the drafter's depths, and one more copy of the latter for its scores.
    logits = 4 * demand.vocab_size * batch * (demand.rows + 2 * demand.horizon)
    captured = demand.graph_batch * demand.rows
    graph_indices = 8 * captured * demand.context  # int64, one table of the longest context for each row
    masks = max(demand.graph_batch, batch) * demand.rows * (demand.context + demand.rows)
    pairs = PAIR_BYTES * batch * demand.pairs
    activations = RUNTIME + ACTIVATION_BYTES * demand.hidden * max(demand.prefill_chunk, batch * demand.rows)
    rest = logits + graph_indices + masks + pairs + activations
    static = max(int(total * SAFETY) - rest, 0)
    kv = max(static - demand.weights - demand.drafter - demand.edges, 0)
    tokens = kv // demand.kv_token
    # A running request reserves two windows beyond its text.
    fitting = tokens // (demand.context + 2 * demand.rows)
    return Plan(
        total=total,
        weights=demand.weights,
        drafter=demand.drafter,
        edges=demand.edges,
        kv=kv,
        logits=logits,
        graph_indices=graph_indices,
        masks=masks,
        pairs=pairs,
        activations=activations,
        fraction=int(100 * static / total) / 100,
        tokens=tokens,
        fitting=fitting,
    )
