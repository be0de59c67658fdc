"""Acceptance from known answers, teacher-forced: one target pass an answer for any number of drafters and budgets.

A round at an anchor depends on nothing but the text before it, so every anchor of an answer is drafted at once and
the rounds that decoding would have taken are walked afterwards. Exact for greedy decoding, and for seeded sampling
too, since the answer was drawn with noise that can be drawn again. Rounds near the token limit draft shorter
blocks, as the engine's do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree.evaluation.answers import Answer, AnswerRequest
from ddtree.evaluation.arms import Arm, Round
from ddtree.evaluation.calibration import Calibration, no_calibration
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.noise import gumbel, seed_tensor
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.processors import draft_scores, row_params
from ddtree.speculation.rescoring import edge_count
from ddtree.training.acceptance import hidden_after, labels_after, offer, sharing, steps_by_budget
from ddtree.training.capture import causal_attend
from ddtree.tree import Candidates

__all__ = ["Measured", "measure_offline"]

# Bytes that the blocks of one pass may take besides the models.
SCRATCH = {"cpu": 2**28, "cuda": 2**32}


@dataclass(frozen=True, slots=True)
class Measured:
    """rounds: for each arm's name, the rounds of each answer. calibration: of coupled and of uncoupled drafts."""

    rounds: Mapping[str, list[tuple[Round, ...]]]
    calibration: Mapping[bool, Calibration]


@dataclass(frozen=True, slots=True)
class Ledger:
    """What rounds at the anchors of one answer would do, by (budget or None for the chain, coupled)."""

    committed: dict[tuple[int | None, bool], list[int]]
    drafted: dict[tuple[int | None, bool], list[int]]
    expected: dict[tuple[int | None, bool], list[float]]
    horizon: list[int]


@torch.inference_mode()
def measure_offline(
    target: TargetModel,
    drafters: Mapping[str, LoadedDrafter],
    answers: Sequence[Answer],
    request: AnswerRequest,
    arms: Sequence[Arm],
    coupling: float,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Measured]:
    """Rounds of every arm of every drafter through the answers. coupling: scale of coupled drafts."""
    widest = max(arm.budget for arm in arms)
    layers = sorted({layer for drafter in drafters.values() for layer in drafter.model.spec.layer_ids})
    found: dict[str, Measured] = {
        name: Measured(
            {arm.name: [] for arm in arms},
            {c: no_calibration(drafter.model.spec.block_size - 1) for c in {arm.coupled for arm in arms}},
        )
        for name, drafter in drafters.items()
    }
    for done, answer in enumerate(answers, start=1):
        tokens_T = torch.tensor([*answer.prompt, *answer.tokens], device=target.device)
        features = _features(target, tokens_T, layers)
        for name, drafter in drafters.items():
            own_TF = torch.cat([features[layer] for layer in drafter.model.spec.layer_ids], dim=-1)
            pass_ = _Pass(target, drafter, tokens_T, own_TF, answer, request, coupling, widest)
            ledger = pass_.ledger(arms, found[name].calibration)
            for arm in arms:
                found[name].rounds[arm.name].append(_walk(arm, ledger, len(answer.prompt)))
        report(done, len(answers))
    return found


