"""The contract: mode, budget, block size, drafter, coupling, batch and earlier requests never change what is said.

Toys in float64, so equal means equal. Plain decoding is held against a decoder written out here and against
transformers; every other mode is held against plain decoding. The oracle makes branches win, the random drafter
makes nearly every round reject everything.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from transformers import LlamaForCausalLM, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.models.block import block_tokens
from ddtree.models.load import LoadedDrafter, load_drafter
from ddtree.speculation.chooser import Chooser
from ddtree.speculation.drafter import DFlashDrafter
from ddtree.speculation.noise import gumbel, seed_tensor
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import RoundPlan, fixed_plan
from ddtree.speculation.protocols import Lengths, Proposal
from ddtree.tree import best_chain
from tests.checkpoints import (
    drafter_tensors,
    plain_draft,
    random_tree,
    target_config,
    target_tensors,
    write_drafter,
    write_folder,
)
from tests.drafters import (
    LAYERS,
    OracleDrafter,
    draft_with,
    has_gap,
    pieces,
    plain_forward,
    records_of,
    stage,
    tokens_of,
)
from tests.toys import MASK, VOCABULARY, random_tokens, toy_drafter, toy_target

FAMILIES = ("llama", "qwen3")
BUDGETS = (1, 4, 15, 16, 64)
BLOCKS = (2, 5, 8)
COUPLINGS = (1.25, None)
COUNT = 201  # tokens of an answer
PROMPT = random_tokens(12, 5)
OFF = fixed_plan("off", 1, 0)
SHAPES = [("chain", 1), *itertools.product(("tree", "shadow"), BUDGETS)]


class Automaton:
    """A pure constraint of 11 states; about two thirds of the vocabulary may follow each."""

    def start(self):
        return 4

    def allowed(self, state):
        return (torch.arange(VOCABULARY) * 7 + state) % 3 != 0

    def advance(self, state, token):
        assert bool(self.allowed(state)[token]), "only allowed tokens advance a constraint"
        return (3 * state + token + 1) % 11


# Each alone, then all together. The first three do nothing to a greedy request.
FILTERS = {"top_k": {"top_k": 7}, "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.08}}
OTHERS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.2},
    "bias": {"logit_bias": {3: 2.5, 7: -100.0, 11: 1.5}},
    "constraint": {"constraint": Automaton()},
}
ALONE = FILTERS | OTHERS
SETTINGS = {"plain": {}, **ALONE, "all": {key: value for one in ALONE.values() for key, value in one.items()}}


def settings(name: str, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=2**63 + 11, max_tokens=COUNT, **SETTINGS[name])


@cache
def target_of(family):
    return toy_target(family, layers=2)


@cache
def drafter_of(family):
    return LoadedDrafter(*toy_drafter(target_of(family), layers=1, layer_ids=LAYERS, block_size=8))


def new_engine(family, coupling=1.25, max_context=256, prefill_chunk=512):
    config = EngineConfig(max_context=max_context, coupling=coupling, prefill_chunk=prefill_chunk)
    return BatchEngine(target_of(family), drafter_of(family), config, lambda tokens: "")


# One engine answers hundreds of requests: what it kept of one would show in the next.
engine_of = cache(new_engine)


@cache
def plainly(family, name, temperature, count=COUNT):
    params = dataclasses.replace(settings(name, temperature), max_tokens=count)
    return tokens_of(pieces(engine_of(family), PROMPT, params, OFF))


def by_oracle(family, params, plan, expected, coupling=1.25, seed=0):
    """The answer with the oracle as drafter: its tokens, and the path of each round that drafted."""
    engine = engine_of(family, coupling)
    own = engine.runner.drafters
    draft_with(engine, OracleDrafter([[*PROMPT, *expected]], VOCABULARY, seed=seed))
    answer = pieces(engine, PROMPT, params, plan)
    draft_with(engine, own)
    return tokens_of(answer), [record.path for record in records_of(answer)]


# Plain decoding itself


def by_hand(family, params: SamplingParams, count: int) -> list[int]:
    """Step-by-step decoding as its definition says: the whole text anew for each token, one rule at a time."""
    target, said, state = target_of(family), [], None
    if params.constraint is not None:
        state = params.constraint.start()
    for _ in range(count):
        text = PROMPT + said
        scores = plain_forward(target, text)[0][-1].clone()
        for token, shift in params.logit_bias.items():
            scores[token] += shift
        for token in set(text):
            factor = params.repetition_penalty
            scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
        for token in set(said):
            scores[token] -= params.presence_penalty + params.frequency_penalty * said.count(token)
        if params.constraint is not None:
            scores[~params.constraint.allowed(state)] = -torch.inf
        if not params.greedy:
            scores = nucleus(scores / params.temperature, params)
            scores = scores + gumbel(seed_tensor([params.seed]), torch.tensor([[len(text)]]), VOCABULARY)[0, 0]
        said.append(int(scores.argmax()))
        if params.constraint is not None:
            state = params.constraint.advance(state, said[-1])
    return said


def nucleus(scores, params):
    """top-k, top-p, min-p, each on what the one before has left."""
    if params.top_k:
        scores[scores < scores.sort().values[-params.top_k]] = -torch.inf
    order = scores.argsort(descending=True).tolist()
    probs, mass = scores.softmax(0), 0.0
    for token in order:
        if mass >= params.top_p:
            scores[token] = -torch.inf
        mass += float(probs[token])
    probs = scores.softmax(0)
    scores[probs < params.min_p * probs.max()] = -torch.inf
    return scores


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("name", "temperature"), [("plain", 0), ("all", 0), ("plain", 1), ("top_p", 0.7), ("all", 0.7), ("all", 1)]
)
def test_plain_decoding_is_step_by_step_decoding(family, name, temperature):
    expected = by_hand(family, settings(name, temperature), 60)
    assert plainly(family, name, temperature)[:60] == expected
    assert len(set(expected)) > 10  # no loop of a few tokens


@pytest.fixture
def exact_norms(monkeypatch):
    """transformers takes norms in float32 whatever the model's dtype; float64 models are compared in float64."""
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):

        def forward(self, hidden_states):
            wide = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide

        monkeypatch.setattr(norm, "forward", forward)


