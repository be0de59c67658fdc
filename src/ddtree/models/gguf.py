"""Convert a GGUF file of the llama architecture to a Hugging Face folder in bfloat16.

Invariant: each tensor of the file is used exactly once and each tensor of the architecture is written; metadata
of the architecture that is not understood is refused. The result is never silently another model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ddtree.errors import CheckpointError, UnsupportedError

__all__ = ["convert"]

Progress = Callable[[int, int], None]  # bytes written, bytes in all

_BLOCK_ROWS = 4096  # rows dequantised at a time: bounds memory, whatever the vocabulary
_BF16_BYTES = 2
_NORMAL, _CONTROL = 1, 3  # kinds of vocabulary entries
_UNDERSTOOD = {
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


def convert(source: Path, folder: Path, *, progress: Progress | None = None) -> None:
    """Write config, weights and tokenizer of the GGUF file `source` into `folder`, which exists.

    Raises UnsupportedError for a model that is understood but not handled, CheckpointError for a damaged file.
    """
    try:
        reader = gguf.GGUFReader(source)
        metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()})
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{source} cannot be read as a GGUF file: {error}: fetch it again") from error
    model = _read_model(metadata, tied="output.weight" not in tensors)
    pieces = _plan(model, tensors)
    tokenizer = _build_tokenizer(metadata)
    _write_json(folder / "config.json", _hf_config(model))
    _write_json(folder / "generation_config.json", _special_ids(model))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, model, tokenizer))
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_safetensors(folder / "model.safetensors", pieces, progress)


class _Metadata(dict[str, Any]):
    """Metadata of the file; a missing key is an error that names it."""

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"the GGUF file has no metadata {key!r}, which a llama model needs")


@dataclass(frozen=True)
class _Model:
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


@dataclass(frozen=True)
class _Piece:
    """One tensor to write: its new name, the GGUF tensor, its shape, and the order that its rows are taken in."""

    name: str
    tensor: gguf.ReaderTensor
    shape: tuple[int, ...]
    rows: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape)) * _BF16_BYTES


def _read_model(metadata: _Metadata, *, tied: bool) -> _Model:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise UnsupportedError(f"GGUF architecture {architecture!r}: only 'llama' is converted")
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    unknown = [key for key in metadata if key.startswith("llama.") and key not in _UNDERSTOOD]
    same = {"llama.attention.value_length": head_dim, "llama.rope.dimension_count": head_dim}
    same |= {"llama.vocab_size": len(metadata["tokenizer.ggml.tokens"]), "tokenizer.ggml.add_bos_token": False}
    unknown += [key for key, value in same.items() if metadata.get(key, value) != value]
    for key in unknown:
        raise UnsupportedError(
            f"GGUF metadata {key} = {metadata[key]!r}: a llama model with that is not converted"
        )
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return _Model(
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


def _plan(model: _Model, tensors: Mapping[str, gguf.ReaderTensor]) -> list[_Piece]:
    """Match the file's tensors with those of the architecture, by name and shape; all of both or an error."""
    expected = list(_expected(model))
    missing = [name for name, *_ in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"the GGUF file lacks {_some(missing)}: fetch it again")
    unknown = sorted(set(tensors) - {name for name, *_ in expected})
    if unknown:
        raise UnsupportedError(f"the GGUF file holds {_some(unknown)}, which a plain llama model has not")
    pieces = []
    for name, hf_name, shape, rotary_heads in expected:
        found = tuple(int(n) for n in reversed(tensors[name].shape))
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {found}, but the metadata asks for {shape}")
        n_rows = shape[0] if len(shape) == 2 else 1
        rows = _half_split_order(n_rows, rotary_heads) if rotary_heads else np.arange(n_rows)
        pieces.append(_Piece(hf_name, tensors[name], shape, rows))
    return pieces


