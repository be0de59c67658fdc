"""On-policy answers: the target's own continuations of prompts, in shards that training reads.

Stages are resumable: a shard that exists is not made again. Each shard holds the prompts of its number, so a
killed run loses one shard at most; it carries what it was made with, and a run with anything else is refused. A
`card-*.json` says how the data came to be and under which licences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ddtree.data.decode import decode_many
from ddtree.data.prompts import OPENERS, HeldOut, Prompt, read_prompts
from ddtree.errors import DataError
from ddtree.models.storage import new_file
from ddtree.models.target import TargetModel
from ddtree.provenance import provenance, text_hash
from ddtree.training.examples import shard_metadata, stable_seed, write_shard

__all__ = ["AnswerPlan", "Progress", "answer_prompts", "write_own_prompts"]

# One key of a shard's metadata holds all: several would be written in an order that changes from run to run.
MADE_WITH = "made_with"


class ChatTokenizer(Protocol):
    """What is needed of a tokenizer."""

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Whose answers, and how they are made. max_length counts prompt and answer; longer prompts are left out."""

    model: str
    max_tokens: int = 384
    max_length: int = 1024
    temperature: float = 0.0
    batch: int = 512
    shard: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage is: items done of all, and tokens made so far."""

    done: int
    total: int
    tokens: int


def write_own_prompts(
    target: TargetModel,
    tokenizer: ChatTokenizer,
    count: int,
    plan: AnswerPlan,
    prefix_ids: Sequence[int],
    path: Path,
) -> list[Prompt]:
    """User turns that the target writes itself at temperature 1, from openers that steer the kind of request.

    prefix_ids: the chat template up to where the user's words begin. Turns that did not end, are too short to
    ask anything, or repeat each other are dropped, so fewer than `count` may come back. They are kept in the JSONL
    file `path`, and read from there the next time.
    """
    if path.exists():
        return read_prompts(path)[0] if path.stat().st_size else []
    generator = torch.Generator(target.device).manual_seed(stable_seed(plan.seed, count))
    total = sum(weight for _, weight in OPENERS)
    starts = [opener for opener, weight in OPENERS for _ in range(-(-count * weight // total))][:count]
    prefixes = [[*prefix_ids, *(tokenizer.encode(opener) if opener else [])] for opener in starts]
    batches = decode_many(
        target,
        prefixes,
        max_tokens=192,
        temperature=1.0,
        stop_ids=target.spec.eos_ids,
        batch=plan.batch,
        generator=generator,
    )
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for decoded in (item for batch in batches for item in batch):
        text = (starts[decoded.index] + tokenizer.decode(decoded.tokens[:-1])).strip()
        if decoded.ended and len(text) >= 12 and text not in seen:
            seen.add(text)
            prompts.append(Prompt((("user", text),), "self-generated", "target's own text"))
    rows = ({"prompt": p.text, "source": p.source, "license": p.license} for p in prompts)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return prompts


def answer_prompts(
    target: TargetModel,
    tokenizer: ChatTokenizer,
    prompts: Sequence[Prompt],
    out: Path,
    plan: AnswerPlan,
    held_out: HeldOut,
    part: int = 0,
) -> Iterator[Progress]:
    """Write shards of answers into `out`, reporting after each batch. part: in the shards' names, so that several
    processes can fill one folder.

    Prompts that touch the held-out set, repeat, or are too long are left out and counted in the card. DataError
    when shards of this temperature and part are there that another run made: a card tells of one run.
    """
    kept, dropped = _usable(prompts, tokenizer, plan, held_out)
    made_with = _made_with(kept, plan)
    for path in sorted(out.glob(f"answers-{_label(plan, part)}-*.safetensors")):
        _check_shard(path, made_with)
    shards = [kept[i : i + plan.shard] for i in range(0, len(kept), plan.shard)]
    done = tokens = 0
    for number, rows in enumerate(shards):
        path = out / f"answers-{_label(plan, part)}-{number:05d}.safetensors"
        if path.exists():
            done += len(rows)
            yield Progress(done, len(kept), tokens)
            continue
        generator = torch.Generator(target.device).manual_seed(stable_seed(plan.seed, part, number))
        examples: list[tuple[list[int], int]] = []
        for batch in decode_many(
            target,
            [ids for _, ids in rows],
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            stop_ids=target.spec.eos_ids,
            batch=plan.batch,
            generator=generator,
        ):
            examples += [([*rows[d.index][1], *d.tokens], len(rows[d.index][1])) for d in batch]
            done += len(batch)
            tokens += sum(len(d.tokens) for d in batch)
            yield Progress(done, len(kept), tokens)
        write_shard(path, examples, {MADE_WITH: json.dumps(made_with)})
    _write_card(out / f"card-{_label(plan, part)}.json", kept, dropped, plan)


def _usable(
    prompts: Sequence[Prompt], tokenizer: ChatTokenizer, plan: AnswerPlan, held_out: HeldOut
) -> tuple[list[tuple[Prompt, list[int]]], Counter[str]]:
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    kept: list[tuple[Prompt, list[int]]] = []
    for prompt in prompts:
        if prompt.text in seen:
            dropped["repeated"] += 1
            continue
        seen.add(prompt.text)
        if held_out.touches(prompt.text):
            dropped["shares words with held-out prompts"] += 1
            continue
        ids = tokenizer.chat_ids(prompt.as_chat())
        if len(ids) + 16 > plan.max_length:
            dropped["too long"] += 1
            continue
        kept.append((prompt, ids))
    return kept, dropped


def _label(plan: AnswerPlan, part: int) -> str:
    return f"t{round(plan.temperature * 100):03d}-p{part}"


def _made_with(kept: Sequence[tuple[Prompt, list[int]]], plan: AnswerPlan) -> dict[str, Any]:
    """What answers depend on. Not the batch: how many are decoded together may change between two runs."""
    facts = {key: value for key, value in asdict(plan).items() if key != "batch"}
    return facts | {"prompt_hash": text_hash(str(ids) for _, ids in kept)}


def _check_shard(path: Path, made_with: dict[str, Any]) -> None:
    stored = json.loads(shard_metadata(path).get(MADE_WITH, "{}"))
    for key, now in made_with.items():
        if stored.get(key) != now:
            raise DataError(
                f"{path}: was made with {key} {stored.get(key, 'unknown')}, not {now}; a folder holds one run: "
                "choose another, or delete its shards to make them again"
            )


def _write_card(
    path: Path, kept: Sequence[tuple[Prompt, list[int]]], dropped: Counter[str], plan: AnswerPlan
) -> None:
    """Say what the shards of this pass hold and how they came to be."""
    card: dict[str, Any] = {
        "prompts": len(kept),
        "sources": dict(Counter(p.source for p, _ in kept).most_common()),
        "licenses": dict(Counter(p.license for p, _ in kept).most_common()),
        "left_out": dict(dropped),
        "prompt_hash": text_hash(p.text for p, _ in kept),
        "plan": asdict(plan),
        "provenance": provenance(),
    }
    with new_file(path) as partial:
        partial.write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