@pytest.mark.parametrize(("family", "model"), [("llama", LlamaForCausalLM), ("qwen3", Qwen3ForCausalLM)])
def test_greedy_text_is_that_of_transformers(family, model, tmp_path, exact_norms):
    target = target_of(family)
    write_folder(tmp_path, target_config(target), target_tensors(target))
    theirs = model.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.tensor([PROMPT])
    output = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, eos_token_id=None
    )
    expected = output[0, len(PROMPT) :].tolist()
    assert len(expected) == COUNT
    assert plainly(family, "plain", 0) == expected
    params = settings("plain", 0)
    for mode, budget in [("chain", 1), ("tree", 16), ("shadow", 16)]:
        assert by_oracle(family, params, fixed_plan(mode, 8, budget), expected)[0] == expected


@pytest.mark.parametrize("name", ALONE)
def test_each_setting_changes_the_text(name):
    """Or the tests of equality below would say little about it."""
    assert plainly("llama", name, 1.0, 50) != plainly("llama", "plain", 1.0, 50)
    if name in OTHERS:
        assert plainly("llama", name, 0, 50) != plainly("llama", "plain", 0, 50)


# Every mode against plain decoding


def cases():
    """(family, settings, temperature). Settings alone meet both temperatures and both families, crosswise."""
    for family, temperature in itertools.product(FAMILIES, (0, 0.7, 1.0)):
        yield family, "plain", temperature
        yield family, "all", temperature
    for i, name in enumerate(ALONE):
        yield FAMILIES[i % 2], name, 0.7
        yield FAMILIES[(i + 1) % 2], name, 1.0
    for i, name in enumerate(OTHERS):
        yield FAMILIES[i % 2], name, 0


