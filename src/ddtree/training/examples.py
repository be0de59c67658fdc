"""Answers on disk, and the packs that a training step is made of.

A shard is a safetensors file: `tokens` (int32, all examples in a row), `lengths` and `prompt_lengths` (int32,
one of each for an example). Which examples and anchors a step sees is a pure function of (seed, step, rank), so
a resumed run repeats nothing and skips nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddtree.errors import DataError
from ddtree.models.storage import new_file

__all__ = [
    "Examples",
    "Pack",
    "load_examples",
    "pack_for_step",
    "send",
    "shard_metadata",
    "split_examples",
    "stable_seed",
    "write_shard",
]

SHARD_PATTERN = "answers-*.safetensors"


@dataclass(frozen=True, slots=True)
class Examples:
    """All examples of a run, end to end. tokens_T: int64. starts_E, ends_E, prompts_E: int64; `prompts_E` is the
    place of an example's first answer token. too_short counts examples left out for lack of a token to draft,
    cut those that were longer than wanted."""

    tokens_T: Tensor
    starts_E: Tensor
    ends_E: Tensor
    prompts_E: Tensor
    too_short: int
    cut: int

    def __len__(self) -> int:
        return int(self.starts_E.numel())

    @property
    def token_count(self) -> int:
        """Tokens of all examples together, prompts included."""
        return int((self.ends_E - self.starts_E).sum())

    @property
    def key(self) -> str:
        """A hash of every token and of what is an answer: other data have another."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (self.tokens_T, self.starts_E, self.ends_E, self.prompts_E):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def take(self, index_E: Tensor) -> Examples:
        """Some of the examples; the tokens are shared."""
        return Examples(
            self.tokens_T,
            self.starts_E[index_E],
            self.ends_E[index_E],
            self.prompts_E[index_E],
            self.too_short,
            self.cut,
        )


@dataclass(frozen=True, slots=True)
class Pack:
    """The context and the draft blocks of one step.

    examples: their indices. source_T: place of each packed token among all tokens; the last example may be
    followed by padding. positions_T, example_T: position inside its example, and which one (-1 marks padding).
    anchors_A: places in the pack, ascending. weights say whether an anchor is real (padding repeats place 0).
    """

    examples: tuple[int, ...]
    source_T: Tensor
    positions_T: Tensor
    example_T: Tensor
    anchors_A: Tensor
    real_A: Tensor

    def to(self, device: torch.device) -> Pack:
        """The pack on a device."""
        tensors = (self.source_T, self.positions_T, self.example_T, self.anchors_A, self.real_A)
        return Pack(self.examples, *(send(t, device) for t in tensors))


def split_examples(examples: Examples, count: int) -> tuple[Examples, Examples]:
    """Examples to train on, and about `count` to validate on: no prompt has answers on both sides."""
    prompt_keys = [
        hash_tokens(examples.tokens_T[start:end])
        for start, end in zip(examples.starts_E.tolist(), examples.prompts_E.tolist(), strict=True)
    ]
    held_keys: set[int] = set()
    held = torch.zeros(len(examples), dtype=torch.bool)
    for index in sorted(range(len(examples)), key=lambda i: (prompt_keys[i], i)):
        if int(held.sum()) >= count and prompt_keys[index] not in held_keys:
            break
        held_keys.add(prompt_keys[index])
        held[index] = True
    return examples.take((~held).nonzero()[:, 0]), examples.take(held.nonzero()[:, 0])


def hash_tokens(tokens_T: Tensor) -> int:
    """A 64-bit key of some tokens: a stable order that has nothing to do with their length."""
    return int.from_bytes(hashlib.blake2b(tokens_T.numpy().tobytes(), digest_size=8).digest())


def write_shard(path: Path, examples: list[tuple[list[int], int]], metadata: dict[str, str]) -> None:
    """Write (tokens, prompt length) pairs; the file gets its name only when it is whole. StorageError when the
    disk says no."""
    tokens = torch.tensor([t for tokens, _ in examples for t in tokens], dtype=torch.int32)
    lengths = torch.tensor([len(tokens) for tokens, _ in examples], dtype=torch.int32)
    prompts = torch.tensor([prompt for _, prompt in examples], dtype=torch.int32)
    with new_file(path) as partial:
        save_file({"tokens": tokens, "lengths": lengths, "prompt_lengths": prompts}, partial, metadata)


