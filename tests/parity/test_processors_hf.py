"""Processors against Hugging Face's own: alone, together in the order of its `generate`, and along a tree."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ddtree.speculation import filters, penalties
from ddtree.speculation.noise import gumbel, seed_tensor
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.penalties import count_tokens, node_paths
from ddtree.speculation.processors import RowParams, draft_scores, row_params, target_scores
from ddtree.tree import build_tree
from tests.toys import top_candidates

NO_TOKENS = torch.zeros(1, 0, dtype=torch.int64)
DTYPES = st.sampled_from([torch.float32, torch.float64])
SIZES = st.sampled_from([2, 17, 40, 600, 5000])  # on both sides of the heads that top-p tries
KINDS = st.sampled_from(["plain", "peaked", "ties", "bfloat16", "holes"])
SEEDS = st.integers(0, 2**31)


def random_logits(seed: int, shape: tuple[int, int], kind: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_MV = torch.randn(shape, generator=generator, dtype=dtype) * 3
    if kind == "peaked":
        logits_MV = logits_MV * 4
    if kind == "ties":
        logits_MV = logits_MV.round()
    if kind == "bfloat16":
        logits_MV = logits_MV.bfloat16().to(dtype)
    if kind == "holes":
        holes_MV = torch.rand(shape, generator=generator) < 0.4
        holes_MV[:, seed % shape[1]] = False
        logits_MV = logits_MV.masked_fill(holes_MV, -torch.inf)
    return logits_MV


def assert_same(ours_MV: torch.Tensor, theirs_MV: torch.Tensor, kind: str) -> None:
    """Equal bit for bit. Which of several tied tokens top-p keeps is chance in Hugging Face's unstable sort."""
    assert ours_MV.dtype == theirs_MV.dtype
    if kind in ("ties", "bfloat16"):
        ours_MV, theirs_MV = ours_MV.sort(dim=1).values, theirs_MV.sort(dim=1).values
    assert torch.equal(ours_MV, theirs_MV)


def rows(logits_MV: torch.Tensor, **settings: object) -> RowParams:
    return row_params([SamplingParams(**settings)], len(logits_MV))


@given(SEEDS, SIZES, KINDS, DTYPES, st.floats(1e-2, 50))
@settings(max_examples=40, deadline=None)
def test_temperature(seed, vocab_size, kind, dtype, temperature):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    ours_MV = target_scores(logits_MV, rows(logits_MV, temperature=temperature))
    assert torch.equal(ours_MV, TemperatureLogitsWarper(temperature)(NO_TOKENS, logits_MV))


@given(SEEDS, SIZES, KINDS, DTYPES, st.integers(1, 6000))
@settings(max_examples=60, deadline=None)
def test_top_k(seed, vocab_size, kind, dtype, top_k):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    for k in (top_k, top_k % 20 + 1):
        ours_MV = target_scores(logits_MV, rows(logits_MV, temperature=1.0, top_k=k))
        assert torch.equal(ours_MV, TopKLogitsWarper(k)(NO_TOKENS, logits_MV))


@given(SEEDS, SIZES, KINDS, DTYPES, st.one_of(st.floats(0, 0.9999), st.sampled_from([0.5, 0.9, 0.95])))
@settings(max_examples=150, deadline=None)
def test_top_p(seed, vocab_size, kind, dtype, top_p):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    ours_MV = target_scores(logits_MV, rows(logits_MV, temperature=1.0, top_p=top_p))
    assert_same(ours_MV, TopPLogitsWarper(top_p)(NO_TOKENS, logits_MV), kind)


