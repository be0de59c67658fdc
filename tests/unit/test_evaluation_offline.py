"""What is measured from known answers is what the engine does, round by round: in float64 exactly, always."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.engine.request import Gathering
from ddtree.evaluation.answers import AnswerRequest, make_answers
from ddtree.evaluation.arms import Arm, arms_of
from ddtree.evaluation.calibration import no_calibration
from ddtree.evaluation.offline import measure_offline
from ddtree.evaluation.online import measure_online
from ddtree.models.block import draft_along, draft_hidden
from ddtree.models.dflash import DraftVocabulary
from ddtree.models.load import LoadedDrafter
from ddtree.ops import FULL_VIEW, View
from ddtree.speculation.plan import fixed_plan
from ddtree.training.acceptance import steps_by_budget
from tests.drafters import plain_forward
from tests.toys import random_tokens, top_candidates, toy_drafter, toy_edges, toy_target

WORDS, MASK, BLOCK = 12, 11, 6  # so few words that a random drafter is often right
PROMPTS = tuple(tuple(random_tokens(length, length, WORDS)) for length in (3, 9, 14))
BUDGETS = (1, 16, 40)
COUPLING = 1.25


def drafter_of(target, *, edges=False, mask_token_id=MASK, **options):
    model, vocabulary = toy_drafter(target, block_size=BLOCK, mask_token_id=mask_token_id, **options)
    return LoadedDrafter(model, vocabulary, toy_edges(vocabulary) if edges else None)


def asker(target, drafter, coupled):
    """The engine, asked as the online measurement asks it."""
    config = EngineConfig("tree", max_context=256, coupling=COUPLING if coupled else None)
    engine = BatchEngine(target, drafter, config, lambda tokens: "")

    def ask(prompt, params, arm):
        plan = fixed_plan(arm.mode, BLOCK, arm.budget or 1)
        gathering = Gathering(len(prompt), 0.0)
        for piece in engine.run(engine.fixed_job(prompt, params, plan, records=True)):
            gathering.add(piece, 0.0)
        return gathering.completion()

    return ask


def online(target, drafter, request, arms):
    """Rounds by arm, and the answer to each prompt, which all arms give."""
    rounds, told = {}, [set() for _ in request.prompts]
    for coupled in (True, False):
        some = [arm for arm in arms if arm.coupled == coupled]
        if some:
            found, answers = measure_online(asker(target, drafter, coupled), request, some, BLOCK)
            rounds |= found
            told = [a | b for a, b in zip(told, answers, strict=True)]
    assert all(len(answers) == 1 for answers in told)
    return rounds, [answers.pop() for answers in told]


def without_expected(rounds):
    return {
        arm: [[dataclasses.replace(one, expected=None) for one in answer] for answer in answers]
        for arm, answers in rounds.items()
    }


def check_equal(target, drafter, tmp_path, temperature, max_tokens=26):
    """Offline and online agree in every round of every arm; returns the rounds."""
    request = AnswerRequest(PROMPTS, max_tokens, temperature, seed=3)
    arms = arms_of(BUDGETS, temperature > 0, shadow=True)
    answers = make_answers(target, request, tmp_path, batch=3)
    rounds, told = online(target, drafter, request, arms)
    assert [answer.tokens for answer in answers] == told
    measured = measure_offline(target, {"it": drafter}, answers, request, arms, COUPLING)["it"]
    assert without_expected(measured.rounds) == {arm: [list(a) for a in found] for arm, found in rounds.items()}
    return measured.rounds


def mean(rounds):
    every = [one for answer in rounds for one in answer]
    return sum(one.committed for one in every) / len(every)


@pytest.mark.parametrize(
    ("view", "edges", "temperature"),
    [
        (FULL_VIEW, False, 0.0),
        (FULL_VIEW, True, 0.8),
        (View(window=7), True, 0.0),
        (View(window=7), False, 0.8),
        (View(causal=True), False, 0.0),
    ],
)
def test_offline_is_online(tmp_path, view, edges, temperature):
    target = toy_target("qwen3", vocabulary=WORDS)
    drafter = drafter_of(target, edges=edges, view=view, layer_ids=(2, 0))
    rounds = check_equal(target, drafter, tmp_path, temperature)
    assert mean(rounds["tree-40"]) > 1.15 * mean(rounds["chain"]), "trees that accept nothing test nothing"


def test_answers_that_end_by_themselves(tmp_path):
    """Where they do is inside a round. The mask token is a word like any other to the target: said, it counts."""
    free = toy_target("qwen3", vocabulary=WORDS)
    request = AnswerRequest(PROMPTS, 26)
    told = [answer.tokens for answer in make_answers(free, request, tmp_path, batch=4)]
    end = told[0][9]
    mask = next(token for token in told[0] if token != end)
    target = toy_target("qwen3", vocabulary=WORDS, eos_ids=(end,))
    drafter = drafter_of(target, mask_token_id=mask)
    rounds = check_equal(target, drafter, tmp_path, 0.0)
    assert sum(one.committed for one in rounds["tree-40"][0]) == told[0].index(end)
    assert mask in told[0][: told[0].index(end)]
    last = [answer[-1] for answer in rounds["tree-40"] if answer]
    assert any(one.committed < one.horizon + 1 and one.accepted == one.committed for one in last), "no bonus"


def test_an_answer_of_one_token_takes_no_round(tmp_path):
    free = toy_target("qwen3", vocabulary=WORDS)
    first = make_answers(free, AnswerRequest(PROMPTS, 4), tmp_path, batch=4)[0].tokens[0]
    target = toy_target("qwen3", vocabulary=WORDS, eos_ids=(first,))
    rounds = check_equal(target, drafter_of(target), tmp_path, 0.0)
    assert rounds["chain"][0] == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_reduced_vocabulary(tmp_path, temperature):
    """Columns are tokens only through the drafter's own map; what it cannot name it never drafts."""
    target = toy_target("qwen3", vocabulary=WORDS)
    model, whole = toy_drafter(target, block_size=BLOCK, mask_token_id=MASK)
    ids = torch.tensor([9, 0, 4, 7, 2, 10, 5])
    drafter = LoadedDrafter(model, DraftVocabulary(whole.embedding, whole.head[ids], len(ids), ids))
    rounds = check_equal(target, drafter, tmp_path, temperature)
    assert mean(rounds["tree-40"]) > 1.1


