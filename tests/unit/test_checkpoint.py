"""Checkpoints: whole or not at all, resumed exactly or refused, and served as they were trained."""

from __future__ import annotations

import copy
import dataclasses
import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ddtree.data.decode import decode_batch
from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.errors import CheckpointError, ConfigError, StorageError
from ddtree.models import save
from ddtree.models.block import draft_hidden
from ddtree.models.load import load_drafter
from ddtree.models.parity import write_parity
from ddtree.models.save import save_drafter
from ddtree.ops import View
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from ddtree.training import checkpoint
from ddtree.training.acceptance import Acceptance, measure_example
from ddtree.training.checkpoint import (
    TrainState,
    latest,
    model_tensors,
    optimizer_tensors,
    prune,
    read_state,
    restore,
    write_state,
)
from ddtree.training.examples import load_examples, write_shard
from ddtree.training.start import new_drafter
from ddtree.training.trainer import Trainer
from tests.drafters import pieces, plain_forward, records_of
from tests.toys import VOCABULARY, random_tokens, toy_target
from tests.unit.test_trainer import CONFIG, new_trainer

STATE = TrainState(3, {"steps": 9, "target": "toy"}, {"model.a": torch.arange(6.0).view(2, 3)})


def trained(folder, steps, **changes):
    """A trainer after so many steps."""
    trainer = new_trainer(folder, **changes)
    reports = trainer.steps()
    for _ in range(steps):
        next(reports)
    return trainer