def _features(target: TargetModel, tokens_T: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Outputs of some layers at every position, each [T, h]."""
    positions_1T = torch.arange(tokens_T.numel(), device=tokens_T.device)[None]
    _, features_1TF = target.run(tokens_T[None], positions_1T, causal_attend, layers)
    return dict(zip(layers, features_1TF[0].chunk(len(layers), dim=-1), strict=True))


@dataclass(frozen=True, slots=True)
class _Pass:
    """One drafter over one answer."""

    target: TargetModel
    drafter: LoadedDrafter
    tokens_T: Tensor
    features_TF: Tensor
    answer: Answer
    request: AnswerRequest
    coupling: float
    widest: int  # the largest budget

    def ledger(self, arms: Iterable[Arm], calibration: Mapping[bool, Calibration]) -> Ledger:
        """Draft at every anchor, some at a time, and judge each draft by the answer. Adds to the calibration."""
        first, depth = len(self.answer.prompt), self.drafter.model.spec.block_size - 1
        wanted: dict[bool, set[int | None]] = {}
        for arm in arms:
            wanted.setdefault(arm.coupled, {None}).add(arm.budget or None)
        keys = [(budget, coupled) for coupled, budgets in wanted.items() for budget in budgets]
        ledger = Ledger({k: [] for k in keys}, {k: [] for k in keys}, {k: [] for k in keys}, [])
        anchors = torch.arange(first, self.tokens_T.numel() - 1, device=self.tokens_T.device)
        passes = anchors.split(self._anchors_per_pass()) if anchors.numel() else ()
        for anchors_A in passes:
            # As the engine shortens its last rounds: a block must not overrun the limit.
            sizes_A = (self.request.max_tokens - (anchors_A - first + 1)).clamp(max=depth + 1)
            hidden_ADh = hidden_after(self.drafter, self.tokens_T, self.features_TF, anchors_A, sizes_A)
            logits_ADV = self.drafter.vocabulary.target_logits(hidden_ADh, self.target.spec.vocab_size)
            labels_AD = labels_after(self.tokens_T, anchors_A, depth)
            inside_AD = torch.arange(1, depth + 1, device=anchors_A.device) < sizes_A[:, None]
            ledger.horizon.extend((sizes_A - 1).tolist())
            for coupled, budgets in wanted.items():
                count = edge_count(max(budget or 1 for budget in budgets))
                ranked = self._ranked(logits_ADV, anchors_A, coupled, count)
                said_AD = labels_AD.masked_fill(~inside_AD, -1)
                calibration[coupled].add(ranked[1][..., 0], ranked[0][..., 0], said_AD)
                for group in sharing(budgets, self.drafter.edges is not None):
                    candidates = self._candidates(ranked, hidden_ADh, anchors_A, inside_AD, coupled, group)
                    for budget, step in steps_by_budget(candidates, labels_AD, group).items():
                        key = (budget, coupled)
                        committed, drafted = torch.stack([step.committed_A, step.drafted_A]).tolist()
                        ledger.committed[key] += committed
                        ledger.drafted[key] += drafted
                        ledger.expected[key] += step.expected_A.tolist()
        return ledger

    def _candidates(
        self,
        ranked: tuple[Tensor, Tensor],
        hidden_ADh: Tensor,
        anchors_A: Tensor,
        inside_AD: Tensor,
        coupled: bool,
        budgets: Collection[int | None],
    ) -> Candidates:
        """What rounds of some budgets build their trees from; nothing at depths that a round may not reach."""
        heat = self.request.temperature
        sharpness = 1 / (heat * (self.coupling if coupled else 1.0)) if heat else 1.0
        count = max(budget or 1 for budget in budgets)
        candidates = offer(self.drafter, ranked, hidden_ADh, self.tokens_T[anchors_A], count, sharpness)
        log_probs_ADSK = candidates.log_probs_RDSK.masked_fill(~inside_AD[..., None, None], -torch.inf)
        return replace(candidates, log_probs_RDSK=log_probs_ADSK)

    def _ranked(self, logits_ADV: Tensor, anchors_A: Tensor, coupled: bool, count: int) -> tuple[Tensor, Tensor]:
        """The best tokens of each position and their log-probabilities, as `Chooser` has them. [A, D, K] each."""
        ops = self.target.ops
        if not self.request.temperature:
            log_probs_ADK, tokens_ADK = ops.top_log_probs(logits_ADV, count)
            return tokens_ADK, log_probs_ADK
        anchors, depth, columns = logits_ADV.shape
        noise_MV = self._noise(logits_ADV, anchors_A).flatten(0, 1) if coupled else None
        params = row_params(
            [SamplingParams(temperature=self.request.temperature)], anchors * depth, logits_ADV.device
        )
        scores_MV = draft_scores(logits_ADV.flatten(0, 1), params, None, noise_MV, self.coupling)
        log_probs_ADK, tokens_ADK = ops.ranked(scores_MV.view(anchors, depth, columns), count)
        return tokens_ADK, log_probs_ADK

    def _noise(self, logits_ADV: Tensor, anchors_A: Tensor) -> Tensor:
        """The noise that the target draws each drafted position with. [A, D, V]."""
        seed = self.request.seed_of(self.answer.index)
        assert seed is not None, "what is sampled has a seed"
        device, depth = anchors_A.device, logits_ADV.shape[1]
        place_AD = anchors_A[:, None] - anchors_A[0] + torch.arange(depth, device=device)
        positions_P = anchors_A[0] + 1 + torch.arange(anchors_A.numel() - 1 + depth, device=device)
        vocabulary = self.target.spec.vocab_size
        noise_PV = gumbel(seed_tensor([seed], device), positions_P[None], vocabulary)[0]
        wide = logits_ADV.dtype if logits_ADV.dtype == torch.float64 else torch.float32
        return noise_PV.to(wide)[place_AD]

    def _anchors_per_pass(self) -> int:
        """As many anchors as the scratch memory allows: logits with their copies, each block's context, and what
        every candidate is worth after every other where there are edges."""
        model, spec = self.drafter.model, self.drafter.model.spec
        logits = 6 * 4 * (spec.block_size - 1) * self.target.spec.vocab_size
        row = spec.decoder.kv_heads * spec.decoder.head_dim * model.dtype.itemsize
        context = 4 * row * (self.tokens_T.numel() + spec.block_size)
        edges = 40 * (spec.block_size - 1) * self.widest**2 if self.drafter.edges is not None else 0
        return max(SCRATCH[self.tokens_T.device.type] // (logits + context + edges), 1)


def _walk(arm: Arm, ledger: Ledger, prompt: int) -> tuple[Round, ...]:
    """The rounds of an arm from the first anchor to the end of the answer."""
    tree = (arm.budget or None, arm.coupled)
    moves = (None, arm.coupled) if arm.mode == "shadow" else tree
    places = len(ledger.horizon)
    rounds: list[Round] = []
    place = 0
    while place < places:
        left = places - place
        rounds.append(
            Round(
                context=prompt + place,
                committed=min(ledger.committed[tree][place], left),
                accepted=min(ledger.committed[tree][place] - 1, left),
                drafted=ledger.drafted[tree][place],
                horizon=ledger.horizon[place],
                expected=ledger.expected[tree][place],
            )
        )
        place += ledger.committed[moves][place]
    return tuple(rounds)
