"""What a GGUF file says of its model. Metadata of the architecture that is not understood is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import CheckpointError, UnsupportedError

__all__ = ["LlamaSpec", "Metadata", "read_spec"]

UNDERSTOOD = {
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.attention.value_length",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.vocab_size",
}


class Metadata(dict[str, Any]):
    """Metadata of the file; a missing key is an error that names it."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"the GGUF file has no metadata {key!r}, which a llama model needs")


@dataclass(frozen=True)
class LlamaSpec:
    """Sizes, switches and special token ids of the model in the file."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_eps: float
    tied: bool
    bos: int
    eos: int
    pad: int


def read_spec(metadata: Metadata, *, tied: bool) -> LlamaSpec:
    """What the metadata says of the model. tied: the file has no head of its own.

    CheckpointError names a key that is missing, UnsupportedError one that a plain llama model has not.
    """
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise UnsupportedError(f"GGUF architecture {architecture!r}: only 'llama' is converted")
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    unknown = [key for key in metadata if key.startswith("llama.") and key not in UNDERSTOOD]
    same = {"llama.attention.value_length": head_dim, "llama.rope.dimension_count": head_dim}
    same |= {"llama.vocab_size": len(metadata["tokenizer.ggml.tokens"]), "tokenizer.ggml.add_bos_token": False}
    unknown += [key for key, value in same.items() if metadata.get(key, value) != value]
    for key in unknown:
        raise UnsupportedError(
            f"GGUF metadata {key} = {metadata[key]!r}: a llama model with that is not converted"
        )
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return LlamaSpec(
        vocabulary=len(metadata["tokenizer.ggml.tokens"]),
        hidden=hidden,
        intermediate=metadata["llama.feed_forward_length"],
        layers=metadata["llama.block_count"],
        heads=heads,
        kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        context=metadata["llama.context_length"],
        rope_theta=_shortest(metadata.get("llama.rope.freq_base", 10_000.0)),
        norm_eps=_shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        tied=tied,
        bos=metadata["tokenizer.ggml.bos_token_id"],
        eos=eos,
        pad=metadata.get("tokenizer.ggml.padding_token_id", eos),
    )


def _shortest(value: float) -> float:
    """The number that was meant: GGUF keeps float32, so 1e-05 arrives as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