def test_several_drafters_share_one_pass(tmp_path, monkeypatch):
    """Each has its own layers, in its own order, and is measured as if it were alone."""
    target = toy_target("qwen3", vocabulary=WORDS)
    drafters = {
        "one": drafter_of(target, layer_ids=(2, 0)),
        "two": drafter_of(target, layer_ids=(1,), seed=5),
    }
    request = AnswerRequest(PROMPTS, 24)
    arms = arms_of(BUDGETS, False, False)
    answers = make_answers(target, request, tmp_path, batch=4)
    alone = {
        name: measure_offline(target, {name: drafter}, answers, request, arms, COUPLING)[name].rounds
        for name, drafter in drafters.items()
    }
    passes = []
    run = target.run
    monkeypatch.setattr(target, "run", lambda *a, **k: passes.append(1) or run(*a, **k))
    both = measure_offline(target, drafters, answers, request, arms, COUPLING)
    assert {name: found.rounds for name, found in both.items()} == alone
    assert len(passes) == len(answers)
    assert alone["one"] != alone["two"]


def test_passes_of_few_anchors_change_nothing(tmp_path, monkeypatch):
    target = toy_target("qwen3", vocabulary=WORDS)
    drafters = {"it": drafter_of(target, edges=True)}
    request = AnswerRequest(PROMPTS, 40, 0.8)
    arms = arms_of(BUDGETS, True, True)
    answers = make_answers(target, request, tmp_path, batch=4)
    whole = measure_offline(target, drafters, answers, request, arms, COUPLING)["it"]
    monkeypatch.setattr("ddtree.evaluation.offline.SCRATCH", {"cpu": 300_000})
    parts = measure_offline(target, drafters, answers, request, arms, COUPLING)["it"]
    assert parts.rounds.keys() == whole.rounds.keys()
    assert without_expected(parts.rounds) == without_expected(whole.rounds)
    torch.testing.assert_close(parts.calibration[True].sums_3DC, whole.calibration[True].sums_3DC)


