"""Checkpoints as they are published: what loads gives the right logits, what does not is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.errors import CheckpointError, StorageError, UnsupportedError
from ddtree.models import save
from ddtree.models.block import block_tokens
from ddtree.models.drafter_spec import INT8_METHOD, default_layer_ids, read_drafter
from ddtree.models.load import load_drafter, load_target
from ddtree.models.parity import PARITY_FILE
from ddtree.models.save import new_folder, pack_rows, save_drafter
from ddtree.models.spec import read_target
from ddtree.ops import FULL_VIEW, View
from ddtree.training.attention import BlockLayout, block_masks, draft_blocks
from tests.checkpoints import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    chain_rows,
    drafted,
    drafter_config,
    drafter_tensors,
    noise,
    plain_draft,
    target_config,
    target_tensors,
    write_drafter,
    write_folder,
)
from tests.toys import MASK, VOCABULARY, random_tokens, toy_target

FEATURES, ANCHOR = noise(9, 2 * HIDDEN, seed=3), 7
FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def close(found, wanted, atol=1e-9):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def plain(target, tensors=None, *, features=FEATURES, embedding=None, head=None, **how):
    """What a drafter made of these tensors must say, with the target's tables where none are given."""
    embedding = target.embed_tokens.weight if embedding is None else embedding
    head = target.lm_head.weight if head is None else head
    return plain_draft(tensors or drafter_tensors(), features, ANCHOR, embedding, head, **how)


def logits(folder, target=None):
    return drafted(load_drafter(folder, target or toy_target()), FEATURES, ANCHOR)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


# z-lab's own.


