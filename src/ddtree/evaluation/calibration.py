"""Whether a drafter's probabilities mean what they say: how sure it is of its best guesses, and how right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BINS", "Calibration", "DepthCalibration", "no_calibration"]

BINS = 10


@dataclass(frozen=True, slots=True)
class DepthCalibration:
    """One depth. predicted: mean probability of the best guess. observed: how often it was right. error: mean
    distance of the two over ten bins of probability, weighted by count. bins: (count, predicted, observed).
    """

    depth: int
    count: int
    predicted: float
    observed: float
    error: float
    bins: tuple[tuple[int, float, float], ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sums over guesses by depth and bin of probability. sums_3DC: count, probability, hits; added to in place."""

    sums_3DC: Tensor

    def add(self, log_probs_AD: Tensor, tokens_AD: Tensor, labels_AD: Tensor) -> None:
        """Count the best guesses of A blocks where the text goes on and something was drafted."""
        probs_AD = log_probs_AD.double().exp()
        counted_AD = ((labels_AD >= 0) & (log_probs_AD > -torch.inf)).double()
        bin_AD = (probs_AD * BINS).long().clamp(max=BINS - 1)
        values = (counted_AD, probs_AD * counted_AD, (tokens_AD == labels_AD).double() * counted_AD)
        for sums_DC, value_AD in zip(self.sums_3DC, values, strict=True):
            sums_DC += torch.zeros_like(sums_DC).scatter_add(
                1, bin_AD.T.to(sums_DC.device), value_AD.T.to(sums_DC.device)
            )

    def depths(self) -> tuple[DepthCalibration, ...]:
        """The figures of each depth that was reached."""
        found = []
        for depth, (counts, probs, hits) in enumerate(self.sums_3DC.transpose(0, 1).tolist(), start=1):
            total = sum(counts)
            if total:
                error = sum(abs(p - h) for p, h in zip(probs, hits, strict=True)) / total
                bins = tuple(
                    (int(n), p / n if n else 0.0, h / n if n else 0.0)
                    for n, p, h in zip(counts, probs, hits, strict=True)
                )
                found.append(
                    DepthCalibration(depth, int(total), sum(probs) / total, sum(hits) / total, error, bins)
                )
        return tuple(found)


def no_calibration(depth: int) -> Calibration:
    """Nothing counted yet, for `depth` depths."""
    return Calibration(torch.zeros(3, depth, BINS, dtype=torch.float64))
