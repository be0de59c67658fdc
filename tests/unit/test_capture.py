"""Captured features are the outputs of the layers named, wherever they are kept."""

from __future__ import annotations

import torch

from ddtree.training.capture import Features, causal_attend
from ddtree.training.examples import load_examples, pack_for_step, write_shard
from tests.toys import VOCABULARY, random_tokens, toy_target


def some_examples(folder):
    folder.mkdir()
    rows = [(random_tokens(8 + i % 9, i), 4) for i in range(20)]
    write_shard(folder / "answers-a.safetensors", rows, {"format": "pt"})
    return load_examples(folder, VOCABULARY, 64)


@torch.no_grad()
def test_features_of_a_pack_are_those_of_each_example_alone(tmp_path):
    target, examples = toy_target(), some_examples(tmp_path / "data")
    cached, fresh = Features(target, examples, (0, 2), 1.0), Features(target, examples, (0, 2), 0.0)
    for step in range(4):
        pack = pack_for_step(examples, step, context_tokens=64, anchors=8, seed=0, rank=0)
        found = cached.of_pack(pack).features_TF
        real_T = pack.example_T >= 0
        torch.testing.assert_close(found[real_T], fresh.of_pack(pack).features_TF[real_T], rtol=0, atol=1e-10)
        for member, index in enumerate(pack.examples):
            start, end = int(examples.starts_E[index]), int(examples.ends_E[index])
            tokens = examples.tokens_T[start:end][None]
            _, alone = target.run(tokens, torch.arange(end - start)[None], causal_attend, (0, 2))
            torch.testing.assert_close(found[pack.example_T == member], alone[0], rtol=0, atol=1e-10)
