"""One process or many. Each process trains on packs of its own; gradients are averaged before every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddtree.errors import ConfigError

__all__ = ["Group", "join_group"]


@dataclass(frozen=True, slots=True)
class Group:
    """This process among `size`. A group of one does nothing."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes checkpoints and speaks."""
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes, in one message."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def average(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the processes."""
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether any process says so. All must ask at the same point."""
        return bool(self.average(torch.tensor(float(flag), device=device)) > 0)

    def wait(self) -> None:
        """Let all processes come here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Part from the others, in the end. All must come here."""
        if self.size > 1:
            dist.destroy_process_group()


def join_group(environment: Mapping[str, str]) -> Group:
    """The group that `torchrun` describes in the environment variables; a group of one without them.

    With GPUs, process r takes GPU LOCAL_RANK and speaks NCCL; without, gloo. ConfigError when they describe none,
    as where a cluster's scheduler has set some of them.
    """
    told = environment.get("WORLD_SIZE", "1")
    if told == "1":
        return Group()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if not told.isdecimal() or told == "0" or missing:
        what = f"without {', '.join(missing)}" if missing else "which is no number of processes"
        raise ConfigError(f"WORLD_SIZE is {told!r}, {what}; start with torchrun, or unset it to train alone")
    size = int(told)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Group(dist.get_rank(), size)
