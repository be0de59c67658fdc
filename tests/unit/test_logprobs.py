"""Log-probabilities: those of plain decoding, for every token that was said, in every mode and in batches."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.engine.logprobs import token_logprobs
from ddtree.engine.request import Job
from ddtree.errors import RequestError
from ddtree.ops import reference_ops, select_ops
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import ALGORITHMS, FixedPolicy, fixed_plan
from tests.drafters import draft_from_library, pieces, plain_forward, tokens_of
from tests.soak import BLOCK, END, PLAIN, models, new_engine
from tests.toys import VOCABULARY, random_tokens

MODES = tuple(ALGORITHMS)
PROMPT = random_tokens(12, 4)


def plainly(target, prompt, said):
    """Log-softmax of a plain forward at the place before each said token. float64 [L, V]."""
    logits_LV = plain_forward(target, [*prompt, *said[:-1]])[0]
    return logits_LV[len(prompt) - 1 :].log_softmax(dim=-1)


def check(found, said, wanted_LV, top):
    assert len(found) == len(said)
    for one, token, wanted_V in zip(found, said, wanted_LV, strict=True):
        assert one.token_id == token
        assert one.logprob == pytest.approx(float(wanted_V[token]), abs=1e-9)
        assert len(one.top) == top
        best = wanted_V.topk(top)
        assert [pair[0] for pair in one.top] == best.indices.tolist()
        assert [pair[1] for pair in one.top] == pytest.approx(best.values.tolist(), abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "top"),
    [
        ({}, 3),
        ({"temperature": 0.9, "seed": 4, "top_k": 8}, 0),
        ({"logit_bias": {5: 9.0}, "repetition_penalty": 1.3}, 20),
    ],
)
def test_log_probabilities_are_those_of_the_target_itself(mode, settings, top):
    """Whatever the request's settings do to the choice; mid-path tokens as well as the first and the bonus."""
    target, drafter = models()
    params = SamplingParams(max_tokens=40, ignore_eos=True, **settings)
    said = tokens_of(pieces(new_engine(target, None, mode="off"), PROMPT, params, PLAIN))
    engine = new_engine(target, drafter, max_sequences=3)
    library = draft_from_library(engine)
    library.learn(PROMPT, params, said)
    got, others = [], []
    # Neighbours: other rows of the same batch, one with log-probabilities of its own.
    for prompt, logprobs in ((random_tokens(20, 1), None), (random_tokens(5, 2), 1)):
        job = Job(
            prompt,
            SamplingParams(max_tokens=45, ignore_eos=True),
            FixedPolicy(fixed_plan("tree", 4, 5)),
            logprobs=logprobs,
        )
        engine.add(job, others.append, lambda end: None)
    job = Job(PROMPT, params, FixedPolicy(fixed_plan(mode, BLOCK, 16)), logprobs=top)
    engine.add(job, got.append, lambda end: None)
    while engine.busy:
        engine.step()
    assert tokens_of(got) == said
    assert mode == "off" or max(len(piece.token_ids) for piece in got) > 3
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in got)
    check([one for piece in got for one in piece.logprobs], said, plainly(target, PROMPT, said), top)
    assert {piece.logprobs is None for piece in others} == {True, False}


def test_a_path_that_is_cut_has_none_for_what_is_not_said():
    target, drafter = models()
    engine = new_engine(target, drafter)
    library = draft_from_library(engine)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    text = tokens_of(pieces(engine, PROMPT, long, PLAIN))
    params = SamplingParams(stop_token_ids=[text[11]], ignore_eos=True)
    library.learn(PROMPT, params, text)
    job = Job(PROMPT, params, FixedPolicy(fixed_plan("tree", BLOCK, 32)), logprobs=2)
    answer = list(engine.run(job))
    said = tokens_of(answer)
    assert said == text[: text.index(text[11]) + 1]
    check([one for piece in answer for one in piece.logprobs], said, plainly(target, PROMPT, said), 2)


@pytest.mark.parametrize("ops", [select_ops(torch.device("cpu")), reference_ops()])
def test_ties_stand_in_the_order_of_their_ids(ops):
    logits = torch.zeros(1, 8)
    logits[0, [2, 5, 6]] = 3.0
    (one,) = token_logprobs(logits, [5], 3, ops)
    assert one.logprob == pytest.approx(-math.log(3 + 5 * math.exp(-3)))
    assert [token for token, _ in one.top] == [2, 5, 6]
    assert {value for _, value in one.top} == {one.logprob}


def test_a_sure_token_has_probability_one_and_others_do_not():
    logits = torch.full((2, 8), -torch.inf, dtype=torch.bfloat16)
    logits[:, 3] = 1.0
    logits[1, 4] = 1.0
    sure, half = token_logprobs(logits, [3, 4], 1, select_ops(torch.device("cpu")))
    assert (sure.logprob, sure.top) == (0.0, ((3, 0.0),))
    assert half.logprob == pytest.approx(-math.log(2))


@pytest.mark.parametrize("count", [-1, VOCABULARY + 1])
def test_more_than_there_are_cannot_be_had(count):
    target, drafter = models()
    engine = new_engine(target, drafter)
    with pytest.raises(RequestError, match=f"logprobs must lie between 0 and {VOCABULARY}: got {count}"):
        next(engine.run(engine.fixed_job([1], SamplingParams(), logprobs=count)))
    everything = next(engine.run(engine.fixed_job([1], SamplingParams(), logprobs=VOCABULARY)))
    assert sum(math.exp(value) for _, value in everything.logprobs[0].top) == pytest.approx(1)
    assert END in dict(everything.logprobs[0].top)