def test_a_published_drafter_loads_and_drafts(tmp_path):
    target = toy_target("qwen3")
    loaded = load_drafter(write_drafter(tmp_path), target)
    spec = loaded.model.spec
    assert (spec.block_size, spec.mask_token_id, spec.layer_ids) == (6, MASK, (0, 2))
    assert spec.views == (FULL_VIEW, FULL_VIEW)
    assert spec.decoder.qk_norm
    assert not spec.packed
    close(drafted(loaded, FEATURES, ANCHOR), plain(target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weights_stored_in_bfloat16_run_in_the_targets_dtype(tmp_path, dtype):
    target = toy_target(dtype=dtype)
    tensors = {name: t.bfloat16() for name, t in drafter_tensors().items()}
    loaded = load_drafter(write_folder(tmp_path, drafter_config(), tensors), target)
    assert loaded.model.dtype == dtype
    assert {p.dtype for p in loaded.model.parameters()} == {dtype}
    wide = {name: t.double() for name, t in tensors.items()}
    wanted = plain(toy_target(), wide)
    error = (drafted(loaded, FEATURES, ANCHOR).double() - wanted).abs().max() / wanted.std()
    assert error < {torch.bfloat16: 0.15, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]


def test_a_drafter_in_a_dtype_of_its_own_drafts(tmp_path):
    target = toy_target(dtype=torch.float32)
    loaded = load_drafter(write_drafter(tmp_path), target, torch.float64)
    assert loaded.model.dtype == torch.float64
    wanted = plain(toy_target())
    close(drafted(loaded, FEATURES, ANCHOR).double(), wanted, atol=1e-4)


def test_names_may_begin_with_model(tmp_path):
    plain_folder = write_drafter(tmp_path / "plain")
    prefixed = {f"model.{name}": t for name, t in drafter_tensors().items()}
    folder = write_folder(tmp_path / "prefixed", drafter_config(), prefixed)
    close(logits(folder), logits(plain_folder))


def test_a_checkpoint_may_come_in_shards(tmp_path):
    tensors = drafter_tensors()
    names = sorted(tensors)
    folder = write_folder(tmp_path / "sharded", drafter_config(), {})
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(3):
        shard = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[i::3]}, folder / shard)
        weight_map |= dict.fromkeys(names[i::3], shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    close(logits(folder), logits(write_drafter(tmp_path / "whole")))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards.*missing: model-00002-of-00003"):
        logits(folder)


# Rope.


def with_rope(**changes):
    return {"rope_theta": None, **changes}


SAME_ROPE = {
    "transformers 5": with_rope(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    "both spellings": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "base at the top": {"rope_parameters": {"rope_type": "default"}},
    "null scaling": {"rope_scaling": None},
    "both sections": {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_theta": 10000.0}},
    "an empty section": {"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}},
    "whole number": {"rope_theta": 10000},
    "one entry a layer type": with_rope(
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 10000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        }
    ),
    "all dimensions": {"partial_rotary_factor": 1.0},
}


@pytest.mark.parametrize("case", SAME_ROPE)
def test_spellings_of_rope_agree(tmp_path, case):
    found = logits(write_drafter(tmp_path / "a", **SAME_ROPE[case]))
    close(found, logits(write_drafter(tmp_path / "b")))
    close(found, plain(toy_target()))


@pytest.mark.parametrize("spelling", [{"rope_theta": 500.0}, with_rope(rope_parameters={"rope_theta": 500.0})])
def test_the_base_is_that_of_the_file(tmp_path, spelling):
    close(logits(write_drafter(tmp_path, **spelling)), plain(toy_target(), theta=500.0), atol=1e-5)


def test_spellings_of_scaled_rope_agree(tmp_path):
    spellings = {
        "old": {"rope_scaling": {"type": "yarn", **YARN}},
        "between": {"rope_scaling": {"rope_type": "yarn", **YARN}},
        "new": with_rope(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **YARN}),
        "both": with_rope(
            rope_scaling={"type": "yarn", **YARN},
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
        ),
    }
    old, *others = (logits(write_drafter(tmp_path / name, **s)) for name, s in spellings.items())
    for other in others:
        close(old, other)
    assert not torch.allclose(old, logits(write_drafter(tmp_path / "plain")), atol=1e-3)


def test_linear_scaling_stretches_positions(tmp_path):
    folder = write_drafter(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}, partial_rotary_factor=0.25)
    # One pair of dimensions of base 1 to any power: its angle is the position, here a quarter of it.
    loaded = load_drafter(folder, toy_target())
    cos, _ = loaded.model.rope(torch.tensor([[8]]), torch.float64)
    close(cos[0, 0], torch.tensor([2.0, 2.0]).cos().double(), atol=1e-6)


BAD_ROPES = {
    "two scalings": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
        CheckpointError,
        "rope_scaling says .*'linear'.* but rope_parameters says .*'default'.*keep one",
    ),
    "two factors": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        CheckpointError,
        r"rope_scaling says .*2\.0.* but rope_parameters says .*4\.0",
    ),
    "two bases in sections": (
        with_rope(rope_scaling={"rope_theta": 1e4}, rope_parameters={"rope_theta": 1e6}),
        CheckpointError,
        "rope_scaling says",
    ),
    "two bases": ({"rope_parameters": {"rope_theta": 500.0}}, CheckpointError, "rope_theta says 10000 .* 500"),
    "no base": (with_rope(), CheckpointError, "rope_theta is missing"),
    "no base inside": (
        with_rope(rope_parameters={"rope_type": "default"}),
        CheckpointError,
        "rope_theta is missing",
    ),
    "different ropes": (
        with_rope(rope_parameters={FULL: {"rope_theta": 1e4}, SLIDING: {"rope_theta": 1e6}}),
        UnsupportedError,
        "full_attention, sliding_attention",
    ),
    "dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedError, "'dynamic'"),
    "longrope": ({"rope_scaling": {"type": "longrope"}}, UnsupportedError, "'longrope'"),
    "mrope": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, UnsupportedError, "'mrope'"),
    "odd part": ({"partial_rotary_factor": 0.4}, CheckpointError, "partial_rotary_factor rotates 3 of 8"),
    "too large a part": ({"partial_rotary_factor": 1.5}, CheckpointError, "rotates 12 of 8"),
    "negative base": ({"rope_theta": -1.0}, CheckpointError, "rope_theta must be greater than 0"),
    "list": ({"rope_scaling": [1]}, CheckpointError, "rope_scaling must be an object"),
    "type": ({"rope_scaling": {"rope_type": 3}}, CheckpointError, "rope_type must be a string"),
    "no factor": ({"rope_scaling": {"rope_type": "yarn"}}, CheckpointError, "factor"),
    "no llama3 factors": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        CheckpointError,
        "low_freq_factor",
    ),
    "mistyped factor": ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, CheckpointError, "factor"),
    "two parts": (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        CheckpointError,
        "partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("case", BAD_ROPES)
def test_ropes_that_cannot_be_honoured_are_refused(tmp_path, case):
    changes, error, message = BAD_ROPES[case]
    with pytest.raises(error, match=message):
        load_drafter(write_drafter(tmp_path, **changes), toy_target())


@pytest.mark.parametrize(
    "spelling",
    [
        {"partial_rotary_factor": 0.25},
        with_rope(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        {"rope_parameters": {"rope_dim": 2}},
    ],
)
def test_a_part_of_each_head_rotates(tmp_path, spelling):
    found = logits(write_drafter(tmp_path / "part", **spelling))
    close(found, plain(toy_target(), rotary=2))
    assert not torch.allclose(found, logits(write_drafter(tmp_path / "whole")), atol=1e-3)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_training_rotates_what_serving_rotates(tmp_path, factor):
    """A trainer that rotates whole heads where the server rotates a quarter looks fine until it is served."""
    target = toy_target()
    loaded = load_drafter(write_drafter(tmp_path, partial_rotary_factor=factor), target)
    tokens = torch.tensor(random_tokens(20, 4))
    tokens[9] = ANCHOR
    features = torch.cat([FEATURES, noise(11, 2 * HIDDEN, seed=4)])
    layout = BlockLayout(torch.arange(20), torch.zeros(20, dtype=torch.int64), torch.tensor([9]), 6)
    embedded = loaded.vocabulary.embedding[block_tokens(tokens[layout.anchors_A], 6, MASK)[0]]
    masks = block_masks(layout, loaded.model.spec.views, fused=False)
    trained = draft_blocks(loaded.model, features, layout.positions_T, embedded, 9 + torch.arange(6), masks)
    close(loaded.vocabulary.logits(trained[1:]), drafted(loaded, FEATURES, ANCHOR))
    close(loaded.vocabulary.logits(trained[1:]), plain(target, rotary=int(HEAD_DIM * factor)))


# Fields at the top or nested.

NESTED = {"block_size": 6, "num_target_layers": 3, "mask_token_id": MASK, "target_layer_ids": [0, 2]}
OTHER = {"block_size": 5, "num_target_layers": 4, "mask_token_id": 59, "target_layer_ids": [0, 1]}


@pytest.mark.parametrize("key", NESTED)
def test_fields_may_stand_at_the_top_nested_or_in_both(tmp_path, key):
    wanted = read_drafter(write_drafter(tmp_path / "usual"), toy_target().spec)
    value, other = NESTED[key], OTHER[key]
    places = {"top": (None, value), "nested": (value, None), "both": (value, value)}
    for name, (nested, top) in places.items():
        folder = write_drafter(tmp_path / name, {key: nested}, **{key: top})
        assert read_drafter(folder, toy_target().spec) == wanted
    for nested, top in ((value, other), (other, value)):
        folder = write_drafter(tmp_path / "contradiction", {key: nested}, **{key: top})
        with pytest.raises(CheckpointError, match=f"{key} is .* at the top but .* in dflash_config"):
            load_drafter(folder, toy_target())


# Sliding windows.

WINDOWS = {
    "layer types": ({"layer_types": [SLIDING, FULL], "sliding_window": 5}, {}, (5, None)),
    "unused window": ({"layer_types": [FULL, FULL], "sliding_window": 5}, {}, (None, None)),
    "no layer types": ({"sliding_window": 4096, "use_sliding_window": False}, {}, (None, None)),
    # transformers' Qwen3Config would drop these two windows: the first for its flag, ...
    "flag unset": (
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 5, "use_sliding_window": False},
        {},
        (5, 5),
    ),
    # ... the second because it looks at layers past max_window_layers only.
    "many full layers": (
        {"layer_types": [FULL, SLIDING], "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 28},
        {},
        (None, 5),
    ),
    "use_swa": ({}, {"use_swa": True, "swa_window_size": 5}, (5, 5)),
    "use_swa off": ({}, {"use_swa": False, "swa_window_size": 5}, (None, None)),
    "use_swa of some layers": (
        {"layer_types": [SLIDING, FULL]},
        {"use_swa": True, "swa_window_size": 5},
        (5, None),
    ),
    # No layer types, but transformers' own rule: layers from max_window_layers on slide.
    "flag set": ({"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, {}, (None, 5)),
    "layer types nested": ({}, {"layer_types": [SLIDING, FULL], "sliding_window": 5}, (5, None)),
    "use_swa at the top": ({"use_swa": True, "swa_window_size": 5}, {}, (5, 5)),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_as_the_checkpoint_says(tmp_path, case):
    top, nested, windows = WINDOWS[case]
    causal = tuple(window is not None for window in windows)
    loaded = load_drafter(write_drafter(tmp_path, nested, **top), toy_target())
    assert loaded.model.spec.views == tuple(View(*view) for view in zip(windows, causal, strict=True))
    close(drafted(loaded, FEATURES, ANCHOR), plain(toy_target(), windows=windows, causal=causal))


BAD_WINDOWS = {
    "no window": ({"layer_types": [SLIDING, FULL]}, {}, CheckpointError, "sliding_window is missing"),
    "null window": ({}, {"use_swa": True}, CheckpointError, "swa_window_size is missing"),
    "zero window": (
        {"layer_types": [SLIDING] * 2, "sliding_window": 0},
        {},
        CheckpointError,
        "sliding_window must be",
    ),
    "too many": ({"layer_types": [SLIDING] * 3, "sliding_window": 5}, {}, CheckpointError, "layer_types names 3"),
    "too few": ({"layer_types": [FULL]}, {}, CheckpointError, "layer_types names 1"),
    "unknown": ({"layer_types": ["linear_attention", FULL]}, {}, UnsupportedError, "linear_attention"),
    "a flag alone": (
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 28},
        {},
        CheckpointError,
        "layer_types is missing",
    ),
    "swa flag": ({}, {"use_swa": "yes", "swa_window_size": 5}, CheckpointError, "use_swa must be true or false"),
    "two windows": (
        {"layer_types": [SLIDING] * 2, "sliding_window": 7},
        {"use_swa": True, "swa_window_size": 5},
        CheckpointError,
        "swa_window_size",
    ),
    "all full but use_swa": (
        {"layer_types": [FULL] * 2},
        {"use_swa": True, "swa_window_size": 5},
        CheckpointError,
        "use_swa",
    ),
}


@pytest.mark.parametrize("case", BAD_WINDOWS)
def test_windows_that_cannot_be_honoured_are_refused(tmp_path, case):
    top, nested, error, message = BAD_WINDOWS[case]
    with pytest.raises(error, match=message):
        load_drafter(write_drafter(tmp_path, nested, **top), toy_target())


@pytest.mark.parametrize("spelling", ["layer_types", "use_swa"])
def test_a_window_hides_all_but_the_last_rows_and_survives_saving(tmp_path, spelling):
    """A window of 8 over a context of 30 rows gives what the last 7 rows give: the anchor itself is the eighth."""
    target = toy_target()
    if spelling == "layer_types":
        config = drafter_config(layer_types=[SLIDING] * 2, sliding_window=8)
    else:
        config = drafter_config({"use_swa": True, "swa_window_size": 8})
    tensors = {name: t.bfloat16().double() for name, t in drafter_tensors().items()}
    first = load_drafter(write_folder(tmp_path / "first", config, tensors), target)
    save_drafter(tmp_path / "again", config, first.model, first.vocabulary)
    again = load_drafter(tmp_path / "again", target)
    assert again.model.spec == first.model.spec
    assert [view.window for view in again.model.spec.views] == [8, 8]
    features = noise(30, 2 * HIDDEN, seed=9)
    for loaded in (first, again):
        found = drafted(loaded, features, ANCHOR)
        # Rope is relative, so the last rows may stand at 0 to 6; its float32 angles round differently there.
        close(found, drafted(loaded, features[-7:], ANCHOR), atol=1e-4)
        assert not torch.allclose(found, drafted(loaded, features[-6:], ANCHOR), atol=1e-3)
        close(found, plain(target, tensors, features=features, windows=(8, 8), causal=(True, True)))


# Causality.

CAUSAL = {
    "untold": ({}, {}, (False, False)),
    "untold, sliding": ({"layer_types": [SLIDING, FULL], "sliding_window": 5}, {}, (True, False)),
    "nested causal": ({}, {"causal": True}, (True, True)),
    "nested is_causal": ({}, {"is_causal": True}, (True, True)),
    "top causal": ({"causal": True}, {}, (True, True)),
    "top is_causal": ({"is_causal": True}, {}, (True, True)),
    "all agree": ({"is_causal": True, "causal": True}, {"causal": True}, (True, True)),
    "not causal": ({"is_causal": False}, {}, (False, False)),
    "not causal, sliding": (
        {"is_causal": False, "layer_types": [SLIDING, FULL], "sliding_window": 5},
        {},
        (False, False),
    ),
    "causal, sliding": ({"layer_types": [FULL, SLIDING], "sliding_window": 5}, {"causal": True}, (True, True)),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_the_block_mask_follows_causality(tmp_path, case):
    top, nested, causal = CAUSAL[case]
    kinds = top.get("layer_types", [FULL] * 2)
    windows = [5 if kind == SLIDING else None for kind in kinds]
    loaded = load_drafter(write_drafter(tmp_path, nested, **top), toy_target())
    assert tuple(view.causal for view in loaded.model.spec.views) == causal
    close(drafted(loaded, FEATURES, ANCHOR), plain(toy_target(), windows=windows, causal=causal))


@pytest.mark.parametrize(
    ("top", "nested"),
    [
        ({"is_causal": True}, {"causal": False}),
        ({"causal": False, "is_causal": True}, {}),
        ({}, {"causal": "yes"}),
    ],
)
def test_causality_stated_twice_or_wrongly_is_refused(tmp_path, top, nested):
    with pytest.raises(CheckpointError, match="causal"):
        load_drafter(write_drafter(tmp_path, nested, **top), toy_target())


# Feature layers.


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),  # as in Qwen3-4B-DFlash-b16 and Qwen3-8B-DFlash-b16
        (36, 1, (18,)),
        (28, 2, (1, 25)),
        (30, 3, (1, 14, 27)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
    ],
)
def test_layers_by_default(target_layers, draft_layers, ids):
    assert default_layer_ids(target_layers, draft_layers) == ids


def test_layers_not_named_are_those_by_default(tmp_path):
    target = toy_target(layers=9)
    folder = write_drafter(tmp_path, {"target_layer_ids": None}, num_target_layers=9)
    spec = read_drafter(folder, target.spec)
    assert spec.layer_ids == (1, 6)
    close(drafted(load_drafter(folder, target), FEATURES, ANCHOR), plain(target))


def test_layers_may_be_named_without_their_number(tmp_path):
    assert read_drafter(write_drafter(tmp_path, num_target_layers=None), toy_target().spec).layer_ids == (0, 2)


def test_layers_by_default_must_exist(tmp_path):
    folder = write_drafter(tmp_path, {"target_layer_ids": None}, num_target_layers=2)
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        read_drafter(folder, toy_target(layers=2).spec)


@pytest.mark.parametrize("ids", [[2], [0, 1, 2], [2, 0]])
def test_the_last_layer_may_be_a_feature(tmp_path, ids):
    tensors = drafter_tensors(features=len(ids))
    folder = write_folder(tmp_path, drafter_config({"target_layer_ids": ids}), tensors)
    target = toy_target()
    loaded = load_drafter(folder, target)
    assert loaded.model.spec.layer_ids == tuple(ids)
    rows = chain_rows(torch.tensor([random_tokens(9, 1)]), [0])
    _, features = target(rows, target.new_cache(1, 9), loaded.model.spec.layer_ids)
    close(drafted(loaded, features[0], ANCHOR), plain(target, tensors, features=features[0]))


BAD_LAYERS = {
    "past the last": ([0, 3], r"\[3\] do not exist in a target of 3 layers \(0 to 2\)"),
    "boundaries": ([1, 3], r"\[3\] do not exist"),
    "negative": ([-1, 2], "target_layer_ids must be a non-empty list of whole numbers"),
    "twice": ([2, 2], "names a layer twice"),
    "none": ([], "target_layer_ids must be a non-empty list"),
    "no list": ("0,2", "target_layer_ids must be a list"),
    "text": (["0", "2"], "target_layer_ids must be a non-empty list of whole numbers"),
    "truth": ([True, 2], "target_layer_ids must be a non-empty list of whole numbers"),
    "too many for fc": ([0, 1, 2], r"fc.weight has shape \(24, 48\).*asks for \(24, 72\)"),
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_feature_layers_that_cannot_be_are_refused(tmp_path, case):
    ids, message = BAD_LAYERS[case]
    with pytest.raises(CheckpointError, match=message):
        load_drafter(write_drafter(tmp_path, {"target_layer_ids": ids}), toy_target())


# Other families.

FOREIGN = {
    "DFlash 2": {"architectures": ["DFlash2DraftModel"], "selector_rank": 64, "selector_top_k": 8},
    "DFlash 2 by its selector": {"selector_top_k": 8},
    "DFlash 2 by its convolution": {"conv_kernel_size": 4, "conv_group_size": 2},
    "DFlash2DraftModel": {"architectures": ["DFlash2DraftModel"]},
    "Domino": {"projector_type": "domino", "gru_hidden_dim": 128},
    "DominoDraftModel": {"architectures": ["DominoDraftModel"]},
    "DSparkDraftModel": {"architectures": ["DSparkDraftModel"]},
    "EAGLE": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]},
    },
    "LlamaForCausalLMEagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "MLA attention": {"attention_mode": "mla"},
    "SPARSE attention": {"attention_mode": "sparse"},
    "MLA attention by its rank": {"kv_lora_rank": 512},
    "mixture-of-experts": {"num_experts": 64},
    "mixture-of-experts by its local experts": {"num_local_experts": 8},
    "Qwen3ForCausalLM": {"architectures": ["Qwen3ForCausalLM"]},
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_families_are_refused_by_name(tmp_path, case):
    """Their tensors are never counted: the name is known from the configuration."""
    folder = write_folder(tmp_path, drafter_config(**FOREIGN[case]), {"selector.weight": torch.zeros(2, 2)})
    with pytest.raises(UnsupportedError, match=f"{case.split(' by ')[0]}.*not supported"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize(
    ("key", "value"), [("selector_rank", 64), ("projector_type", "domino"), ("attention_mode", "mla")]
)
def test_marks_of_other_families_are_seen_when_nested(tmp_path, key, value):
    with pytest.raises(UnsupportedError, match=key):
        load_drafter(write_drafter(tmp_path, {key: value}), toy_target())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 0},
        {"projector_type": "none"},
        {"attention_sink_bias": False},
        {"architectures": None},
        {"attention_mode": "gqa"},
        {"nested": {"attention_mode": "mha"}},
    ],
)
def test_marks_that_are_switched_off_do_not_matter(tmp_path, changes):
    close(logits(write_drafter(tmp_path, **changes)), plain(toy_target()))


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_quantised_checkpoints_are_refused_by_name(tmp_path, method):
    quantised = {"quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(UnsupportedError, match=rf"quantised weights \({method}\) are not supported"):
        load_drafter(write_drafter(tmp_path / "drafter", **quantised), toy_target())
    target = toy_target()
    folder = write_folder(tmp_path / "target", target_config(target, **quantised), target_tensors(target))
    with pytest.raises(UnsupportedError, match=rf"quantised weights \({method}\) are not supported"):
        load_target(folder, torch.float64)


# Vocabularies.


@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 7])
def test_own_embedding(tmp_path, rows):
    target, embedding = toy_target(), noise(rows, HIDDEN, seed=20)
    tensors = drafter_tensors() | {"embed_tokens.weight": embedding}
    config = drafter_config(vocab_size=rows, tie_word_embeddings=False)
    loaded = load_drafter(write_folder(tmp_path, config, tensors), target)
    close(drafted(loaded, FEATURES, ANCHOR), plain(target, embedding=embedding))