def test_calibration_counts_what_could_be_drafted(tmp_path):
    """Anchors 0 to 18 of an answer of 20: a depth counts where a token stands and the round may reach it."""
    target = toy_target("qwen3", vocabulary=WORDS)
    drafter, request = drafter_of(target), AnswerRequest(PROMPTS[:1], 20)
    answers = make_answers(target, request, tmp_path, batch=1)
    found = measure_offline(target, {"it": drafter}, answers, request, [Arm("chain")], COUPLING)["it"]
    depths = found.calibration[True].depths()
    assert [d.depth for d in depths] == list(range(1, BLOCK))
    assert [d.count for d in depths] == [18, 17, 16, 15, 14]


def test_calibration_by_hand():
    """Two depths; three guesses of 0.95 of which two are right, one of 0.25 that is; one past the end."""
    calibration = no_calibration(2)
    probs_AD = torch.tensor([[0.95, 0.25], [0.95, 0.5], [0.95, 0.5]])
    tokens_AD = torch.tensor([[3, 4], [3, 4], [3, 4]])
    labels_AD = torch.tensor([[3, 4], [3, -1], [1, -1]])
    for some in (slice(0, 2), slice(2, 3)):
        calibration.add(probs_AD[some].log(), tokens_AD[some], labels_AD[some])
    first, second = calibration.depths()
    assert (first.depth, first.count, second.depth, second.count) == (1, 3, 2, 1)
    assert first.observed == pytest.approx(2 / 3)
    assert first.predicted == pytest.approx(0.95)
    assert first.error == pytest.approx(0.95 - 2 / 3)
    assert second.error == pytest.approx(0.75)
    assert [count for count, _, _ in first.bins] == [0] * 9 + [3]
    assert second.bins[2] == (1, pytest.approx(0.25), 1.0)


@pytest.mark.parametrize("view", [FULL_VIEW, View(window=4), View(causal=True), View(window=4, causal=True)])
@torch.inference_mode()
def test_a_block_along_a_sequence_is_the_served_block(view):
    """For every anchor and every size: rows past the size are not there."""
    target = toy_target()
    model, vocabulary = toy_drafter(target, view=view, block_size=5)
    text = random_tokens(17, 2)
    _, features_TF = plain_forward(target, text, model.spec.layer_ids)
    anchors_A = torch.tensor([1, 4, 4, 9, 15])
    sizes_A = torch.tensor([5, 5, 2, 1, 3])
    found = draft_along(model, vocabulary, torch.tensor(text), features_TF, anchors_A, sizes_A)
    for row, (anchor, size) in enumerate(zip(anchors_A.tolist(), sizes_A.tolist(), strict=True)):
        short = dataclasses.replace(model.spec, block_size=size)
        model.spec, whole = short, model.spec
        served = draft_hidden(
            model, vocabulary, features_TF[None, :anchor], torch.tensor(text[anchor : anchor + 1])
        )
        model.spec = whole
        torch.testing.assert_close(found[row, :size], served[0], rtol=1e-9, atol=1e-9)


def test_one_tree_holds_all_smaller_ones():
    """Steps cut out of the largest tree are those of trees built to each size."""
    logits = 2 * torch.randn(50, 5, 30, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    labels = logits.topk(4, dim=-1).indices.gather(-1, torch.randint(4, (50, 5, 1)))[..., 0]
    candidates = top_candidates(logits.log_softmax(-1).float(), 30)
    budgets = (None, 1, 2, 3, 7, 15, 64, 255, 256, 500)
    together = steps_by_budget(candidates, labels, budgets)
    for budget in budgets:
        alone = steps_by_budget(candidates, labels, (budget,))[budget]
        assert torch.equal(together[budget].committed_A, alone.committed_A), budget
        assert torch.equal(together[budget].drafted_A, alone.drafted_A), budget
        torch.testing.assert_close(together[budget].expected_A, alone.expected_A)
    lengths = [float(together[b].committed_A.double().mean()) for b in budgets[1:]]
    assert all(a <= b for a, b in pairwise(lengths))
    assert lengths[-1] > lengths[0]
