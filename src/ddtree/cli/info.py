"""`ddtree info`: what would run here, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from ddtree.cli.common import DRAFTER_OPTION, JSON_OPTION, MODEL_OPTION, cache_dir, notes, print_json, words

if TYPE_CHECKING:
    from ddtree.models.drafter_spec import DrafterSpec
    from ddtree.models.spec import TargetSpec

__all__ = ["info"]


def info(
    model: str = MODEL_OPTION,
    drafter: str = DRAFTER_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say which device, dtype, threads, model and drafter would be used here, and why; fetches nothing."""
    from ddtree.models.hub import find
    from ddtree.models.spec import read_target

    local = find(model, cache_dir=cache_dir())
    if local is None:
        facts = _machine(None) | {"model": f"{model}: not on this machine yet", "missing": True}
    else:
        target = read_target(local.folder)
        decoder = target.decoder
        facts = _machine(target) | {
            "model": f"{local.name} ({target.family}): {decoder.layers} layers, hidden {decoder.hidden}, "
            f"vocabulary {target.vocab_size:,}, {decoder.max_positions:,} positions",
            "model_folder": str(local.folder),
        }
        facts |= _drafter(drafter, local.drafter, target)
        facts["memory"] = _memory(target, facts.pop("drafter_spec", None))
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        lines = value.items() if isinstance(value, dict) else [("", value)]
        for part, line in lines:
            table.add_row(f"[bold]{key}[/]", f"{part}: {line}" if part else str(line))
    words.print(table)
    if facts.get("missing"):
        notes.print("`ddtree pull` fetches what is missing")


def _machine(target: TargetSpec | None) -> dict[str, Any]:
    """Device, dtype and budget; on a CPU also the threads that are fastest for this target, measured now."""
    import torch

    from ddtree.engine.config import DEFAULT_BUDGETS, check_device
    from ddtree.engine.hardware import choose_dtype, choose_threads
    from ddtree.provenance import provenance

    device = torch.device(check_device("auto", torch.cuda.device_count()))
    choice = choose_dtype(device)
    budget = DEFAULT_BUDGETS[device.type]
    record = provenance([])
    facts: dict[str, Any] = {
        "device": str(device),
        "hardware": record["device"].get("gpu", record["device"]["cpu"]),
        "dtype": f"{str(choice.dtype).removeprefix('torch.')}: {choice.reason}",
        "default_budget": budget,
    }
    if device.type == "cpu" and target is not None:
        found = choose_threads(target.decoder.hidden, target.decoder.intermediate, budget + 1, choice.dtype)
        best = min(found, key=found.__getitem__)
        timed = ", ".join(f"{n}: {s * 1000:.1f} ms" for n, s in found.items())
        facts["threads"] = f"{best}: fastest now ({timed})"
    facts["versions"] = record["versions"] | {"python": record["python"]}
    return facts


def _drafter(asked: str | None, shipped: str | None, target: TargetSpec) -> dict[str, Any]:
    """The drafter that was asked for, else the one shipped for the target, and the mode that it allows."""
    from ddtree.engine.config import EngineConfig
    from ddtree.models.drafter_spec import read_drafter
    from ddtree.models.hub import find
    from ddtree.models.shipped import SHIPPED
    from ddtree.speculation.plan import PLAIN

    if asked is not None:
        local = find(asked)
        if local is None:
            return {"drafter": f"{asked}: not on this machine yet", "missing": True}
        folder = local.folder
    elif shipped is not None:
        folder = SHIPPED / shipped
    else:
        mend = "give one with --drafter, or decode plainly with --mode off"
        return {"drafter": f"none ships for this model; {mend}", "mode": PLAIN.mode}
    spec = read_drafter(folder, target)
    return {
        "drafter": f"{folder.name}: {spec.decoder.layers} layers, blocks of {spec.block_size}, "
        f"features of layers {list(spec.layer_ids)}, " + ("int8 rows" if spec.packed else "unpacked"),
        "mode": EngineConfig().mode,
        "drafter_spec": spec,
    }


def _memory(target: TargetSpec, drafter: DrafterSpec | None) -> dict[str, str]:
    """The memory plan of an engine with default options, from what is free now; no weights are read."""
    import torch

    from ddtree.engine.config import EngineConfig, check_device, context_limit
    from ddtree.engine.hardware import available_memory, choose_dtype
    from ddtree.engine.memory import most_places, plan_memory
    from ddtree.engine.runner import footprint
    from ddtree.errors import ConfigError
    from ddtree.models.dflash import DFlashModel
    from ddtree.models.target import TargetModel
    from ddtree.speculation.plan import PLAIN

    device = torch.device(check_device("auto", torch.cuda.device_count()))
    config = EngineConfig()
    limits, block_size = {"target": target.decoder.max_positions}, 1
    with torch.device("meta"):
        models = TargetModel(target), None if drafter is None else DFlashModel(drafter)
    if drafter is not None:
        limits["drafter"], block_size = drafter.decoder.max_positions, drafter.block_size
    sizes = footprint(*models, device, choose_dtype(device).dtype)
    try:
        plan = plan_memory(
            sizes,
            available_memory(device) - sizes.weights,
            plan=PLAIN if drafter is None else config.plan(device.type, block_size),
            sequences=config.max_sequences,
            places=most_places(context_limit(None, limits), block_size),
            page_size=config.page_size,
            pages=config.pages,
            prefill_chunk=config.prefill_chunk,
        )
    except ConfigError as error:
        return {"problem": str(error)}
    return plan.lines()