@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 7])
def test_own_embedding_is_the_head_too_when_tied(tmp_path, rows):
    target, embedding = toy_target(), noise(rows, HIDDEN, seed=20)
    tensors = drafter_tensors() | {"embed_tokens.weight": embedding}
    loaded = load_drafter(write_folder(tmp_path, drafter_config(vocab_size=rows), tensors), target)
    wanted = plain(target, embedding=embedding, head=embedding[:VOCABULARY])
    close(drafted(loaded, FEATURES, ANCHOR), wanted)


@pytest.mark.parametrize("rows", [VOCABULARY, VOCABULARY + 7])
def test_own_head_never_drafts_padding(tmp_path, rows):
    target, head = toy_target(), noise(rows, HIDDEN, seed=21)
    head[VOCABULARY:] *= 100  # padding would win every draft
    tensors = drafter_tensors() | {"lm_head.weight": head}
    config = drafter_config(vocab_size=rows, tie_word_embeddings=False)
    loaded = load_drafter(write_folder(tmp_path, config, tensors), target)
    found = drafted(loaded, FEATURES, ANCHOR)
    close(found, plain(target, head=head)[:, :VOCABULARY])
    tokens = loaded.vocabulary.tokens(found.argmax(-1))
    assert tokens.tolist() == found.argmax(-1).tolist()


