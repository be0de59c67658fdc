"""Checkpoints of a run: the drafter as others load it, and beside it all that resuming exactly needs.

`step-N/` is a drafter folder in z-lab's layout. `step-N/state/` holds float32 masters and the optimiser's moments;
data order and anchors follow from (seed, step), so nothing else has state. Old states are dropped, drafters stay.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddtree.errors import CheckpointError, ConfigError
from ddtree.models.save import new_folder

__all__ = [
    "TrainState",
    "latest",
    "model_tensors",
    "optimizer_tensors",
    "prune",
    "read_state",
    "restore",
    "write_state",
]

STATES_KEPT = 2
STEP = re.compile(r"step-[0-9]+")


@dataclass(frozen=True, slots=True)
class TrainState:
    """A point of a run that can be resumed: the step, and tensors by name. data: the key of its examples."""

    step: int
    recipe: dict[str, Any]
    tensors: dict[str, Tensor]
    data: str = ""


def write_state(folder: Path, state: TrainState) -> None:
    """Write a state folder; whole or not at all."""
    with new_folder(folder) as partial:
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.tensors.items()}
        save_file(tensors, partial / "tensors.safetensors")
        content = {"step": state.step, "data": state.data, "recipe": state.recipe}
        (partial / "state.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_state(folder: Path) -> TrainState:
    """Read a state folder. CheckpointError when it is damaged."""
    try:
        content = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
        return TrainState(int(content["step"]), dict(content["recipe"]), tensors, str(content.get("data", "")))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder}: this training state is damaged ({error}); remove it to resume from the one before"
        ) from None


def latest(run: Path) -> Path | None:
    """The state folder of the latest checkpoint of a run that has one."""
    states = [folder / "state" for folder in _steps(run) if (folder / "state" / "state.json").exists()]
    return states[-1] if states else None


def prune(run: Path) -> None:
    """Drop all but the last states; the drafters themselves stay."""
    states = [folder / "state" for folder in _steps(run) if (folder / "state").exists()]
    for state in states[:-STATES_KEPT]:
        shutil.rmtree(state)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under `model.`, as a state holds them."""
    return {f"model.{name}": p for name, p in model.named_parameters()}


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor of the optimisers' states under `optimizer.<which>.<parameter>.<moment>`."""
    return {
        f"optimizer.{which}.{parameter}.{moment}": value if isinstance(value, Tensor) else torch.tensor(value)
        for which, optimizer in enumerate(optimizers)
        for parameter, moments in optimizer.state_dict()["state"].items()
        for moment, value in moments.items()
    }


def restore(state: TrainState, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Put a state back into a model and its optimisers, bit for bit."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = state.tensors.get(f"model.{name}")
            if stored is None or stored.shape != parameter.shape:
                raise ConfigError(
                    f"the stored state has no {name} of shape {tuple(parameter.shape)}; "
                    "resume with the recipe it came from"
                )
            parameter.copy_(stored)
    for which, optimizer in enumerate(optimizers):
        content = optimizer.state_dict()
        prefix = f"optimizer.{which}."
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.tensors.items():
            if name.startswith(prefix):
                parameter_id, moment = name.removeprefix(prefix).split(".", 1)
                moments.setdefault(int(parameter_id), {})[moment] = value
        optimizer.load_state_dict({"state": moments, "param_groups": content["param_groups"]})


def _steps(run: Path) -> list[Path]:
    """The checkpoints of a run in order. Folders of other names, such as a copy `step-9-best`, are the user's."""
    numbered = [(int(folder.name[5:]), folder) for folder in run.glob("step-*") if STEP.fullmatch(folder.name)]
    return [folder for _, folder in sorted(numbered)]