CASES = list(cases())


@pytest.mark.parametrize(("family", "name", "temperature"), CASES)
def test_every_mode_says_the_same(family, name, temperature):
    """Block sizes, coupling, and where the oracle errs change from case to case; a setting alone meets all budgets
    over its cases."""
    case = CASES.index((family, name, temperature))
    params, expected = settings(name, temperature), plainly(family, name, temperature)
    assert len(expected) == COUNT
    budgets = BUDGETS if name == "all" else {0: (16,), 0.7: (1, 15, 64), 1.0: (4, 16)}[temperature]
    shapes = [("tree", budget) for budget in budgets]
    if name in ("plain", "all") or temperature != 1.0:
        shapes += [("chain", 1), ("shadow", BUDGETS[case % len(BUDGETS)])]
    tried = []
    for i, (mode, budget) in enumerate(shapes):
        block = BLOCKS[(case + i) % 2 + 1] if budget > 4 else BLOCKS[(case + i) % 3]
        coupling = COUPLINGS[(case // 2 + i) % 2]
        said, paths = by_oracle(family, params, fixed_plan(mode, block, budget), expected, coupling, case)
        assert said == expected, (mode, budget, block, coupling)
        if mode == "tree" and budget > 4:
            tried += paths
    assert sum(has_gap(path) for path in tried) > 10
    assert sum(map(len, tried)) / len(tried) > 2  # a round commits as many tokens as its path has nodes
    if temperature == 0.7 and name in ALONE:
        engine, plan = engine_of(family, COUPLINGS[case % 2]), fixed_plan("tree", 8, 64)
        assert tokens_of(pieces(engine, PROMPT, params, plan)) == expected


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("family", "temperature"), [("qwen3", 0), ("llama", 1.0)])
def test_every_shape_says_the_same(family, temperature, block):
    """Every mode with every budget and block size; every second of them when sampling."""
    params, expected = settings("plain", temperature), plainly(family, "plain", temperature)
    some = slice(block % 2, None, 2) if temperature else slice(None)
    for i, (mode, budget) in list(enumerate(SHAPES))[some]:
        coupling = COUPLINGS[(i + block) % 2]
        said, paths = by_oracle(family, params, fixed_plan(mode, block, budget), expected, coupling, budget)
        assert said == expected, (mode, budget, coupling)
        assert max(map(len, paths)) <= block
        assert mode != "chain" or not any(has_gap(path) for path in paths)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "temperature"), [("plain", 0), ("all", 1.0)])
def test_a_useless_drafter_changes_nothing(family, name, temperature):
    """Random drafts, nearly all rejected: every mode and budget, and a prompt of more chunks than one."""
    params, expected = settings(name, temperature), plainly(family, name, temperature)
    engine = new_engine(family, prefill_chunk=5)
    assert tokens_of(pieces(engine, PROMPT, params, OFF)) == expected
    # The cases take turns: what one leaves out, another does.
    turn = 2 * FAMILIES.index(family) + (temperature > 0)
    for i, (mode, budget) in list(enumerate(SHAPES))[turn::4]:
        plan = fixed_plan(mode, BLOCKS[i % 3], budget)
        assert tokens_of(pieces(engine, PROMPT, params, plan)) == expected, (mode, budget)


# One request after another


@pytest.mark.parametrize("mode", ["off", "chain", "tree", "shadow"])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_nothing_of_a_request_reaches_the_next(mode, temperature):
    """Two on one engine, the second shorter: text, trees, scores and paths are those of a fresh engine."""
    plan = fixed_plan(mode, 8, 16)
    long = SamplingParams(temperature=temperature, seed=1, max_tokens=90, repetition_penalty=1.2)
    short = SamplingParams(temperature=temperature, seed=2, max_tokens=30, frequency_penalty=0.3)
    second = random_tokens(3, 8)
    used = new_engine("qwen3")
    pieces(used, random_tokens(40, 7), long, plan)
    assert pieces(used, second, short, plan) == pieces(new_engine("qwen3"), second, short, plan)


