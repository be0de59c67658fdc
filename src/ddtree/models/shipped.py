"""Drafters that come inside the package, one folder each."""

from __future__ import annotations

from pathlib import Path

from ddtree.errors import ConfigError
from ddtree.models.hub import LocalModel, locate

__all__ = ["SHIPPED", "drafter_folder"]

SHIPPED = Path(__file__).resolve().parent / "shipped"


def drafter_folder(drafter: str | None, target: LocalModel) -> Path:
    """The folder of a drafter: a path, a hub id, or None for the one shipped for this target.

    ConfigError when none was asked for and none is shipped.
    """
    if drafter is not None:
        return locate(drafter).folder
    if target.drafter is None:
        raise ConfigError(
            f"no drafter is shipped for {target.name}; pass --drafter with a folder or a hub id, "
            "or decode without one (--mode off)"
        )
    return SHIPPED / target.drafter
