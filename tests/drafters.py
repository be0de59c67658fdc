"""An oracle for tests, and rounds by hand.

The oracle knows how each text goes on and is right, nearly right or wrong by a fixed rule: the true token is its
best guess at some positions, its second or third at others, and has no chance at the rest. Trees over it branch
and win, so what is wrong with branches shows. It also watches its own side of the contract: every round must find
in it the features of exactly the positions before the anchor, each handed over once and in order.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.engine.engine import BatchEngine
from ddtree.engine.request import Piece, RoundRecord
from ddtree.engine.runner import Drafters
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.drafter import DFlashDrafter
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import RoundPlan
from ddtree.speculation.protocols import Drafter, Lengths, Proposal
from ddtree.speculation.round import RoundOutcome, RoundState, run_round
from ddtree.speculation.verifier import TargetVerifier
from tests.checkpoints import chain_rows

LAYERS = (1, 0)  # feature layers of all drafters here, in an order that is not the layers' own
TRUE, DECOYS, BASE = 4.2, (4.8, 4.5), 0.3  # logits of the true token, of what is put before it, spread of the rest
PAST_THE_END = 64  # positions after a text for which there are guesses all the same


class OracleDrafter:
    """Drafts for sequences whose whole texts, prompts included, are known.

    chances: how often the true token is the first, second and third guess; in all other cases its logit is -inf.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        seed: int = 0,
        chances: tuple[float, ...] = (0.55, 0.25, 0.12),
        feature_layers: tuple[int, ...] = LAYERS,
    ) -> None:
        self._layers = feature_layers
        draw = random.Random(seed)
        self._logits = [_guesses(text, vocab_size, draw, chances) for text in texts]
        self._absorbed: list[list[Tensor]] = [[] for _ in texts]
        self.anchors: list[tuple[int, ...]] = []

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._layers

    def features(self, r: int = 0) -> Tensor:
        """Everything absorbed of sequence r so far, one row a position. [L, F]."""
        return torch.stack(self._absorbed[r])

    def propose(self, anchors_R: Tensor, lengths: Lengths, block_size: int) -> Proposal:
        assert lengths.device_R.tolist() == list(lengths.host)
        known = tuple(len(rows) for rows in self._absorbed)
        assert known == lengths.host, f"features of {known} positions before anchors at {lengths.host}"
        self.anchors.append(tuple(anchors_R.tolist()))
        blocks = zip(self._logits, lengths.host, strict=True)
        return Proposal(torch.stack([logits_LV[n + 1 : n + block_size] for logits_LV, n in blocks]))

    def absorb(self, features_RPF: Tensor, lengths: Lengths, counts_R: Tensor) -> None:
        for r, (first, count) in enumerate(zip(lengths.host, counts_R.tolist(), strict=True)):
            if first == 0:
                self._absorbed[r] = []
            assert first == len(self._absorbed[r]), "features follow those that are there, without gap or repeat"
            self._absorbed[r] += features_RPF[r, :count].clone()


def _guesses(text: Sequence[int], vocab_size: int, draw: random.Random, chances: tuple[float, ...]) -> Tensor:
    """Row p: logits of the token at position p. float64 [L, V]."""
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    shape = (len(text) + PAST_THE_END, vocab_size)
    logits_LV = BASE * torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = (*chances, 1 - sum(chances))
    for position, token in enumerate(text):
        rank = draw.choices(range(len(weights)), weights)[0]
        hidden = rank == len(chances)
        decoys = [other for other in draw.sample(range(vocab_size), 3) if other != token]
        for decoy, logit in zip(decoys[: len(DECOYS) if hidden else rank], DECOYS, strict=False):
            logits_LV[position, decoy] = logit
        logits_LV[position, token] = -torch.inf if hidden else TRUE
    return logits_LV


def draft_with(engine: BatchEngine, drafter: Drafter | Drafters) -> None:
    """Let an engine draft with something else than the model that it was made with."""
    engine.runner.drafters = drafter if isinstance(drafter, Drafters) else Drafters(drafter, drafter)


def pieces(engine: BatchEngine, prompt: Sequence[int], params: SamplingParams, plan: RoundPlan) -> list[Piece]:
    """A request from beginning to end, with records."""
    return list(engine.run(engine.fixed_job(prompt, params, plan, records=True)))


def tokens_of(answer: Sequence[Piece]) -> list[int]:
    return [token for piece in answer for token in piece.token_ids]


def records_of(answer: Sequence[Piece]) -> list[RoundRecord]:
    return [piece.record for piece in answer if piece.record is not None]


def has_gap(path: Sequence[int]) -> bool:
    """Whether rejected nodes lie between those of a committed path, so that commit has to move something."""
    return list(path) != list(range(len(path)))