# Batches

PROMPTS = [random_tokens(count, 20 + count) for count in (5, 17, 11)]
MIXED = [
    SamplingParams(repetition_penalty=1.2, logit_bias={5: 1.0}),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, seed=6, top_k=9, constraint=Automaton()),
]


def texts_of(family, params):
    """Each prompt with its plain continuation."""
    engine = engine_of(family)
    answers = [
        tokens_of(pieces(engine, prompt, dataclasses.replace(one, max_tokens=60), OFF))
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    return [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]


@pytest.mark.parametrize("mode", ["chain", "tree", "shadow"])
@pytest.mark.parametrize("oracle", [True, False])
@pytest.mark.parametrize("params", [MIXED, [SamplingParams()] * 3], ids=["mixed", "greedy"])
@torch.inference_mode()
def test_a_batch_says_what_its_sequences_say_alone(mode, oracle, params):
    """Three sequences of different lengths, round by round: committed tokens, trees and paths are those of one."""
    target, texts = target_of("llama"), texts_of("llama", params)
    plan = fixed_plan(mode, 6, 12)

    def drafter(texts):
        return OracleDrafter(texts, VOCABULARY) if oracle else drafter_of("llama")

    together = stage(target, drafter(texts), PROMPTS, params)
    alone = []
    for r, (text, prompt, one) in enumerate(zip(texts, PROMPTS, params, strict=True)):
        alone.append(stage(target, drafter([text]), [prompt], [one]))
        if oracle:  # it errs where it errs in the batch
            alone[r].drafter._logits = [together.drafter._logits[r]]
    said = [[int(anchor)] for anchor in together.state.anchors_R]
    for _ in range(12):
        outcome = together.round(plan)
        for r, one in enumerate(alone):
            single = one.round(plan)
            assert outcome.committed[r] == single.committed[0]
            size = int(single.tree.sizes_R[0])
            for name in ("tokens_RN", "parents_RN", "depths_RN"):
                batched, by_itself = getattr(outcome.tree, name)[r], getattr(single.tree, name)[0]
                assert torch.equal(batched[:size], by_itself[:size])
            assert int(outcome.tree.sizes_R[r]) == size
            if mode == "shadow":
                assert outcome.would_accept[r] == single.would_accept[0]
            said[r] += outcome.committed[r]
    for prompt, text, tokens in zip(PROMPTS, texts, said, strict=True):
        assert tokens[: len(text) - len(prompt)] == text[len(prompt) :][: len(tokens)]


# Two walks


class AllAtOnce(Chooser):
    """Judges every node at once, as other devices do."""

    def walk(self, tree, logits_RNV, history, lengths):
        return self._walk_all(tree, logits_RNV, history, lengths)


FREE = {name: one for name, one in SETTINGS.items() if name != "constraint"}
FREE["all"] = {key: value for key, value in SETTINGS["all"].items() if key != "constraint"}


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 700])
@pytest.mark.parametrize("sharp", [0.2, 4.0])
def test_both_walks_take_the_same_path(temperature, vocabulary, sharp):
    """Random logits over random trees, one sequence for each setting; siblings and cousins repeat tokens."""
    params = [SamplingParams(temperature=temperature, seed=i, **one) for i, one in enumerate(FREE.values())]
    # A greedy and a sampled request in one batch, whatever the temperature.
    params += [SamplingParams(), SamplingParams(temperature=1.3, seed=9)]
    sequences = len(params)
    chooser = Chooser(params, vocabulary, target_of("llama").ops, torch.device("cpu"), 6, 1.25)
    prompts = [random_tokens(10 + r, r) for r in range(sequences)]
    lengths = Lengths(torch.tensor([len(p) for p in prompts]), tuple(len(p) for p in prompts))
    history = chooser.extend(chooser.begin(prompts), [random_tokens(r, 50 + r) for r in range(1, sequences + 1)])
    longest = 0
    for seed in range(6):
        tree = random_tree([24 - r for r in range(sequences)], 24, seed)
        draw = torch.Generator().manual_seed(seed)
        logits = sharp * torch.randn(*tree.tokens_RN.shape, vocabulary, generator=draw, dtype=torch.float64)
        logits = liked(tree, logits, draw)
        steps = chooser._walk_steps(tree, logits, history, lengths)
        every = chooser._walk_all(tree, logits, history, lengths)
        assert torch.equal(steps.path_RP, every.path_RP)
        assert torch.equal(steps.lengths_R, every.lengths_R)
        assert torch.equal(steps.bonus_R, every.bonus_R)
        longest = max(longest, int(steps.lengths_R.max()))
    assert longest >= 4


