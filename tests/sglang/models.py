"""Tiny random targets and a drafter for them in the published formats, and what Hugging Face says they say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from ddtree.models.edges import EdgeNet, save_edges

VOCABULARY = 500  # SGLang pads its heads to 512, so the last shard of two has columns that are no tokens
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16
MASK, EOS = 3, 2
LAYERS = 4

Step = Sequence[tuple[int, float]]


def write_target(folder: Path, family: str, spread: float = 5.0) -> Path:
    """A random target with a tokenizer. spread: how far apart its logits lie, so that rounding rarely decides."""
    torch.manual_seed(0)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    model.save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": EOS, "<mask>": MASK} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    ).save_pretrained(folder)
    return folder


def write_drafter(folder: Path, block_size: int = 8, layer_ids: list[int] | None = None) -> Path:
    """A random drafter in z-lab's format."""
    folder.mkdir(parents=True)
    layer_ids = layer_ids or [0, 2]
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "block_size": block_size,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": layer_ids},
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    query, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"fc": (HIDDEN, HIDDEN * len(layer_ids))}
    for layer in range(2):
        at = f"layers.{layer}."
        shapes |= {
            at + f"self_attn.{name}_proj": (rows, HIDDEN)
            for name, rows in zip("qkv", (query, keys, keys), strict=True)
        }
        shapes |= {at + "self_attn.o_proj": (HIDDEN, query), at + "mlp.down_proj": (HIDDEN, 128)}
        shapes |= {at + "mlp.gate_proj": (128, HIDDEN), at + "mlp.up_proj": (128, HIDDEN)}
    tensors = {f"{name}.weight": torch.randn(*shape) * 0.1 for name, shape in shapes.items()}
    norms = {"hidden_norm": HIDDEN, "norm": HIDDEN}
    for layer in range(2):
        norms |= {f"layers.{layer}.self_attn.{name}": HEAD_DIM for name in ("q_norm", "k_norm")}
        norms |= {f"layers.{layer}.{name}": HIDDEN for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_edges(folder: Path, target: Path, texts: Sequence[Sequence[int]], gain: float = 6.0) -> None:
    """An edge correction beside a drafter that knows some texts: `gain` for each pair of neighbours in them, next
    to nothing for their other pairs."""
    pairs = sorted({pair for text in texts for pair in itertools.pairwise(text)})
    parents, children = (sorted({pair[i] for pair in pairs}) for i in (0, 1))
    even_Vh = F.rms_norm(reference(target).get_input_embeddings().weight.detach(), (HIDDEN,))
    net = EdgeNet(HIDDEN, len(parents), len(children))
    torch.manual_seed(2)
    with torch.no_grad():
        net.parent.weight.copy_(gain * torch.linalg.pinv(even_Vh[parents].T))
        net.child.weight.copy_(torch.linalg.pinv(even_Vh[children].T))
        net.state.weight.normal_(std=0.02)
        net.mix.weight.zero_()
        for parent, child in pairs:
            net.mix.weight[children.index(child), parents.index(parent)] = 1.0
    save_edges(folder, net)


@lru_cache(maxsize=2)
def reference(folder: Path) -> Any:
    """The target in Hugging Face, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What Hugging Face says greedily, end tokens ignored."""
    ids = torch.tensor([list(prompt)])
    said = reference(folder).generate(
        ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return said[0, len(prompt) :].tolist()


@torch.no_grad()
def next_logits(folder: Path, tokens: Sequence[int]) -> Tensor:
    """The target's logits after some tokens. float32 [V]."""
    return reference(folder)(torch.tensor([list(tokens)])).logits[0, -1]


def foresight(truth: Sequence[int], decoy: int = 3) -> list[Step]:
    """Proposals of a drafter that knows the future but ranks the true token second in every `decoy`-th position,
    so that only a branch beside the chain holds it."""
    steps: list[Step] = []
    for place, token in enumerate(truth):
        step: list[tuple[int, float]] = [(token, 5.0)]
        if place % decoy == 0:
            step.append(((token + 11) % VOCABULARY, 5.5))
        steps.append(step)
    return steps


def write_oracle(rig: Path, proposals: dict[tuple[int, ...], list[Step]]) -> None:
    """What the drafter proposes from now on, by prompt."""
    rig.mkdir(exist_ok=True)
    entries = [{"prompt": list(prompt), "steps": steps} for prompt, steps in proposals.items()]
    (rig / "oracle.json").write_text(json.dumps(entries))
