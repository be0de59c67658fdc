"""What a transformer is made of, read from a Hugging Face `config.json`.

Targets (Llama, Qwen3) and drafters share one decoder; the spec holds all that tells them apart. Both
spellings of rope are understood: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import Fields, read_json
from ddtree.errors import CheckpointError, UnsupportedError

__all__ = [
    "DecoderSpec",
    "RopeSpec",
    "TargetSpec",
    "check_layer_ids",
    "read_decoder",
    "read_target",
    "refuse_quantised",
]

# Rope types whose frequencies do not depend on the length of the sequence, and the numbers that each needs.
STATIC_ROPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, how many of a head's dimensions rotate, and the scaling with its parameters."""

    theta: float
    rotary_dim: int
    kind: str
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The sizes and switches of a stack of decoder layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: RopeSpec
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    max_positions: int


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A target: its decoder, its vocabulary, and the token ids that mean something to the engine."""

    family: str
    decoder: DecoderSpec
    vocab_size: int
    tied_head: bool
    eos_ids: tuple[int, ...]
    pad_id: int | None


@dataclass(frozen=True, slots=True)
class _Family:
    qk_norm: bool
    biased: tuple[str, ...]  # configuration keys that switch biases on


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(qk_norm=False, biased=("attention_bias", "mlp_bias")),
    "qwen3": _Family(qk_norm=True, biased=("attention_bias",)),
}


def read_target(folder: Path) -> TargetSpec:
    """The target in a model folder. End-of-sequence ids come from config.json and generation_config.json."""
    path = folder / "config.json"
    fields = Fields(read_json(path), str(path))
    family = fields.text("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"{path}: model_type {family!r} is not supported as a target; supported: {', '.join(FAMILIES)}"
        )
    refuse_quantised(fields)
    _refuse_sliding(fields)
    vocab_size = fields.integer("vocab_size")
    generation = folder / "generation_config.json"
    eos_ids = set(_token_ids(fields, "eos_token_id"))
    if generation.exists():
        eos_ids |= set(_token_ids(Fields(read_json(generation), str(generation)), "eos_token_id"))
    for token in eos_ids:
        if token >= vocab_size:
            raise fields.fail("eos_token_id", f"{token} lies outside the vocabulary of {vocab_size}")
    # transformers spells "none" as -1 too.
    pad = () if fields.values.get("pad_token_id") == -1 else _token_ids(fields, "pad_token_id")
    return TargetSpec(
        family=family,
        decoder=read_decoder(fields, FAMILIES[family]),
        vocab_size=vocab_size,
        tied_head=fields.boolean("tie_word_embeddings", False),
        eos_ids=tuple(sorted(eos_ids)),
        pad_id=pad[0] if pad else None,
    )


def read_decoder(fields: Fields, family: _Family = FAMILIES["qwen3"]) -> DecoderSpec:
    """The decoder part of a configuration. Only silu-gated MLPs exist in the supported families."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if heads % kv_heads:
        raise fields.fail("num_attention_heads", f"({heads}) must be a multiple of key/value heads ({kv_heads})")
    if not fields.has("head_dim") and hidden % heads:
        raise fields.fail("head_dim", f"is missing and hidden_size {hidden} is no multiple of {heads} heads")
    head_dim = fields.integer("head_dim", max(hidden // heads, 1))
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedError(f"{fields.where}: hidden_act {activation!r} is not supported, only 'silu'")
    return DecoderSpec(
        hidden=hidden,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, head_dim),
        qk_norm=family.qk_norm,
        attention_bias="attention_bias" in family.biased and fields.boolean("attention_bias", False),
        mlp_bias="mlp_bias" in family.biased and fields.boolean("mlp_bias", False),
        max_positions=fields.integer("max_position_embeddings"),
    )


def read_rope(fields: Fields, head_dim: int) -> RopeSpec:
    """Rope in either spelling; a missing base and two bases that differ are errors."""
    parameters = _one_rope(fields)
    if fields.has("rope_theta") and parameters.has("rope_theta"):
        outer, inner = fields.number("rope_theta"), parameters.number("rope_theta")
        if outer != inner:
            raise fields.fail("rope_theta", f"says {outer:g} at the top and {inner:g} in rope_parameters")
    theta = (parameters if parameters.has("rope_theta") else fields).number("rope_theta")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind not in STATIC_ROPES:
        raise UnsupportedError(
            f"{fields.where}: rope type {kind!r} is not supported; supported: {', '.join(STATIC_ROPES)}"
        )
    for key in STATIC_ROPES[kind]:
        parameters.number(key)
    parts = {
        holder.number("partial_rotary_factor")
        for holder in (fields, parameters)
        if holder.has("partial_rotary_factor")
    }
    if len(parts) > 1:
        raise fields.fail("partial_rotary_factor", f"is stated twice with different values: {sorted(parts)}")
    rotary_dim = parameters.integer("rope_dim", head_dim)
    if not parameters.has("rope_dim"):
        holder = parameters if parameters.has("partial_rotary_factor") else fields
        rotary_dim = int(head_dim * holder.number("partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.fail("partial_rotary_factor", f"rotates {rotary_dim} of {head_dim} dimensions")
    names = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "rope_dim"}
    scaling = tuple(sorted((k, v) for k, v in parameters.values.items() if k not in names))
    return RopeSpec(theta, rotary_dim, kind, scaling if kind != "default" else ())


def _one_rope(fields: Fields) -> Fields:
    """The rope section, whichever key holds it; both keys are fine when they agree."""
    ropes = [rope for key in ("rope_parameters", "rope_scaling") if (rope := _uniform_rope(fields, key)).values]
    if len(ropes) == 2:
        new, old = _spelled_out(ropes[0], ropes[1]), _spelled_out(ropes[1], ropes[0])
        if new != old:
            raise fields.fail("rope_scaling", f"says {old}, but rope_parameters says {new}; keep one")
    return ropes[0] if ropes else fields.section("rope_parameters")


def _spelled_out(rope: Fields, other: Fields) -> dict[str, Any]:
    """A rope section in one spelling; the older one holds no base, which is then the other section's."""
    values = {"rope_theta": other.values.get("rope_theta"), **rope.values}
    kind = values.pop("type", None)
    return {"rope_type": kind or "default", **values}


def _uniform_rope(fields: Fields, key: str) -> Fields:
    """The rope section under a key; one entry a layer type is fine when they all agree."""
    section = fields.section(key)
    entries = [section.section(name) for name, v in section.values.items() if isinstance(v, Mapping)]
    if not entries:
        return section
    if any(entry.values != entries[0].values for entry in entries):
        raise UnsupportedError(
            f"{fields.where}: {key} gives layer types different ropes ({', '.join(section.values)}); "
            "only one rope for all layers is supported"
        )
    return entries[0]


def _token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    if not fields.has(key):
        return ()
    value = fields.values[key]
    return fields.integers(key) if isinstance(value, list) else (fields.integer(key, minimum=0),)


def refuse_quantised(fields: Fields) -> None:
    """Quantised checkpoints are refused by name: their tensors would load as nonsense."""
    if fields.has("quantization_config"):
        method = fields.section("quantization_config").values.get("quant_method", "unknown")
        raise UnsupportedError(
            f"{fields.where}: quantised weights ({method}) are not supported; use the unquantised checkpoint"
        )


def _refuse_sliding(fields: Fields) -> None:
    """Targets attend to everything; one that was trained with windows would answer wrongly, and in silence."""
    if not fields.boolean("use_sliding_window", False) or not fields.has("sliding_window"):
        return
    kinds = fields.texts("layer_types")
    first = fields.integer("max_window_layers", 0, minimum=0)
    if "sliding_attention" in kinds or (not kinds and first < fields.integer("num_hidden_layers")):
        raise UnsupportedError(f"{fields.where}: a target with sliding-window layers is not supported")


def check_layer_ids(ids: tuple[int, ...], layers: int, where: str) -> None:
    """Feature layers must exist in the target. Ids name layer outputs, so the last one is layers - 1."""
    wrong = [i for i in ids if not 0 <= i < layers]
    if wrong:
        raise CheckpointError(
            f"{where}: target_layer_ids {wrong} do not exist in a target of {layers} layers (0 to {layers - 1}); "
            "this drafter was made for another target"
        )
