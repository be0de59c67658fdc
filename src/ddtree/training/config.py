"""The whole of a training run in one frozen value, read strictly from TOML and flags.

Every key is documented by its comment here; unknown keys are refused. `resolve_drafter` turns the recipe into
the `config.json` that the checkpoint will carry.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import read_text
from ddtree.errors import ConfigError
from ddtree.models.catalog import DEFAULT_MODEL
from ddtree.models.drafter_spec import ARCHITECTURE, default_layer_ids
from ddtree.models.spec import TargetSpec

__all__ = ["TrainConfig", "check_resumable", "read_config", "resolve_drafter"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A recipe. Token counts are of one optimiser step of one process."""

    data: str  # folder of answers, as `ddtree data` writes it
    out: str  # folder of the run: checkpoints, log
    target: str = DEFAULT_MODEL  # model name, hub id or folder
    # drafter
    layers: int = 5
    intermediate: int = 0  # 0: the target's
    block_size: int = 16
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = ()  # empty: spread as the reference does
    sliding_window: int = 0  # tokens of context that a drafter layer sees; 0: all
    causal_block: bool = False  # rows of a block see only earlier ones, instead of each other
    rope_theta: float = 10000.0
    # optimisation
    steps: int = 1000
    context_tokens: int = 16384  # answers and prompts packed into one step
    anchors: int = 4096  # draft blocks of one step
    max_length: int = 1024  # longer examples are cut
    optimizer: str = "adamw"  # adamw, or muon (matrices by Muon, the rest by AdamW)
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    accumulation: int = 1  # packs whose gradients make one step
    # objective
    decay_gamma: float = 7.0  # weight of draft position k: exp(-(k - 1) / gamma)
    dpace_alpha: float = 0.0  # above 0: weights by D-PACE instead, with this smoothing (0.5 is usual)
    soft_share: float = 0.0  # how much of a label is the target's distribution instead of the answer's token
    soft_temperature: float = 1.0  # of that distribution
    edge_rank: int = 0  # rank of the edge correction; 0: none
    edge_inner: int = 256  # width of its net
    edge_blocks: int = 512  # blocks of a pack that it learns from, at most
    seed: int = 0
    # machine
    device: str = "auto"
    dtype: str = "auto"  # forward arithmetic; masters are float32. auto: bfloat16 on a GPU, float32 on a CPU
    feature_cache_gib: float = 0.0  # captured features kept on the device; 0: captured anew each step
    feature_cache_dir: str = (
        ""  # a folder to keep them in instead; a later run on the same answers finds them there
    )
    compile: bool = False  # compile the drafter's forward and backward
    # record
    log_every: int = 20
    validate_every: int = 500
    checkpoint_every: int = 500
    validation_examples: int = 64
    budget: int = 64  # of the trees that validation builds


# What a run keeps when it is resumed: the drafter, its optimiser, and which examples and anchors each step sees.
FIXED = (
    "target",
    "layers",
    "intermediate",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "sliding_window",
    "causal_block",
    "rope_theta",
    "edge_rank",
    "edge_inner",
    "edge_blocks",
    "context_tokens",
    "anchors",
    "accumulation",
    "max_length",
    "optimizer",
    "seed",
    "validation_examples",
)
RANGES: Mapping[str, tuple[float, float]] = {
    "layers": (1, 64),
    "intermediate": (0, 1e6),
    "block_size": (2, 64),
    "mask_token_id": (0, 2**31),
    "sliding_window": (0, 1e7),
    "rope_theta": (1, 1e12),
    "steps": (1, 1e9),
    "context_tokens": (16, 1e8),
    "anchors": (1, 1e7),
    "max_length": (4, 1e7),
    "learning_rate": (1e-9, 1e2),
    "final_learning_rate": (0, 1e2),
    "warmup_steps": (0, 1e9),
    "weight_decay": (0, 1e2),
    "clip_norm": (1e-6, 1e6),
    "accumulation": (1, 1e6),
    "decay_gamma": (1e-3, 1e6),
    "dpace_alpha": (0, 1),
    "soft_share": (0, 1),
    "soft_temperature": (1e-3, 1e3),
    "edge_rank": (0, 1e5),
    "edge_inner": (1, 1e5),
    "edge_blocks": (1, 1e7),
    "seed": (0, 2**63),
    "feature_cache_gib": (0, 1e6),
    "log_every": (1, 1e9),
    "validate_every": (1, 1e9),
    "checkpoint_every": (1, 1e9),
    "validation_examples": (1, 1e6),
    "budget": (1, 255),
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "muon"),
    "dtype": ("auto", "bfloat16", "float32", "float64"),
}