def test_own_embedding_and_head(tmp_path):
    target, embedding, head = toy_target(), noise(VOCABULARY, HIDDEN, seed=20), noise(VOCABULARY, HIDDEN, seed=21)
    tensors = drafter_tensors() | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    loaded = load_drafter(write_folder(tmp_path, drafter_config(tie_word_embeddings=False), tensors), target)
    close(drafted(loaded, FEATURES, ANCHOR), plain(target, embedding=embedding, head=head))


def test_a_padded_vocabulary_without_tables_uses_the_targets(tmp_path):
    close(logits(write_drafter(tmp_path, vocab_size=VOCABULARY + 3)), plain(toy_target()))


def reduced(kept):
    """Tensors of a drafter whose head knows the tokens `kept` alone, and that head."""
    head = noise(len(kept), HIDDEN, seed=22)
    offsets = torch.tensor(kept) - torch.arange(len(kept))
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[kept] = True
    return drafter_tensors() | {"lm_head.weight": head, "d2t": offsets, "t2d": known}, head


def test_a_reduced_vocabulary_is_mapped_to_the_targets_tokens(tmp_path):
    kept = [0, 3, 4, 10, 11, 40, 60]
    tensors, head = reduced(kept)
    target = toy_target()
    loaded = load_drafter(write_folder(tmp_path, drafter_config(vocab_size=len(kept)), tensors), target)
    found = drafted(loaded, FEATURES, ANCHOR)
    close(found, plain(target, head=head))
    assert loaded.vocabulary.used == len(kept)
    assert loaded.vocabulary.tokens(torch.arange(len(kept))).tolist() == kept
    winners = loaded.vocabulary.tokens(found.argmax(-1)).tolist()
    assert winners == [kept[column] for column in found.argmax(-1).tolist()]


def changed_tensors(**changes):
    """A reduced drafter's tensors with some replaced, or left out when None."""
    tensors = reduced([0, 3, 4, 10])[0] | {name.replace("__", "."): t for name, t in changes.items()}
    return {name: t for name, t in tensors.items() if t is not None}


