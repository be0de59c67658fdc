"""Sampled text follows the target's distribution: chi-square on the joint distribution of three tokens.

Twenty thousand seeds answer one prompt, as a batch, with a vocabulary of five. What is expected is computed from
the target's own logits for every sequence of three tokens. Samplers that are wrong on purpose must fail the same
test.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from ddtree.speculation.chooser import Chooser
from ddtree.speculation.noise import gumbel
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from ddtree.speculation.processors import target_scores
from ddtree.speculation.protocols import Lengths, Proposal
from ddtree.tree import accept, spine_tree
from tests.checkpoints import chain_rows
from tests.drafters import plain_forward, stage
from tests.toys import toy_target

ALPHA = 1e-4  # seeds are fixed, so a right sampler passes always or never
VOCABULARY, HORIZON, BUDGET = 5, 3, 6
SEEDS, WRONG_SEEDS = 20_000, 6_000
PROMPT = [1, 3, 0]
TRIPLES = list(itertools.product(range(VOCABULARY), repeat=3))
SETTINGS = {
    "T=1": {"temperature": 1.0},
    "all": {"temperature": 0.8, "top_k": 4, "presence_penalty": 0.9, "repetition_penalty": 1.2},
}
MODES = {"off": (1, 0), "chain": (HORIZON + 1, 1), "tree": (HORIZON + 1, BUDGET), "shadow": (HORIZON + 1, BUDGET)}


class Device(Chooser):
    """Takes a batch at once, as on devices other than a CPU: noise by the formula, every node judged together."""

    def first(self, logits_RV, history, lengths):
        # The first token is what follows a root that stands on the prompt's last token.
        root = spine_tree(torch.zeros_like(lengths.device_R), *torch.zeros(2, len(logits_RV), 0))
        before = Lengths(lengths.device_R - 1, tuple(n - 1 for n in lengths.host))
        return self.walk(root, logits_RV[:, None], history, before).bonus_R

    def walk(self, tree, logits_RNV, history, lengths):
        return self._walk_all(tree, logits_RNV, history, lengths)

    def _noise(self, lengths, offset, count):
        return gumbel(self._seeds_R, lengths.device_R[:, None] + offset + torch.arange(count), VOCABULARY)


class Lookalike:
    """A drafter that resembles the target: the target's own marginals after each anchor, and some noise."""

    feature_layers = ()

    def __init__(self, table_VDV: Tensor) -> None:
        self._table_VDV = table_VDV

    def propose(self, anchors_R, lengths, block_size):
        return Proposal(self._table_VDV[anchors_R][:, : block_size - 1])

    def absorb(self, features_RPF, lengths, counts_R):
        assert features_RPF.shape[-1] == 0


@cache
def target():
    return toy_target(layers=1, vocabulary=VOCABULARY, spread=0.2, seed=4)


@cache
def triple_logits():
    """The target's logits after the prompt, after one token more, after two, after three. [125, 4, V]."""
    texts = torch.tensor([[*PROMPT, *triple] for triple in TRIPLES])
    with torch.inference_mode():
        cache = target().new_cache(len(TRIPLES), texts.shape[1])
        hidden, _ = target()(chain_rows(texts, [0] * len(TRIPLES)), cache)
        logits = target().logits(hidden)[:, len(PROMPT) - 1 :]
    torch.testing.assert_close(logits[37], plain_forward(target(), texts[37].tolist())[0][-4:])
    return logits


def probabilities(scores: Tensor, settings: dict, said: tuple[int, ...]) -> Tensor:
    """One step's distribution, written out rule by rule."""
    scores = scores.clone()
    for token in {*PROMPT, *said}:
        factor = settings.get("repetition_penalty", 1.0)
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    for token in set(said):
        scores[token] -= settings.get("presence_penalty", 0.0)
    scores = scores / settings["temperature"]
    scores[scores < scores.sort().values[-settings.get("top_k", VOCABULARY)]] = -torch.inf
    return scores.softmax(0)


@cache
def expected(name: str) -> Tensor:
    """The probability of every sequence of three tokens: the target's softmax chain. [125]."""
    found = []
    for triple, logits in zip(TRIPLES, triple_logits(), strict=True):
        steps = [probabilities(logits[i], SETTINGS[name], triple[:i])[triple[i]] for i in range(3)]
        found.append(steps[0] * steps[1] * steps[2])
    found = torch.stack(found)
    torch.testing.assert_close(found.sum(), torch.ones((), dtype=found.dtype))
    return found


@cache
def table(noise: float = 0.3) -> Tensor:
    """What follows an anchor that is the first token, depth by depth. [V, D, V]."""
    probs = triple_logits().softmax(-1).view(*[VOCABULARY] * 3, 4, VOCABULARY)
    second = probs[:, 0, 0, 1]
    third = probs[:, :, 0, 2] * second[..., None]
    fourth = probs[:, :, :, 3] * third[..., None]
    marginals = torch.stack([second, third.sum(1), fourth.sum((1, 2))], dim=1)
    draw = torch.Generator().manual_seed(8)
    return marginals.log() + noise * torch.randn(marginals.shape, generator=draw, dtype=marginals.dtype)