def shard_metadata(path: Path) -> dict[str, str]:
    """What a shard's file says of itself. DataError when it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from None


def load_examples(folder: Path, vocab_size: int, max_length: int) -> Examples:
    """All shards of a folder. DataError for none, damaged ones, or tokens of another vocabulary."""
    paths = sorted(folder.glob(SHARD_PATTERN))
    if not paths:
        raise DataError(f"{folder}: holds no {SHARD_PATTERN}; make answers first with `ddtree data`")
    tokens: list[Tensor] = []
    lengths: list[Tensor] = []
    prompts: list[Tensor] = []
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                parts = [file.get_tensor(name).long() for name in ("tokens", "lengths", "prompt_lengths")]
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
        if parts[0].numel() and int(parts[0].max()) >= vocab_size:
            raise DataError(
                f"{path}: holds token {int(parts[0].max())}, outside the target's vocabulary of {vocab_size}; "
                "these answers are another model's"
            )
        for kept, part in zip((tokens, lengths, prompts), parts, strict=True):
            kept.append(part)
    length_E, prompt_E = torch.cat(lengths), torch.cat(prompts)
    start_E = length_E.cumsum(0) - length_E
    end_E = start_E + length_E.clamp(max=max_length)
    # An anchor needs a token after it, and the first anchor is the first token of the answer.
    usable_E = end_E - (start_E + prompt_E) >= 2
    if not usable_E.any():
        raise DataError(f"{folder}: no example has two answer tokens within {max_length} tokens")
    all_examples = Examples(
        torch.cat(tokens),
        start_E,
        end_E,
        start_E + prompt_E,
        int((~usable_E).sum()),
        int((length_E > max_length).sum()),
    )
    return all_examples.take(usable_E.nonzero()[:, 0])


def pack_for_step(
    examples: Examples, step: int, *, context_tokens: int, anchors: int, seed: int, rank: int
) -> Pack:
    """The pack of one step of one process: random examples until the context is full, then random anchors among
    their answer tokens. A function of its arguments alone."""
    generator = torch.Generator().manual_seed(stable_seed(seed, step, rank))
    order = torch.randperm(len(examples), generator=generator)
    length_E = (examples.ends_E - examples.starts_E)[order]
    fits = length_E.cumsum(0) <= context_tokens
    fits[0] = True
    chosen = order[fits]
    start_E = examples.starts_E[chosen]
    length_E = length_E[fits].clamp(max=context_tokens)
    member_T = torch.repeat_interleave(length_E)
    position_T = torch.arange(member_T.numel()) - (length_E.cumsum(0) - length_E)[member_T]
    source_T = start_E[member_T] + position_T
    # The last token of an example has no successor to draft.
    answer_T = (source_T >= examples.prompts_E[chosen][member_T]) & (position_T < length_E[member_T] - 1)
    candidates = answer_T.nonzero()[:, 0]
    picked = candidates[torch.randperm(candidates.numel(), generator=generator)[:anchors]].sort().values
    pad = context_tokens - source_T.numel()
    fill = anchors - picked.numel()
    return Pack(
        examples=tuple(chosen.tolist()),
        source_T=_padded(source_T, pad, 0),
        positions_T=_padded(position_T, pad, 0),
        example_T=_padded(member_T, pad, -1),
        anchors_A=_padded(picked, fill, int(picked[-1]) if picked.numel() else 0),
        real_A=_padded(torch.ones_like(picked, dtype=torch.bool), fill, False),
    )


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from the host without waiting for what the device is doing."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def stable_seed(*parts: int) -> int:
    """A 63-bit seed from some numbers, the same on every machine and Python."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: truncated or damaged ({error}); delete it and make it again")


def _padded(values: Tensor, count: int, fill: int | bool) -> Tensor:
    return torch.cat([values, values.new_full((count,), fill)])