def liked(tree, logits_RNV, draw):
    """Let the target like one child of most nodes, so that paths go deep."""
    for r, size in enumerate(tree.sizes_R.tolist()):
        for node in range(1, size):
            if float(torch.rand(1, generator=draw)) < 0.5:
                logits_RNV[r, tree.parents_RN[r, node], tree.tokens_RN[r, node]] += 12
    return logits_RNV


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("temperature", [0, 1.0])
@torch.inference_mode()
def test_the_walk_of_other_devices_says_the_same(name, temperature):
    params = SamplingParams(temperature=temperature, seed=4, **FREE[name])
    expected = tokens_of(pieces(engine_of("qwen3"), PROMPT, dataclasses.replace(params, max_tokens=80), OFF))
    drafter = OracleDrafter([PROMPT + expected], VOCABULARY)
    running = stage(target_of("qwen3"), drafter, [PROMPT], [params], chooser=AllAtOnce)
    said = running.state.anchors_R.tolist()
    while len(said) < len(expected):
        said += running.round(fixed_plan("tree", 8, 16)).committed[0]
    assert said[: len(expected)] == expected


@pytest.mark.parametrize("count", [1, 4])
def test_noise_of_a_ring_is_the_noise_of_other_devices(count):
    params = [SamplingParams(temperature=1, seed=seed) for seed in (3, 2**64 - 5)]
    chooser = Chooser(params, VOCABULARY, target_of("llama").ops, torch.device("cpu"), 6, None)
    lengths = Lengths(torch.tensor([9, 40]), (9, 40))
    positions = torch.tensor([[9], [40]]) + 1 + torch.arange(count)
    assert torch.equal(chooser._noise(lengths, 1, count), gumbel(seed_tensor([3, -5]), positions, VOCABULARY))


# A spine is the chain


