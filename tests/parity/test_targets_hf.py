"""Our targets equal Hugging Face's: logits, features of every layer, in chunks, row by row, and as trees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ddtree.errors import CheckpointError
from ddtree.models.load import load_target
from ddtree.models.rope import Rope
from ddtree.models.spec import TargetSpec
from ddtree.models.target import TargetModel
from ddtree.tree import DraftTree, check_tree, row_bucket
from tests.checkpoints import chain_rows, prefilled, random_tree, tree_rows
from tests.toys import decoder_spec, random_tokens, toy_target

LAYERS = 3
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "sdpa",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

LLAMAS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama wide heads": {"head_dim": 10},
    "llama narrow heads": {"head_dim": 2, "num_key_value_heads": 4},
    "llama one key head": {"num_key_value_heads": 1},
    "llama large base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "llama llama3": {"rope_parameters": LLAMA3},
    "llama yarn": {"rope_parameters": YARN},
    "llama linear": {"rope_parameters": LINEAR},
}
QWENS = {
    "qwen3": {"head_dim": 6},
    "qwen3 tied": {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3 biased": {"head_dim": 8, "attention_bias": True},
    "qwen3 yarn": {"head_dim": 8, "rope_parameters": YARN | {"attention_factor": 1.5}},
}
CASES = [*LLAMAS, *QWENS]
TEXT = random_tokens(40, 3)


def hugging_face(name):
    """A model of transformers in float64 in which no tensor has the value that a fresh one has."""
    if name in LLAMAS:
        model = LlamaForCausalLM(LlamaConfig(**SIZES | LLAMAS[name]))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES | QWENS[name]))
    model = model.double().eval()
    draw = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * noise if "norm" in path else 0.3 * noise)
    return model


@pytest.fixture(autouse=True)
def exact_norms(monkeypatch):
    """transformers takes norms in float32 whatever the model's dtype; float64 models are compared in float64."""
    for norm in (LlamaRMSNorm, Qwen3RMSNorm):

        def forward(self, hidden_states):
            wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(hidden_states.dtype)

        monkeypatch.setattr(norm, "forward", forward)


@pytest.fixture
def pair(request, tmp_path):
    """(their model, ours loaded from what theirs saved), in float64."""
    theirs = hugging_face(request.param)
    theirs.save_pretrained(tmp_path)
    return theirs, load_target(tmp_path, torch.float64)


every_case = pytest.mark.parametrize("pair", CASES, indirect=True)
one_of_each = pytest.mark.parametrize("pair", ["llama", "qwen3 tied"], indirect=True)


def their_logits(model, tokens):
    return model(torch.tensor([tokens])).logits[0]


def one_pass(target, tokens, feature_layers=()):
    rows = chain_rows(torch.tensor([tokens]), [0])
    hidden, features = target(rows, target.new_cache(1, len(tokens)), feature_layers)
    return target.logits(hidden)[0], features[0]


def close(found, wanted, atol=1e-10):
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


@every_case
@torch.inference_mode()
def test_logits_equal(pair):
    theirs, ours = pair
    close(one_pass(ours, TEXT)[0], their_logits(theirs, TEXT))


