"""Keyed noise: the hash against a twin in Python integers, its statistics, and the memo that slides along."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ddtree.speculation import noise
from ddtree.speculation.noise import NoiseRing, choice_seed, fresh_seed, gumbel, seed_tensor, uniform_bits

M64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
SEEDS = (0, 1, 2, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF)
POSITIONS = (0, 1, 2, 77, 2**20, 2**31, 2**40)
KNOWN = {  # (seed, position, token): bits
    (0, 0, 0): 0x568A9B0B1A2C05EC,
    (1, 0, 0): 0x6EC85F1F8547BC0C,
    (0, 1, 0): 0x238275BC38FCBE91,
    (0, 0, 1): 0x44E5B8B147EF718B,
    (-1, 4096, 49151): 0x9E99958563F74014,
    (2**64 - 1, 4096, 49151): 0x9E99958563F74014,
    (2**63, 2**31, 7): 0x91A08A037A428AF2,
    (0xDEADBEEF, 123456, 31999): 0x0564E98B1838261B,
}


def mix(z: int) -> int:
    """SplitMix64's finaliser on unsigned integers, written out once more."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M64
    return z ^ (z >> 31)


def twin_bits(seed: int, position: int, token: int) -> int:
    key = mix((mix((seed + GOLDEN) & M64) + position * GOLDEN) & M64)
    return mix((key + (token + 1) * GOLDEN) & M64)


def bits_of(seeds, positions, vocab_size):
    """Unsigned bits as nested lists [R][N][V]."""
    bits_RNV = uniform_bits(seed_tensor(seeds), torch.tensor(positions), vocab_size)
    return bits_RNV.numpy().view(np.uint64).tolist()


def test_the_finaliser_is_splitmix64():
    # The first outputs of the published generator from state 1234567: the finaliser of state + n * step.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix((1234567 + n * GOLDEN) & M64) for n in range(1, 5)] == published


def test_bits_are_the_twins():
    vocab_size = 517
    bits = bits_of(SEEDS, [POSITIONS] * len(SEEDS), vocab_size)
    for r, seed in enumerate(SEEDS):
        for n, position in enumerate(POSITIONS):
            for token in (0, 1, 255, 256, vocab_size - 1):
                assert bits[r][n][token] == twin_bits(seed, position, token), (seed, position, token)