BAD_TABLES = {
    "reduced without d2t": (changed_tensors(d2t=None), "lm_head has 4 rows for the target's 61 tokens and no d2t"),
    "d2t without head": (
        changed_tensors(lm_head__weight=None),
        "d2t maps a reduced vocabulary, but there is no lm_",
    ),
    "d2t too short": (changed_tensors(d2t=torch.tensor([0, 2])), r"d2t has shape \(2,\) for a head of 4 rows"),
    "d2t past the vocabulary": (changed_tensors(d2t=torch.tensor([0, 0, 0, 58])), "d2t does not map to distinct"),
    "d2t below zero": (changed_tensors(d2t=torch.tensor([-1, 0, 0, 0])), "d2t does not map to distinct"),
    "d2t to one token twice": (changed_tensors(d2t=torch.tensor([1, 0, 0, 0])), "d2t does not map to distinct"),
    "small embedding": (
        drafter_tensors() | {"embed_tokens.weight": noise(MASK, HIDDEN, seed=1)},
        "mask_token_id 60 has no row in the embedding of 60 rows",
    ),
    "narrow embedding": (
        drafter_tensors() | {"embed_tokens.weight": noise(VOCABULARY, HIDDEN - 2, seed=1)},
        "embed_tokens.weight has shape",
    ),
    "narrow head": (
        drafter_tensors() | {"lm_head.weight": noise(VOCABULARY, HIDDEN - 2, seed=1)},
        "lm_head.weight has shape",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_tables_that_do_not_fit_are_refused(tmp_path, case):
    tensors, message = BAD_TABLES[case]
    with pytest.raises(CheckpointError, match=message):
        load_drafter(write_folder(tmp_path, drafter_config(), tensors), toy_target())


def test_an_embedding_with_fewer_rows_than_tokens_is_refused(tmp_path):
    tensors = drafter_tensors() | {"embed_tokens.weight": noise(50, HIDDEN, seed=1)}
    folder = write_folder(tmp_path, drafter_config({"mask_token_id": 40}), tensors)
    with pytest.raises(CheckpointError, match="embed_tokens has 50 rows for the target's 61 tokens"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_target_needs_no_head(tmp_path, stored):
    """Neither the target's own loader nor a drafter that borrows its head may ask for an lm_head."""
    target = toy_target(tied=True)
    tensors = target_tensors(target)
    assert "lm_head.weight" not in tensors
    if stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    loaded = load_target(write_folder(tmp_path / "target", target_config(target), tensors), torch.float64)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    drafter = load_drafter(write_drafter(tmp_path / "drafter"), loaded)
    close(drafted(drafter, FEATURES, ANCHOR), plain(target, head=target.embed_tokens.weight))


# The mask token.


def test_a_mask_without_a_row_is_refused(tmp_path):
    folder = write_drafter(tmp_path, {"mask_token_id": VOCABULARY})
    with pytest.raises(CheckpointError, match="mask_token_id 61 has no row in the embedding of 61 rows"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize("mask", [MASK, VOCABULARY])
def test_a_mask_embedding_in_a_pickle_is_refused(tmp_path, mask):
    folder = write_drafter(tmp_path, {"mask_token_id": mask})
    torch.save(noise(HIDDEN, seed=1), folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt.*pickle"):
        load_drafter(folder, toy_target())


def test_a_mask_embedding_of_its_own_is_refused(tmp_path):
    folder = write_drafter(tmp_path)
    save_file({"mask_embedding": noise(HIDDEN, seed=1)}, folder / "mask_embedding.safetensors")
    with pytest.raises(CheckpointError, match="mask_embedding"):
        load_drafter(folder, toy_target())


def test_a_mask_that_text_contains_is_refused(tmp_path):
    folder = write_drafter(tmp_path)
    with pytest.raises(CheckpointError, match="mask_token_id 60 is the target's end-of-sequence or padding"):
        load_drafter(folder, toy_target(eos_ids=(3, MASK)))
    target = toy_target()
    target.spec = dataclasses.replace(target.spec, pad_id=MASK)
    with pytest.raises(CheckpointError, match="mask_token_id 60 is the target's end-of-sequence or padding"):
        load_drafter(folder, target)


# Tensors.


def fused_tensors(biased=False):
    """Apart and fused tensors of the same drafter."""
    apart = drafter_tensors()
    if biased:
        sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM, "o": HIDDEN}
        for layer in range(2):
            for i, (name, size) in enumerate(sizes.items()):
                apart[f"layers.{layer}.self_attn.{name}_proj.bias"] = noise(size, seed=10 * layer + i)
    fused = dict(apart)
    parts = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer in range(2):
        for name, (first, *others) in parts.items():
            module, kind = name.split(".")
            for what in ("weight", "bias"):
                names = [f"layers.{layer}.{module}.{part}.{what}" for part in (first, *others)]
                if names[0] in fused:
                    fused[f"layers.{layer}.{module}.{kind}.{what}"] = torch.cat([fused.pop(n) for n in names])
    return apart, fused


@pytest.mark.parametrize("biased", [False, True])
def test_fused_projections_load(tmp_path, biased):
    apart, fused = fused_tensors(biased)
    config = drafter_config(attention_bias=biased)
    found = logits(write_folder(tmp_path / "fused", config, fused))
    close(found, logits(write_folder(tmp_path / "apart", config, apart)))
    close(found, plain(toy_target(), apart))


def test_fused_and_apart_at_once_is_refused(tmp_path):
    apart, fused = fused_tensors()
    folder = write_folder(tmp_path, drafter_config(), apart | fused)
    with pytest.raises(CheckpointError, match="belong to no part of this model"):
        logits(folder)


@pytest.mark.parametrize(
    "name",
    [
        "fc",
        "hidden_norm",
        "norm",
        "layers.1.self_attn.k_proj",
        "layers.1.self_attn.k_norm",
        "layers.0.mlp.up_proj",
    ],
)
def test_missing_tensors_are_named(tmp_path, name):
    tensors = drafter_tensors()
    del tensors[f"{name}.weight"]
    with pytest.raises(CheckpointError, match=f"1 tensors are missing: {re.escape(name)}.weight$"):
        logits(write_folder(tmp_path, drafter_config(), tensors))


@pytest.mark.parametrize(
    "name", ["selector.weight", "layers.2.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias"]
)
def test_unknown_tensors_are_named(tmp_path, name):
    tensors = drafter_tensors() | {name: torch.zeros(2)}
    with pytest.raises(CheckpointError, match=f"belong to no part of this model: {re.escape(name)}"):
        logits(write_folder(tmp_path, drafter_config(), tensors))


def test_stored_rope_frequencies_are_ignored(tmp_path):
    tensors = drafter_tensors() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    close(logits(write_folder(tmp_path, drafter_config(), tensors)), plain(toy_target()))


@pytest.mark.parametrize(
    "name", ["norm.weight", "layers.0.mlp.down_proj.weight", "layers.1.self_attn.q_norm.weight"]
)
def test_wrong_shapes_are_named(tmp_path, name):
    tensors = drafter_tensors()
    tensors[name] = tensors[name][..., :-1]
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} has shape .* but the configuration asks for"):
        logits(write_folder(tmp_path, drafter_config(), tensors))


def test_wrong_sizes_of_heads_are_a_wrong_shape(tmp_path):
    with pytest.raises(CheckpointError, match=r"q_proj.weight \+ .*k_proj.weight \+ .*v_proj.weight has shape"):
        logits(write_drafter(tmp_path, num_key_value_heads=None))


# Files.


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: no such file; a model folder holds config.json"):
        load_drafter(tmp_path, toy_target())
    with pytest.raises(CheckpointError, match=r"config.json: no such file"):
        load_target(tmp_path / "nowhere", torch.float64)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"not json", b'{"a": 1'])
def test_a_config_that_is_not_json_is_named(tmp_path, content):
    folder = write_drafter(tmp_path)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config.json: not valid JSON"):
        load_drafter(folder, toy_target())


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    folder = write_drafter(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config.json: is a folder; a model folder holds"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null"])
def test_a_config_that_is_no_object_is_named(tmp_path, content):
    folder = write_drafter(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config.json: holds a JSON .*; an object is needed"):
        load_drafter(folder, toy_target())


def test_no_weights_are_named(tmp_path):
    folder = write_drafter(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file$"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_are_never_loaded(tmp_path, name):
    folder = write_drafter(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save(drafter_tensors(), folder / name)
    with pytest.raises(CheckpointError, match=f"{name} are pickles, which are never loaded"):
        load_drafter(folder, toy_target())


def cut(data, keep):
    return data[: int(len(data) * keep)]


DAMAGE = {
    "empty": lambda data: b"",
    "a few bytes": lambda data: data[:4],
    "within the header": lambda data: data[:50],
    "half": lambda data: cut(data, 0.5),
    "the last byte": lambda data: data[:-1],
    "more bytes": lambda data: data + b"\0" * 8,
    "length of the header": lambda data: b"\xff" * 8 + data[8:],
    "text of the header": lambda data: data[:8] + b"x" * 100 + data[108:],
    "something else": lambda data: b"<html>404</html>" * 100,
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_weights_are_named(tmp_path, case):
    path = write_drafter(tmp_path) / "model.safetensors"
    path.write_bytes(DAMAGE[case](path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated or damaged .*; fetch the file again"):
        load_drafter(tmp_path, toy_target())


@pytest.mark.parametrize("index", [{"weight_map": "model.safetensors"}, {"weight_map": ["model.safetensors"]}])
def test_a_damaged_index_is_named(tmp_path, index):
    folder = write_drafter(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        load_drafter(folder, toy_target())


@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight"])
def test_a_tensor_stored_twice_is_named(tmp_path, name):
    """A stale shard beside newer weights: nothing says which of them counts."""
    folder = write_drafter(tmp_path)
    save_file({name: noise(HIDDEN, 2 * HIDDEN, seed=1)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"fc.weight.*(twice|both)"):
        load_drafter(folder, toy_target())


# Keys.

REQUIRED = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "block_size",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
        load_drafter(write_drafter(tmp_path, **{key: None}), toy_target())


def test_a_missing_mask_token_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="mask_token_id is missing"):
        load_drafter(write_drafter(tmp_path, {"mask_token_id": None}), toy_target())


MISTYPED = [
    ("hidden_size", "24", "must be a whole number"),
    ("hidden_size", 24.0, "must be a whole number"),
    ("hidden_size", True, "must be a whole number"),
    ("num_hidden_layers", 0, "must be at least 1"),
    ("num_attention_heads", -4, "must be at least 1"),
    ("num_attention_heads", 3, r"\(3\) must be a multiple of key/value heads \(2\)"),
    ("head_dim", "8", "must be a whole number"),
    ("rms_norm_eps", "1e-6", "must be a finite number"),
    ("rms_norm_eps", 0, "must be greater than 0"),
    ("rms_norm_eps", float("nan"), "must be a finite number"),
    ("rope_theta", "10000", "must be a finite number"),
    ("rope_theta", float("inf"), "must be a finite number"),
    ("block_size", "16", "must be a whole number"),
    ("block_size", 1, "must be at least 2"),
    ("vocab_size", 0, "must be at least 1"),
    ("vocab_size", "61", "must be a whole number"),
    ("attention_bias", "no", "must be true or false"),
    ("hidden_act", 3, "must be a string"),
    ("layer_types", "full_attention", "must be a list"),
    ("layer_types", [1, 2], "must be a list of strings"),
    ("architectures", "DFlashDraftModel", "must be a list"),
    ("dflash_config", [], "must be an object"),
    ("quantization_config", "fp8", "must be an object"),
    ("is_causal", "no", "must be true or false"),
    ("num_target_layers", "3", "must be a whole number"),
]


@pytest.mark.parametrize(("key", "value", "message"), MISTYPED)
def test_mistyped_keys_are_named(tmp_path, key, value, message):
    config = drafter_config() | {key: value}
    with pytest.raises(CheckpointError, match=f"config.json: {key}:? {message}"):
        load_drafter(write_folder(tmp_path, config, drafter_tensors()), toy_target())


def test_another_activation_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedError, match="hidden_act 'gelu' is not supported"):
        load_drafter(write_drafter(tmp_path, hidden_act="gelu"), toy_target())


def test_a_head_dimension_is_derived_or_missing(tmp_path):
    narrow = {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}
    with pytest.raises(CheckpointError, match="head_dim is missing and hidden_size 24 is no multiple of 5 heads"):
        load_drafter(write_drafter(tmp_path, **narrow), toy_target())
    assert read_drafter(write_drafter(tmp_path, head_dim=None), toy_target().spec).decoder.head_dim == 6


# Another target.


def test_a_drafter_for_another_target_is_refused(tmp_path):
    folder = write_drafter(tmp_path)
    with pytest.raises(CheckpointError, match="num_target_layers is 3 but the target has 4"):
        load_drafter(folder, toy_target(layers=4))
    with pytest.raises(CheckpointError, match="vocab_size 61 differs from the target's 70"):
        load_drafter(folder, toy_target(vocabulary=70))
    wide = write_drafter(tmp_path / "wide", hidden_size=32)
    with pytest.raises(CheckpointError, match=r"hidden_size 32 differs from the target's 24.*another target"):
        load_drafter(wide, toy_target())


# Targets.


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_targets_load_in_both_spellings_of_rope(tmp_path, family, tied):
    target = toy_target(family, tied=tied)
    spellings = {
        "old": {},
        "new": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    }
    rows = chain_rows(torch.tensor([random_tokens(9, 1)]), [0])
    wanted = target.logits(target(rows, target.new_cache(1, 9))[0])
    for name, changes in spellings.items():
        folder = write_folder(tmp_path / name, target_config(target, **changes), target_tensors(target))
        loaded = load_target(folder, torch.float64)
        assert loaded.spec == target.spec
        close(loaded.logits(loaded(rows, loaded.new_cache(1, 9))[0]), wanted)


def test_ends_of_sequence_come_from_both_files(tmp_path):
    target = toy_target()
    folder = write_folder(tmp_path, target_config(target, eos_token_id=5, pad_token_id=9), target_tensors(target))
    assert read_target(folder).eos_ids == (5,)
    assert read_target(folder).pad_id == 9
    unpadded = target_config(target, eos_token_id=5, pad_token_id=-1)
    assert read_target(write_folder(tmp_path / "unpadded", unpadded, {})).pad_id is None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 12]}))
    assert read_target(folder).eos_ids == (5, 7, 12)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 99}))
    with pytest.raises(CheckpointError, match="eos_token_id 99 lies outside the vocabulary of 61"):
        read_target(folder)


