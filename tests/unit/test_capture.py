"""Captured features are the outputs of the layers named, wherever they are kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ddtree.errors import ConfigError, StorageError
from ddtree.training.capture import Features, causal_attend, feature_widths
from ddtree.training.examples import load_examples, pack_for_step, send, write_shard
from ddtree.training.feature_store import feature_key, on_device, on_disk
from ddtree.training.start import new_drafter
from ddtree.training.trainer import Trainer
from tests.toys import VOCABULARY, random_tokens, toy_target
from tests.unit.test_trainer import CONFIG, write_examples


def some_examples(folder):
    folder.mkdir()
    rows = [(random_tokens(8 + i % 9, i), 4) for i in range(20)]
    write_shard(folder / "answers-a.safetensors", rows, {"format": "pt"})
    return load_examples(folder, VOCABULARY, 64)


@pytest.mark.parametrize("where", ["device", "disk"])
def test_features_of_a_pack_are_those_of_each_example_alone(tmp_path, where):
    target, examples = toy_target(), some_examples(tmp_path / "data")
    count = examples.token_count, len(examples)
    width = sum(feature_widths(target, (0, 2), False))
    stores = {
        "device": on_device(*count, width, target.dtype, target.device, 1.0),
        "disk": on_disk(tmp_path / "cache", "key", *count, width, target.dtype),
    }
    cached, fresh = Features(target, examples, (0, 2), stores[where]), Features(target, examples, (0, 2))
    # Both stores hold what was captured: the second time nothing is.
    for step in (0, 1, 2, 3, 0):
        pack = pack_for_step(examples, step, context_tokens=64, anchors=8, seed=0, rank=0)
        found = cached.of_pack(pack).features_TF
        real_T = pack.example_T >= 0
        torch.testing.assert_close(found[real_T], fresh.of_pack(pack).features_TF[real_T], rtol=0, atol=1e-10)
        for member, index in enumerate(pack.examples):
            start, end = int(examples.starts_E[index]), int(examples.ends_E[index])
            tokens = examples.tokens_T[start:end][None]
            _, alone = target.run(tokens, torch.arange(end - start)[None], causal_attend, (0, 2))
            torch.testing.assert_close(found[pack.example_T == member], alone[0], rtol=0, atol=1e-10)


def test_a_file_of_features_serves_the_next_run(tmp_path, monkeypatch):
    """The same run again captures nothing and has the same losses; other layers get a file of their own."""
    config = dataclasses.replace(CONFIG, steps=4, feature_cache_dir=str(tmp_path / "cache"), soft_share=0.5)

    def losses(**changes):
        changed = dataclasses.replace(config, **changes)
        target = toy_target("qwen3")
        trainer = Trainer(changed, target, new_drafter(changed, target), write_examples(tmp_path / "data"))
        return [report.loss for report in trainer.steps()]

    first = losses()
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 1
    calls = []
    capture = Features._capture
    monkeypatch.setattr(Features, "_capture", lambda self, *a: calls.append(self) or capture(self, *a))
    assert losses() == first == losses(feature_cache_dir="")
    assert len({id(call) for call in calls}) == 1, "only the run without a folder captures"
    losses(target_layer_ids=(0, 1))
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 2


def test_a_disk_without_room_is_named_before_anything_is_captured(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("ddtree.training.feature_store.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(StorageError, match=r"the features of 500 tokens take .* and .* are free; free some space"):
        on_disk(tmp_path, "key", 500, 3, 8, torch.float64)
    assert not list(tmp_path.glob("*.bin"))


def test_room_is_asked_for_again_where_a_file_is_only_as_long_as_it_will_be(tmp_path, monkeypatch):
    """A run that was stopped early leaves a file of full length with next to nothing in it."""
    on_disk(tmp_path, "key", 10**6, 3, 8, torch.float64)
    usage = type("Usage", (), {"free": 10**7})
    monkeypatch.setattr("ddtree.training.feature_store.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(StorageError, match="are free; free some space"):
        on_disk(tmp_path, "key", 10**6, 3, 8, torch.float64)


@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_features_that_are_gone_are_captured_again(tmp_path, harm):
    """What is left of the folder must not vouch for them: a run would train on zeros."""
    store = on_disk(tmp_path, "key", 10, 3, 8, torch.float64)
    store.captured_E.fill_(1)
    store.rows_TF.fill_(5.0)
    again = on_disk(tmp_path, "key", 10, 3, 8, torch.float64)
    assert (again.captured_E.tolist(), float(again.rows_TF.min())) == ([1, 1, 1], 5.0)
    path = tmp_path / "features-key.bin"
    if harm == "removed":
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(100)
    assert on_disk(tmp_path, "key", 10, 3, 8, torch.float64).captured_E.tolist() == [0, 0, 0]


def test_features_too_many_for_the_device_are_refused_with_the_other_ways():
    with pytest.raises(ConfigError, match=r"take 0\.1 GiB, but feature_cache_gib is 0\.01; .*feature_cache_dir"):
        on_device(1000, 3, 16384, torch.float64, torch.device("cpu"), 0.01)


def test_the_key_follows_target_layers_and_tokens(tmp_path):
    """One weight anywhere in the target is enough: a tuned target has other features."""
    examples, target, tuned = some_examples(tmp_path / "data"), toy_target(), toy_target()
    with torch.no_grad():
        tuned.layers[1].mlp.down_proj.weight[0, 0] += 1
    keys = {
        feature_key(target, (0, 2), False, examples),
        feature_key(tuned, (0, 2), False, examples),
        feature_key(toy_target(dtype=torch.float32), (0, 2), False, examples),
        feature_key(target, (0, 1), False, examples),
        feature_key(target, (0, 2), True, examples),
        feature_key(target, (0, 2), False, examples.take(torch.arange(5))),
        feature_key(target, (0, 2), False, dataclasses.replace(examples, ends_E=examples.ends_E - 1)),
        feature_key(target, (0, 2), False, dataclasses.replace(examples, tokens_T=examples.tokens_T + 1)),
    }
    assert len(keys) == 8
    assert feature_key(toy_target(), (0, 2), False, examples) in keys


class Lodged:
    """A tensor on a GPU, as far as `send` sees: torch refuses to pin one."""

    device = torch.device("cuda")

    def pin_memory(self):
        raise RuntimeError("only dense CPU tensors can be pinned")

    def to(self, device, non_blocking):
        return self


def test_what_lies_on_the_device_is_not_pinned():
    lodged = Lodged()
    assert send(lodged, torch.device("cuda")) is lodged
    here = torch.arange(3)
    assert torch.equal(send(here, torch.device("cpu")), here)
