"""What a DFlash drafter is, read from its `config.json` in any of the published dialects.

A field may stand at the top or inside `dflash_config`; in both places with different values it is an error.
Drafter families with other modules are refused by name, not by a count of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import Fields, read_json
from ddtree.errors import CheckpointError, UnsupportedError
from ddtree.models.spec import DecoderSpec, TargetSpec, check_layer_ids, read_decoder, refuse_quantised
from ddtree.ops import View

__all__ = ["ARCHITECTURE", "INT8_METHOD", "DrafterSpec", "default_layer_ids", "parse_drafter", "read_drafter"]

# How ddtree's own packed checkpoints say what they are; other engines then refuse them by name.
INT8_METHOD = "ddtree-int8-rows"

# Configuration keys that only drafters of other families carry, and the name of the family; {} is the value.
FOREIGN_KEYS = {
    "selector_rank": "DFlash 2",
    "selector_top_k": "DFlash 2",
    "conv_kernel_size": "DFlash 2",
    "projector_type": "Domino",
    "gru_hidden_dim": "Domino",
    "attention_mode": "{} attention",
    "kv_lora_rank": "MLA attention",
    "num_experts": "mixture-of-experts",
    "num_local_experts": "mixture-of-experts",
    "eagle_config": "EAGLE",
    "attention_sink_bias": "attention sinks",
}
# Values of such keys that say what every DFlash drafter is.
ORDINARY: Mapping[str, tuple[str, ...]] = {"attention_mode": ("mha", "mqa", "gqa")}
ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A block-diffusion drafter of one target.

    views[i]: sliding window and causality of layer i. layer_ids: the target layers whose outputs are its
    context features. vocab_size: rows of its own embedding and head, where it has them. packed: the weights
    are stored as int8 rows with scales.
    """

    decoder: DecoderSpec
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    views: tuple[View, ...]
    vocab_size: int
    packed: bool
    tied_head: bool = False


def default_layer_ids(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The reference's feature layers when a checkpoint names none: spread from layer 1 to L - 3."""
    if draft_layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))


def read_drafter(folder: Path, target: TargetSpec) -> DrafterSpec:
    """The drafter in a folder, checked against the target that it will draft for."""
    path = folder / "config.json"
    return parse_drafter(read_json(path), str(path), target)


def parse_drafter(config: Mapping[str, Any], where: str, target: TargetSpec) -> DrafterSpec:
    """`read_drafter` of a configuration at hand; `where` names it in messages."""
    fields = Fields(config, where)
    nested = fields.section("dflash_config")
    _refuse_foreign(fields, nested)
    packed = fields.section("quantization_config").values.get("quant_method") == INT8_METHOD
    if not packed:
        refuse_quantised(fields)
    decoder = read_decoder(fields)
    spec = DrafterSpec(
        decoder=decoder,
        block_size=_either(fields, nested, "block_size").integer("block_size", minimum=2),
        mask_token_id=_either(fields, nested, "mask_token_id").integer("mask_token_id", minimum=0),
        layer_ids=_layer_ids(fields, nested, target, decoder.layers),
        views=_views(fields, nested, decoder.layers),
        vocab_size=fields.integer("vocab_size", target.vocab_size),
        packed=packed,
        tied_head=fields.boolean("tie_word_embeddings", False),
    )
    _check_fit(spec, target, fields)
    return spec


def _refuse_foreign(fields: Fields, nested: Fields) -> None:
    architectures = fields.texts("architectures") or (ARCHITECTURE,)
    for holder in (fields, nested):
        for key, family in FOREIGN_KEYS.items():
            value = holder.values.get(key)
            if value not in (None, 0, False, [], "none", *ORDINARY.get(key, ())):
                name = family.format(str(value).upper())
                raise UnsupportedError(f"{fields.where}: {key}={value!r} marks a {name} drafter, not supported")
    if ARCHITECTURE not in architectures:
        raise UnsupportedError(
            f"{fields.where}: architecture {', '.join(architectures)} is not supported as a drafter; "
            f"only {ARCHITECTURE} is"
        )


