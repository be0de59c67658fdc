"""A recipe is read strictly, and says the drafter that will be loaded."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ddtree.errors import CheckpointError, ConfigError
from ddtree.models.drafter_spec import parse_drafter
from ddtree.ops import View
from ddtree.training.config import CHOICES, RANGES, TrainConfig, check_resumable, read_config, resolve_drafter
from ddtree.training.optimizer import learning_rate
from ddtree.training.start import new_drafter, resolve_device, resolve_dtype
from tests.toys import MASK, VOCABULARY, toy_target

NEEDED = {"data": "answers", "out": "run"}
FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}


def recipe(folder, text):
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


# Reading


def test_a_recipe_of_its_needs_alone_is_the_default():
    assert read_config(None, NEEDED) == TrainConfig(data="answers", out="run")


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path):
    path = recipe(tmp_path, 'data = "a"\nout = "b"\nsteps = 7\nlearning_rate = 1\ntarget_layer_ids = [2, 0]\n')
    config = read_config(path, {"out": "c", "steps": 9, "seed": None, "data": None})
    assert (config.data, config.out, config.steps, config.seed) == ("a", "c", 9, 0)
    assert config.target_layer_ids == (2, 0)
    assert config.learning_rate == 1.0
    assert isinstance(config.learning_rate, float)
    assert config.anchors == TrainConfig("", "").anchors


def test_a_recipe_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_config(None, NEEDED).steps = 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'data = "a"\nout = "b"\nstep = 3\nlr = 1\n',
            r"unknown keys lr, step; did you mean steps\? Known: data, out, target",
        ),
        ('data = "a"\nout = "b"\n[optimizer]\nname = "muon"\n', r"optimizer must be of type str: got \{"),
        ('data = "a"\n', r"out must be given"),
        ("", r"data and out must be given"),
        ("steps = = 3", r"not valid TOML \("),
        ("steps = 3\nsteps = 4", r"not valid TOML \("),
    ],
)
def test_files_that_cannot_be_honoured(tmp_path, text, message):
    with pytest.raises(ConfigError, match=rf"recipe\.toml: {message}"):
        read_config(recipe(tmp_path, text), {})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: no such file; give the path of a TOML recipe"):
        read_config(tmp_path / "none.toml", NEEDED)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes\.toml: not valid TOML"):
        read_config(tmp_path / "bytes.toml", NEEDED)
    with pytest.raises(ConfigError, match="is a folder; give the path of a TOML recipe"):
        read_config(tmp_path, NEEDED)


WRONG = {"int": (2.0, "2", True, None, [2]), "float": ("1e-3", True, [0.1]), "str": (3, True, ["x"])}
WRONG |= {"bool": (1, "true", 0.0), "tuple[int, ...]": (3, "1, 2", [1.5], [True], ["1"])}


@pytest.mark.parametrize("name", FIELDS)
def test_values_of_another_type(name):
    for value in WRONG[FIELDS[name].type]:
        if value is None:
            continue  # a flag that was not given
        with pytest.raises(ConfigError, match=rf"training options: {name} must be (of type|a list of whole)"):
            read_config(None, {**NEEDED, name: value})


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.type in ("int", "float")])
def test_every_number_has_a_range(name):
    low, high = RANGES[name]
    kind = float if FIELDS[name].type == "float" else int
    assert getattr(read_config(None, {**NEEDED, name: kind(low)}), name) == low
    assert low <= getattr(TrainConfig("", ""), name) <= high
    for value in (low - 1, -1, high * 2 + 1):
        with pytest.raises(ConfigError, match=rf"training options: {name} must lie between"):
            read_config(None, {**NEEDED, name: kind(value)})
    if kind is float:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ConfigError, match=rf"{name} must lie between"):
                read_config(None, {**NEEDED, name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    for value in CHOICES[name]:
        assert getattr(read_config(None, {**NEEDED, name: value}), name) == value
    for value in ("", "nonsense", CHOICES[name][0].upper()):
        with pytest.raises(ConfigError, match=rf"{name} must be one of {', '.join(CHOICES[name])}: got '{value}'"):
            read_config(None, {**NEEDED, name: value})


def test_every_choice_of_dtype_is_understood():
    cpu = torch.device("cpu")
    assert [resolve_dtype(name, cpu) for name in CHOICES["dtype"]] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ]


MAY_CHANGE = {
    *("data", "out", "device", "dtype", "compile", "feature_cache_gib", "feature_cache_dir"),
    *("steps", "learning_rate", "final_learning_rate", "warmup_steps", "weight_decay", "clip_norm"),
    *("decay_gamma", "dpace_alpha", "soft_share", "soft_temperature"),
    *("log_every", "validate_every", "checkpoint_every", "budget"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_run_keeps(name):
    """The drafter, its optimiser, and what each step sees; lists come back from JSON."""
    config = TrainConfig("answers", "run", target_layer_ids=(2, 0))
    begun = {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(config).items()}
    check_resumable(config, begun)
    if name in MAY_CHANGE:
        check_resumable(config, begun | {name: "another"})
    else:
        with pytest.raises(ConfigError, match=f"{name} is .*, but this run began with 'another'; keep it"):
            check_resumable(config, begun | {name: "another"})


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto", 3) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 3) == torch.device("cpu")


def test_nonsense_for_the_machine_is_refused(monkeypatch, tmp_path):
    for name in ("nonsense", "", "cpu:x", "meta", "mps"):
        with pytest.raises(ConfigError, match=f"device '{name}' is not supported; use auto, cpu or cuda"):
            resolve_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="device cuda:2 was asked for, but torch sees 2 GPUs here"):
        resolve_device("cuda:2")
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float32, float64: got 'int8'"):
        resolve_dtype("int8", torch.device("cpu"))
    with pytest.raises(ConfigError, match="learning_rate is larger than any float"):
        read_config(None, {**NEEDED, "learning_rate": 10**400})
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_config(recipe(tmp_path, f"steps = 1{'0' * 5000}"), NEEDED)


# The drafter that a recipe means


def resolved(target, **changes):
    config = TrainConfig("answers", "run", **{"mask_token_id": MASK, "layers": 2} | changes)
    return config, resolve_drafter(config, target.spec)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "views", "layer_ids"),
    [
        ({}, (View(),) * 2, (1, 5)),
        ({"layers": 1}, (View(),), (4,)),
        ({"layers": 5}, (View(),) * 5, (1, 2, 3, 4, 5)),
        ({"target_layer_ids": (7, 0, 2)}, (View(),) * 2, (7, 0, 2)),
        ({"sliding_window": 9, "layers": 3}, (View(window=9),) * 3, (1, 3, 5)),
        ({"block_size": 5, "intermediate": 20, "rope_theta": 5e5}, (View(),) * 2, (1, 5)),
    ],
)
def test_the_config_parses_back(family, changes, views, layer_ids):
    """What is trained is what a checkpoint says: sizes, windows, causality, feature layers, rope."""
    target = toy_target(family, layers=8, max_positions=128)
    config, content = resolved(target, **changes)
    spec = parse_drafter(content, "config.json", target.spec)
    assert spec.views == views, "no layer may become causal because it slides"
    assert (spec.block_size, spec.mask_token_id) == (config.block_size, MASK)
    assert spec.layer_ids == layer_ids
    assert (spec.vocab_size, spec.packed) == (VOCABULARY, False)
    decoder, mine = target.spec.decoder, spec.decoder
    assert mine.layers == config.layers
    assert mine.intermediate == (config.intermediate or decoder.intermediate)
    assert mine.rope.theta == config.rope_theta
    assert mine.rope.rotary_dim == decoder.head_dim, "all of a head turns, as in the reference"
    for name in ("hidden", "heads", "kv_heads", "head_dim", "max_positions"):
        assert getattr(mine, name) == getattr(decoder, name)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask_token_id": VOCABULARY}, ConfigError, rf"mask_token_id {VOCABULARY} lies outside .* {VOCABULARY}"),
        ({"mask_token_id": 7}, CheckpointError, r"mask_token_id 7 is the target's end-of-sequence"),
        ({"target_layer_ids": (0, 5)}, CheckpointError, r"target_layer_ids \[5\] do not exist in a target of 5"),
        ({"target_layer_ids": (-1,)}, CheckpointError, r"target_layer_ids"),
        ({"target_layer_ids": (1, 1)}, CheckpointError, r"target_layer_ids names a layer twice"),
    ],
)
def test_drafters_that_cannot_be(changes, error, message):
    target = toy_target("qwen3", layers=5, eos_ids=(7,))
    config = TrainConfig("answers", "run", **{"mask_token_id": MASK, "layers": 2} | changes)
    with pytest.raises(error, match=message):
        new_drafter(config, target)


def test_a_fresh_drafter_depends_on_the_seed_alone():
    target = toy_target("qwen3", layers=5)
    config, content = resolved(target)
    found, model = new_drafter(config, target)
    assert found == content
    again = new_drafter(config, target)[1]
    other = new_drafter(dataclasses.replace(config, seed=1), target)[1]
    for (name, a), b, c in zip(model.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad
        assert a.dtype == torch.float64
        if a.ndim == 2:
            assert not torch.equal(a, c)
            narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert float(a.detach().std()) == pytest.approx(0.01 if narrow else 0.02, rel=0.25)
        else:
            assert torch.equal(a, torch.ones_like(a))


def test_the_rate_warms_up_and_falls_to_the_last():
    config = TrainConfig("", "", steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    rates = [learning_rate(config, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    flat = dataclasses.replace(config, warmup_steps=0, steps=1)
    assert learning_rate(flat, 0) == 1.0