@every_case
@torch.inference_mode()
def test_features_are_the_outputs_of_the_layers(pair):
    """Feature k is hidden_states[k + 1]; of the last layer, the residual stream before the final norm."""
    theirs, ours = pair
    outputs = {}
    hooks = [
        layer.register_forward_hook(
            lambda _module, _arguments, output, index=index: outputs.update(
                {index: output[0] if isinstance(output, tuple) else output}
            )
        )
        for index, layer in enumerate(theirs.model.layers)
    ]
    hidden_states = theirs(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(hidden_states) == LAYERS + 1
    for layer in range(LAYERS):
        _, feature = one_pass(ours, TEXT, (layer,))
        close(feature, outputs[layer].view(len(TEXT), -1))
        if layer < LAYERS - 1:
            close(feature, hidden_states[layer + 1][0])
        else:
            assert not torch.allclose(feature, hidden_states[layer + 1][0], atol=1e-3)
            close(ours.norm(feature), hidden_states[layer + 1][0])


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_logits_equal_in_float32(name, tmp_path, monkeypatch):
    theirs = hugging_face(name).float()
    monkeypatch.undo()  # with the norms that users have
    theirs.save_pretrained(tmp_path)
    ours = load_target(tmp_path, torch.float32)
    assert ours.dtype == torch.float32
    logits, features = one_pass(ours, TEXT, (0, 1))
    output = theirs(torch.tensor([TEXT]), output_hidden_states=True)
    close(logits, output.logits[0], atol=1e-4)
    close(features, torch.cat(output.hidden_states[1:3], dim=-1)[0], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_are_float32_whatever_the_dtype(dtype, tmp_path):
    """In bfloat16 positions past 256 would collide."""
    hugging_face("llama").save_pretrained(tmp_path)
    positions = torch.tensor([[0, 1, 255, 257, 3001]])
    wanted = load_target(tmp_path, torch.float32).rope(positions, torch.float32)
    found = load_target(tmp_path, dtype).rope(positions, dtype)
    for ours, exact in zip(found, wanted, strict=True):
        assert torch.equal(ours, exact.to(dtype))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (1,), (1, 1), ()])
@torch.inference_mode()
def test_one_feature_for_each_layer_asked_in_that_order(order):
    target = toy_target()
    single = [one_pass(target, TEXT, (layer,))[1] for layer in range(LAYERS)]
    logits, features = one_pass(target, TEXT, order)
    assert features.shape == (len(TEXT), 24 * len(order))
    if order:
        assert torch.equal(features, torch.cat([single[layer] for layer in order], dim=-1))
    assert torch.equal(logits, one_pass(target, TEXT)[0])


@pytest.mark.parametrize("layers", [(3,), (0, 7)])
def test_a_layer_that_does_not_exist_is_refused(layers):
    with pytest.raises(CheckpointError, match=rf"\[{layers[-1]}\] do not exist"):
        one_pass(toy_target(), TEXT, layers)


@pytest.mark.parametrize("last", range(5))
@torch.inference_mode()
def test_a_layer_that_writes_its_number_is_found_under_that_number(last):
    """Layer k adds one to channel k and does nothing else, so its output tells which layers have run."""
    decoder = dataclasses.replace(decoder_spec(False, layers=5), mlp_bias=True)
    target = TargetModel(TargetSpec("llama", decoder, 61, False, (), None)).double()
    target.rope = Rope(decoder)
    for k, layer in enumerate(target.layers):
        for parameter in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, layer.mlp.down_proj.bias):
            parameter.zero_()
        layer.mlp.down_proj.bias[k] = 1.0
    target.embed_tokens.weight.zero_()
    _, features = one_pass(target, TEXT, (last,))
    wanted = [1.0] * (last + 1) + [0.0] * (24 - last - 1)
    assert features.tolist() == [wanted] * len(TEXT)


@one_of_each
@pytest.mark.parametrize("chunks", [[1] * 40, [7, 13, 1, 19], [39, 1], [1, 39]])
@torch.inference_mode()
def test_chunks_equal_one_pass(pair, chunks):
    """A prompt in pieces, down to one row at a time, as in plain decoding."""
    theirs, ours = pair
    cache, start, found, captured = ours.new_cache(1, 40), 0, [], []
    for count in chunks:
        rows = chain_rows(torch.tensor([TEXT[start : start + count]]), [start])
        hidden, features = ours(rows, cache, (0, 2))
        found.append(ours.logits(hidden)[0])
        captured.append(features[0])
        start += count
    logits, features = one_pass(ours, TEXT, (0, 2))
    close(torch.cat(found), logits)
    close(torch.cat(captured), features)
    close(torch.cat(found), their_logits(theirs, TEXT))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 32, 64, 65])
@torch.inference_mode()
def test_features_are_captured_at_every_width(width):
    """Stale features in some widths once cost a drafter nearly all of its acceptance."""
    target, layers = toy_target("qwen3"), (2, 0)
    text = random_tokens(10 + width, 4)
    cache, _ = prefilled(target, [text[:10]], capacity=80)
    hidden, features = target(chain_rows(torch.tensor([text[10:]]), [10]), cache, layers)
    assert features.shape == (1, width, 48)
    logits, wanted = one_pass(target, text, layers)
    close(features[0], wanted[10:])
    close(target.logits(hidden)[0], logits[10:])

    # The same rows in their bucket, padding behind.
    bucket = row_bucket(width)
    tokens = torch.tensor([text[10:] + [0] * (bucket - width)])
    cache, _ = prefilled(target, [text[:10]], capacity=10 + bucket)
    real = (torch.arange(bucket) < width)[None]
    _, features = target(chain_rows(tokens, [10], real), cache, layers)
    close(features[0, :width], wanted[10:])