@torch.inference_mode()
def sample(name, mode, *, chooser=Device, coupling=1.25, seeds=SEEDS, first_seed=0):
    """Three tokens for each seed, [seeds, 3], and how many tokens the first round committed on average."""
    params = [SamplingParams(seed=first_seed + seed, **SETTINGS[name]) for seed in range(seeds)]
    running = stage(
        target(),
        Lookalike(table()),
        [PROMPT] * seeds,
        params,
        chooser=chooser,
        coupling=coupling,
        horizon=HORIZON,
        capacity=len(PROMPT) + 2 * (HORIZON + 1) + BUDGET + HORIZON,
    )
    plan = fixed_plan(mode, *MODES[mode])
    said = [(anchor,) for anchor in running.state.anchors_R.tolist()]
    committed = []
    for _ in range(2):
        outcome = running.round(plan)
        said = [before + after for before, after in zip(said, outcome.committed, strict=True)]
        committed.append(sum(map(len, outcome.committed)) / seeds)
    return torch.tensor([tokens[:3] for tokens in said]), committed[0]


def p_value(said: Tensor, name: str) -> float:
    """Of the chi-square test; cells of fewer than five expected sequences are joined into one."""
    cells = (said * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(1)
    found, wanted = torch.bincount(cells, minlength=VOCABULARY**3), expected(name) * len(said)
    if bool((found[wanted == 0] > 0).any()):
        return 0.0
    rare = wanted < 5
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    keep = wanted > 0
    assert int(keep.sum()) > 30, "enough cells to see a dependence between positions"
    return float(stats.chisquare(found[keep].numpy(), wanted[keep].numpy()).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mode", ["off", "tree"])
def test_three_tokens_follow_the_distribution_of_the_target(name, mode):
    said, committed = sample(name, mode, first_seed={"off": 0, "tree": 2**40}[mode])
    assert p_value(said, name) > ALPHA
    assert committed > 1.5 or mode == "off"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_mode_draws_the_same(name):
    """One by one, as on a CPU, with rings of noise, with and without coupling: seed by seed the same tokens."""
    seeds = 150
    said, _ = sample(name, "tree", seeds=seeds)
    for mode, coupling in [("off", None), ("chain", 1.25), ("tree", 1.25), ("tree", None), ("shadow", 1.25)]:
        assert torch.equal(sample(name, mode, chooser=Chooser, coupling=coupling, seeds=seeds)[0], said)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_coupled_drafts_are_accepted_more_often_and_change_nothing(mode):
    seeds = 4000
    coupled, more = sample("T=1", mode, seeds=seeds)
    uncoupled, fewer = sample("T=1", mode, seeds=seeds, coupling=None)
    assert torch.equal(coupled, uncoupled)
    assert more > fewer + 0.3


# Samplers that are wrong on purpose


class SharedNoise(Device):
    """All depths of a round are judged with the noise of the first."""

    def _noise(self, lengths, offset, count):
        return super()._noise(lengths, offset, 1).expand(-1, count, -1)


class NoiseOneEarly(Device):
    """In a tree, a successor is drawn with the noise of its parent's position, which drew the parent already."""

    def _noise(self, lengths, offset, count):
        return super()._noise(lengths, offset - (count > 1), count)


class Greedy(Device):
    """The request's temperature is forgotten."""

    def _noise(self, lengths, offset, count):
        return torch.zeros_like(super()._noise(lengths, offset, count))


class DrawForEachSibling(Device):
    """A draw of its own for every sibling, then another for what follows the path."""

    def walk(self, tree, logits_RNV, history, lengths):
        scores_RNV = target_scores(logits_RNV.flatten(0, 1), self._row_params(tree.rows)).view(logits_RNV.shape)
        scores_RNV = scores_RNV.gather(1, tree.parents_RN[..., None].expand_as(scores_RNV))
        draw_RN = (scores_RNV + self._own_noise(tree, lengths, 1)).argmax(-1)
        choices_RN = (scores_RNV + self._own_noise(tree, lengths, 2)).argmax(-1)
        node_R = torch.zeros_like(lengths.device_R)
        for child in range(1, tree.rows):
            taken_R = tree.real_RN[:, child] & (tree.parents_RN[:, child] == node_R)
            taken_R &= draw_RN[:, child] == tree.tokens_RN[:, child]
            at_R1, token_R1 = node_R[:, None], tree.tokens_RN[:, child, None]
            choices_RN.scatter_(1, at_R1, torch.where(taken_R[:, None], token_R1, choices_RN.gather(1, at_R1)))
            node_R = torch.where(taken_R, child, node_R)
        return accept(tree, choices_RN)

    def _own_noise(self, tree, lengths, stream):
        """Noise of a node's own: of positions that no text reaches. [R, N, V]."""
        places_RN = 1000 * stream + 100 * lengths.device_R[:, None] + torch.arange(tree.rows)
        return gumbel(self._seeds_R, places_RN, VOCABULARY)


class NoAncestors(Device):
    """Penalties count the committed tokens alone."""

    def walk(self, tree, logits_RNV, history, lengths):
        scores_MV = target_scores(logits_RNV.flatten(0, 1), self._row_params(tree.rows), history.counts)
        noise_RPV = self._noise(lengths, 1, tree.horizon + 1)
        noise_RNV = noise_RPV.gather(1, tree.depths_RN[..., None].expand(-1, -1, VOCABULARY))
        return accept(tree, (scores_MV.view(noise_RNV.shape) + noise_RNV).argmax(-1))


@pytest.mark.parametrize(
    ("chooser", "name"),
    [
        (SharedNoise, "T=1"),
        (NoiseOneEarly, "T=1"),
        (Greedy, "T=1"),
        (DrawForEachSibling, "T=1"),
        (NoAncestors, "all"),
    ],
)
def test_a_wrong_sampler_fails_the_same_test(chooser, name):
    said, _ = sample(name, "tree", chooser=chooser, first_seed=2**40, seeds=WRONG_SEEDS)
    assert p_value(said, name) < ALPHA
