"""Reference answers: what the target says to each prompt, made once and kept.

Answers are decoded in batches (data/decode.py), greedy or with one seed for each prompt, with the engine's own
noise. In a batch products of matrices round differently than alone, so now and then an answer turns another way
where two tokens were nearly equal; it is the target's own text all the same, and acceptance is measured on that
text. The file's name is a hash of all that an answer depends on: the target's weights, its dtype and device, the
prompts, the length, temperature and seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ddtree.data.decode import decode_many
from ddtree.models.fingerprint import fingerprint
from ddtree.models.storage import storage_error
from ddtree.models.target import TargetModel
from ddtree.speculation.noise import choice_seed
from ddtree.training.examples import write_shard

__all__ = ["Answer", "AnswerRequest", "estimate_mib", "make_answers"]


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """What answers are asked for. prompts: token ids. seed: answer i is drawn with the seed of its choice i."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def seed_of(self, index: int) -> int | None:
        """The seed that prompt `index` is answered with; None where nothing is drawn."""
        return choice_seed(self.seed, index) if self.temperature else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's index, its ids and what the target says to it, an end token included."""

    index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def estimate_mib(request: AnswerRequest) -> float:
    """The most that the kept answers can take on disk, in MiB."""
    tokens = sum(len(prompt) + request.max_tokens for prompt in request.prompts)
    return 4 * (tokens + 2 * len(request.prompts)) / 2**20


def make_answers(
    target: TargetModel,
    request: AnswerRequest,
    folder: Path,
    batch: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Answer]:
    """The answers, from `folder` when they are there, else made and kept there. report: (answers made, of all)."""
    path = folder / f"answers-{_key(target, request)}.safetensors"
    kept = _read(path, request)
    if kept is not None:
        return kept
    seeds = [choice_seed(request.seed, i) for i in range(len(request.prompts))] if request.temperature else None
    found: list[Answer] = []
    for decoded in decode_many(
        target,
        request.prompts,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        stop_ids=target.spec.eos_ids,
        batch=batch,
        seeds=seeds,
    ):
        found += [Answer(d.index, request.prompts[d.index], tuple(d.tokens)) for d in decoded]
        report(len(found), len(request.prompts))
    found.sort(key=lambda answer: answer.index)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_shard(path, [([*a.prompt, *a.tokens], len(a.prompt)) for a in found], {"format": "pt"})
    except OSError as error:
        raise storage_error(error, folder, "", "--answers") from error
    return found


def _key(target: TargetModel, request: AnswerRequest) -> str:
    parts = [
        fingerprint(target),
        str(target.dtype),
        target.device.type,
        request.prompts,
        request.max_tokens,
        request.temperature,
        request.seed if request.temperature else None,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _read(path: Path, request: AnswerRequest) -> list[Answer] | None:
    """Kept answers; None when there are none or the file is damaged: they are made again then."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tokens, lengths = file.get_tensor("tokens").tolist(), file.get_tensor("lengths").tolist()
    except (SafetensorError, OSError):
        return None
    found: list[Answer] = []
    place = 0
    for index, (prompt, length) in enumerate(zip(request.prompts, lengths, strict=True)):
        found.append(Answer(index, prompt, tuple(tokens[place + len(prompt) : place + length])))
        place += length
    return found