BAD_TARGETS = {
    "padding": ({"pad_token_id": -2}, CheckpointError, "pad_token_id must be at least 0: got -2"),
    "family": ({"model_type": "gemma3"}, UnsupportedError, "model_type 'gemma3' is not supported.*llama, qwen3"),
    "no family": ({"model_type": None}, CheckpointError, "model_type is missing"),
    "no vocabulary": ({"vocab_size": None}, CheckpointError, "vocab_size is missing"),
    "end of sequence": ({"eos_token_id": "<end>"}, CheckpointError, "eos_token_id must be a whole number"),
    "ends of sequence": ({"eos_token_id": [1, None]}, CheckpointError, "eos_token_id must be a non-empty list"),
    "ties": ({"tie_word_embeddings": 1}, CheckpointError, "tie_word_embeddings must be true or false"),
    "sliding": (
        {"model_type": "qwen3", "layer_types": [SLIDING] * 3, "sliding_window": 8, "use_sliding_window": True},
        UnsupportedError,
        "sliding",
    ),
    "sliding by its flag": (
        {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
        UnsupportedError,
        "sliding",
    ),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_targets_that_cannot_be_honoured_are_refused(tmp_path, case):
    changes, error, message = BAD_TARGETS[case]
    target = toy_target("qwen3" if "sliding" in case else "llama")
    folder = write_folder(tmp_path, target_config(target, **changes), target_tensors(target))
    with pytest.raises(error, match=message):
        load_target(folder, torch.float64)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    target = toy_target(tied=True)
    tensors = target_tensors(target) | {"lm_head.weight": noise(VOCABULARY, HIDDEN, seed=1)}
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding, but lm_head.weight differs"):
        load_target(write_folder(tmp_path, target_config(target), tensors), torch.float64)


@pytest.mark.parametrize(("tied", "head"), [(False, False), (True, False), (True, True)])
def test_a_target_without_its_embedding_is_refused_by_name(tmp_path, tied, head):
    target = toy_target(tied=tied)
    tensors = target_tensors(target)
    embedding = tensors.pop("model.embed_tokens.weight")
    if head:
        tensors["lm_head.weight"] = embedding
    with pytest.raises(CheckpointError, match=r"missing: embed_tokens.weight"):
        load_target(write_folder(tmp_path, target_config(target), tensors), torch.float64)


def test_a_target_without_its_head_is_refused_by_name(tmp_path):
    target = toy_target()
    tensors = target_tensors(target)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing: lm_head.weight"):
        load_target(write_folder(tmp_path, target_config(target), tensors), torch.float64)


# Saving.


def loaded_drafter(folder, target=None, **changes):
    """A drafter whose weights bfloat16 holds exactly, and its config."""
    config = drafter_config(**changes)
    tensors = {name: t.bfloat16().double() for name, t in drafter_tensors().items()}
    return load_drafter(write_folder(folder, config, tensors), target or toy_target()), config, tensors


def test_saving_and_loading_gives_equal_tensors(tmp_path):
    loaded, config, tensors = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary, extra={"training.json": {"step": 3}})
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: t.dtype for name, t in stored.items()} == dict.fromkeys(tensors, torch.bfloat16)
    assert all(torch.equal(stored[name].double(), tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    assert json.loads((tmp_path / "b" / "training.json").read_text()) == {"step": 3}
    again = load_drafter(tmp_path / "b", toy_target())
    assert again.model.spec == loaded.model.spec
    wanted = loaded.model.state_dict()
    for name, found in again.model.state_dict().items():
        assert torch.equal(found, wanted.pop(name)), name
    assert not wanted
    assert torch.equal(drafted(again, FEATURES, ANCHOR), drafted(loaded, FEATURES, ANCHOR))


@pytest.mark.parametrize("own", ["embedding", "head", "reduced"])
def test_own_tables_survive_saving(tmp_path, own):
    target = toy_target()
    tensors = {
        "embedding": drafter_tensors() | {"embed_tokens.weight": noise(VOCABULARY, HIDDEN, seed=20)},
        "head": drafter_tensors() | {"lm_head.weight": noise(VOCABULARY, HIDDEN, seed=21)},
        "reduced": reduced([0, 3, 4, 10, 11, 40, 60])[0],
    }[own]
    config = drafter_config()
    loaded = load_drafter(write_folder(tmp_path / "a", config, tensors), target)
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    again = load_drafter(tmp_path / "b", target)
    columns = torch.arange(again.vocabulary.used)
    assert torch.equal(again.vocabulary.tokens(columns), loaded.vocabulary.tokens(columns))
    wanted = drafted(loaded, FEATURES, ANCHOR)
    assert (drafted(again, FEATURES, ANCHOR) - wanted).abs().max() < 0.15 * wanted.std()


def test_rows_are_packed_within_half_a_step():
    matrix = noise(20, 30, seed=1) * torch.logspace(-6, 6, 20, dtype=torch.float64)[:, None]
    matrix[3] = 0
    matrix[4, 5] *= 1000  # an outlier costs its own row alone
    (name, rows), (scale_name, scale) = pack_rows("fc.weight", matrix)
    assert (name, scale_name) == ("fc.weight", "fc.weight.scale")
    assert (rows.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (20,))
    error = (rows.double() * scale.double()[:, None] - matrix).abs().amax(dim=1)
    assert (error <= matrix.abs().amax(dim=1) / 254 * (1 + 1e-4)).all()
    assert not rows[3].any()
    assert scale[3] > 0
    assert int(rows.abs().max()) == 127
    ((_, vector),) = pack_rows("norm.weight", noise(30, seed=2))
    assert vector.dtype == torch.bfloat16


def test_packed_checkpoints_load_and_say_what_they_are(tmp_path):
    loaded, config, tensors = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary, packed=True)
    content = json.loads((tmp_path / "b" / "config.json").read_text())
    assert content["quantization_config"] == {"quant_method": INT8_METHOD}
    stored = load_file(tmp_path / "b" / "model.safetensors")
    matrices = {name for name, t in tensors.items() if t.ndim == 2}
    assert {name for name, t in stored.items() if t.dtype == torch.int8} == matrices
    assert set(stored) == set(tensors) | {f"{name}.scale" for name in matrices}
    again = load_drafter(tmp_path / "b", toy_target())
    assert again.model.spec.packed
    wanted = drafted(loaded, FEATURES, ANCHOR)
    assert (drafted(again, FEATURES, ANCHOR) - wanted).abs().max() < 0.1 * wanted.std()
    # Exported again as bfloat16 it is no longer packed.
    save_drafter(tmp_path / "c", content, again.model, again.vocabulary)
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())
    assert not load_drafter(tmp_path / "c", toy_target()).model.spec.packed


