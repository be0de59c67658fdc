"""`ddtree info`: what would run here, and why."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ddtree.cli.common import DRAFTER_OPTION, JSON_OPTION, MODEL_OPTION, cache_dir, notes, print_json, words

__all__ = ["info"]


def info(
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say which device, dtype, threads, model and drafter would be used here, and why; fetches nothing."""
    facts = _machine() | _models(model, drafter)
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        table.add_row(f"[bold]{key}[/]", str(value))
    words.print(table)
    if facts.get("missing"):
        notes.print("`ddtree pull` fetches the model")


def _machine() -> dict[str, Any]:
    import torch

    from ddtree.engine.config import DEFAULT_BUDGETS, check_device
    from ddtree.engine.hardware import choose_dtype, choose_threads
    from ddtree.provenance import provenance

    device = torch.device(check_device("auto", torch.cuda.is_available()))
    choice = choose_dtype(device)
    record = provenance([])
    facts: dict[str, Any] = {
        "device": str(device),
        "hardware": record["device"].get("gpu", record["device"]["cpu"]),
        "dtype": f"{str(choice.dtype).removeprefix('torch.')}: {choice.reason}",
        "default_budget": DEFAULT_BUDGETS[device.type],
    }
    if device.type == "cpu":
        found = choose_threads(576, 1536, DEFAULT_BUDGETS["cpu"] + 1, choice.dtype)
        best = min(found, key=found.__getitem__)
        timed = ", ".join(f"{n}: {s * 1000:.1f} ms" for n, s in found.items())
        facts["threads"] = f"{best}: fastest now ({timed})"
    facts["versions"] = record["versions"] | {"python": record["python"]}
    return facts


def _models(model: str, drafter: str | None) -> dict[str, Any]:
    from ddtree.models.drafter_spec import read_drafter
    from ddtree.models.hub import find
    from ddtree.models.shipped import drafter_folder
    from ddtree.models.spec import read_target

    local = find(model, cache_dir=cache_dir())
    if local is None:
        return {"model": f"{model}: not on this machine yet", "missing": True}
    target = read_target(local.folder)
    decoder = target.decoder
    facts: dict[str, Any] = {
        "model": f"{local.name} ({target.family}): {decoder.layers} layers, hidden {decoder.hidden}, "
        f"vocabulary {target.vocab_size:,}, {decoder.max_positions:,} positions",
        "model_folder": str(local.folder),
    }
    if drafter is None and local.drafter is None:
        return facts | {"drafter": "none ships for this model; give one with --drafter", "mode": "off"}
    folder = drafter_folder(drafter, local)
    spec = read_drafter(folder, target)
    return facts | {
        "drafter": f"{folder.name}: {spec.decoder.layers} layers, blocks of {spec.block_size}, "
        f"features of layers {list(spec.layer_ids)}, " + ("int8 rows" if spec.packed else "unpacked"),
        "mode": "tree",
    }
