"""Keyed Gumbel noise: sampling as a function of logits, seed and position.

The noise of a token is a pure function of (seed, absolute position of the token being drawn, token id), so
neither the mode, nor the batch, nor the shape of a draft tree can change what is said. The integers are made
by wrap-around int64 arithmetic and are equal on every backend; only the two logarithms may round differently.

The hash is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) used as a counter: its finaliser, Stafford's
variant 13, is a bijection of 64 bits in which every input bit reaches every output bit. Seed and position are
mixed to a key, and token t gets output number t + 1 of the generator that starts at that key.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["NoiseRing", "choice_seed", "fresh_seed", "gumbel", "seed_tensor", "uniform_bits"]

GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's odd step
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
CHOICE_STEP = 0xD1342543DE82EF95  # another odd constant: choices do not walk along the positions' steps
MASK = 2**64 - 1


def fresh_seed() -> int:
    """64 random bits, for a request that brought no seed."""
    return secrets.randbits(64)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request, unsigned. Choice 0 has the request's own seed."""
    if index == 0:
        return seed & MASK
    z = (seed + index * CHOICE_STEP) & MASK
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z = ((z ^ (z >> shift)) * multiplier) & MASK
    return z ^ (z >> SHIFTS[-1])


def seed_tensor(seeds: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Unsigned 64-bit seeds as the int64 of the same bits. int64 [R]."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniform_bits(seeds_R: Tensor, positions_RN: Tensor, vocab_size: int) -> Tensor:
    """64 hashed bits for every (seed, position, token). seeds_R, positions_RN: int64. int64 [R, N, V]."""
    key_R = _mix(seeds_R + _signed(GOLDEN))
    key_RN = _mix(key_R[:, None] + positions_RN * _signed(GOLDEN))
    return _mix(key_RN[..., None] + _token_steps(vocab_size, seeds_R.device))


def gumbel(seeds_R: Tensor, positions_RN: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise -log(-log u) for every (seed, position, token). float64 [R, N, V].

    u = (k + 1/2) / 2**52 from the upper 52 bits k. One bit more would not fit: k + 1/2 must be exact in
    float64, or the largest k rounds to u = 1 and the noise to infinity.
    """
    k_RNV = _shift_right_(uniform_bits(seeds_R, positions_RN, vocab_size), 12)
    noise_RNV = k_RNV.to(torch.float64).add_(0.5).mul_(2.0**-52)
    return noise_RNV.log_().neg_().log_().neg_()


class NoiseRing:
    """The noise of one sequence, each position computed once while a window slides forward.

    Invariant: row i of the buffer is the noise of position `first + i`. A row once written is never written
    again, so what `rows` returned stays valid: a window that leaves the buffer moves to a fresh one.
    """

    def __init__(self, seed: int, vocab_size: int, capacity: int, device: torch.device | None = None) -> None:
        """capacity: the most positions that one call asks for."""
        self._capacity = capacity
        self._seed_R = seed_tensor([seed], device)
        self._buffer_PV = self._seed_R.new_empty(0, vocab_size, dtype=torch.float64)
        self._first = self._end = 0

    def rows(self, first_position: int, count: int) -> Tensor:
        """Noise of `count` positions from the first one on. float64 [count, V], not to be written."""
        assert 0 < count <= self._capacity, "the window is wider than the ring"
        end = first_position + count
        if not self._first <= first_position <= self._end or end > self._first + len(self._buffer_PV):
            self._move(first_position)
        if end > self._end:
            self._fill(end)
        return self._buffer_PV[first_position - self._first : end - self._first]

    def _fill(self, end: int) -> None:
        positions_N = torch.arange(self._end, end, device=self._seed_R.device)
        # On a CPU row by row: the scratch of one row stays in the cache, which halves the time.
        each = 1 if positions_N.device.type == "cpu" else len(positions_N)
        for some_N in torch.split(positions_N, each):
            fresh_NV = gumbel(self._seed_R, some_N[None], self._buffer_PV.shape[1])[0]
            at = self._end - self._first
            self._buffer_PV[at : at + len(some_N)] = fresh_NV
            self._end += len(some_N)

    def _move(self, first_position: int) -> None:
        """Start a fresh buffer at the position, with the rows from there on that the old one holds."""
        kept_PV = self._buffer_PV[:0]
        if self._first <= first_position < self._end:
            kept_PV = self._buffer_PV[first_position - self._first : self._end - self._first]
        # Twice the window, so that the copy costs less than one row for each position gone forward.
        self._buffer_PV = self._buffer_PV.new_empty(2 * self._capacity, self._buffer_PV.shape[1])
        self._buffer_PV[: len(kept_PV)] = kept_PV
        self._first, self._end = first_position, first_position + len(kept_PV)


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    bits &= MASK
    return bits - 2**64 if bits >= 2**63 else bits


def _shift_right_(z: Tensor, shift: int) -> Tensor:
    """Logical right shift in place: int64's own shift would copy the sign."""
    return z.bitwise_right_shift_(shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser. Overwrites its argument, which is always a fresh sum here."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        z.bitwise_xor_(_shift_right_(z.clone(), shift)).mul_(_signed(multiplier))
    return z.bitwise_xor_(_shift_right_(z.clone(), SHIFTS[-1]))


@lru_cache(maxsize=8)
def _token_steps(vocab_size: int, device: torch.device) -> Tensor:
    """What is added to a key for each token: (t + 1) steps. int64 [V]."""
    return torch.arange(1, vocab_size + 1, device=device) * _signed(GOLDEN)
