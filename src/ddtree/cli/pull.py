"""`ddtree pull`: get a model onto this machine."""

from __future__ import annotations

import typer

from ddtree.cli.common import JSON_OPTION, cache_dir, fetching, notes, print_json
from ddtree.models.catalog import DEFAULT_MODEL

__all__ = ["pull"]


def pull(
    model: str = typer.Argument(DEFAULT_MODEL, help="A known name, a hub id (owner/name) or a folder."),
    revision: str = typer.Option(None, help="Revision of a hub model."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Fetch a model and make it ready. Does nothing when it is already here; goes on where it was interrupted."""
    from ddtree.models.hub import locate

    with fetching(model) as progress:
        local = locate(model, cache_dir=cache_dir(), progress=progress, revision=revision)
    if as_json:
        print_json(
            {"name": local.name, "folder": str(local.folder), "source": local.source, "drafter": local.drafter}
        )
    else:
        notes.print(f"{local.name} is ready in {local.folder}")
        notes.print(f"from: {local.source}")
