"""Tiny random checkpoints in the published dialects, rows for the models in them, and a plain drafter.

The plain drafter is what the real one is held against: it reads the tensors of a file by their
published names and shares no code with ddtree: one row, one head, one place at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.models.block import draft_hidden
from ddtree.models.cache import SlotCache
from ddtree.models.load import LoadedDrafter
from ddtree.models.target import TargetModel
from ddtree.models.weights import named_apart
from ddtree.ops import Rows
from ddtree.tree import DraftTree, ancestor_words, chain_words, check_tree, positions
from tests.toys import MASK, VOCABULARY

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 24, 4, 2, 8, 20


def drafter_config(nested: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """z-lab's `config.json` of a drafter for `toy_target()`, with changes at the top and in `dflash_config`.

    A key changed to None is left out. Head dimension times heads is not the hidden size, as in Qwen3.
    """
    content: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2], **(nested or {})},
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "dtype": "bfloat16",
    }
    content |= changes
    content["dflash_config"] = {k: v for k, v in content["dflash_config"].items() if v is not None}
    return {k: v for k, v in content.items() if v is not None}


def noise(*shape: int, seed: int) -> Tensor:
    """Normal float64 numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drafter_tensors(layers: int = 2, features: int = 2, seed: int = 5) -> dict[str, Tensor]:
    """Random float64 tensors under the published names, for `drafter_config`."""
    query, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, features * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (query, HIDDEN),
                "self_attn.k_proj": (keys, HIDDEN),
                "self_attn.v_proj": (keys, HIDDEN),
                "self_attn.o_proj": (HIDDEN, query),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
                "mlp.up_proj": (INTERMEDIATE, HIDDEN),
                "mlp.down_proj": (HIDDEN, INTERMEDIATE),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    tensors = {}
    for index, (name, shape) in enumerate(shapes.items()):
        random = noise(*shape, seed=1000 * seed + index)
        tensors[name] = 0.3 * random if len(shape) > 1 else 1 + 0.1 * random
    return tensors


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint folder of one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def write_drafter(folder: Path, nested: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """A drafter's folder: `drafter_config` with changes, and `drafter_tensors`."""
    return write_folder(folder, drafter_config(nested, **changes), drafter_tensors())


def target_config(target: TargetModel, **changes: Any) -> dict[str, Any]:
    """The `config.json` that Hugging Face would write for a toy target."""
    spec, decoder = target.spec, target.spec.decoder
    content: dict[str, Any] = {
        "model_type": spec.family,
        "hidden_size": decoder.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope.theta,
        "max_position_embeddings": decoder.max_positions,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_head,
        "eos_token_id": list(spec.eos_ids) or None,
    }
    return {k: v for k, v in (content | changes).items() if v is not None}


def target_tensors(target: TargetModel) -> dict[str, Tensor]:
    """A toy target's tensors under Hugging Face's names; a tied head is left out."""
    tensors = {}
    for name, tensor in named_apart(target.state_dict(), target.spec.decoder):
        if name != "lm_head.weight":
            tensors[f"model.{name}"] = tensor
        elif not target.spec.tied_head:
            tensors[name] = tensor
    return tensors


def drafted(loaded: LoadedDrafter, features_LF: Tensor, anchor: int) -> Tensor:
    """Logits of the masked rows of one block. [b - 1, columns]."""
    hidden_RbH = draft_hidden(loaded.model, loaded.vocabulary, features_LF[None], torch.tensor([anchor]))
    return loaded.vocabulary.logits(hidden_RbH[0, 1:])


def plain_draft(
    tensors: Mapping[str, Tensor],
    features_LF: Tensor,
    anchor: int,
    embedding: Tensor,
    head: Tensor,
    *,
    block_size: int = 6,
    theta: float = 10000.0,
    rotary: int = HEAD_DIM,
    windows: Sequence[int | None] = (None, None),
    causal: Sequence[bool] = (False, False),
) -> Tensor:
    """Logits of the masked rows, one row, head and place at a time. [b - 1, rows of the head]."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + 1e-6).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for i in range(rotary // 2):
            angle = position * torch.tensor(theta ** (-2 * i / rotary))  # angles are float32 everywhere
            a, b = x[i], x[i + rotary // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + rotary // 2] = b * angle.cos() + a * angle.sin()
        return out

    def linear(x: Tensor, name: str) -> Tensor:
        out = tensors[f"{name}.weight"] @ x
        return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out

    def heads(x: Tensor, name: str) -> list[Tensor]:
        return list(linear(x, name).split(HEAD_DIM))

    length = features_LF.shape[0]
    context = [norm(tensors["fc.weight"] @ f, tensors["hidden_norm.weight"]) for f in features_LF]
    rows = [embedding[anchor]] + [embedding[MASK]] * (block_size - 1)
    for layer, (window, is_causal) in enumerate(zip(windows, causal, strict=True)):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        before, between = f"layers.{layer}.input_layernorm", f"layers.{layer}.post_attention_layernorm"
        inputs = context + [norm(x, tensors[f"{before}.weight"]) for x in rows]
        keys = [
            [turn(norm(k, tensors[f"{attention}.k_norm.weight"]), place) for k in heads(x, f"{attention}.k_proj")]
            for place, x in enumerate(inputs)
        ]
        values = [heads(x, f"{attention}.v_proj") for x in inputs]
        for row in range(block_size):
            place = length + row
            seen = [
                other
                for other in range(length + block_size)
                if (window is None or abs(place - other) < window) and not (is_causal and other > place)
            ]
            mixed = []
            for h, query in enumerate(heads(inputs[place], f"{attention}.q_proj")):
                group = h // (HEADS // KV_HEADS)
                query = turn(norm(query, tensors[f"{attention}.q_norm.weight"]), place)
                scores = torch.stack([query @ keys[other][group] for other in seen]) / HEAD_DIM**0.5
                mixed.append(torch.stack([values[other][group] for other in seen]).T @ scores.softmax(0))
            rows[row] = rows[row] + linear(torch.cat(mixed), f"{attention}.o_proj")
        for row in range(block_size):
            x = norm(rows[row], tensors[f"{between}.weight"])
            gate, up = linear(x, f"{mlp}.gate_proj"), linear(x, f"{mlp}.up_proj")
            rows[row] = rows[row] + linear(gate * gate.sigmoid() * up, f"{mlp}.down_proj")
    return torch.stack([head @ norm(x, tensors["norm.weight"]) for x in rows[1:]])


def random_tree(sizes: Sequence[int], rows: int, seed: int, horizon: int = 6) -> DraftTree:
    """One random tree of each size, padded to `rows` nodes; any node above the horizon may have children."""
    draw = torch.Generator().manual_seed(seed)
    tokens, parents, depths = (torch.zeros(len(sizes), rows, dtype=torch.int64) for _ in range(3))
    for r, size in enumerate(sizes):
        children: set[tuple[int, int]] = set()
        tokens[r, 0] = int(torch.randint(MASK, (1,), generator=draw))
        for node in range(1, size):
            while True:
                parent = int(torch.randint(node, (1,), generator=draw))
                token = int(torch.randint(MASK, (1,), generator=draw))
                if depths[r, parent] < horizon and (parent, token) not in children:
                    break
            children.add((parent, token))
            tokens[r, node], parents[r, node], depths[r, node] = token, parent, depths[r, parent] + 1
    tree = DraftTree(tokens, parents, depths, torch.zeros(len(sizes), rows), torch.tensor(sizes), horizon)
    check_tree(tree)
    return tree


def tree_rows(tree: DraftTree, lengths: Sequence[int], span: int = 0) -> Rows:
    """Rows that verify trees whose anchors stand at positions `lengths`."""
    lengths_R = torch.tensor(lengths)
    return Rows(
        tokens_RN=tree.tokens_RN,
        positions_RN=positions(tree, lengths_R),
        lengths_R=lengths_R,
        words_RNW=ancestor_words(tree),
        span=span or max(lengths) + tree.rows,
        real_RN=tree.real_RN,
    )


def chain_rows(tokens_RN: Tensor, lengths: Sequence[int], real_RN: Tensor | None = None) -> Rows:
    """Rows of chunks of text that begin at positions `lengths`."""
    sequences, count = tokens_RN.shape
    lengths_R = torch.tensor(lengths)
    positions_RN = lengths_R[:, None] + torch.arange(count)
    words_RNW = chain_words(sequences, count, tokens_RN.device)
    return Rows(tokens_RN, positions_RN, lengths_R, words_RNW, max(lengths) + count, real_RN)


@torch.inference_mode()
def prefilled(
    target: TargetModel, prompts: Sequence[list[int]], capacity: int = 40, table_RS: Tensor | None = None
) -> tuple[SlotCache, list[int]]:
    """A cache with each prompt in it, and the prompts' lengths. Shorter prompts are padded on the right."""
    longest = max(len(prompt) for prompt in prompts)
    tokens_RN = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    real_RN = torch.arange(longest) < torch.tensor([len(prompt) for prompt in prompts])[:, None]
    cache = target.new_cache(len(prompts), capacity, table_RS)
    target(chain_rows(tokens_RN, [0] * len(prompts), real_RN), cache)
    return cache, [len(prompt) for prompt in prompts]
