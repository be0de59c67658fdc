"""Reference answers are the engine's own, made once, and never another target's."""

from __future__ import annotations

import errno

import pytest
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.errors import StorageError
from ddtree.evaluation import answers
from ddtree.evaluation.answers import AnswerRequest, estimate_mib, make_answers
from ddtree.models.fingerprint import fingerprint
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import PLAIN
from tests.drafters import pieces, tokens_of
from tests.toys import random_tokens, toy_target

PROMPTS = tuple(tuple(random_tokens(length, length)) for length in (4, 11, 2, 7, 9))


def plain(target, request, index):
    """What the engine says to one prompt, alone."""
    params = SamplingParams(
        temperature=request.temperature, seed=request.seed_of(index), max_tokens=request.max_tokens
    )
    engine = BatchEngine(target, None, EngineConfig("off", max_context=128), lambda tokens: "")
    return tuple(tokens_of(pieces(engine, request.prompts[index], params, PLAIN)))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_batch_says_what_the_engine_says(tmp_path, temperature, batch):
    """Prompts of different lengths, ends at different times: rows leave the batch and keep their noise."""
    free = toy_target("qwen3")
    request = AnswerRequest(PROMPTS, 40, temperature, seed=2**63 + 5)
    ends = {plain(free, request, index)[place] for index, place in ((0, 3), (1, 6), (3, 20))}
    target = toy_target("qwen3", eos_ids=tuple(ends))
    found = make_answers(target, request, tmp_path, batch)
    assert [answer.index for answer in found] == list(range(len(PROMPTS)))
    assert [answer.tokens for answer in found] == [plain(target, request, i) for i in range(len(PROMPTS))]
    assert len({len(answer.tokens) for answer in found}) > 2


def test_equal_prompts_are_answered_with_seeds_of_their_own(tmp_path):
    request = AnswerRequest((PROMPTS[0],) * 4, 12, 1.0)
    found = make_answers(toy_target(), request, tmp_path, 4)
    assert len({answer.tokens for answer in found}) == 4


def test_answers_are_made_once(tmp_path, monkeypatch):
    target, request = toy_target(), AnswerRequest(PROMPTS, 12, 1.0)
    seen = []
    made = make_answers(target, request, tmp_path, 2, lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    monkeypatch.setattr(answers, "decode_many", None)
    assert make_answers(target, request, tmp_path, 4) == made
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) / 2**20 < estimate_mib(request) + 0.001


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": PROMPTS[:4]},
        {"prompts": (*PROMPTS[:4], (1, 2, 3))},
        {"max_tokens": 13},
        {"temperature": 0.9},
        {"temperature": 0.0},
        {"seed": 1},
    ],
)
def test_other_requests_have_other_answers(tmp_path, change):
    target = toy_target()
    make_answers(target, AnswerRequest(PROMPTS, 12, 1.0), tmp_path, 5)
    changed = AnswerRequest(**{"prompts": PROMPTS, "max_tokens": 12, "temperature": 1.0} | change)
    make_answers(target, changed, tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 2


def test_one_target_in_two_dtypes_is_asked_twice(tmp_path):
    """Its weights are the same numbers, what it says may not be."""
    target = toy_target(dtype=torch.float32)
    make_answers(target, AnswerRequest(PROMPTS, 12), tmp_path, 5)
    make_answers(target.double(), AnswerRequest(PROMPTS, 12), tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_seed_does_not_matter_where_nothing_is_drawn(tmp_path):
    for seed in (0, 7):
        make_answers(toy_target(), AnswerRequest(PROMPTS, 12, 0.0, seed), tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_target_is_known_by_its_weights():
    """The shape is the same, one tensor differs a little: a fine-tune must not get the old model's answers."""
    target, tuned = toy_target(), toy_target()
    assert fingerprint(target) == fingerprint(tuned)
    with torch.no_grad():
        tuned.layers[1].mlp.down_proj.weight.add_(1e-6)
    assert fingerprint(target) != fingerprint(tuned)
    assert fingerprint(target) != fingerprint(toy_target(eos_ids=(7,))), "nor those that end elsewhere"


@pytest.mark.parametrize("harm", [lambda whole: whole[:60], lambda whole: b""])
def test_a_damaged_file_is_made_again(tmp_path, harm):
    target, request = toy_target(), AnswerRequest(PROMPTS, 12)
    made = make_answers(target, request, tmp_path, 5)
    (path,) = tmp_path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert make_answers(target, request, tmp_path, 5) == made


def test_a_full_disk_names_the_folder(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(answers, "write_shard", full)
    with pytest.raises(StorageError, match="--answers"):
        make_answers(toy_target(), AnswerRequest(PROMPTS, 12), tmp_path, 5)