@given(st.integers(-(2**63), M64), st.integers(0, 2**40), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_bits_are_the_twins_anywhere(seed, position, vocab_size):
    bits = bits_of([seed], [[position]], vocab_size)[0][0]
    assert [bits[0], bits[-1]] == [twin_bits(seed, position, 0), twin_bits(seed, position, vocab_size - 1)]


def test_known_answers():
    """Fixed for good: other values would change what every seeded request says."""
    for (seed, position, token), bits in KNOWN.items():
        assert bits_of([seed], [[position]], token + 1)[0][0][token] == bits


def test_bits_depend_neither_on_the_vocabulary_nor_on_the_batch():
    seeds_R, positions_RN = seed_tensor([5, 6]), torch.tensor([[3, 4, 5], [9, 9, 1]])
    all_RNV = uniform_bits(seeds_R, positions_RN, 100)
    assert torch.equal(all_RNV[..., :40], uniform_bits(seeds_R, positions_RN, 40))
    assert torch.equal(all_RNV[1:, 2:], uniform_bits(seeds_R[1:], positions_RN[1:, 2:], 100))
    assert torch.equal(all_RNV[1, 0], all_RNV[1, 1])


def test_arguments_are_not_written():
    seeds_R, positions_RN = seed_tensor([5, 6]), torch.tensor([[3, 4], [9, 1]])
    gumbel(seeds_R, positions_RN, 10)
    assert seeds_R.tolist() == [5, 6]
    assert positions_RN.tolist() == [[3, 4], [9, 1]]


def test_gumbel_is_the_double_logarithm_of_an_open_uniform():
    seeds_R, positions_RN = seed_tensor([11]), torch.arange(4)[None]
    noise_NV = gumbel(seeds_R, positions_RN, 50)[0]
    assert noise_NV.dtype == torch.float64
    for position in range(4):
        for token in (0, 1, 49):
            uniform = ((twin_bits(11, position, token) >> 12) + 0.5) / 2**52
            expected = -math.log(-math.log(uniform))
            assert noise_NV[position, token].item() == pytest.approx(expected, rel=1e-14)


def test_the_ends_of_the_uniform_are_finite(monkeypatch):
    ends = torch.tensor([[[0, -1, (1 << 63) - 1, -(1 << 63)]]])  # all bits off, all on, and the sign alone
    monkeypatch.setattr(noise, "uniform_bits", lambda *_: ends.clone())
    lowest, highest, *middle = gumbel(seed_tensor([0]), torch.zeros(1, 1), 4)[0, 0].tolist()
    assert -4 < lowest < -3
    assert 36 < highest < 37
    assert middle == pytest.approx([-math.log(math.log(2))] * 2)


def test_no_collisions_between_neighbours():
    seeds = [*range(-32, 32), *(choice_seed(7, i) for i in range(1, 17))]
    positions_RN = torch.arange(48).expand(len(seeds), -1)
    bits = uniform_bits(seed_tensor(seeds), positions_RN, 300).flatten()
    assert len(bits.unique()) == len(bits)


def test_neighbours_are_uncorrelated():
    """Noise one token, one position or one seed apart: correlations as small as independence makes them."""
    noise_RNV = gumbel(seed_tensor(list(range(64))), torch.arange(64).expand(64, -1), 256)
    standard = (noise_RNV - noise_RNV.mean()) / noise_RNV.std()
    for dim in range(3):
        size = standard.shape[dim] - 1
        product = standard.narrow(dim, 0, size) * standard.narrow(dim, 1, size)
        assert abs(product.mean().item()) * math.sqrt(product.numel()) < 4


@pytest.mark.parametrize("shape", [(1, 1, 200_000), (1, 20_000, 10), (20_000, 1, 10), (100, 100, 20)])
def test_uniforms_are_uniform_whichever_way_one_walks(shape):
    sequences, count, vocab_size = shape
    positions_RN = torch.arange(count).expand(sequences, -1)
    noise_RNV = gumbel(seed_tensor(list(range(sequences))), positions_RN, vocab_size)
    assert stats.kstest(noise_RNV.flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_every_bit_is_fair():
    bits = uniform_bits(seed_tensor([3]), torch.arange(40)[None], 2500).flatten()
    ones = torch.stack([(bits >> shift) & 1 for shift in range(64)]).double().mean(dim=1)
    assert (ones - 0.5).abs().max().item() < 4.5 * 0.5 / math.sqrt(len(bits))


@pytest.mark.parametrize("walk", ["positions", "seeds"])
def test_argmax_follows_the_softmax(walk):
    logits_V = torch.tensor([2.0, 1.5, 0.0, -1.0, 1.5, -3.0, 0.7], dtype=torch.float64)
    draws = 40_000
    if walk == "positions":
        noise_SV = gumbel(seed_tensor([99]), torch.arange(draws)[None], 7)[0]
    else:
        noise_SV = gumbel(seed_tensor(list(range(draws))), torch.full((draws, 1), 12), 7)[:, 0]
    counts = torch.bincount((logits_V + noise_SV).argmax(dim=1), minlength=7)
    assert stats.chisquare(counts.numpy(), (logits_V.softmax(0) * draws).numpy()).pvalue > 1e-3


def test_choice_seeds():
    for seed in SEEDS:
        assert choice_seed(seed, 0) == seed & M64
    seeds = {choice_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50
    assert all(0 <= seed <= M64 for seed in seeds)
    assert choice_seed(7, 3) == choice_seed(7 - 2**64, 3)


def test_fresh_seeds():
    seeds = [fresh_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed <= M64 for seed in seeds)


@pytest.fixture
def counted(monkeypatch):
    """Every position that the ring asks noise for."""
    asked = []

    def counting(seeds_R, positions_RN, vocab_size):
        asked.extend(positions_RN.flatten().tolist())
        return gumbel(seeds_R, positions_RN, vocab_size)

    monkeypatch.setattr(noise, "gumbel", counting)
    return asked


def expected_rows(seed, first, count, vocab_size=13):
    return gumbel(seed_tensor([seed]), torch.arange(first, first + count)[None], vocab_size)[0]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_the_ring_gives_the_noise_of_the_position(steps):
    """Forward, standing still, skipping, and (from one example to the next start) back again."""
    ring = NoiseRing(2**63 + 5, 13, capacity=5)
    first, held = 100, []
    for step, count in steps:
        first += step - 1
        rows_NV = ring.rows(first, count)
        held.append((rows_NV, expected_rows(2**63 + 5, first, count)))
    # Rows handed out earlier are still what they were.
    assert all(torch.equal(rows_NV, expected_NV) for rows_NV, expected_NV in held)


def test_the_ring_computes_each_position_once(counted):
    ring = NoiseRing(4, 13, capacity=9)
    position = 20
    for accepted in [1, 9, 3, 1, 1, 5, 8, 2, 4, 9, 9, 1] * 4:
        ring.rows(position, 8)  # drafting
        ring.rows(position, 9)  # judging: one position deeper
        position += accepted
    assert len(counted) == len(set(counted))
    assert set(counted) == set(range(20, position - 1 + 9))


def test_the_ring_starts_over_behind_and_far_ahead(counted):
    ring = NoiseRing(4, 13, capacity=3)
    for first in (50, 10, 90):
        assert torch.equal(ring.rows(first, 3), expected_rows(4, first, 3))
    ring.rows(94, 1)
    assert counted == [50, 51, 52, 10, 11, 12, 90, 91, 92, 94]
    with pytest.raises(AssertionError, match="wider than the ring"):
        ring.rows(90, 4)
