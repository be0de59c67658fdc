"""A long run of an engine under random load, checked while it runs: `python -m tests.soak --rounds 20000`.

Requests arrive at random, in every mode, with every setting, some sharing their beginnings, some taken back;
there are too few pages, so that requests are pushed out. Checked: every answer is what plain decoding says; pages
are accounted for, after every step; pages that may be shared never change; now and then, keys, values and drafter
contexts of a running request are those of a plain pass over its text; and memory does not grow.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ddtree.engine.batch import Batch, Live
from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.engine.request import Completion, Job, Piece
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.speculation.noise import NoiseRing
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import ALGORITHMS, FixedPolicy, fixed_plan
from tests.checkpoints import chain_rows
from tests.drafters import LAYERS, draft_from_library, pieces, plain_forward, tokens_of
from tests.toys import random_tokens, toy_drafter, toy_target

MODES = tuple(ALGORITHMS)
BLOCK = 8
END = 17
LONGEST = 60
PLAIN = fixed_plan("off", 1, 0)


@dataclass(frozen=True)
class Case:
    """A request and what plain decoding answers."""

    prompt: list[int]
    params: SamplingParams
    answer: list[int]


def models() -> tuple[TargetModel, LoadedDrafter]:
    target = toy_target("qwen3", layers=2, eos_ids=(END,))
    return target, LoadedDrafter(*toy_drafter(target, layers=1, layer_ids=LAYERS, block_size=BLOCK))


def new_engine(target: TargetModel, drafter: LoadedDrafter | None, **config: object) -> BatchEngine:
    options = EngineConfig(**({"max_context": 160, "memory_gib": 1.0} | config))  # type: ignore[arg-type]
    return BatchEngine(target, drafter, options, lambda tokens: "".join(chr(200 + t) for t in tokens))


def make_cases(target: TargetModel, count: int, seed: int) -> list[Case]:
    """Requests with settings of all kinds. Every second one goes on where another has ended, as a chat does."""
    draw = random.Random(seed)
    plain = new_engine(target, None, mode="off")
    settings: list[dict[str, object]] = [
        {},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"temperature": 1.2, "top_k": 5, "logit_bias": {4: 2.0}},
    ]
    cases: list[Case] = []
    for i in range(count):
        prompt = random_tokens(draw.randint(1, 40), 1000 * seed + i)
        if cases and i % 2:
            before = draw.choice(cases)
            if len(before.prompt) + len(before.answer) < 90:
                prompt = before.prompt + before.answer + prompt[:10]
        ignoring = draw.random() < 0.7
        params = SamplingParams(seed=i, max_tokens=LONGEST, ignore_eos=ignoring, **draw.choice(settings))  # type: ignore[arg-type]
        cases.append(Case(prompt, params, tokens_of(pieces(plain, prompt, params, PLAIN))))
    return cases


def held_by(pool: Tensor, pages: list[int], count: int) -> Tensor:
    """The first `count` places of some pages of one pool. [layers, count, G, d]."""
    return pool[:, pages].flatten(1, 2)[:, :count]


@torch.inference_mode()
def check_contents(engine: BatchEngine, drafter: LoadedDrafter, live: Live) -> None:
    """What a request has in the caches is what plain passes over its text put there."""
    track, target = live.track, engine.target
    count = track.computed
    if not count:
        return
    cache = target.new_cache(1, count)
    target(chain_rows(torch.tensor([track.tokens[:count]]), [0]), cache)
    wanted = [(cache.keys[:, :count], cache.values[:, :count])]
    if track.context:
        features_1NF = plain_forward(target, track.tokens[:count], LAYERS)[1][None]
        context = drafter.model.new_cache(1, count)
        place_1N = torch.arange(count)[None]
        drafter.model.absorb(features_1NF, place_1N, context.slots(place_1N), context)
        wanted.append((context.keys[:, :count], context.values[:, :count]))
    for pool, (keys, values) in zip(engine.runner.pools, wanted, strict=False):
        torch.testing.assert_close(held_by(pool.keys, track.pages, count), keys, rtol=0, atol=1e-9)
        torch.testing.assert_close(held_by(pool.values, track.pages, count), values, rtol=0, atol=1e-9)


class SharedPages:
    """Watches pages that the prefix cache knows: until it gives them up, nobody may write to them."""

    def __init__(self, engine: BatchEngine) -> None:
        self._pools = engine.runner.pools
        self._prefix = prefix = engine.blocks.prefix
        self._seen: dict[int, float] = {}
        if prefix is not None:
            evict = prefix.evict

            def evicting() -> int:
                page = evict()
                self._seen.pop(page, None)
                return page

            prefix.evict = evicting  # type: ignore[method-assign]

    def check(self) -> None:
        if self._prefix is None:
            return
        for page in self._prefix._key_of:
            now = sum(float(tensor[:, page].sum()) for pool in self._pools for tensor in (pool.keys, pool.values))
            assert self._seen.setdefault(page, now) == now, "a shared page changed"


@dataclass
class Sent:
    """A request on its way."""

    case: Case
    limit: int
    job: Job
    got: list[Piece] = field(default_factory=list)
    ends: list[Completion] = field(default_factory=list)
    cancelled: bool = False

    def check(self) -> None:
        said = tokens_of(self.got)
        assert said == self.case.answer[: len(said)], "the answer is not what plain decoding says"
        (done,) = self.ends
        assert isinstance(done, Completion), done
        assert list(done.token_ids) == said
        if self.cancelled:
            assert done.finish_reason in ("cancelled", "stop", "length")
        else:
            assert len(said) == min(self.limit, len(self.case.answer))


def soak(
    rounds: int, seed: int = 0, say: Callable[[str], None] = lambda line: None, **config: object
) -> dict[str, int]:
    """Run an engine for so many steps. Returns what happened, for tests to see that enough of it did."""
    draw = random.Random(seed)
    target, drafter = models()
    cases = make_cases(target, 40, seed)
    engine = new_engine(target, drafter, **({"max_sequences": 9, "pages": 54, "page_size": 8} | config))
    library = draft_from_library(engine, seed)
    shared = SharedPages(engine)
    on_the_way: dict[Live, Sent] = {}
    happened = dict.fromkeys(("answers", "cancelled", "idle", "contents", "widest", "longest"), 0)
    flat: list[int] = []
    alive = _alive()
    began_s = time.perf_counter()

    def arrive() -> None:
        case = draw.choice(cases)
        limit = draw.randint(1, LONGEST)
        params = replace(case.params, max_tokens=limit)
        plan = fixed_plan(draw.choice(MODES), draw.randint(2, BLOCK), draw.choice((1, 3, 8, 15, 16, 33)))
        sent = Sent(
            case, limit, Job(case.prompt, params, FixedPolicy(plan), logprobs=draw.choice((None, None, 2)))
        )
        if draw.random() < 0.8:
            library.learn(case.prompt, params, case.answer)
        on_the_way[engine.add(sent.job, sent.got.append, sent.ends.append)] = sent  # type: ignore[arg-type]

    busy, step, reported = 0.5, 0, -1
    while step < rounds:
        if draw.random() < 0.02:
            busy = draw.choice((0.05, 0.3, 0.9))
        while len(on_the_way) < 20 and draw.random() < busy:
            arrive()
        if on_the_way and draw.random() < 0.03:
            live = draw.choice(list(on_the_way))
            on_the_way[live].cancelled = True
            engine.cancel(live)
        if engine.busy:
            engine.step()
            step += 1
        for live, sent in list(on_the_way.items()):
            if sent.ends:
                sent.check()
                del on_the_way[live]
                happened["answers"] += 1
                happened["cancelled"] += sent.cancelled
                happened["longest"] = max([happened["longest"], *(len(piece.token_ids) for piece in sent.got)])
        engine.scheduler.check()
        if draw.random() < 0.1:
            shared.check()
        if engine.scheduler.running and draw.random() < 0.02:
            check_contents(engine, drafter, engine._live[draw.choice(engine.scheduler.running)])
            happened["contents"] += 1
        happened["widest"] = max(happened["widest"], len(engine.scheduler.running))
        if not engine.busy:
            happened["idle"] += 1
            assert engine.blocks.held == 0
            library._logits.clear()
        if step % max(rounds // 20, 1) == 0 and step != reported:
            reported = step
            flat.append(_resident())
            say(
                f"{step} rounds, {happened['answers']} answers, {engine.scheduler.preemptions} pushed out, "
                f"{flat[-1] >> 20} MiB resident, {time.perf_counter() - began_s:.0f} s"
            )
    for live in list(on_the_way):
        engine.cancel(live)
    engine.scheduler.check()
    assert engine.blocks.held == 0
    engine.blocks.forget()
    assert engine.blocks.free == engine.blocks.total
    # The first fifth fills pools and caches; after it nothing may grow.
    settled = flat[len(flat) // 5 :]
    assert settled[-1] - settled[0] < 48 << 20, "resident memory grows"
    on_the_way.clear()
    assert _alive() - alive < 5, "requests are held on to"  # what variables here and padding hold is not many
    numbers = engine.snapshot()
    happened["preemptions"] = numbers.preemptions
    happened["hits"] = numbers.prefix_hit_tokens
    happened["accepted"] = sum(counts.accepted for counts in numbers.modes.values())
    return happened


def _alive() -> int:
    """Requests, batches and noise that somebody still holds."""
    gc.collect()
    return sum(type(one) in (Live, Batch, NoiseRing) for one in gc.get_objects())


def _resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(options.rounds, options.seed, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    print(found)  # noqa: T201


if __name__ == "__main__":
    main()
