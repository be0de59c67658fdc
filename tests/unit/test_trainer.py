"""A training run learns, resumes exactly, and is the same on one process as described."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ddtree.errors import CheckpointError, ConfigError, DataError, DivergedError
from ddtree.training.checkpoint import latest, read_state
from ddtree.training.config import TrainConfig
from ddtree.training.examples import load_examples, pack_for_step, split_examples, write_shard
from ddtree.training.start import load_weights, new_drafter
from ddtree.training.trainer import Trainer
from tests.toys import MASK, VOCABULARY, random_tokens, toy_target

CONFIG = TrainConfig(
    data="unused",
    out="unused",
    target="toy",
    layers=2,
    intermediate=32,
    block_size=4,
    mask_token_id=MASK,
    steps=12,
    context_tokens=96,
    anchors=24,
    learning_rate=3e-3,
    warmup_steps=2,
    log_every=1,
    validation_examples=2,
    budget=8,
)


def write_examples(folder, count=30, length=18, prompt=6):
    """Answers that count upwards: easy to learn, and every token tells its successor."""
    folder.mkdir(exist_ok=True)
    rows = []
    for i in range(count):
        question, first = random_tokens(prompt, 1000 + i), random_tokens(1, i)[0]
        rows.append(([*question, *((first + k) % (VOCABULARY - 1) for k in range(length - prompt))], prompt))
    write_shard(folder / "answers-a.safetensors", rows, {"format": "pt"})
    return load_examples(folder, VOCABULARY, 64)


def new_trainer(folder, count=30, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    target = toy_target("qwen3")
    return Trainer(config, target, new_drafter(config, target), write_examples(folder, count))


def test_resuming_repeats_the_losses_bit_for_bit(tmp_path):
    whole = [report.loss for report in new_trainer(tmp_path / "data").steps()]
    first = new_trainer(tmp_path / "data")
    for report in first.steps():
        if report.step == 5:
            break
    first.save(tmp_path / "run")
    second = new_trainer(tmp_path / "data")
    second.resume(read_state(latest(tmp_path / "run")))
    rest = [report.loss for report in second.steps()]
    assert rest == whole[5:]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"mask_token_id": 3},
        {"block_size": 3},
        {"target_layer_ids": (0, 1)},
        {"optimizer": "muon"},
        {"sliding_window": 4},
    ],
)
def test_another_recipe_is_not_resumed(tmp_path, change):
    """Shapes alone do not tell: a drafter that goes on with another mask token or block is silently spoiled."""
    first = new_trainer(tmp_path / "data")
    next(first.steps())
    first.save(tmp_path / "run")
    state = read_state(latest(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"{next(iter(change))} is .*, but this run began with .*; keep it"):
        new_trainer(tmp_path / "data", **change).resume(state)


def test_other_answers_are_not_resumed_with(tmp_path):
    """Wherever they lie: which examples a step sees follows from them."""
    first = new_trainer(tmp_path / "data")
    next(first.steps())
    first.save(tmp_path / "run")
    state = read_state(latest(tmp_path / "run"))
    new_trainer(tmp_path / "elsewhere").resume(state)
    new_trainer(tmp_path / "data").resume(dataclasses.replace(state, data=""))
    with pytest.raises(ConfigError, match="other answers than this run began with; give it those"):
        new_trainer(tmp_path / "more", count=31).resume(state)


def test_examples_are_known_by_every_token_and_by_what_is_an_answer(tmp_path):
    """Data of the same lengths are other data."""
    examples = write_examples(tmp_path / "data")
    tokens_T = examples.tokens_T.clone()
    tokens_T[3] += 1
    others = [
        dataclasses.replace(examples, tokens_T=tokens_T),
        dataclasses.replace(examples, prompts_E=examples.prompts_E + 1),
        dataclasses.replace(examples, ends_E=examples.ends_E - 1),
    ]
    assert len({examples.key, *(other.key for other in others)}) == 4
    assert write_examples(tmp_path / "again").key == examples.key


def test_a_longer_run_may_go_on(tmp_path):
    first = new_trainer(tmp_path / "data")
    next(first.steps())
    first.save(tmp_path / "run")
    changes = {"steps": 40, "learning_rate": 1e-3, "log_every": 2, "checkpoint_every": 7}
    longer = new_trainer(tmp_path / "data", **changes)
    longer.resume(read_state(latest(tmp_path / "run")))
    assert next(longer.steps()).step == 2


def test_a_run_can_begin_with_the_weights_of_a_drafter(tmp_path):
    """As the folder has them, in bfloat16, and they go on learning."""
    first = new_trainer(tmp_path / "data")
    next(first.steps())
    folder = first.save(tmp_path / "run")
    target = toy_target("qwen3")
    drafter = new_drafter(CONFIG, target)
    load_weights(drafter[1], folder)
    for mine, stored in zip(drafter[1].parameters(), first.model.parameters(), strict=True):
        assert torch.equal(mine, stored.bfloat16().double())
    before = [p.detach().clone() for p in drafter[1].parameters()]
    next(Trainer(CONFIG, target, drafter, write_examples(tmp_path / "data")).steps())
    assert not any(map(torch.equal, before, drafter[1].parameters()))
    wider = new_drafter(dataclasses.replace(CONFIG, intermediate=40), target)[1]
    with pytest.raises(CheckpointError, match="configuration and weights do not belong together"):
        load_weights(wider, folder)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_overfit_drafter_accepts_whole_blocks(tmp_path, optimizer):
    """Labels are aligned and nothing differs between training and measuring, or this could not be reached."""
    # Enough examples that those held out start like some that are not.
    trainer = new_trainer(
        tmp_path / "data", count=300, steps=400, optimizer=optimizer, log_every=100, learning_rate=1e-2
    )
    losses = [report.loss for report in trainer.steps()]
    assert losses[-1] < 0.2
    report = trainer.validate()
    # Rounds of 4 tokens over the 11 that follow the first answer token: 4 + 4 + 3.
    assert report.chain.length == pytest.approx(11 / 3)
    assert report.tree.length == pytest.approx(11 / 3)


@pytest.mark.parametrize("fault", ["loss", "gradient", "edges"])
def test_a_run_that_diverges_says_so(tmp_path, fault):
    """At the step where it is no number any more, and not in a checkpoint later."""
    trainer = new_trainer(tmp_path / "data", edge_rank=4, edge_inner=8)
    next(trainer.steps())
    broken = {"loss": trainer.model.norm.weight, "edges": trainer.edges.mix.weight}
    if fault == "gradient":
        trainer.model.fc.weight.register_hook(lambda gradient: gradient * torch.inf)
    else:
        broken[fault].data.fill_(torch.nan)
    with pytest.raises(
        DivergedError, match="step 1: the loss or its gradient is not a number; lower learning_rate"
    ):
        next(trainer.steps())


def test_packs_depend_on_the_step_and_nothing_else(tmp_path):
    examples = write_examples(tmp_path / "data")
    arguments = {"context_tokens": 96, "anchors": 24, "seed": 7}
    once = pack_for_step(examples, 3, rank=0, **arguments)
    again = pack_for_step(examples, 3, rank=0, **arguments)
    assert once.examples == again.examples
    assert torch.equal(once.anchors_A, again.anchors_A)
    assert pack_for_step(examples, 4, rank=0, **arguments).examples != once.examples
    assert pack_for_step(examples, 3, rank=1, **arguments).examples != once.examples


def test_anchors_stand_on_answer_tokens_that_have_a_successor(tmp_path):
    examples = write_examples(tmp_path / "data")
    for step in range(20):
        pack = pack_for_step(examples, step, context_tokens=90, anchors=40, seed=0, rank=0)
        position = pack.positions_T[pack.anchors_A[pack.real_A]]
        assert int(position.min()) >= 6
        assert int(position.max()) <= 16
        assert (pack.example_T[pack.anchors_A] >= 0).all()


def test_too_few_examples_to_validate_on_is_an_error(tmp_path):
    target = toy_target("qwen3")
    few = write_examples(tmp_path / "data", count=5)
    with pytest.raises(DataError, match="5 examples"):
        Trainer(CONFIG, target, new_drafter(CONFIG, target), few)


def test_no_prompt_stands_on_both_sides_of_the_split(tmp_path):
    questions = [random_tokens(6, i) for i in range(10)]
    rows = [([*questions[i % 10], *random_tokens(8, i)], 6) for i in range(40)]
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "answers-a.safetensors", rows, {"format": "pt"})
    examples = load_examples(tmp_path / "data", VOCABULARY, 64)
    training, held_out = split_examples(examples, 9)

    def prompts(some):
        return {tuple(some.tokens_T[s : s + 6].tolist()) for s in some.starts_E.tolist()}

    assert len(held_out) == 12, "three prompts of four answers"
    assert len(training) + len(held_out) == 40
    assert not prompts(training) & prompts(held_out)