def everything(folder):
    """Every file under a folder and what is in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# States


def test_a_state_comes_back_as_it_was(tmp_path):
    strided = torch.arange(12.0).view(3, 4).t()
    state = dataclasses.replace(STATE, tensors=STATE.tensors | {"optimizer.0.0.exp_avg": strided})
    write_state(tmp_path / "state", state)
    found = read_state(tmp_path / "state")
    assert (found.step, found.recipe) == (3, STATE.recipe)
    assert set(found.tensors) == set(state.tensors)
    assert all(torch.equal(found.tensors[name], state.tensors[name]) for name in state.tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


FULL = [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]


def full_disk(error):
    """A save_file that writes half and then finds the disk full."""

    def fail(tensors, path, *rest):
        path.write_bytes(b"half")
        raise error

    return fail


@pytest.mark.parametrize("error", FULL)
def test_a_state_is_written_whole_or_not_at_all(tmp_path, monkeypatch, error):
    write_state(tmp_path / "state", STATE)
    before = everything(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", full_disk(error))
    for name in ("state", "new"):
        with pytest.raises(StorageError, match=r"cannot be written .*No space left.*; free some space"):
            write_state(tmp_path / name, dataclasses.replace(STATE, step=4))
    assert everything(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["state"], "nothing half-written stays, hidden or not"
    monkeypatch.undo()
    write_state(tmp_path / "state", dataclasses.replace(STATE, step=4))
    assert read_state(tmp_path / "state").step == 4


@pytest.mark.parametrize("fails", [checkpoint, save], ids=["state", "drafter"])
def test_a_full_disk_loses_no_checkpoint(tmp_path, monkeypatch, fails):
    """A save that fails, at the drafter or at the state, leaves the checkpoints before it to resume from."""
    run = tmp_path / "run"
    trainer = trained(tmp_path / "data", 2)
    trainer.save(run)
    next(trainer.steps())
    before = everything(run)
    monkeypatch.setattr(fails, "save_file", full_disk(FULL[0]))
    with pytest.raises(StorageError, match="No space left"):
        trainer.save(run)
    monkeypatch.undo()
    assert before.items() <= everything(run).items()
    assert latest(run) == run / "step-2" / "state"
    assert not list(run.rglob(".*"))
    again = new_trainer(tmp_path / "data")
    again.resume(read_state(latest(run)))
    assert again.step == 2
    next(again.steps())
    assert all(
        torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True)
    )
    assert trainer.save(run) == run / "step-3", "with room again, the same step can be saved"
    assert latest(run) == run / "step-3" / "state"


def test_states_are_pruned_by_number_and_drafters_stay(tmp_path):
    assert latest(tmp_path) is None
    for step in (9, 20, 100, 3):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "model.safetensors").write_bytes(b"drafter")
        write_state(tmp_path / f"step-{step}" / "state", STATE)
    (tmp_path / "step-500").mkdir()  # a drafter alone
    assert latest(tmp_path) == tmp_path / "step-100" / "state"
    prune(tmp_path)
    assert sorted(p.parent.name for p in tmp_path.glob("step-*/state")) == ["step-100", "step-20"]
    assert sorted(p.parent.name for p in tmp_path.glob("step-*/model.safetensors")) == [
        f"step-{step}" for step in (100, 20, 3, 9)
    ]
    assert latest(tmp_path) == tmp_path / "step-100" / "state"
    prune(tmp_path)
    assert len(list(tmp_path.glob("step-*/state"))) == 2


def test_copies_that_the_user_made_are_left_alone(tmp_path):
    for step in (7, 8, 9):
        write_state(tmp_path / f"step-{step}" / "state", STATE)
    for name in ("step-9-best", "step-", "step-10.old"):
        shutil.copytree(tmp_path / "step-9", tmp_path / name)
    assert latest(tmp_path) == tmp_path / "step-9" / "state"
    prune(tmp_path)
    left = {p.parent.name for p in tmp_path.glob("*/state")}
    assert left == {"step-8", "step-9", "step-9-best", "step-", "step-10.old"}


def test_a_run_keeps_two_states_and_all_drafters(tmp_path):
    trainer = new_trainer(tmp_path / "data")
    for report in trainer.steps():
        if report.step % 3 == 0:
            trainer.save(tmp_path / "run")
    steps = [3, 6, 9, 12]
    assert sorted(int(p.name.removeprefix("step-")) for p in (tmp_path / "run").iterdir()) == steps
    for step in steps:
        folder = tmp_path / "run" / f"step-{step}"
        load_drafter(folder, toy_target("qwen3"))
        assert (folder / "state").exists() == (step > 6)
        assert json.loads((folder / "training.json").read_text())["step"] == step


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tensors.safetensors", None),
        ("tensors.safetensors", b""),
        ("tensors.safetensors", b"\x00" * 100),
        ("tensors.safetensors", "cut"),
        ("state.json", None),
        ("state.json", b""),
        ("state.json", b'{"step": 3'),
        ("state.json", b'{"step": 3}'),
        ("state.json", b"\xff\xfe\x00"),
        ("state.json", b"[3]"),
        ("state.json", b'{"step": "three", "recipe": {}}'),
        ("state.json", b'{"step": 3, "recipe": 9}'),
    ],
)
def test_damaged_states(tmp_path, name, content):
    write_state(tmp_path / "state", STATE)
    path = tmp_path / "state" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] if content == "cut" else content)
    with pytest.raises(CheckpointError, match=r"state: this training state is damaged \(.*; remove it to resume"):
        read_state(tmp_path / "state")


# Resuming


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_number_of_a_state_is_restored(tmp_path, optimizer):
    """Weights and moments bit for bit, and the steps that follow as if nothing had happened."""
    first = trained(tmp_path / "data", 3, optimizer=optimizer)
    first.save(tmp_path / "run")
    second = new_trainer(tmp_path / "data", optimizer=optimizer)
    second.resume(read_state(latest(tmp_path / "run")))
    assert second.step == 3
    for _ in range(2):
        mine, theirs = (model_tensors(t.model) | optimizer_tensors(t._optimizers) for t in (second, first))
        assert set(mine) == set(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert sum(name.startswith("optimizer") for name in mine) >= sum(name.startswith("model") for name in mine)
        for trainer in (first, second):
            next(trainer.steps())


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"intermediate": 40}, "layers.0.mlp"),
        ({"layers": 3, "target_layer_ids": (1, 0)}, "layers.2"),
        ({"target_layer_ids": (1,)}, "fc.weight"),
    ],
)
def test_a_state_of_another_shape_is_refused(tmp_path, changes, tensor):
    trainer = trained(tmp_path / "data", 1)
    trainer.save(tmp_path / "run")
    other = new_trainer(tmp_path / "data", **changes)
    with pytest.raises(
        ConfigError, match=rf"no drafter\.{tensor}.* of shape \(.*\); resume with the recipe it came from"
    ):
        restore(read_state(latest(tmp_path / "run")), other._trained, other._optimizers)


def test_a_state_without_a_tensor_is_refused(tmp_path):
    trainer = trained(tmp_path / "data", 1)
    tensors = model_tensors(trainer.model) | optimizer_tensors(trainer._optimizers)
    del tensors["model.norm.weight"]
    with pytest.raises(ConfigError, match=r"has no norm\.weight of shape \(24,\)"):
        restore(TrainState(1, {}, tensors), trainer.model, trainer._optimizers)


# Served as trained


def counting_target():
    """A target that counts upwards, mostly: its text can be learned in seconds, but not by heart."""
    target = toy_target("qwen3", spread=0.1)
    table = torch.randn(VOCABULARY, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with torch.no_grad():
        target.embed_tokens.weight.copy_(0.5 * table)
        target.lm_head.weight.copy_(table.roll(1, 0))
    return target


def rounded(model):
    """A copy of a model with the weights that a bfloat16 checkpoint holds."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.copy_(parameter.bfloat16())
    return copied.eval()


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A target, a trainer that learned from its answers, and the checkpoint."""
    root, target = tmp_path_factory.mktemp("learned"), counting_target()
    prompts = [random_tokens(5, 100 + i) for i in range(60)]
    options = {"max_tokens": 24, "temperature": 0.0, "stop_ids": (), "generator": torch.Generator()}
    answers = decode_batch(target, prompts, **options)
    write_shard(
        root / "answers-a.safetensors", [([*p, *a], 5) for p, (a, _) in zip(prompts, answers, strict=True)], {}
    )
    config = dataclasses.replace(
        CONFIG,
        block_size=5,
        optimizer="muon",
        learning_rate=2e-2,
        steps=100,
        context_tokens=120,
        anchors=60,
        validation_examples=6,
        log_every=100,
    )
    trainer = Trainer(config, target, new_drafter(config, target), load_examples(root, VOCABULARY, 64))
    list(trainer.steps())
    return target, trainer, trainer.save(root / "run")


def held_out_texts(trainer):
    """The validation examples as token lists."""
    held = trainer._held_out
    return [held.tokens_T[a:b].tolist() for a, b in zip(held.starts_E.tolist(), held.ends_E.tolist(), strict=True)]


def measured(target, drafter, texts, budget):
    """Teacher-forced acceptance of a drafter on texts."""
    total = Acceptance(0, 0)
    for text in texts:
        _, features_TF = plain_forward(target, text, drafter.model.spec.layer_ids)
        total += measure_example(drafter, torch.tensor(text), features_TF, 5, (budget,))[budget]
    return total


def test_what_training_measures_is_what_serving_reaches(learned):
    """The checkpoint, loaded as any drafter is, in the engine: as many rounds as validation counted."""
    target, trainer, folder = learned
    report = trainer.validate()
    assert report.chain.length > 1.8
    assert report.tree.length > report.chain.length
    loaded, texts = load_drafter(folder, target), held_out_texts(trainer)
    engine = BatchEngine(target, loaded, EngineConfig(max_context=128), lambda tokens: "")
    for budget, claimed in ((None, report.chain), (report.budget, report.tree)):
        plan = fixed_plan("chain", 5, 1) if budget is None else fixed_plan("tree", 5, budget)
        found = Acceptance(0, 0)
        for text in texts:
            answer = pieces(engine, text[:5], SamplingParams(max_tokens=60), plan)
            counts = [len(record.emitted) for record in records_of(answer)]
            done = rounds = 0
            while done < len(text) - 6:
                done, rounds = done + counts[rounds], rounds + 1
            found += Acceptance(len(text) - 6, rounds)
        assert found == measured(target, loaded, texts, budget)
        assert found.tokens == claimed.tokens
        assert found.length == pytest.approx(claimed.length, rel=0.03), "bfloat16 weights cost next to nothing"


def test_the_checkpoint_is_the_model_in_bfloat16(learned):
    target, trainer, folder = learned
    loaded = load_drafter(folder, target)
    mine, theirs = dict(loaded.model.named_parameters()), dict(rounded(trainer.model).named_parameters())
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    stored = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "parity.safetensors",
        "state",
        "training.json",
    ]


def test_the_proof_beside_a_checkpoint_is_that_of_the_weights_it_holds(tmp_path):
    """Not of the masters, which rounding has moved: a loader that reads all right finds no difference."""
    trainer = trained(tmp_path / "data", 1)
    stored = load_file(trainer.save(tmp_path / "run") / "parity.safetensors")["logits"]
    far = []
    for model in (rounded(trainer.model), trainer.model):
        write_parity(tmp_path, model, trainer._vocabulary)
        far.append(float((load_file(tmp_path / "parity.safetensors")["logits"] - stored).abs().max()))
    assert far[0] < 1e-5 < 1e-3 < far[1]


@pytest.mark.parametrize("window", [0, 7])
@torch.inference_mode()
def test_blocks_in_training_equal_blocks_of_the_loaded_drafter(tmp_path, window):
    """Of every anchor of a pack: rope, windows, norms and feature layers are the same on both paths."""
    with torch.inference_mode(False):
        trainer = trained(tmp_path / "data", 2, sliding_window=window, target_layer_ids=(2, 0), learning_rate=0.05)
        folder = trainer.save(tmp_path / "run")
    loaded = load_drafter(folder, trainer._target)
    assert loaded.model.spec.views == (View(window or None),) * 2
    trainer.model = rounded(trainer.model)
    pack = trainer._pack(0)
    features_TF = trainer._features.of_pack(pack).features_TF
    hidden_AbH = trainer._hidden(pack, features_TF)
    tokens_T = trainer._tokens_T[pack.source_T]
    for a, anchor in enumerate(pack.anchors_A[pack.real_A].tolist()):
        start = anchor - int(pack.positions_T[anchor])
        _, features_LF = plain_forward(trainer._target, tokens_T[start:anchor].tolist(), (2, 0))
        served = draft_hidden(loaded.model, loaded.vocabulary, features_LF[None], tokens_T[anchor : anchor + 1])
        torch.testing.assert_close(hidden_AbH[a], served[0], rtol=1e-6, atol=1e-7)


def test_int8_rows_accept_as_much(learned, tmp_path):
    target, trainer, folder = learned
    plain = load_drafter(folder, target)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    save_drafter(tmp_path / "packed", config, trainer.model, trainer._vocabulary, packed=True)
    packed = load_drafter(tmp_path / "packed", target)
    assert packed.model.spec.packed
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert {t.dtype for t in stored.values() if t.ndim == 2} == {torch.int8}
    texts = held_out_texts(trainer)
    for budget in (None, 16):
        whole, eight_bits = (measured(target, drafter, texts, budget) for drafter in (plain, packed))
        assert eight_bits.length == pytest.approx(whole.length, rel=0.05)
        assert eight_bits.length > 1.8


def test_the_card_names_no_folder_of_this_machine(learned, tmp_path):
    _, trainer, folder = learned
    config = dataclasses.replace(trainer.config, data=str(tmp_path / "answers"), out=str(tmp_path / "run"))
    trainer = new_trainer(tmp_path / "data", data=config.data, out=config.out)
    card = (trainer.save(tmp_path / "run") / "training.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in card
    content = json.loads(card)
    assert content["recipe"] | {"data": "", "out": ""} == json.loads(
        json.dumps(dataclasses.asdict(dataclasses.replace(trainer.config, data="", out="")))
    )
    assert (content["recipe"]["data"], content["recipe"]["out"]) == ("answers", "run")
    assert json.loads((folder / "training.json").read_text())["step"] == 100


@pytest.mark.parametrize(
    ("target", "told"),
    [("{here}/models/toy", "toy"), ("models/toy", "toy"), ("owner/name", "owner/name"), ("toy", "toy")],
)
def test_the_card_names_no_folder_of_the_target(tmp_path, monkeypatch, target, told):
    """A hub id stays whole."""
    (tmp_path / "models" / "toy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    trainer = new_trainer(tmp_path / "data", target=target.format(here=tmp_path))
    card = (trainer.save(tmp_path / "run") / "training.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in card
    assert json.loads(card)["recipe"]["target"] == told
