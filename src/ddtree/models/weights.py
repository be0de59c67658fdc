"""Weights from safetensors files into our modules, strictly: every tensor is used and every one is there.

The modules fuse query, key and value, and gate and up; files may hold them apart, as Hugging Face does, or
fused. Only safetensors are read: a pickle can run code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ddtree.config import Fields, read_json
from ddtree.errors import CheckpointError
from ddtree.models.spec import DecoderSpec

__all__ = ["SCALE_SUFFIX", "assign", "named_apart", "read_tensors"]

# Files beside a checkpoint's weights that have readers of their own.
BESIDE = ("parity.safetensors", "edges.safetensors")
# Our fused module -> the modules it is made of, in order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
SCALE_SUFFIX = ".scale"


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder by name, without the prefix `model.`; packed rows are unpacked.

    Tensors are mapped from the files, not copied. CheckpointError for no, truncated or damaged files.
    """
    files = sorted(p for p in folder.glob("*.safetensors") if p.name not in BESIDE)
    if not files:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        hint = f"; {', '.join(pickled)} are pickles, which are never loaded" if pickled else ""
        raise CheckpointError(f"{folder}: holds no *.safetensors file{hint}")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    short = name.removeprefix("model.")
                    if short in tensors:
                        raise CheckpointError(
                            f"{folder}: {short} is stored twice (again in {path.name}); remove one"
                        )
                    tensors[short] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: truncated or damaged ({error}); fetch the file again") from None
    _refuse_missing_shards(folder, files)
    return _unpacked(tensors, folder)


def assign(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, where: str) -> None:
    """Give every parameter of `module` its tensor, converted to `dtype`.

    CheckpointError names tensors that are missing, left over or of another shape.
    """
    left = set(tensors)
    state: dict[str, Tensor] = {}
    missing: list[str] = []
    for name, parameter in module.state_dict().items():
        parts = _parts(name) if name not in tensors else [name]
        absent = [part for part in parts if part not in tensors]
        if absent:
            missing += absent
            continue
        value = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        if value.shape != parameter.shape:
            raise CheckpointError(
                f"{where}: {' + '.join(parts)} has shape {tuple(value.shape)}, but the configuration asks for "
                f"{tuple(parameter.shape)}; configuration and weights do not belong together"
            )
        state[name] = value.to(dtype)
        left -= set(parts)
    if missing:
        raise CheckpointError(f"{where}: {len(missing)} tensors are missing: {_some(missing)}")
    left = {name for name in left if not name.endswith("rotary_emb.inv_freq")}
    if left:
        raise CheckpointError(
            f"{where}: {len(left)} tensors belong to no part of this model: {_some(sorted(left))}; "
            "is it another kind of model?"
        )
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False)


def named_apart(state: Mapping[str, Tensor], spec: DecoderSpec) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module under the names that files hold: fused ones split into their parts."""
    head = spec.head_dim
    sizes = {
        "qkv_proj": [spec.heads * head, spec.kv_heads * head, spec.kv_heads * head],
        "gate_up_proj": [spec.intermediate, spec.intermediate],
    }
    for name, value in state.items():
        fused = next((f for f in FUSED if f".{f}." in name), None)
        if fused is None:
            yield name, value
        else:
            yield from zip(_parts(name), value.split(sizes[fused]), strict=True)


def _parts(name: str) -> list[str]:
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _unpacked(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Int8 rows times their scales, as float32; other tensors as they are."""
    scales = {n.removesuffix(SCALE_SUFFIX): t for n, t in tensors.items() if n.endswith(SCALE_SUFFIX)}
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        if value.dtype == torch.int8:
            if name not in scales or scales[name].shape != value.shape[:1]:
                raise CheckpointError(f"{folder}: {name} holds int8 rows without one scale for each row")
            value = value.float() * scales.pop(name).float()[:, None]
        plain[name] = value
    if scales:
        raise CheckpointError(f"{folder}: scales without int8 rows: {_some(sorted(scales))}")
    return plain


def _refuse_missing_shards(folder: Path, files: list[Path]) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return
    wanted = set(Fields(read_json(index), str(index)).section("weight_map").values.values())
    absent = sorted(wanted - {p.name for p in files})
    if absent:
        raise CheckpointError(f"{folder}: shards named in {index.name} are missing: {_some(absent)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