def path_of(tree, r, node):
    """Tokens from the root to a node."""
    tokens = [int(tree.tokens_RN[r, node])]
    while node:
        node = int(tree.parents_RN[r, node])
        tokens.insert(0, int(tree.tokens_RN[r, node]))
    return tokens


PROMPTS = [random_tokens(11, 5), random_tokens(6, 6)]


@pytest.mark.parametrize("pair", ["llama", "llama biased", "llama llama3", "qwen3 tied"], indirect=True)
@torch.inference_mode()
def test_every_node_of_a_tree_equals_a_plain_forward_of_its_path(pair):
    theirs, ours = pair
    tree = random_tree([20, 13], 20, seed=40)
    assert max(int((tree.parents_RN[r] == node).sum()) for r in range(2) for node in range(20)) > 2
    cache, lengths = prefilled(ours, PROMPTS)
    hidden, features = ours(tree_rows(tree, lengths), cache, (0, 1))
    logits = ours.logits(hidden)
    for r, prompt in enumerate(PROMPTS):
        for node in range(int(tree.sizes_R[r])):
            text = prompt + path_of(tree, r, node)
            output = theirs(torch.tensor([text]), output_hidden_states=True)
            close(logits[r, node], output.logits[0, -1])
            close(features[r, node], torch.cat(output.hidden_states[1:3], dim=-1)[0, -1])
            if node in (0, 7):
                close(logits[r, node], one_pass(ours, text)[0][-1])


@one_of_each
@torch.inference_mode()
def test_the_root_gives_the_plain_next_token_logits(pair):
    """Row 0 of a pass is the anchor, so its logits are those of plain decoding."""
    _, ours = pair
    tree = random_tree([9, 9], 9, seed=41)
    cache, lengths = prefilled(ours, PROMPTS)
    hidden, _ = ours(tree_rows(tree, lengths), cache)
    cache, lengths = prefilled(ours, PROMPTS)
    alone, _ = ours(chain_rows(tree.tokens_RN[:, :1], lengths), cache)
    close(ours.logits(hidden)[:, 0], ours.logits(alone)[:, 0])


# 0 is the root; 1, 2 and 3 its children; 4 and 5 children of 2; 6 a child of 4.
PARENTS = [0, 0, 0, 0, 2, 2, 4]
DEPTHS = [0, 1, 1, 1, 2, 2, 3]
DESCENDANTS = {1: {1}, 2: {2, 4, 5, 6}, 4: {4, 6}, 5: {5}, 6: {6}}


@pytest.mark.parametrize("node", DESCENDANTS)
@pytest.mark.parametrize("what", ["position", "token"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_a_change_of_one_node_reaches_its_descendants_alone(family, what, node):
    target = toy_target(family)
    tree = DraftTree(
        torch.tensor([[5, 1, 2, 3, 4, 7, 8]]),
        torch.tensor([PARENTS]),
        torch.tensor([DEPTHS]),
        torch.zeros(1, 7),
        torch.tensor([7]),
        3,
    )
    check_tree(tree)

    def logits(rows):
        cache, _ = prefilled(target, PROMPTS[:1])
        return target.logits(target(rows, cache)[0])[0]

    rows = tree_rows(tree, [11])
    changed = {"position": rows.positions_RN.clone(), "token": rows.tokens_RN.clone()}
    changed[what][0, node] += 30
    before = logits(rows)
    after = logits(dataclasses.replace(rows, positions_RN=changed["position"], tokens_RN=changed["token"]))
    moved = {n for n in range(7) if not torch.allclose(before[n], after[n], rtol=0, atol=1e-9)}
    assert moved == DESCENDANTS[node]
    still = [n for n in range(7) if n not in moved]
    assert torch.equal(before[still], after[still])