@dataclass
class Stage:
    """R sequences between two rounds, without an engine around them."""

    verifier: TargetVerifier
    drafter: Drafter
    chooser: Chooser
    state: RoundState

    def round(self, plan: RoundPlan) -> RoundOutcome:
        outcome = run_round(self.state, plan, self.drafter, self.verifier, self.chooser)
        self.state = outcome.state
        return outcome

    def twin(self) -> Stage:
        """The same sequences at the same place, with caches of their own."""
        cache, layers = copy.deepcopy(self.verifier._cache), self.drafter.feature_layers
        verifier = TargetVerifier(self.verifier.model, cache, layers)
        return Stage(verifier, copy.deepcopy(self.drafter), self.chooser, self.state)


@torch.inference_mode()
def stage(
    target: TargetModel,
    drafter: LoadedDrafter | Drafter,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    coupling: float | None = 1.25,
    horizon: int = 7,
    capacity: int = 400,
    chooser: Callable[..., Chooser] = Chooser,
) -> Stage:
    """Prefill prompts of different lengths as one batch, padded on the right, and choose their first tokens."""
    sequences, longest = len(prompts), max(len(prompt) for prompt in prompts)
    if isinstance(drafter, LoadedDrafter):
        context = drafter.model.new_cache(sequences, capacity)
        drafter = DFlashDrafter(drafter, context, target.spec.vocab_size)
    cache = target.new_cache(sequences, capacity)
    counts_R = torch.tensor([len(prompt) for prompt in prompts])
    tokens_RN = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    rows = chain_rows(tokens_RN, [0] * sequences, torch.arange(longest) < counts_R[:, None])
    hidden_RNh, features_RNF = target(rows, cache, drafter.feature_layers)
    drafter.absorb(features_RNF, Lengths(torch.zeros_like(counts_R), (0,) * sequences), counts_R)
    picker = chooser(params, target.spec.vocab_size, target.ops, target.device, horizon, coupling)
    lengths = Lengths(counts_R, tuple(counts_R.tolist()))
    history = picker.begin(prompts)
    logits_RV = target.logits(hidden_RNh[torch.arange(sequences), counts_R - 1])
    anchors_R = picker.first(logits_RV, history, lengths)
    history = picker.extend(history, [(token,) for token in anchors_R.tolist()])
    verifier = TargetVerifier(target, cache, drafter.feature_layers)
    return Stage(verifier, drafter, picker, RoundState(anchors_R, lengths, history))


@torch.inference_mode()
def plain_forward(
    target: TargetModel, text: Sequence[int], feature_layers: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Logits and features of every position of a text, in one pass from nothing. [L, V], [L, F]."""
    rows = chain_rows(torch.tensor([list(text)]), [0])
    hidden_1Lh, features_1LF = target(rows, target.new_cache(1, len(text)), feature_layers)
    return target.logits(hidden_1Lh)[0], features_1LF[0]


class LibraryDrafter:
    """An oracle for batches whose requests come and go, before a real drafter whose context it keeps.

    It knows the answers of jobs by prompt and settings, and asks the engine which requests the rows belong to. The
    real drafter absorbs and proposes too, so that its pages are written as they are in earnest.
    """

    def __init__(self, engine: BatchEngine, real: Drafter, *, seed: int = 0) -> None:
        self._engine, self._real, self._seed = engine, real, seed
        self._logits: dict[tuple[tuple[int, ...], SamplingParams], Tensor] = {}
        self.proposals: list[int] = []  # sequences of each call

    def learn(self, prompt: Sequence[int], params: SamplingParams, answer: Sequence[int]) -> None:
        vocabulary = self._engine.target.spec.vocab_size
        draw = random.Random(self._seed + len(self._logits))
        guesses = _guesses([*prompt, *answer], vocabulary, draw, (0.55, 0.25, 0.12))
        self._logits[tuple(prompt), params] = guesses

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self._real.feature_layers

    def propose(self, anchors_R: Tensor, lengths: Lengths, block_size: int) -> Proposal:
        logits_RDV = self._real.propose(anchors_R, lengths, block_size).logits_RDV.clone()
        assert self._engine._batch is not None
        self.proposals.append(len(anchors_R))
        for r, member in enumerate(self._engine._batch.members):
            guesses = self._logits.get((tuple(member.job.prompt), member.job.params))
            if guesses is not None:
                place = lengths.host[r] + 1
                logits_RDV[r] = guesses[place : place + block_size - 1]
        return Proposal(logits_RDV)

    def absorb(self, features_RPF: Tensor, lengths: Lengths, counts_R: Tensor) -> None:
        self._real.absorb(features_RPF, lengths, counts_R)


def draft_from_library(engine: BatchEngine, seed: int = 0) -> LibraryDrafter:
    """Let an engine's rounds draft from a library, which is still empty."""
    drafters = engine.runner.drafters
    assert drafters is not None
    library = LibraryDrafter(engine, drafters.decode, seed=seed)
    engine.runner.drafters = Drafters(library, drafters.prefill)
    return library
