"""`ddtree export`: a drafter folder in another storage, for other engines or for shipping."""

from __future__ import annotations

from pathlib import Path

import typer

from ddtree.cli.common import JSON_OPTION, cache_dir, notes, print_json
from ddtree.models.catalog import DEFAULT_MODEL

__all__ = ["export"]


def export(
    out: Path = typer.Argument(..., help="Folder to write."),
    drafter: str = typer.Option(None, help="Drafter folder; the shipped one when not given."),
    model: str = typer.Option(DEFAULT_MODEL, help="The target that it drafts for."),
    storage: str = typer.Option("bfloat16", help="bfloat16 (z-lab's layout, any engine) or int8 (half the size)."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Write a drafter in z-lab's bfloat16 layout for other engines, or packed as int8 rows."""
    import torch

    from ddtree.config import read_json
    from ddtree.errors import ConfigError
    from ddtree.models.hub import locate
    from ddtree.models.load import load_drafter, load_target
    from ddtree.models.save import save_drafter
    from ddtree.models.shipped import drafter_folder

    if storage not in ("bfloat16", "int8"):
        raise ConfigError(f"--storage must be bfloat16 or int8: got {storage!r}")
    if out.exists():
        raise ConfigError(f"{out}: already exists; choose a folder that does not")
    local = locate(model, cache_dir=cache_dir())
    folder = drafter_folder(drafter, local)
    target = load_target(local.folder, torch.float32)
    loaded = load_drafter(folder, target)
    card = {name: read_json(folder / name) for name in ("training.json",) if (folder / name).exists()}
    save_drafter(
        out,
        read_json(folder / "config.json"),
        loaded.model,
        loaded.vocabulary,
        edges=loaded.edges.net if loaded.edges else None,
        packed=storage == "int8",
        extra=card,
    )
    size = sum(p.stat().st_size for p in out.iterdir())
    if as_json:
        print_json({"folder": str(out), "storage": storage, "bytes": size})
    else:
        notes.print(f"{out}: {size / 2**20:.1f} MiB, {storage}")
