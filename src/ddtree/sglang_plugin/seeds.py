"""The seed of every running request, on the device, addressed by its row in SGLang's request pool.

Requests are admitted when they are prefilled; the rounds after that only gather. A request without a seed of its
own gets 64 bits from its id and the server's random seed, which are the same on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.speculation.noise import seed_tensor

__all__ = ["SeedTable", "request_seed"]


def request_seed(given: int | None, request_id: str, server_seed: int) -> int:
    """A request's own seed, or 64 bits that no other request of this server has."""
    if given is not None:
        return given
    digest = hashlib.blake2b(f"{server_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class SeedTable:
    """Seeds by pool row. Rows of requests that have left hold old seeds until they are admitted again."""

    def __init__(self, pool_rows: int, device: torch.device) -> None:
        self._seeds_S = torch.zeros(pool_rows, dtype=torch.int64, device=device)

    def admit(self, rows_R: Tensor, seeds: Sequence[int]) -> None:
        """Remember the seeds of requests that are being prefilled. rows_R: int64, on the table's device."""
        self._seeds_S[rows_R] = seed_tensor(seeds).to(self._seeds_S.device, non_blocking=True)

    def of(self, rows_R: Tensor) -> Tensor:
        """int64 [R]."""
        return self._seeds_S[rows_R]
