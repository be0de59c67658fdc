"""The tokenizer that a GGUF file describes, as `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ddtree.errors import CheckpointError, UnsupportedError
from ddtree.models.gguf.metadata import LlamaSpec, Metadata

__all__ = ["build_tokenizer", "tokenizer_config"]

NORMAL, CONTROL = 1, 3  # kinds of vocabulary entries


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE with digits one by one, as SmolLM's own tokenizer has it."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise UnsupportedError(f"GGUF tokenizer {kind[0]}/{kind[1]}: only gpt2/smollm is converted")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if not set(kinds) <= {NORMAL, CONTROL}:
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
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def tokenizer_config(metadata: Metadata, spec: LlamaSpec, tokenizer: Tokenizer) -> dict[str, Any]:
    """Special tokens and chat template as transformers reads them."""
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", spec.bos)
    return {
        # Not GPT2Tokenizer: that class builds its own pre-tokeniser, which joins digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(spec.bos),
        "eos_token": tokenizer.id_to_token(spec.eos),
        "pad_token": tokenizer.id_to_token(spec.pad),
        "unk_token": tokenizer.id_to_token(unknown),
        "model_max_length": spec.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
