"""GGUF conversion: the same logits as the model that the file was made of, and the tokenizer that it means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ddtree.errors import CheckpointError, UnsupportedError
from ddtree.models.gguf import convert, tensors

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
MERGES = ["n Ġ", "Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ 1"]  # "nĠ", "12" and "Ġ1" must never be used
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


TOKENS = [*CONTROL, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_model(*, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # large enough that a wrong rotation changes the logits a lot
    )
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return names[name.removesuffix(".weight")] + ".weight"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to query and key rows when it writes a GGUF."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str = "llama",
    pre: str = "smollm",
    drop: str = "",
    merges: list[str] = MERGES,
) -> None:
    """Write the model as llama.cpp would, and round its weights to what the file holds in bfloat16."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if gguf_name(name) == drop or (name.startswith("lm_head") and config.tie_word_embeddings):
            continue
        values = weight.numpy().copy()
        kind = quantisation if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        weight.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).bfloat16())
        rotary = next((n for part, n in heads.items() if part in name), None)
        stored = values if rotary is None else interleave(values, rotary)
        writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.arange(1, 200, 5)[None]
    with torch.inference_mode():
        result: torch.Tensor = model(ids).logits
    return result


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_model())
    folder = tmp_path / "hf"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
def test_logits_are_those_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantisation: str, tied: bool
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_ROWS", 7)  # blocks end inside heads and inside the vocabulary
    original = tiny_model(tied=tied)
    write_gguf(tmp_path / "t.gguf", original, quantisation=gguf.GGMLQuantizationType[quantisation])
    convert(tmp_path / "t.gguf", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), logits(original), rtol=0, atol=1e-5)


def test_logits_notice_rows_left_as_llama_cpp_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tiny_model()
    write_gguf(tmp_path / "t.gguf", original)
    monkeypatch.setattr(tensors, "_half_split_order", lambda n_rows, heads: np.arange(n_rows))
    convert(tmp_path / "t.gguf", tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert (logits(loaded) - logits(original)).abs().max() > 0.1


def test_config_is_what_transformers_would_write(converted: Path) -> None:
    config = AutoConfig.from_pretrained(converted)
    expected = tiny_model().config
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rope_parameters", "max_position_embeddings"):
        assert getattr(config, key) == getattr(expected, key), key
    assert config.rms_norm_eps == 1e-5
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    config.save_pretrained(converted / "again")
    written = json.loads((converted / "config.json").read_text())
    assert written.items() <= json.loads((converted / "again" / "config.json").read_text()).items()
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x[0] + 12345  # the end\n",
        "2024-01-31, 3.14159 and 1,000,000",
        "  two  spaces and a tail   ",
        "\t\r\n\n mixed \x00 white",
        "héllo wörld, 日本語, العربية, ¼ ² ٣",
        "🙂🚀👩‍👩‍👧‍👦",
        "Don't I'LL we've",
        "",
    ],
)
def test_text_survives_the_tokenizer(converted: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone_and_spaces_lead_words(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("in the 12 12") == ["in", "Ġthe", "Ġ", "1", "2", "Ġ", "1", "2"]
    assert tokenizer.tokenize("the\n the") == ["t", "he", "Ċ", "Ġthe"]


def test_control_tokens_are_whole_and_special(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    ids = [1, TOKENS.index("in"), 3, 2]
    assert tokenizer.encode("<|im_start|>in<file_sep><|im_end|>") == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "in"
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")


def test_chat_template_comes_from_the_file(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "in 12"}], tokenize=False)
    assert text == "<|im_start|>user\nin 12<|im_end|>\n"


def test_progress_reaches_the_end_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", tiny_model())
    seen: list[tuple[int, int]] = []
    convert(tmp_path / "t.gguf", tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == sum(p.numel() for p in tiny_model().parameters()) * 2


def extra_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))


def scaled_rope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)


def partial_rope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_count(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen3"}, "architecture 'qwen3'"),
        ({"pre": "llama-bpe"}, "tokenizer gpt2/llama-bpe"),
        ({"edit": extra_tensor}, "rope_freqs.weight"),
        ({"edit": scaled_rope}, "llama.rope.scaling.type = 'linear'"),
        ({"edit": partial_rope}, "llama.rope.dimension_count = 8"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "t.gguf", tiny_model(), **options)
    with pytest.raises(UnsupportedError, match=message):
        convert(tmp_path / "t.gguf", tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", tiny_model(), drop="blk.1.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"lacks blk\.1\.ffn_up\.weight"):
        convert(tmp_path / "t.gguf", tmp_path)


def test_merges_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "t.gguf", tiny_model(), merges=["o n"])
    with pytest.raises(CheckpointError, match="merges name tokens that the vocabulary lacks"):
        convert(tmp_path / "t.gguf", tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.num_key_value_heads = 1
    write_gguf(tmp_path / "t.gguf", model)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.weight has shape \(32, 96\)"):
        convert(tmp_path / "t.gguf", tmp_path)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_an_error_of_ours(tmp_path: Path, kept: float) -> None:
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, tiny_model())
    content = whole.read_bytes()
    (tmp_path / "t.gguf").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"t\.gguf cannot be read as a GGUF file"):
        convert(tmp_path / "t.gguf", tmp_path)


def test_another_kind_of_file_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "t.gguf").write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(CheckpointError, match="cannot be read as a GGUF file"):
        convert(tmp_path / "t.gguf", tmp_path)
