"""Plain decoding of many sequences at once, for making data: static cache, one batch until all have ended.

Rows that have ended are dropped now and then, so a batch shrinks as it goes. Sampling takes its noise from a
generator, or, for sequences with seeds of their own, from the noise that the engine draws with: those say what the
engine would say with that seed, whatever the batch (rounding aside).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.models.cache import SlotCache
from ddtree.models.target import TargetModel
from ddtree.ops import Rows
from ddtree.speculation.noise import gumbel, seed_tensor
from ddtree.tree import chain_words

__all__ = ["Decoded", "decode_batch", "decode_many"]

# Spans grow in steps, so that shapes repeat.
SPAN_STEP = 64
PREFILL_TOKENS = 65536
# How often it is looked which rows have ended, and how few must be left for the others to be dropped.
CHECK_STEPS = 16
WORTH_SHRINKING = 0.8
# What is added to scores [R, V] for tokens that will stand at some positions [R], by the prompt of each row [R].
Noise = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One continuation. ended: it stopped by itself, at an end-of-sequence token (the last of `tokens`)."""

    index: int
    tokens: list[int]
    ended: bool


def decode_many(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    batch: int,
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | None = None,
) -> Iterator[list[Decoded]]:
    """Continue every prompt, `batch` at a time, prompts of similar length together; yields batch by batch.

    seeds: one for each prompt; without them a temperature above 0 draws from the device's generator.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        found = decode_batch(
            target,
            [prompts[i] for i in chosen],
            max_tokens=max_tokens,
            temperature=temperature,
            stop_ids=stop_ids,
            generator=generator,
            seeds=None if seeds is None else [seeds[i] for i in chosen],
        )
        yield [Decoded(i, tokens, ended) for i, (tokens, ended) in zip(chosen, found, strict=True)]


@torch.inference_mode()
def decode_batch(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    stop_ids: Sequence[int],
    generator: torch.Generator | None = None,
    seeds: Sequence[int] | None = None,
) -> list[tuple[list[int], bool]]:
    """Continue some prompts in step with each other. temperature 0 is greedy; seeds as in `decode_many`."""
    device = target.device
    noise = _drawn_noise(generator) if seeds is None else _keyed_noise(seed_tensor(seeds, device))
    lengths_R = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths_R.max())
    cache = target.new_cache(len(prompts), _stepped(longest + max_tokens))
    stops = torch.tensor(list(stop_ids), device=device)
    member_R = torch.arange(len(prompts), device=device)  # which prompt each row of the batch continues
    last_RV = _prefill(target, prompts, lengths_R, longest, cache)
    tokens_R = _choose(last_RV, temperature, noise, lengths_R, member_R)
    said_RT = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=device)
    said_RT[:, 0] = tokens_R
    live_R = ~torch.isin(tokens_R, stops)
    for step in range(1, max_tokens):
        if step % CHECK_STEPS == 0:  # a host read now and then, not at each step
            left = int(live_R.sum())
            if not left:
                break
            if left <= WORTH_SHRINKING * member_R.numel():
                kept = live_R.nonzero()[:, 0]
                cache.drop_others(kept)
                tokens_R, lengths_R, member_R, live_R = (a[kept] for a in (tokens_R, lengths_R, member_R, live_R))
        words = chain_words(member_R.numel(), 1, device)
        rows = Rows(tokens_R[:, None], lengths_R[:, None], lengths_R, words, _stepped(longest + step))
        hidden_R1h, _ = target(rows, cache)
        lengths_R = lengths_R + 1
        tokens_R = _choose(target.logits(hidden_R1h[:, 0]), temperature, noise, lengths_R, member_R)
        said_RT[member_R, step] = tokens_R
        live_R = live_R & ~torch.isin(tokens_R, stops)
    return [_cut(row, set(stop_ids)) for row in said_RT.tolist()]


def _prefill(
    target: TargetModel, prompts: Sequence[Sequence[int]], lengths_R: Tensor, longest: int, cache: SlotCache
) -> Tensor:
    """Logits after each prompt. Prompts are padded on the right; padding is seen by no real row. [R, V]."""
    device = target.device
    tokens_RN = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens_RN[row, : len(prompt)] = torch.tensor(prompt)
    tokens_RN = tokens_RN.to(device)
    zero_R = torch.zeros_like(lengths_R)
    last_RV: Tensor | None = None
    # Whole columns of the batch at a time, so that activations stay small.
    chunk = max(PREFILL_TOKENS // len(prompts), 1)
    for first in range(0, longest, chunk):
        part_RN = tokens_RN[:, first : first + chunk]
        count = part_RN.shape[1]
        place_RN = torch.arange(first, first + count, device=device).expand(len(prompts), -1)
        rows = Rows(
            part_RN,
            place_RN,
            zero_R + first,
            chain_words(len(prompts), count, device),
            first + count,
            place_RN < lengths_R[:, None],
        )
        hidden_RNh, _ = target(rows, cache)
        at_R = lengths_R - 1 - first
        logits_RV = target.logits(hidden_RNh[torch.arange(len(prompts)), at_R.clamp(0, count - 1)])
        here_R1 = ((at_R >= 0) & (at_R < count))[:, None]
        last_RV = logits_RV if last_RV is None else torch.where(here_R1, logits_RV, last_RV)
    assert last_RV is not None
    return last_RV


def _choose(logits_RV: Tensor, temperature: float, noise: Noise, positions_R: Tensor, member_R: Tensor) -> Tensor:
    if temperature == 0:
        return logits_RV.argmax(dim=-1)
    wide_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    scores_RV = wide_RV / temperature
    return (scores_RV + noise(scores_RV, positions_R, member_R)).argmax(dim=-1)


def _drawn_noise(generator: torch.Generator | None) -> Noise:
    def noise(scores_RV: Tensor, positions_R: Tensor, member_R: Tensor) -> Tensor:
        waiting_RV = torch.empty_like(scores_RV).exponential_(generator=generator).clamp_(min=1e-30)
        return -waiting_RV.log()

    return noise


def _keyed_noise(seeds_E: Tensor) -> Noise:
    """seeds_E: one for each prompt."""

    def noise(scores_RV: Tensor, positions_R: Tensor, member_R: Tensor) -> Tensor:
        noise_R1V = gumbel(seeds_E[member_R], positions_R[:, None], scores_RV.shape[1])
        return noise_R1V[:, 0].to(scores_RV.dtype)

    return noise


def _cut(tokens: list[int], stops: set[int]) -> tuple[list[int], bool]:
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1], True
    return tokens, False


def _stepped(span: int) -> int:
    return -(-span // SPAN_STEP) * SPAN_STEP