@pytest.mark.parametrize("case", ["no scale", "short scale", "no rows"])
def test_broken_packing_is_named(tmp_path, case):
    tensors = dict(item for name, tensor in drafter_tensors().items() for item in pack_rows(name, tensor))
    if case == "no scale":
        del tensors["fc.weight.scale"]
    elif case == "short scale":
        tensors["fc.weight.scale"] = tensors["fc.weight.scale"][:-1]
    else:
        tensors["fc.weight"] = drafter_tensors()["fc.weight"]
    config = drafter_config(quantization_config={"quant_method": INT8_METHOD})
    message = (
        "scales without int8 rows: fc.weight" if case == "no rows" else "fc.weight holds int8 rows without one"
    )
    with pytest.raises(CheckpointError, match=message):
        load_drafter(write_folder(tmp_path, config, tensors), toy_target())


# The parity check.


def rewrite(folder, tensors=None, **changes):
    """Change a saved folder's config or tensors in place."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parity_passes_on_what_was_saved(tmp_path, dtype, packed):
    target = toy_target()
    tensors = drafter_tensors()  # bfloat16 does not hold these exactly
    loaded = load_drafter(write_folder(tmp_path / "a", drafter_config(), tensors), target)
    save_drafter(tmp_path / "b", drafter_config(), loaded.model, loaded.vocabulary, packed=packed)
    assert (tmp_path / "b" / PARITY_FILE).exists()
    load_drafter(tmp_path / "b", toy_target(dtype=dtype))


ALTERED = {
    "rope base": {"rope_theta": 500.0},
    "rotary part": {"partial_rotary_factor": 0.5},
    "norm": {"rms_norm_eps": 1.0},
    "causality": {"is_causal": True},
    "window": {"layer_types": [SLIDING] * 2, "sliding_window": 5, "is_causal": False},
    "mask token": {"dflash_config": {"mask_token_id": 59, "target_layer_ids": [0, 2]}},
    "order of layers": {},
    "a weight": {},
    "a sign": {},
    "not a number": {},
}


@pytest.mark.parametrize("case", ALTERED)
def test_parity_catches_what_was_altered(tmp_path, case):
    loaded, config, tensors = loaded_drafter(tmp_path / "a")
    folder = tmp_path / "b"
    save_drafter(folder, config, loaded.model, loaded.vocabulary)
    bfloat = {name: t.bfloat16() for name, t in tensors.items()}
    changed = {}
    if case == "order of layers":
        changed = {
            name.replace("layers.0", "layers.1") if "layers.0" in name else name.replace("layers.1", "layers.0"): t
            for name, t in bfloat.items()
        }
    elif case == "a weight":
        changed = {"layers.1.self_attn.v_proj.weight": bfloat["layers.1.self_attn.v_proj.weight"].roll(1, 0)}
    elif case == "a sign":
        changed = {"layers.0.input_layernorm.weight": -bfloat["layers.0.input_layernorm.weight"]}
    elif case == "not a number":
        changed = {"norm.weight": torch.full_like(bfloat["norm.weight"], torch.nan)}
    rewrite(folder, changed, **ALTERED[case])
    with pytest.raises(CheckpointError, match="drafted logits differ from those stored"):
        load_drafter(folder, toy_target())


def test_parity_catches_another_target(tmp_path):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    with pytest.raises(CheckpointError, match="drafted logits differ"):
        load_drafter(tmp_path / "b", toy_target(seed=5))


def test_parity_catches_a_wide_window_that_is_lost(tmp_path):
    sliding = {"layer_types": [SLIDING] * 2, "sliding_window": 24, "is_causal": False}
    loaded, config, _ = loaded_drafter(tmp_path / "a", **sliding)
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    rewrite(tmp_path / "b", layer_types=[FULL] * 2)
    with pytest.raises(CheckpointError, match="drafted logits differ"):
        load_drafter(tmp_path / "b", toy_target())


@pytest.mark.parametrize("case", ["damaged", "a tensor lacks", "other columns", "other features", "another shape"])
def test_a_broken_parity_file_is_named(tmp_path, case):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    path = tmp_path / "b" / PARITY_FILE
    stored = {name: t.clone() for name, t in load_file(path).items()}
    if case == "damaged":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        if case == "a tensor lacks":
            del stored["anchor"]
        elif case == "other columns":
            stored["columns"] += VOCABULARY
        elif case == "other features":
            stored["features"] = stored["features"][:, :-1].contiguous()
        else:
            stored["logits"] = stored["logits"][:-1].contiguous()
        save_file(stored, path)
    with pytest.raises(CheckpointError, match=re.escape(PARITY_FILE)):
        load_drafter(tmp_path / "b", toy_target())


# Writing whole or not at all.


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_save_replaces_the_whole_folder(tmp_path):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "stale.safetensors").write_bytes(b"old")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    assert set(listing(tmp_path / "b")) == {"config.json", "model.safetensors", PARITY_FILE}
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    load_drafter(tmp_path / "b", toy_target())


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["save_file", "write_parity", "json"])
def test_a_failing_write_leaves_the_old_folder(tmp_path, monkeypatch, where, existing):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    if existing:
        save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    before = listing(tmp_path / "b") if existing else None

    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((save.json, "dumps") if where == "json" else (save, where)), full)
    with pytest.raises(StorageError, match=r"b: cannot be written .*No space left"):
        save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    assert {path.name for path in tmp_path.iterdir()} == ({"a", "b"} if existing else {"a"})
    if existing:
        assert listing(tmp_path / "b") == before


@contextlib.contextmanager
def largest_file(size):
    """A limit that the kernel enforces, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_the_disk_refuses_are_a_storage_error(tmp_path):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    before = listing(tmp_path / "b")
    with pytest.raises(StorageError, match="b: cannot be written"), largest_file(4096):
        save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    assert listing(tmp_path / "b") == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_an_error_of_the_writer_leaves_the_old_folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").write_text("old")

    def write():
        with new_folder(tmp_path / "b") as partial:
            (partial / "new").write_text("new")
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        write()
    assert listing(tmp_path / "b") == {"old": b"old"}
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_failing_rename_leaves_the_old_folder(tmp_path, monkeypatch):
    loaded, config, _ = loaded_drafter(tmp_path / "a")
    save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    before = listing(tmp_path / "b")
    rename = type(tmp_path).rename

    def refuse_new(path, target):
        if ".part-" in path.name:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse_new)
    with pytest.raises(StorageError, match="b: cannot be written"):
        save_drafter(tmp_path / "b", config, loaded.model, loaded.vocabulary)
    assert listing(tmp_path / "b") == before
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