def _either(fields: Fields, nested: Fields, key: str) -> Fields:
    """Where a field stands: at the top or nested. Both with different values is a contradiction."""
    if fields.has(key) and nested.has(key) and fields.values[key] != nested.values[key]:
        raise fields.fail(
            key, f"is {fields.values[key]!r} at the top but {nested.values[key]!r} in dflash_config; keep one"
        )
    return nested if nested.has(key) else fields


def _layer_ids(fields: Fields, nested: Fields, target: TargetSpec, draft_layers: int) -> tuple[int, ...]:
    stated = _either(fields, nested, "num_target_layers")
    if stated.has("num_target_layers"):
        layers = stated.integer("num_target_layers")
        if layers != target.decoder.layers:
            raise fields.fail(
                "num_target_layers",
                f"is {layers} but the target has {target.decoder.layers}; this drafter is for another target",
            )
    holder = _either(fields, nested, "target_layer_ids")
    if not holder.has("target_layer_ids"):
        ids = default_layer_ids(target.decoder.layers, draft_layers)
        check_layer_ids(ids, target.decoder.layers, fields.where)
        return ids
    ids = holder.integers("target_layer_ids")
    if len(set(ids)) != len(ids):
        raise fields.fail("target_layer_ids", f"names a layer twice: {list(ids)}")
    check_layer_ids(ids, target.decoder.layers, fields.where)
    return ids


def _windows(fields: Fields, nested: Fields, layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Read from the file itself: Qwen3Config would drop it in silence."""
    kinds = _either(fields, nested, "layer_types").texts("layer_types")
    window_holder, window_key = _either(fields, nested, "sliding_window"), "sliding_window"
    if _either(fields, nested, "use_swa").boolean("use_swa", False):
        if kinds and "sliding_attention" not in kinds:
            raise fields.fail("use_swa", "is true, but layer_types names no sliding layer")
        other, window_holder, window_key = (
            window_holder,
            _either(fields, nested, "swa_window_size"),
            "swa_window_size",
        )
        if other.has("sliding_window") and other.integer("sliding_window") != window_holder.integer(window_key):
            raise fields.fail(window_key, "and sliding_window differ; keep one")
        kinds = kinds or ("sliding_attention",) * layers
    elif not kinds and fields.boolean("use_sliding_window", False):
        first = fields.integer("max_window_layers", layers, minimum=0)
        if first >= layers:
            raise fields.fail(
                "layer_types", "is missing: use_sliding_window is true, but no layer is said to slide"
            )
        kinds = ("full_attention",) * first + ("sliding_attention",) * (layers - first)
    if not kinds:
        return (None,) * layers
    if len(kinds) != layers:
        raise fields.fail("layer_types", f"names {len(kinds)} layers but num_hidden_layers is {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedError(f"{fields.where}: layer types {unknown} are not supported")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = window_holder.integer(window_key)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _views(fields: Fields, nested: Fields, layers: int) -> tuple[View, ...]:
    """Window and causality of each layer. Unless told, sliding layers are causal and full ones are not."""
    windows = _windows(fields, nested, layers)
    stated = {
        f"{holder.where}: {key}": holder.boolean(key)
        for holder in (fields, nested)
        for key in ("is_causal", "causal")
        if holder.has(key)
    }
    if len(set(stated.values())) > 1:
        raise fields.fail("causal", f"is stated with different values: {stated}")
    told = next(iter(stated.values()), None)
    return tuple(View(window, (window is not None) if told is None else told) for window in windows)


def _check_fit(spec: DrafterSpec, target: TargetSpec, fields: Fields) -> None:
    if spec.decoder.hidden != target.decoder.hidden:
        raise CheckpointError(
            f"{fields.where}: hidden_size {spec.decoder.hidden} differs from the target's "
            f"{target.decoder.hidden}; this drafter was made for another target"
        )
    if spec.mask_token_id in target.eos_ids or spec.mask_token_id == target.pad_id:
        raise fields.fail(
            "mask_token_id",
            f"{spec.mask_token_id} is the target's end-of-sequence or padding token; a drafter needs a token "
            "that no text contains",
        )