@given(SEEDS, SIZES, KINDS, DTYPES, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_min_p(seed, vocab_size, kind, dtype, min_p):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    ours_MV = target_scores(logits_MV, rows(logits_MV, temperature=1.0, min_p=min_p))
    theirs_MV = MinPLogitsWarper(min_p)(NO_TOKENS, logits_MV)
    assert torch.equal(ours_MV, theirs_MV)


@given(SEEDS, SIZES, KINDS, DTYPES)
@settings(max_examples=40, deadline=None)
def test_logit_bias(seed, vocab_size, kind, dtype):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    bias = {token: 0.1 * token - 100.0 * (token % 2) for token in range(0, vocab_size, 3)}
    ours_MV = target_scores(logits_MV, rows(logits_MV, logit_bias=bias))
    hf = SequenceBiasLogitsProcessor({(token,): shift for token, shift in bias.items()})
    assert torch.equal(ours_MV, hf(NO_TOKENS.expand(3, -1), logits_MV))


@given(SEEDS, SIZES, KINDS, DTYPES, st.floats(0.3, 3), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_repetition_penalty(seed, vocab_size, kind, dtype, penalty, length):
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    ids = torch.randint(vocab_size, (length + 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    counts = count_tokens([ids[: length // 2]], [ids[length // 2 :]], vocab_size)
    ours_MV = target_scores(logits_MV, rows(logits_MV, repetition_penalty=penalty), counts)
    assert torch.equal(ours_MV, RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids] * 3), logits_MV))


@given(SEEDS, SIZES, KINDS, DTYPES)
@settings(max_examples=40, deadline=None)
def test_constraint(seed, vocab_size, kind, dtype):
    """Rows that the model gives no chance under the constraint included: the constraint holds all the same."""
    logits_MV = random_logits(seed, (4, vocab_size), kind, dtype)
    allowed_MV = random_logits(seed + 1, (4, vocab_size), "plain", dtype) > 3
    allowed_MV[:, 0] = True
    logits_MV[0] = logits_MV[0].masked_fill(allowed_MV[0], -torch.inf)
    hf = PrefixConstrainedLogitsProcessor(lambda row, _: allowed_MV[row].nonzero()[:, 0].tolist(), 1)
    theirs_MV = hf(torch.zeros(4, 1, dtype=torch.int64), logits_MV)
    assert torch.equal(target_scores(logits_MV, rows(logits_MV), None, allowed_MV), theirs_MV)


def test_a_constraint_that_allows_nothing_leaves_nothing():
    logits_MV = torch.randn(2, 600)
    allowed_MV = torch.zeros(2, 600, dtype=torch.bool)
    params = rows(logits_MV, temperature=0.7, top_k=5, top_p=0.5, min_p=0.1)
    assert (target_scores(logits_MV, params, None, allowed_MV) == -torch.inf).all()


def huggingface(params: SamplingParams, allowed_V: torch.Tensor | None = None):
    """The processors that `generate` itself would compose for these parameters."""
    config = GenerationConfig(
        do_sample=not params.greedy,
        sequence_bias={(token,): shift for token, shift in params.logit_bias.items()} or None,
        repetition_penalty=params.repetition_penalty,
        temperature=None if params.greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        num_beams=1,
        num_return_sequences=1,
    )
    model = SimpleNamespace(
        config=SimpleNamespace(is_encoder_decoder=False),
        _merge_criteria_processor_list=lambda default, custom: default,
    )
    allow = None if allowed_V is None else lambda *_: allowed_V.nonzero()[:, 0].tolist()
    return GenerationMixin._get_logits_processor(
        model, config, input_ids_seq_length=1, prefix_allowed_tokens_fn=allow
    )


@st.composite
def requests(draw, vocab_size: int, openai: bool = False, constraint: bool = False) -> SamplingParams:
    """Random sampling parameters, each part off as often as on. openai: with presence and frequency."""

    def maybe(strategy, off):
        return draw(st.one_of(st.just(off), strategy))

    shifts = st.dictionaries(st.integers(0, vocab_size - 1), st.integers(-50, 50).map(lambda n: n / 8))
    return SamplingParams(
        temperature=maybe(st.floats(0.2, 3), 0.0),
        top_k=maybe(st.integers(1, vocab_size + 5), 0),
        top_p=maybe(st.floats(0.05, 0.99), 1.0),
        min_p=maybe(st.floats(0.001, 0.5), 0.0),
        repetition_penalty=maybe(st.floats(0.5, 2), 1.0),
        presence_penalty=maybe(st.floats(-2, 2), 0.0) if openai else 0.0,
        frequency_penalty=maybe(st.floats(-2, 2), 0.0) if openai else 0.0,
        logit_bias=maybe(shifts, {}),
    )


@given(st.data(), SEEDS, st.sampled_from([17, 600]), KINDS, DTYPES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_all_together_in_the_order_of_generate(data, seed, vocab_size, kind, dtype, constrained):
    params = data.draw(requests(vocab_size))
    logits_MV = random_logits(seed, (2, vocab_size), kind, dtype)
    allowed_V = None
    if constrained:
        allowed_V = random_logits(seed + 1, (1, vocab_size), "plain", dtype)[0] > 0
        allowed_V[seed % vocab_size] = True
        if seed % 4 == 0:
            # No chance at all: every allowed token then has the score 0, a tie.
            logits_MV[0] = logits_MV[0].masked_fill(allowed_V, -torch.inf)
            kind = "ties"
    ids = torch.randint(vocab_size, (2, 12), generator=torch.Generator().manual_seed(seed))
    counts = count_tokens(ids[:, :8].tolist(), ids[:, 8:].tolist(), vocab_size)
    allowed_MV = None if allowed_V is None else allowed_V.expand(2, -1)
    ours_MV = target_scores(logits_MV, row_params([params, params]), counts, allowed_MV)
    assert_same(ours_MV, huggingface(params, allowed_V)(ids, logits_MV), kind)


def test_the_order_in_one_example_where_each_swap_shows():
    """Worked out by hand: bias 2 on a negative logit, then repetition, then the rest."""
    logits_MV = torch.tensor([[-1.0, 2.0, 1.0, 0.5]], dtype=torch.float64)
    params = SamplingParams(
        temperature=0.5,
        top_k=2,
        logit_bias={0: 2.0},
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.125,
    )
    counts = count_tokens([[1]], [[0, 0]], 4)
    # Token 0: (-1 + 2) / 2 - 0.25 - 2 * 0.125 = 0; token 1: 2 / 2 = 1; then all times 2, the best two kept.
    expected_MV = torch.tensor([[-torch.inf, 2.0, 2.0, -torch.inf]], dtype=torch.float64)
    assert torch.equal(target_scores(logits_MV, row_params([params]), counts), expected_MV)


def step_by_step(params: SamplingParams, prompt: list[int], output: list[int], logits_V: torch.Tensor):
    """One row as step-by-step decoding judges it. Presence and frequency are OpenAI's, so written out here."""
    before = dataclasses.replace(params, temperature=0.0)
    scores_1V = huggingface(before)(torch.tensor([prompt + output]), logits_V[None]).clone()
    for token in set(output):
        scores_1V[0, token] -= params.presence_penalty
        scores_1V[0, token] -= logits_V.new_tensor(params.frequency_penalty) * output.count(token)
    after = dataclasses.replace(params, logit_bias={}, repetition_penalty=1.0)
    return huggingface(after)(torch.tensor([prompt + output]), scores_1V)[0]


def random_tree(seed: int, sequences: int, vocab_size: int):
    """Trees over few tokens, so that paths repeat tokens, and anchors are among them."""
    generator = torch.Generator().manual_seed(seed)
    log_probs_RDV = torch.randn(sequences, 4, vocab_size, generator=generator).log_softmax(-1)
    anchors_R = torch.randint(vocab_size, (sequences,), generator=generator)
    return build_tree(top_candidates(log_probs_RDV, 4), anchors_R, budget=12)


def ancestors(tree, r: int, node: int) -> list[int]:
    """Drafted tokens from the root's child down to the node."""
    path = []
    while node != 0:
        path.insert(0, int(tree.tokens_RN[r, node]))
        node = int(tree.parents_RN[r, node])
    return path


@given(st.data(), SEEDS, DTYPES)
@settings(max_examples=60, deadline=None)
def test_every_node_is_judged_as_step_by_step_decoding_would(data, seed, dtype):
    vocab_size, sequences = 6, 2
    params = [data.draw(requests(vocab_size, openai=True)) for _ in range(sequences)]
    ids = torch.randint(vocab_size, (sequences, 7), generator=torch.Generator().manual_seed(seed)).tolist()
    tree = random_tree(seed, sequences, vocab_size)
    anchors = tree.tokens_RN[:, 0].tolist()
    outputs = [[*row[4:], anchor] for row, anchor in zip(ids, anchors, strict=True)]
    counts = count_tokens([row[:4] for row in ids], outputs, vocab_size).along(*node_paths(tree))
    logits_MV = random_logits(seed, (sequences * tree.rows, vocab_size), "plain", dtype)
    ours_MV = target_scores(logits_MV, row_params(params, tree.rows), counts)
    for r in range(sequences):
        for node in range(int(tree.sizes_R[r])):
            row = r * tree.rows + node
            output = outputs[r] + ancestors(tree, r, node)
            theirs_V = step_by_step(params[r], ids[r][:4], output, logits_MV[row])
            assert torch.equal(ours_MV[row], theirs_V), (r, node)


def test_padding_of_paths_counts_for_nothing():
    logits_MV = torch.randn(2, 5)
    counts = count_tokens([[1, 1]], [[2]], 5)
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    path_ML = torch.tensor([[3, 0, 1], [2, 3, 2]])
    real_ML = torch.tensor([[True, False, False], [True, False, True]])
    ours_MV = target_scores(logits_MV, row_params([params], 2), counts.along(path_ML, real_ML))
    for row, output in enumerate(([2, 3], [2, 2, 2])):
        alone = count_tokens([[1, 1]], [output], 5)
        assert torch.equal(ours_MV[row, None], target_scores(logits_MV[row, None], row_params([params]), alone))


@given(SEEDS, DTYPES)
@settings(max_examples=20, deadline=None)
def test_penalties_of_used_tokens_are_those_of_all(seed, dtype):
    """The way of a CPU is the way of other devices."""
    generator = torch.Generator().manual_seed(seed)
    logits_RNV = random_logits(seed, (6, 50), "plain", dtype).reshape(2, 3, 50)
    prompt_RNV, output_RNV = (
        (torch.randint(8, (2, 1, 50), generator=generator) - 5).clamp(min=0).expand(-1, 3, -1) for _ in range(2)
    )
    settings_RN1 = [torch.rand(2, 3, 1, generator=generator).to(dtype) + 0.5 for _ in range(3)]
    expected_RNV = penalties._penalise(logits_RNV, prompt_RNV, output_RNV, *settings_RN1)
    assert torch.equal(penalties._penalise_used(logits_RNV, prompt_RNV, output_RNV, *settings_RN1), expected_RNV)


def test_nothing_before_a_row():
    logits_MV = torch.randn(2, 5)
    nothing = count_tokens([[]], [[]], 5)
    for counts in (nothing, nothing.along(torch.zeros(2, 0).long(), torch.zeros(2, 0).bool())):
        params = rows(logits_MV, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
        assert torch.equal(target_scores(logits_MV, params, counts), logits_MV)


def test_committed_tokens_join_the_counts():
    counts = count_tokens([[1], [2, 2]], [[0], []], 4)
    grown = counts.committed(torch.tensor([[3, 3, 1], [2, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())
    expected = count_tokens([[1], [2, 2]], [[0, 3, 3], [2]], 4)
    assert torch.equal(grown.prompt_RV, expected.prompt_RV)
    assert torch.equal(grown.output_RV, expected.output_RV)
    assert counts.output_RV.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_ids_past_the_head_are_not_counted():
    assert count_tokens([[1, 9]], [[9]], 4).prompt_RV.tolist() == [[0, 1, 0, 0]]


@given(st.data(), SEEDS, st.sampled_from([17, 600]), KINDS, DTYPES)
@settings(max_examples=60, deadline=None)
def test_a_batch_says_what_its_requests_say_alone(data, seed, vocab_size, kind, dtype):
    params = data.draw(st.lists(requests(vocab_size, openai=True), min_size=2, max_size=4))
    each = data.draw(st.integers(1, 3))
    logits_MV = random_logits(seed, (len(params) * each, vocab_size), kind, dtype)
    generator = torch.Generator().manual_seed(seed)
    ids_RL = torch.randint(vocab_size, (len(params), 9), generator=generator).tolist()
    path_ML = torch.randint(vocab_size, (len(logits_MV), 3), generator=generator)
    real_ML = torch.rand(path_ML.shape, generator=generator) < 0.7
    noise_MV = gumbel(seed_tensor([seed]), torch.arange(len(logits_MV))[None], vocab_size)[0]

    def both(some, rows_each, chosen):
        counts = count_tokens([ids_RL[r][:5] for r in some], [ids_RL[r][5:] for r in some], vocab_size)
        settings = row_params([params[r] for r in some], rows_each)
        along = counts.along(path_ML[chosen], real_ML[chosen])
        return (
            target_scores(logits_MV[chosen], settings, along),
            draft_scores(logits_MV[chosen], settings, counts, noise_MV[chosen], 1.3),
        )

    together = both(range(len(params)), each, slice(None))
    for row in range(len(logits_MV)):
        alone = both([row // each], 1, slice(row, row + 1))
        assert torch.equal(together[0][row], alone[0][0])
        assert torch.equal(together[1][row], alone[1][0])


def test_filters_that_are_off_for_one_row_leave_it_alone():
    logits_MV = random_logits(3, (2, 600), "peaked", torch.float32) * 9  # tails whose probability rounds to 0
    off = SamplingParams(temperature=1.0)
    for setting in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        both = target_scores(logits_MV, row_params([off, dataclasses.replace(off, **setting)]))
        assert torch.equal(both[0], logits_MV[0])
        assert (both[1] == -torch.inf).any()


def test_rows_may_bias_different_numbers_of_tokens():
    logits_MV = torch.randn(3, 5)
    params = [SamplingParams(logit_bias=bias) for bias in ({0: 5.0}, {1: 1.0, 2: 2.0}, {})]
    expected_MV = logits_MV + torch.tensor([[5.0, 0, 0, 0, 0], [0, 1, 2, 0, 0], [0, 0, 0, 0, 0]])
    assert torch.equal(target_scores(logits_MV, row_params(params)), expected_MV)


def test_greedy_rows_are_neither_warmed_nor_filtered():
    logits_MV = torch.randn(2, 40)
    greedy = SamplingParams(top_k=1, top_p=0.1, min_p=0.9)
    scores_MV = target_scores(logits_MV, row_params([greedy, SamplingParams(temperature=0.3, top_k=2)]))
    assert torch.equal(scores_MV[0], logits_MV[0])
    assert target_scores(logits_MV, row_params([greedy] * 2)) is logits_MV


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16])
def test_short_types_are_upcast_first(short):
    logits_MV = torch.randn(2, 40).to(short)
    params = rows(logits_MV, temperature=0.7, top_k=5, logit_bias={3: 1.0})
    scores_MV = target_scores(logits_MV, params)
    assert scores_MV.dtype == torch.float32
    assert torch.equal(scores_MV, target_scores(logits_MV.float(), params))


def test_nothing_that_comes_in_is_written():
    logits_MV, noise_MV = torch.randn(2, 600, dtype=torch.float64), torch.randn(2, 600, dtype=torch.float64)
    path_ML, real_ML = torch.randint(600, (2, 3)), torch.ones(2, 3, dtype=torch.bool)
    counts = count_tokens([[1, 2]], [[3]], 600).along(path_ML, real_ML)
    allowed_MV = torch.rand(2, 600) < 0.5
    params = rows(
        logits_MV,
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        min_p=0.1,
        logit_bias={1: 1.0},
        repetition_penalty=1.2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    )
    given = (logits_MV, noise_MV, path_ML, real_ML, counts.prompt_RV, counts.output_RV, allowed_MV)
    copies = [tensor.clone() for tensor in given]
    target_scores(logits_MV, params, counts, allowed_MV)
    draft_scores(logits_MV, params, counts, noise_MV, 1.2)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))


@given(SEEDS, st.sampled_from([700, 5000]), KINDS, DTYPES, st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_top_p_by_heads_is_top_p_by_sorting(seed, vocab_size, kind, dtype, top_p):
    """Ties included: the short way must take the same ones."""
    logits_MV = random_logits(seed, (3, vocab_size), kind, dtype)
    spare_M1 = torch.full((3, 1), 1 - top_p, dtype=dtype)
    expected_MV = filters._outside_nucleus(logits_MV, spare_M1)
    assert torch.equal(filters._outside_nucleus_by_heads(logits_MV, spare_M1), expected_MV)


@pytest.mark.parametrize("between", [0.0, 0.5])
def test_top_p_by_heads_is_right_at_and_between_steps_of_the_mass(between):
    """A large vocabulary, whose float32 softmax does not sum to 1: the cut at a step, and halfway to the next."""
    logits_1V = random_logits(4, (1, 150_000), "plain", torch.float32) * 4 / 3
    mass_V = logits_1V.sort(dim=1).values.softmax(dim=1).cumsum(dim=1)[0]
    for rank in range(20, 4000, 200):
        spare_11 = mass_V[-rank].lerp(mass_V[1 - rank], between).reshape(1, 1)
        expected_1V = filters._outside_nucleus(logits_1V, spare_11)
        assert torch.equal(filters._outside_nucleus_by_heads(logits_1V, spare_11), expected_1V)


@pytest.mark.parametrize("kind", ["peaked", "bfloat16"])
def test_top_p_does_not_sort_whole_rows_when_a_head_will_do(kind, monkeypatch):
    logits_MV = random_logits(1, (8, 5000), kind, torch.float32)
    params = rows(logits_MV, temperature=1.0, top_p=0.8)
    expected_MV = target_scores(logits_MV, params)
    monkeypatch.setattr(filters, "_outside_nucleus", None)
    assert torch.equal(target_scores(logits_MV, params), expected_MV)


def test_ties_at_the_cut_of_top_p_go_by_id():
    logits_MV = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    kept = target_scores(logits_MV, rows(logits_MV, temperature=1.0, top_p=0.4)) > -torch.inf
    assert kept.tolist() == [[False, False, False, True, True, False]]


def test_draws_follow_the_distribution_of_generate():
    """20,000 draws with all settings on, by noise, against the probabilities that Hugging Face samples from."""
    params = SamplingParams(
        temperature=1.3,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        logit_bias={2: 1.5, 5: -2.0},
        repetition_penalty=1.4,
    )
    logits_1V = random_logits(5, (1, 12), "plain", torch.float32)
    ids, draws = [[1, 2, 3, 3, 7]], 20_000
    scores_1V = target_scores(logits_1V, row_params([params]), count_tokens(ids, [[]], 12))
    noise_SV = gumbel(seed_tensor([8]), torch.arange(draws)[None], 12)[0]
    counts_V = torch.bincount((scores_1V + noise_SV).argmax(dim=1), minlength=12)
    probs_V = huggingface(params)(torch.tensor(ids), logits_1V).double().softmax(dim=1)[0]
    assert counts_V[probs_V == 0].sum() == 0
    possible = probs_V > 0
    assert 4 <= possible.sum() < 12
    assert stats.chisquare(counts_V[possible].numpy(), (probs_V[possible] * draws).numpy()).pvalue > 1e-3


def test_drafts_know_bias_penalties_and_temperature():
    logits_MV = random_logits(2, (3, 40), "plain", torch.float32)
    ids = [4, 4, 9]
    params = SamplingParams(temperature=0.6, logit_bias={3: 2.0}, repetition_penalty=1.5)
    counts = count_tokens([ids], [[]], 40)
    theirs_MV = huggingface(params)(torch.tensor([ids] * 3), logits_MV)
    ours_MV = draft_scores(logits_MV, row_params([params], 3), counts)
    assert torch.equal(ours_MV, theirs_MV.log_softmax(dim=1))
    greedy = dataclasses.replace(params, temperature=0.0)
    theirs_MV = huggingface(greedy)(torch.tensor([ids] * 3), logits_MV)
    ours_MV = draft_scores(logits_MV, row_params([greedy], 3), counts, torch.randn(3, 40))
    assert torch.equal(ours_MV, theirs_MV.log_softmax(dim=1))


def test_coupled_drafts_are_the_softmax_of_what_will_be_compared():
    logits_MV = random_logits(2, (4, 40), "holes", torch.float64)
    noise_MV = gumbel(seed_tensor([6]), torch.arange(4)[None], 40)[0]
    params = row_params([SamplingParams(temperature=0.6), SamplingParams()], 2)
    ours_MV = draft_scores(logits_MV, params, None, noise_MV, scale=1.3)
    assert ours_MV.dtype == torch.float32
    log_q_MV = (logits_MV / 0.6).log_softmax(dim=1)
    expected_MV = ((log_q_MV + noise_MV) / 1.3).log_softmax(dim=1).float()
    torch.testing.assert_close(ours_MV[:2], expected_MV[:2], rtol=1e-6, atol=1e-6)
    # A drafter that is right drafts the very token that will be drawn.
    drawn_M = (target_scores(logits_MV, params) + noise_MV).argmax(dim=1)
    assert ours_MV[:2].argmax(dim=1).tolist() == drawn_M[:2].tolist()
    assert torch.equal(ours_MV[2:], logits_MV[2:].log_softmax(dim=1).float())


def test_broken_drafts_have_no_candidates():
    logits_MV = torch.randn(4, 40)
    logits_MV[0, 3] = torch.nan
    logits_MV[1] = -torch.inf
    logits_MV[2, 3] = torch.inf
    params = row_params([SamplingParams(temperature=0.5)], 4)
    for noise_MV in (None, torch.randn(4, 40)):
        scores_MV = draft_scores(logits_MV, params, None, noise_MV)
        assert not scores_MV.isnan().any()
        assert (scores_MV[:3] == -torch.inf).all()
        assert scores_MV[3].exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_penalties_without_counts_are_a_fault_of_the_caller():
    logits_MV = torch.randn(1, 5)
    with pytest.raises(AssertionError, match="penalties need the counts"):
        target_scores(logits_MV, rows(logits_MV, presence_penalty=0.5))