def _expected(model: _Model) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(GGUF name, Hugging Face name, shape, rotary heads or 0) of each tensor, in the order of writing."""
    m, q, kv = model, model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "token_embd.weight", "model.embed_tokens.weight", (m.vocabulary, m.hidden), 0
    for i in range(m.layers):
        old, new = f"blk.{i}", f"model.layers.{i}"
        yield f"{old}.attn_norm.weight", f"{new}.input_layernorm.weight", (m.hidden,), 0
        yield f"{old}.attn_q.weight", f"{new}.self_attn.q_proj.weight", (q, m.hidden), m.heads
        yield f"{old}.attn_k.weight", f"{new}.self_attn.k_proj.weight", (kv, m.hidden), m.kv_heads
        yield f"{old}.attn_v.weight", f"{new}.self_attn.v_proj.weight", (kv, m.hidden), 0
        yield f"{old}.attn_output.weight", f"{new}.self_attn.o_proj.weight", (m.hidden, q), 0
        yield f"{old}.ffn_norm.weight", f"{new}.post_attention_layernorm.weight", (m.hidden,), 0
        yield f"{old}.ffn_gate.weight", f"{new}.mlp.gate_proj.weight", (m.intermediate, m.hidden), 0
        yield f"{old}.ffn_up.weight", f"{new}.mlp.up_proj.weight", (m.intermediate, m.hidden), 0
        yield f"{old}.ffn_down.weight", f"{new}.mlp.down_proj.weight", (m.hidden, m.intermediate), 0
    yield "output_norm.weight", "model.norm.weight", (m.hidden,), 0
    if not m.tied:
        yield "output.weight", "lm_head.weight", (m.vocabulary, m.hidden), 0


def _half_split_order(n_rows: int, heads: int) -> np.ndarray:
    """Rows of a query or key projection in Hugging Face's order.

    llama.cpp rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates row i of a head with row i + half. The
    GGUF therefore interleaves the halves of each head, and this takes them apart again.
    """
    return np.arange(n_rows).reshape(heads, n_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _write_safetensors(path: Path, pieces: list[_Piece], progress: Progress | None) -> None:
    """Write the pieces one after the other; never more than a block of rows is in memory.

    Layout (safetensors format): length of the header in 8 bytes, the header as JSON, then the tensors' bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for piece in pieces:
        offsets = [total, total + piece.n_bytes]
        header[piece.name] = {"dtype": "BF16", "shape": piece.shape, "data_offsets": offsets}
        total += piece.n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            for block in _blocks(piece):
                done += file.write(block)
                if progress is not None:
                    progress(done, total)


def _blocks(piece: _Piece) -> Iterator[bytes]:
    # Quantisation blocks lie within a row, so rows can be reordered before they are dequantised.
    packed = piece.tensor.data if len(piece.shape) == 2 else piece.tensor.data[None]
    for start in range(0, len(piece.rows), _BLOCK_ROWS):
        values = gguf.dequantize(packed[piece.rows[start : start + _BLOCK_ROWS]], piece.tensor.tensor_type)
        block = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16)
        yield block.view(torch.int16).numpy().tobytes()


def _hf_config(model: _Model) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": model.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied,
        **_special_ids(model),
    }


def _special_ids(model: _Model) -> dict[str, Any]:
    return {"bos_token_id": model.bos, "eos_token_id": model.eos, "pad_token_id": model.pad}


def _build_tokenizer(metadata: _Metadata) -> Tokenizer:
    """Byte-level BPE with digits one by one, as SmolLM's own tokenizer has it."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UnsupportedError(f"GGUF tokenizer {kind[0]}/{kind[1]}: only gpt2/smollm is converted")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if not set(kinds) <= {_NORMAL, _CONTROL}:
        raise UnsupportedError(f"GGUF token types {sorted(set(kinds))}: only normal and control are converted")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError("the GGUF vocabulary repeats tokens or lacks their types: fetch the file again")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys() for pair in merges):
        raise CheckpointError("the GGUF merges name tokens that the vocabulary lacks: fetch the file again")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(metadata: _Metadata, model: _Model, tokenizer: Tokenizer) -> dict[str, Any]:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", model.bos)
    return {
        # Not GPT2Tokenizer: that class builds its own pre-tokeniser, which joins digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(model.bos),
        "eos_token": tokenizer.id_to_token(model.eos),
        "pad_token": tokenizer.id_to_token(model.pad),
        "unk_token": tokenizer.id_to_token(unknown),
        "model_max_length": model.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")
