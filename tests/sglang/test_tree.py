"""DDTREE on the real SGLang with a tiny Qwen3: what it says equals Hugging Face, and every fault would show."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.models.load import load_drafter, load_target
from ddtree.sglang_plugin.settings import Flags
from ddtree.speculation.drafter import DFlashDrafter
from ddtree.speculation.protocols import Lengths
from tests.sglang import models
from tests.sglang.engines import forget, said, serving

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [20, 21]]
BLOCK, BUDGET, COUNT = 8, 19, 24


class Bench:
    """An engine and what surrounds it."""

    def __init__(self, engine: Any, target: Path, drafter: Path, rig: Path) -> None:
        self.engine = engine
        self.target = target
        self.drafter = drafter
        self.rig = rig

    def foresee(self, *prompts: Sequence[int], count: int = COUNT, decoy: int = 3) -> list[list[int]]:
        """Let the drafter know the future of some prompts; returns that future."""
        truths = [models.greedy(self.target, prompt, count + BLOCK) for prompt in prompts]
        proposals = {tuple(p): models.foresight(t, decoy) for p, t in zip(prompts, truths, strict=True)}
        models.write_oracle(self.rig, proposals)
        return [truth[:count] for truth in truths]

    def tokens(self, *prompts: Sequence[int], count: int = COUNT, **sampling: Any) -> list[list[int]]:
        return [answer["output_ids"] for answer in said(self.engine, prompts, count, **sampling)]

    def forget(self) -> None:
        """No prefix of earlier tests is reused."""
        forget(self.engine)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("tree")
    target = models.write_target(folder / "target", "qwen3")
    drafter = models.write_drafter(folder / "drafter", BLOCK)
    models.write_oracle(folder / "rig", {})
    fields = {"max_running_requests": 16, "grammar_backend": "xgrammar"}
    with serving(folder / "rig", target, drafter, Flags(budget=BUDGET), **fields) as engine:
        yield Bench(engine, target, drafter, folder / "rig")


def test_three_different_trees_in_one_batch_say_what_hugging_face_says(bench: Bench) -> None:
    truths = bench.foresee(*PROMPTS)
    answers = said(bench.engine, PROMPTS, COUNT)
    assert [a["output_ids"] for a in answers] == truths
    for answer in answers:
        # Every third true token is only the second of its depth: a chain would commit 3 tokens a round at most.
        assert answer["meta_info"]["spec_accept_length"] > 3.5, "branches win"


def test_requests_one_after_the_other_equal_requests_together(bench: Bench) -> None:
    truths = bench.foresee(*PROMPTS)
    for prompt, truth in zip(reversed(PROMPTS), reversed(truths), strict=True):
        bench.forget()
        assert bench.tokens(prompt) == [truth]


@pytest.mark.parametrize("fault", ["no move", "causal", "positions"])
def test_a_fault_on_purpose_is_seen(bench: Bench, fault: str) -> None:
    """Keys and values that stay where they are, a chain's mask, positions that count rows: each gives wrong
    text."""
    truths = bench.foresee(*PROMPTS)
    bench.forget()
    try:
        (bench.rig / "fault").write_text(fault)
        assert bench.tokens(*PROMPTS) != truths
    finally:
        (bench.rig / "fault").unlink()
    bench.forget()
    assert bench.tokens(*PROMPTS) == truths


def test_a_reused_prefix_holds_what_was_committed(bench: Bench) -> None:
    """The second turn reuses keys and values that rounds of the first have moved."""
    bench.forget()
    (truth,) = bench.foresee(PROMPTS[0], count=40)
    assert bench.tokens(PROMPTS[0], count=40) == [truth]
    second = [*PROMPTS[0], *truth, 30, 31]
    (expected,) = bench.foresee(second)
    (answer,) = said(bench.engine, [second], COUNT)
    assert answer["meta_info"]["cached_tokens"] >= len(PROMPTS[0]) + 35
    assert answer["output_ids"] == expected


@pytest.mark.parametrize("count", [1, 2, 4, 8, 15])
def test_exactly_as_many_tokens_as_were_asked_for(bench: Bench, count: int) -> None:
    (truth,) = bench.foresee(PROMPTS[1])
    assert bench.tokens(PROMPTS[1], count=count) == [truth[:count]]


def test_an_end_token_inside_an_accepted_path_ends_the_answer(bench: Bench) -> None:
    (truth,) = bench.foresee(PROMPTS[1], decoy=1000)
    for place in range(1, 9):
        if truth[place] not in truth[:place]:
            (answer,) = said(bench.engine, [PROMPTS[1]], COUNT, ignore_eos=False, stop_token_ids=[truth[place]])
            assert answer["output_ids"] == truth[: place + 1]
            assert answer["meta_info"]["completion_tokens"] == place + 1


def test_log_probabilities_are_those_of_plain_decoding(bench: Bench) -> None:
    (truth,) = bench.foresee(PROMPTS[0])
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    answer = bench.engine.generate(
        input_ids=[PROMPTS[0]], sampling_params=params, return_logprob=True, top_logprobs_num=2
    )[0]
    info = answer["meta_info"]
    for place, (log_prob, token, _) in enumerate(info["output_token_logprobs"]):
        expected = models.next_logits(bench.target, [*PROMPTS[0], *truth[:place]]).log_softmax(-1)
        assert token == truth[place]
        assert log_prob == pytest.approx(float(expected[token]), abs=2e-4)
        best = [entry[1] for entry in info["output_top_logprobs"][place]]
        assert best == expected.topk(2).indices.tolist()


def test_logit_bias_holds_at_every_node(bench: Bench) -> None:
    bench.foresee(PROMPTS[2])
    bias = dict.fromkeys(range(100, 140), 6.0)
    expected: list[int] = []
    for _ in range(8):
        logits = models.next_logits(bench.target, [*PROMPTS[2], *expected])
        for token, shift in bias.items():
            logits[token] += shift
        expected.append(int(logits.argmax()))
    shifts = {str(t): b for t, b in bias.items()}
    models.write_oracle(bench.rig, {tuple(PROMPTS[2]): models.foresight([*expected, *[7] * BLOCK])})
    (answer,) = said(bench.engine, [PROMPTS[2]], 8, logit_bias=shifts)
    assert answer["output_ids"] == expected
    assert answer["meta_info"]["spec_accept_length"] > 2


def test_grammars_hold_along_every_path(bench: Bench) -> None:
    allowed, expected = [4, 5, 6, 7, 8, 9], []  # no word is the beginning of another, where the grammar would end
    for _ in range(10):
        logits = models.next_logits(bench.target, [*PROMPTS[1], *expected])
        expected.append(max(allowed, key=lambda token: float(logits[token])))
    models.write_oracle(bench.rig, {tuple(PROMPTS[1]): models.foresight([*expected, *[models.EOS] * BLOCK])})
    words = "|".join(f"w{token}" for token in allowed)
    (answer,) = said(bench.engine, [PROMPTS[1]], 12, ignore_eos=False, regex=f"({words}){{10}}")
    assert answer["output_ids"] == [*expected, models.EOS]
    assert answer["meta_info"]["spec_accept_length"] > 3.5


def test_penalties_are_refused_by_name_and_the_server_goes_on(bench: Bench) -> None:
    with pytest.raises(ValueError, match=r"DDTREE does not support frequency_penalty: .* leave it out"):
        said(bench.engine, [PROMPTS[0]], 4, frequency_penalty=0.5)
    (truth,) = bench.foresee(PROMPTS[0])
    assert bench.tokens(PROMPTS[0]) == [truth]


def recorded(bench: Bench, *prompts: Sequence[int]) -> list[dict[str, Any]]:
    """Answer some prompts in one batch, and return what the real drafter said in each round."""
    truths = bench.foresee(*prompts)
    record = bench.rig / "record.jsonl"
    record.touch()
    try:
        assert bench.tokens(*prompts) == truths
        return [json.loads(line) for line in record.read_text().splitlines()]
    finally:
        record.unlink()


@pytest.mark.parametrize("reused", [False, True])
def test_the_drafter_sees_what_the_reference_drafter_sees(bench: Bench, reused: bool) -> None:
    """Its logits in every round equal those of the project's own drafter over Hugging Face's hidden states.

    That fails when features come from another layer or another row, when the block is not [anchor, MASK, ...],
    when positions are off, or when the drafter's keys and values are not those of the accepted tokens, in this
    request or in the one whose prefix is reused.
    """
    bench.forget()
    prompt = PROMPTS[1]
    if reused:
        (first,) = bench.foresee(prompt)
        assert bench.tokens(prompt) == [first]
        prompt = [*prompt, *first[:18], 40]
    rounds = recorded(bench, prompt)
    assert len(rounds) >= 4
    text = [*prompt, *models.greedy(bench.target, prompt, COUNT)]
    with torch.no_grad():
        states = models.reference(bench.target)(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[1], states[3]], dim=-1)  # the outputs of layers 0 and 2
    loaded = load_drafter(bench.drafter, load_target(bench.target, torch.float32))
    for entry in rounds:
        (length,), (anchor,) = entry["prefix"], entry["anchor"]
        assert text[length] == anchor
        drafter = DFlashDrafter(loaded, loaded.model.new_cache(1, length + BLOCK), models.VOCABULARY)
        drafter.absorb(features[:, :length], Lengths(torch.tensor([0]), (0,)), torch.tensor([length]))
        ours = drafter.propose(torch.tensor([anchor]), Lengths(torch.tensor([length]), (length,)), BLOCK)
        torch.testing.assert_close(torch.tensor(entry["logits"]), ours.logits_RDV, atol=2e-4, rtol=1e-3)


def test_one_drafter_pass_a_round_for_the_whole_batch(bench: Bench) -> None:
    rounds = recorded(bench, *PROMPTS)
    assert max(len(entry["prefix"]) for entry in rounds) == len(PROMPTS)
    assert len(rounds) < sum(len(entry["prefix"]) for entry in rounds) / 2


def test_requests_that_share_a_prefix_leave_it_as_it_was(bench: Bench) -> None:
    """Rounds write behind a prefix that others read: what is shared must not change."""
    bench.forget()
    (first,) = bench.foresee(PROMPTS[1])
    assert bench.tokens(PROMPTS[1]) == [first]
    shared = [*PROMPTS[1], *first[:10]]
    both = [[*shared, 50], [*shared, 60, 61]]
    truths = bench.foresee(*both, shared)
    assert bench.tokens(*both, shared) == truths
    (truth,) = bench.foresee(shared)
    (again,) = said(bench.engine, [shared], COUNT)
    assert again["meta_info"]["cached_tokens"] > len(PROMPTS[1])
    assert again["output_ids"] == truth


def test_sampled_answers_follow_the_targets_distribution(bench: Bench) -> None:
    """Chi-square of four-token answers at top-k 2, drafts being the likely tokens of each place."""
    heat, prompt, count, repeats = 12.0, PROMPTS[1], 4, 900
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    steps: list[models.Step] = []
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in chances.items():
            logits = (models.next_logits(bench.target, [*prompt, *path]) / heat).topk(2)
            for token, p in zip(logits.indices.tolist(), logits.values.softmax(-1).tolist(), strict=True):
                longer[*path, token] = chance * p
        marginal: Counter[int] = Counter()
        for path, chance in longer.items():
            marginal[path[-1]] += chance
        steps.append([(token, heat * (math.log(chance) + 12)) for token, chance in marginal.items()])
        chances = longer
    models.write_oracle(bench.rig, {tuple(prompt): steps})
    answers = said(bench.engine, [prompt] * repeats, count, temperature=heat, top_k=2)
    seen = Counter(tuple(a["output_ids"]) for a in answers)
    assert set(seen) <= set(chances), "only what the filters leave is said"
    rounds = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    assert rounds < 2.2 * repeats, "drafts are accepted while sampling"
    cells = {path: chance for path, chance in chances.items() if chance * repeats >= 5}
    rest = 1 - sum(cells.values())
    statistic = sum((seen[path] - repeats * p) ** 2 / (repeats * p) for path, p in cells.items())
    if rest * repeats >= 5:
        statistic += (repeats - sum(seen[path] for path in cells) - repeats * rest) ** 2 / (repeats * rest)
    freedom = len(cells) - (rest * repeats < 5)
    assert freedom >= 4
    assert statistic < freedom + 4.5 * math.sqrt(2 * freedom), (statistic, freedom)


def test_greedy_and_sampled_requests_share_a_batch(bench: Bench) -> None:
    truths = bench.foresee(*PROMPTS)
    params = [
        {"temperature": heat, "max_new_tokens": COUNT, "ignore_eos": True, "top_p": 0.9}
        for heat in (0.0, 30.0, 0.0)
    ]
    answers = bench.engine.generate(input_ids=PROMPTS, sampling_params=params)
    assert answers[0]["output_ids"] == truths[0]
    assert answers[1]["output_ids"] != truths[1]
    assert answers[2]["output_ids"] == truths[2]


def test_server_info_says_what_runs(bench: Bench) -> None:
    facts = bench.engine.get_server_info()["internal_states"][0]["ddtree"]
    assert (facts["mode"], facts["budget"], facts["rows"], facts["block_size"]) == ("tree", BUDGET, 20, BLOCK)
    assert facts["rounds"] > 0
    assert facts["acceptance_length"] > 1