class Sure:
    """An oracle that is sure of its first guess, so that the best tree of D nodes is the chain of D tokens."""

    def __init__(self, oracle: OracleDrafter) -> None:
        self._oracle = oracle
        self.feature_layers = oracle.feature_layers
        self.absorb = oracle.absorb

    def propose(self, anchors_R, lengths, block_size):
        logits_RDV = self._oracle.propose(anchors_R, lengths, block_size).logits_RDV
        best_RD1 = logits_RDV.argmax(dim=-1, keepdim=True)
        return Proposal((0.1 * logits_RDV.nan_to_num(neginf=-9)).scatter(2, best_RD1, 20.0))


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("block", [2, 5, 8])
@torch.inference_mode()
def test_a_tree_that_is_a_spine_behaves_bit_for_bit_like_the_chain(temperature, block):
    family, name = "llama", "plain"
    expected, params = plainly(family, name, temperature), settings(name, temperature)

    def start():
        oracle = Sure(OracleDrafter([PROMPT + expected], VOCABULARY))
        running = stage(target_of(family), oracle, [PROMPT], [params], coupling=None)
        return running, spied(running.verifier)

    (chain, chain_logits), (tree, tree_logits) = start(), start()
    deepest = 0
    for _ in range(30):
        one, other = chain.round(fixed_plan("chain", block, 1)), tree.round(fixed_plan("tree", block, block - 1))
        assert one.committed == other.committed
        for field in dataclasses.fields(one.tree):
            ours, theirs = getattr(one.tree, field.name), getattr(other.tree, field.name)
            assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert torch.equal(one.accepted.path_RP, other.accepted.path_RP)
        assert torch.equal(chain_logits[-1], tree_logits[-1])
        caches = [running.verifier._cache for running in (chain, tree)]
        assert torch.equal(caches[0].keys[:, :-1], caches[1].keys[:, :-1])  # the last slot is the bin
        assert torch.equal(caches[0].values[:, :-1], caches[1].values[:, :-1])
        deepest = max(deepest, len(one.committed[0]))
    assert 1 < deepest <= block
    assert torch.equal(chain.drafter._oracle.features(), tree.drafter._oracle.features())


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_ties_do_not_tell_the_chain_from_the_tree(temperature):
    """bfloat16 drafts tie at the top now and then: a chain's tokens are still those of the spine of every tree."""
    params = SamplingParams(temperature=temperature, seed=1)
    chooser = Chooser([params], 700, target_of("llama").ops, torch.device("cpu"), 64, None)
    lengths, history = Lengths(torch.tensor([9]), (9,)), chooser.begin([[1]])
    draw = torch.Generator().manual_seed(3)
    for _ in range(10):
        logits = (3 * torch.randn(1, 64, 700, generator=draw)).bfloat16()
        chain, _ = best_chain(chooser.candidates(Proposal(logits), history, lengths, 1))
        for budget in BUDGETS:
            tokens, _ = best_chain(chooser.candidates(Proposal(logits), history, lengths, budget))
            assert torch.equal(tokens, chain)


def spied(verifier):
    """The logits of every verification to come."""
    seen, verify = [], verifier.verify

    def watched(tree, lengths):
        verification = verify(tree, lengths)
        seen.append(verification.logits_RNV)
        return verification

    verifier.verify = watched
    return seen


# Features


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "budgets"), [("chain", (1,)), ("tree", BUDGETS), ("shadow", BUDGETS)])
def test_the_features_absorbed_are_those_of_a_plain_forward(family, mode, budgets):
    """At every width, over prompt chunks and branches, in rounds cut short at the end of the context."""
    engine = new_engine(family, max_context=len(PROMPT) + 70, prefill_chunk=5)
    expected = plainly(family, "plain", 0)[:70]
    wanted = plain_forward(target_of(family), PROMPT + expected, LAYERS)[1]
    for budget in budgets:
        oracle = OracleDrafter([PROMPT + expected], VOCABULARY)
        draft_with(engine, oracle)
        answer = pieces(engine, PROMPT, settings("plain", 0), fixed_plan(mode, 8, budget))
        assert tokens_of(answer) == expected
        assert answer[-1].finish_reason == "length"
        features = oracle.features()
        # All but the last token, which was chosen and never run.
        assert len(features) == len(wanted) - 1
        torch.testing.assert_close(features, wanted[:-1], rtol=0, atol=1e-12)
        text = PROMPT + expected
        assert [anchor for (anchor,) in oracle.anchors] == [text[n] for n in anchor_places(answer)]


def anchor_places(answer):
    """Where the anchors of the rounds that drafted stood."""
    place = len(PROMPT)
    for piece in answer[1:]:
        if len(piece.record.tokens) > 1:
            yield place
        place += len(piece.token_ids)


