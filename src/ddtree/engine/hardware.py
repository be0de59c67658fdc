"""What this machine is good at: the dtype to compute in, and the threads that decode fastest right now."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.engine.config import DTYPES
from ddtree.errors import ConfigError

__all__ = [
    "DtypeChoice",
    "available_memory",
    "choose_dtype",
    "choose_threads",
    "resolve_dtype",
    "thread_counts",
    "threads",
]

LAYERS_TIMED = 8
PASSES_TIMED = 4
SECONDS_TIMED = 0.15


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype and why it was chosen."""

    dtype: torch.dtype
    reason: str


def choose_dtype(device: torch.device) -> DtypeChoice:
    """bfloat16 where the hardware multiplies it, else float32. Never by timing: a request must repeat."""
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return DtypeChoice(torch.bfloat16, "the GPU multiplies bfloat16")
        return DtypeChoice(torch.float16, "the GPU has no bfloat16")
    # Absent on processors of other kinds and in other versions of torch.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if any(getattr(torch.cpu, name, bool)() for name in probes):
        return DtypeChoice(torch.bfloat16, "the processor multiplies bfloat16")
    return DtypeChoice(torch.float32, "the processor has no bfloat16 arithmetic")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name, the device's own for `auto`. ConfigError for a name that is none of them."""
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}: got {name!r}")
    dtype = choose_dtype(device).dtype if name == "auto" else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def available_memory(device: torch.device) -> int:
    """Bytes that may be planned with: nine tenths of a GPU's free memory, eight of what the machine can give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):  # Linux alone tells what is free, and what a container may use
        numbers = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(numbers["MemAvailable"].split()[0]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(kept["inactive_file"])
            free = min(free, max(int(limit) - used, 0))
    return int(free * 0.8)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Thread counts worth trying: 1, 2, 4, ... and all cores."""
    counts = {cores}
    count = 1
    while count < cores:
        counts.add(count)
        count *= 2
    return tuple(sorted(counts))


def choose_threads(
    hidden: int,
    intermediate: int,
    rows: int,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Mean seconds of some decoder-like layers by number of threads, measured now. The smallest is the one to use.

    Two threads on two busy cores can be ten times slower than one, so cores alone do not tell; and it is the many
    small steps that suffer, so those are what is timed. A mean, because a stall now and then is the point.
    """
    shapes = ((hidden, hidden), (2 * intermediate, hidden), (hidden, intermediate))
    layers = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(LAYERS_TIMED)]
    found: dict[int, float] = {}
    for count in thread_counts(torch.get_num_threads()):
        with threads(count):
            _run_layers(layers, rows, hidden, intermediate, dtype)
            started = clock()
            passes = 0
            while passes < PASSES_TIMED or (clock() - started < SECONDS_TIMED and passes < 20 * PASSES_TIMED):
                _run_layers(layers, rows if passes % 2 else 1, hidden, intermediate, dtype)
                passes += 1
            found[count] = (clock() - started) / passes
    return found


def _run_layers(layers: list[list[Tensor]], rows: int, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    x = torch.ones(rows, hidden, dtype=dtype)
    for square, wide, narrow in layers:
        x = F.rms_norm(x + F.linear(x, square), (hidden,))
        gate, up = F.linear(x, wide).split(intermediate, dim=-1)
        x = F.rms_norm(x + F.linear(F.silu(gate) * up, narrow), (hidden,))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
