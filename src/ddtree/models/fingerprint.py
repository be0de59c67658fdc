"""A short name for a target's weights, for files that depend on them."""

from __future__ import annotations

import hashlib

from ddtree.models.target import TargetModel

__all__ = ["fingerprint"]

SAMPLES = 512  # of each tensor


def fingerprint(target: TargetModel) -> str:
    """A hash of the target's shape and of samples of all its tensors: other weights are another target."""
    digest = hashlib.sha256(repr(target.spec).encode())
    for name, parameter in sorted(target.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(flat.numel() // SAMPLES, 1)]
        digest.update(name.encode() + sample.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