def test_a_block_is_the_anchor_and_masks():
    assert block_tokens(torch.tensor([7, MASK]), 4, MASK).tolist() == [[7, MASK, MASK, MASK], [MASK] * 4]


def test_drafts_are_those_of_a_plain_drafter_on_plain_features(tmp_path, monkeypatch):
    """In the middle of a request, after branches were taken: an independent drafter gets the anchor, masks and the
    features of a plain forward, and proposes the same logits."""
    target = toy_target("llama")
    drafter = load_drafter(write_drafter(tmp_path), target)
    seen = []
    propose = DFlashDrafter.propose

    def watched(self, anchors_R, lengths, block_size):
        proposal = propose(self, anchors_R, lengths, block_size)
        seen.append((int(anchors_R), lengths.host[0], block_size, proposal.logits_RDV[0]))
        return proposal

    monkeypatch.setattr(DFlashDrafter, "propose", watched)
    engine = BatchEngine(target, drafter, EngineConfig(mode="tree", budget=64, max_context=64), lambda tokens: "")
    answer = pieces(engine, PROMPT, SamplingParams(max_tokens=30), engine.plan)
    assert any(has_gap(record.path) for record in records_of(answer))
    text = PROMPT + tokens_of(answer)
    features = plain_forward(target, text, (0, 2))[1]
    tables = (target.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    for anchor, length, block, logits in [seen[0], seen[len(seen) // 2], seen[-1]]:
        assert anchor == text[length]
        wanted = plain_draft(drafter_tensors(), features[:length], anchor, *tables, block_size=block)
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-9)


# Branches move keys and values


@torch.inference_mode()
def test_after_a_branch_the_cache_is_that_of_a_plain_prefill():
    """Every committed place holds the key and value that a plain pass over the text puts there."""
    family, name = "qwen3", "plain"
    text = PROMPT + plainly(family, name, 0)
    running = stage(target_of(family), OracleDrafter([text], VOCABULARY), [PROMPT], [settings(name, 0)])
    gaps = 0
    for _ in range(20):
        outcome = running.round(fixed_plan("tree", 8, 16))
        gaps += has_gap(outcome.accepted.path_RP[0, : int(outcome.accepted.lengths_R[0])].tolist())
    assert gaps > 3
    length = running.state.lengths.host[0]
    # A second stage that has the text as its prompt.
    whole = stage(target_of(family), OracleDrafter([text], VOCABULARY), [text[:length]], [settings(name, 0)])
    for pool in ("keys", "values"):
        found, wanted = (getattr(s.verifier._cache, pool)[:, :length] for s in (running, whole))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_shadow_commits_the_chain_and_tells_what_the_tree_would_have():
    """From the same state, the same drafts: shadow's path is the chain's, its record is the tree's."""
    family, name = "llama", "all"
    expected, params = plainly(family, name, 0.7), settings(name, 0.7)
    oracle = OracleDrafter([PROMPT + expected], VOCABULARY)
    running = stage(target_of(family), oracle, [PROMPT], [params])
    better = 0
    for _ in range(25):
        outcomes = {}
        for mode in ("chain", "tree", "shadow"):
            outcomes[mode] = running.twin().round(fixed_plan(mode, 8, 16))
        running.round(fixed_plan("shadow", 8, 16))
        assert outcomes["shadow"].committed == outcomes["chain"].committed
        assert outcomes["shadow"].would_accept == (len(outcomes["tree"].committed[0]),)
        better += outcomes["shadow"].would_accept[0] > len(outcomes["shadow"].committed[0])
    assert better > 5


def test_plans_are_cut_where_the_answer_ends():
    """A round may draft no deeper than the tokens that may still come, its bonus counted."""
    plan = RoundPlan("tree", 8, 16)
    assert [plan.within(left).horizon for left in (1, 2, 5, 8, 9, 100)] == [0, 1, 4, 7, 7, 7]
    assert plan.within(1) == RoundPlan("off", 1, 0)
