"""Convert a GGUF file of the llama architecture to a Hugging Face folder in bfloat16.

Invariant: each tensor of the file is used exactly once and each tensor of the architecture is written; metadata
of the architecture that is not understood is refused. The result is never silently another model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from ddtree.errors import CheckpointError
from ddtree.models.gguf.metadata import LlamaSpec, Metadata, read_spec
from ddtree.models.gguf.tensors import Progress, match_tensors, write_safetensors
from ddtree.models.gguf.tokenizer import build_tokenizer, tokenizer_config

__all__ = ["convert"]


def convert(source: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Write config, weights and tokenizer of the GGUF file `source` into `folder`, which exists.

    Raises UnsupportedError for a model that is understood but not handled, CheckpointError for a damaged file.
    """
    try:
        reader = gguf.GGUFReader(source)
        metadata = Metadata({name: field.contents() for name, field in reader.fields.items()})
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source} cannot be read as a GGUF file: {error}: fetch it again") from error
    spec = read_spec(metadata, tied="output.weight" not in tensors)
    pieces = match_tensors(spec, tensors)
    tokenizer = build_tokenizer(metadata)
    _write_json(folder / "config.json", _hf_config(spec))
    _write_json(folder / "generation_config.json", _special_ids(spec))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata, spec, tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_safetensors(folder / "model.safetensors", pieces, progress)


def _hf_config(spec: LlamaSpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": spec.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        **_special_ids(spec),
    }


def _special_ids(spec: LlamaSpec) -> dict[str, Any]:
    return {"bos_token_id": spec.bos, "eos_token_id": spec.eos, "pad_token_id": spec.pad}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
