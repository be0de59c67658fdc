"""The torch side of an engine: its caches, and passes over them for whichever sequences are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.engine.config import EngineConfig
from ddtree.engine.hardware import available_memory
from ddtree.engine.memory import GIB, Footprint, MemoryPlan, plan_memory
from ddtree.models.dflash import DFlashModel
from ddtree.models.load import LoadedDrafter
from ddtree.models.pages import PagedCache, PageTable
from ddtree.models.target import TargetModel
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.drafter import DFlashDrafter
from ddtree.speculation.plan import RoundPlan
from ddtree.speculation.protocols import Drafter, Lengths
from ddtree.speculation.round import RoundOutcome, RoundState, run_round
from ddtree.speculation.verifier import TargetVerifier

__all__ = ["Drafters", "PageShape", "Runner", "batch_bucket", "fit", "footprint"]

BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def batch_bucket(sequences: int, device: torch.device, most: int) -> int:
    """Sequences of a pass, padding included. A GPU gets few different shapes; on a CPU padding only costs."""
    if device.type == "cpu":
        return sequences
    return min(next((bucket for bucket in BATCH_BUCKETS if bucket >= sequences), sequences), most)


@dataclass(frozen=True, slots=True)
class PageShape:
    """Pages of an engine. places: the most that one sequence may use."""

    pages: int
    page_size: int
    sequences: int
    places: int

    def table(self, device: torch.device) -> PageTable:
        return PageTable(self.pages, self.page_size, self.sequences, self.places, device)


@dataclass(frozen=True, slots=True)
class Drafters:
    """One drafter and its context, as decoding and as prefill see it: each names other sequences."""

    decode: Drafter
    prefill: Drafter


class Runner:
    """A target and a drafter, where there is one, over paged caches that live as long as the engine."""

    def __init__(self, target: TargetModel, loaded: LoadedDrafter | None, shape: PageShape) -> None:
        self.target = target
        self._decode_table, self._prefill_table = shape.table(target.device), shape.table(target.device)
        self._cache = target.new_paged_cache(self._decode_table)
        self._prefill_cache = self._cache.under(self._prefill_table)
        self._pools = [self._cache]
        self.drafters: Drafters | None = None
        if loaded is not None:
            context = loaded.model.new_paged_cache(self._decode_table)
            vocabulary = target.spec.vocab_size
            self.drafters = Drafters(
                DFlashDrafter(loaded, context, vocabulary),
                DFlashDrafter(loaded, context.under(self._prefill_table), vocabulary),
            )
            self._pools.append(context)

    @property
    def pools(self) -> Sequence[PagedCache]:
        """The caches, the target's first."""
        return self._pools

    def clear(self, pages: Sequence[int]) -> None:
        """Make pages ready for a new holder."""
        for pool in self._pools:
            pool.clear(pages)

    def prefill(
        self, parts: Sequence[Sequence[int]], firsts: Sequence[int], pages: Sequence[list[int]], context: bool
    ) -> Tensor:
        """Run parts of texts from their places `firsts` on. context: whether the drafter's is kept. Returns the
        hidden state after each part, [R, h]."""
        self._prefill_table.seat(pages)
        drafter = self.drafters.prefill if context and self.drafters is not None else None
        verifier = TargetVerifier(
            self.target, self._prefill_cache, () if drafter is None else drafter.feature_layers
        )
        lengths = Lengths(torch.tensor(list(firsts), device=self.target.device), tuple(firsts))
        done = verifier.prefill(parts, lengths)
        if drafter is not None:
            drafter.absorb(done.features_RNF, lengths, done.counts_R)
        return done.last_Rh

    def round(
        self,
        state: RoundState,
        plans: Sequence[RoundPlan],
        pages: Sequence[list[int]],
        chooser: Chooser,
        context: bool,
        clock: Callable[[], float],
    ) -> RoundOutcome:
        """One round of the sequences that hold these pages."""
        self._decode_table.seat(pages)
        drafter = self.drafters.decode if context and self.drafters is not None else None
        verifier = TargetVerifier(self.target, self._cache, () if drafter is None else drafter.feature_layers)
        return run_round(state, plans, drafter, verifier, chooser, clock)


def fit(
    target: TargetModel, drafter: LoadedDrafter | None, config: EngineConfig, plan: RoundPlan, places: int
) -> MemoryPlan:
    """The memory plan of an engine whose models are loaded."""
    available = available_memory(target.device)
    if config.memory_gib is not None:
        available = int(config.memory_gib * GIB)
    return plan_memory(
        footprint(target, None if drafter is None else drafter.model, target.device, target.dtype),
        available,
        plan=plan,
        sequences=config.max_sequences,
        places=places,
        page_size=config.page_size,
        pages=config.pages,
        prefill_chunk=config.prefill_chunk,
    )


def footprint(
    target: TargetModel, drafter: DFlashModel | None, device: torch.device, dtype: torch.dtype
) -> Footprint:
    """What the models weigh on a device. They may be laid out on the meta device: nothing is read."""
    decoder, features = target.spec.decoder, 0
    decoders, parameters = [decoder], list(target.parameters())
    if drafter is not None:
        decoders.append(drafter.spec.decoder)
        parameters += drafter.parameters()
        features = len(drafter.spec.layer_ids) * decoder.hidden
    # A GPU judges all nodes at once: scores in float32, noise and its sum in float64 beside the logits.
    judged = 20 if device.type == "cuda" else 0
    mask = decoder.heads // decoder.kv_heads * decoder.max_positions
    widest = 2 * decoder.intermediate + 8 * decoder.hidden + features + mask
    return Footprint(
        weights=sum(parameter.numel() for parameter in parameters) * dtype.itemsize,
        place=sum(2 * d.layers * d.kv_heads * d.head_dim for d in decoders) * dtype.itemsize,
        logits_row=target.spec.vocab_size * (dtype.itemsize + judged),
        prefill_row=widest * dtype.itemsize,
    )