def read_config(path: Path | None, overrides: Mapping[str, Any]) -> TrainConfig:
    """A recipe from a TOML file (or none) with flags over it. ConfigError names what cannot be honoured."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(read_text(path, ConfigError, "give the path of a TOML recipe"))
        except ValueError as error:  # not UTF-8, not TOML, or a number too long to read
            raise ConfigError(f"{path}: not valid TOML ({error})") from None
    values.update({key: value for key, value in overrides.items() if value is not None})
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    where = str(path) if path is not None else "training options"
    unknown = sorted(set(values) - set(fields))
    if unknown:
        near = [name for key in unknown for name in difflib.get_close_matches(key, fields, n=1)]
        mend = f"did you mean {', '.join(near)}? Known" if near else "known"
        raise ConfigError(f"{where}: unknown keys {', '.join(unknown)}; {mend}: {', '.join(fields)}")
    missing = [name for name in ("data", "out") if name not in values]
    if missing:
        raise ConfigError(f"{where}: {' and '.join(missing)} must be given")
    checked = {name: _typed(where, name, str(fields[name].type), value) for name, value in values.items()}
    config = TrainConfig(**checked)
    for name, (low, high) in RANGES.items():
        if not low <= getattr(config, name) <= high:
            raise ConfigError(
                f"{where}: {name} must lie between {low:g} and {high:g}: got {getattr(config, name)}"
            )
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(
                f"{where}: {name} must be one of {', '.join(choices)}: got {getattr(config, name)!r}"
            )
    return config


def _typed(where: str, name: str, kind: str, value: Any) -> Any:
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{where}: {name} is larger than any float; give a smaller number") from None
    if kind.startswith("tuple") and isinstance(value, list | tuple):
        if all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            return tuple(value)
    elif type(value).__name__ == kind:
        return value
    wanted = "a list of whole numbers" if kind.startswith("tuple") else f"of type {kind}"
    raise ConfigError(f"{where}: {name} must be {wanted}: got {value!r}")


def check_resumable(config: TrainConfig, begun_with: Mapping[str, Any]) -> None:
    """Raise ConfigError when a recipe differs from the one that a run began with in what a run keeps."""
    for key in FIXED:
        now, then = getattr(config, key), begun_with.get(key)
        then = tuple(then) if isinstance(then, list) else then
        if now != then:
            raise ConfigError(
                f"{key} is {now!r}, but this run began with {then!r}; keep it, or begin another run with --out"
            )


def resolve_drafter(config: TrainConfig, target: TargetSpec) -> dict[str, Any]:
    """The drafter's `config.json` in z-lab's layout."""
    decoder = target.decoder
    if config.mask_token_id >= target.vocab_size:
        raise ConfigError(
            f"mask_token_id {config.mask_token_id} lies outside the target's vocabulary of {target.vocab_size}; "
            "take a special token that no text contains"
        )
    ids = config.target_layer_ids or default_layer_ids(decoder.layers, config.layers)
    sliding = config.sliding_window > 0
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": decoder.layers,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(ids)},
        "hidden_size": decoder.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": config.intermediate or decoder.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": decoder.max_positions,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "is_causal": config.causal_block,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * config.layers,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        "max_window_layers": 0 if sliding else config.layers,
        "dtype": "bfloat16",
    }
    return content
