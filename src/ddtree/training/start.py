"""A run's beginning: where it computes, and a drafter with fresh weights or those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ddtree.errors import ConfigError
from ddtree.models.dflash import DFlashModel
from ddtree.models.drafter_spec import parse_drafter
from ddtree.models.edges import EdgeNet, load_edges
from ddtree.models.target import TargetModel
from ddtree.models.weights import assign, read_tensors
from ddtree.training.config import TrainConfig, resolve_drafter

__all__ = ["load_edge_weights", "load_weights", "new_drafter", "new_edges", "resolve_device", "resolve_dtype"]

INITIAL_SPREAD = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """`auto` is this process's GPU where there is one. ConfigError for what torch does not know or see."""
    if name == "auto":
        return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu or cuda")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(f"device {name} was asked for, but torch sees {gpus} GPUs here; use one of those or cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU. ConfigError for a dtype that nothing is computed in."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}: got {name!r}")
    return DTYPES[name]


def new_drafter(config: TrainConfig, target: TargetModel) -> tuple[dict[str, Any], DFlashModel]:
    """The drafter's config.json and a model with fresh float32 weights (float64 when the target has those).

    Matrices are normal with a spread of 0.02, those that write to the residual stream less by sqrt(2 layers).
    """
    content = resolve_drafter(config, target.spec)
    model = DFlashModel(parse_drafter(content, str(Path(config.out) / "config.json"), target.spec), target.ops)
    generator = torch.Generator().manual_seed(config.seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            spread = INITIAL_SPREAD / (2 * config.layers) ** 0.5 if writes else INITIAL_SPREAD
            torch.nn.init.normal_(parameter, std=spread, generator=generator)
    masters = torch.float64 if target.dtype == torch.float64 else torch.float32
    return content, model.to(target.device, masters).train()


def new_edges(config: TrainConfig, target: TargetModel) -> EdgeNet | None:
    """A fresh edge net that adds nothing yet, in the masters' dtype; None when the recipe has none."""
    if not config.edge_rank:
        return None
    net = EdgeNet(target.spec.decoder.hidden, config.edge_inner, config.edge_rank)
    generator = torch.Generator().manual_seed(config.seed)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
    torch.nn.init.zeros_(net.mix.weight)
    masters = torch.float64 if target.dtype == torch.float64 else torch.float32
    return net.to(target.device, masters).train()


def load_weights(model: DFlashModel, folder: Path) -> None:
    """Put the weights of a drafter folder into a fresh model of the same shape, in the masters' dtype."""
    device, dtype = model.fc.weight.device, model.dtype
    assign(model, read_tensors(folder), dtype, str(folder))
    model.to(device).requires_grad_(True)


def load_edge_weights(net: EdgeNet, folder: Path) -> None:
    """Put the edges of a drafter folder, if it has some, into a fresh net. ConfigError for another shape."""
    stored = load_edges(folder, net.parent.in_features, net.mix.weight.dtype, net.mix.weight.device)
    if stored is None:
        return
    if stored.mix.weight.shape != net.mix.weight.shape:
        rank, inner = stored.mix.weight.shape
        raise ConfigError(f"{folder} has edges of edge_rank {rank} and edge_inner {inner}; set them so")
    net.load_state_dict(stored.state_dict())
