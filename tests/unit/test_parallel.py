"""Several processes train one drafter: each on packs of its own, all with the same weights."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from ddtree.errors import ConfigError
from ddtree.training.loss import loss_total
from ddtree.training.optimizer import learning_rate, set_learning_rate
from ddtree.training.parallel import Group, join_group
from ddtree.training.start import new_drafter
from ddtree.training.trainer import Trainer
from tests.toys import toy_target
from tests.unit.test_trainer import CONFIG, write_examples

STEPS, SIZE = 4, 2
ROOT = Path(__file__).resolve().parents[2]


def trainer_of(folder, group):
    config = dataclasses.replace(CONFIG, steps=STEPS, clip_norm=0.5, out=str(folder / "run"))
    target = toy_target("qwen3")
    return Trainer(
        config, target, new_drafter(config, target), write_examples(folder / f"data-{group.rank}"), group
    )


def train_as_member(folder):
    """One process of the group: train, validate, save, and write down what it saw."""
    group = join_group(os.environ)
    trainer = trainer_of(folder, group)
    losses = [report.loss for report in trainer.steps()]
    report = trainer.validate()
    trainer.save(folder / "run")
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(weights, folder / f"weights-{group.rank}.safetensors")
    seen = {
        "rank": group.rank,
        "size": group.size,
        "leads": group.leads,
        "losses": losses,
        "validation": [report.chain.tokens, report.chain.rounds, report.tree.tokens, report.tree.rounds],
        "any": [group.any(group.rank == who, trainer.device) for who in (0, 1, 2)],
        "average": group.average(torch.tensor([float(group.rank), 4.0])).tolist(),
        "example_starts": trainer._training.starts_E.tolist(),
    }
    (folder / f"seen-{group.rank}.json").write_text(json.dumps(seen))
    group.wait()
    group.leave()
    assert not dist.is_initialized()
    os._exit(0)  # threads of gloo can abort a process that ends on its own


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two processes, as `torchrun` would start them; returns the folder that they worked in."""
    folder = tmp_path_factory.mktemp("group")
    code = f"from pathlib import Path; import {__name__} as t; t.train_as_member(Path({str(folder)!r}))"
    shared = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * SIZE, "\n".join(errors)
    return folder


@pytest.fixture(scope="module")
def seen(trained):
    return [json.loads((trained / f"seen-{rank}.json").read_text()) for rank in range(SIZE)]


class Silent(Group):
    """A member that exchanges nothing: it gives each process's own part of the work."""

    def average_gradients(self, parameters):
        pass

    def average(self, value):
        return value


def gradients_of(trainer):
    """Loss of the trainer's next pack; the gradients are added to those of its model."""
    losses_2, _, _ = trainer._backward(trainer._pack(0))
    return float(losses_2[0])


def test_all_processes_hold_the_same_weights(trained):
    first, second = (load_file(trained / f"weights-{rank}.safetensors") for rank in range(SIZE))
    assert all(torch.equal(first[name], second[name]) for name in first)


def total_of(trainer):
    """What the trainer would divide its next pack's loss by, were it alone."""
    pack = trainer._pack(0)
    return loss_total(
        trainer._labels(pack, trainer._features.of_pack(pack)).counted_AD, trainer.config.decay_gamma
    )


def test_the_group_does_what_one_process_would_with_both_packs(trained, seen, tmp_path, monkeypatch):
    """One model and one optimiser, fed with the mean of the two packs' gradients at each step, the losses of both
    divided by one number."""
    members = [trainer_of(tmp_path, Silent(rank, SIZE)) for rank in range(SIZE)]
    one = members[0].model
    members[1].model = one
    optimizers, losses = members[0]._optimizers, []
    for step in range(STEPS):
        for member in members:
            member.step = step
        with monkeypatch.context() as patch:
            total = sum(map(total_of, members)) / SIZE
            patch.setattr("ddtree.training.trainer.loss_total", lambda counted_AD, gamma, total=total: total)
            losses.append(sum(map(gradients_of, members)) / SIZE)
        for parameter in one.parameters():
            parameter.grad /= SIZE
        torch.nn.utils.clip_grad_norm_(one.parameters(), members[0].config.clip_norm)
        set_learning_rate(optimizers, learning_rate(members[0].config, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = load_file(trained / "weights-0.safetensors")
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-11)
    for member in seen:
        assert member["losses"] == pytest.approx(losses, rel=1e-6), "the loss that is logged is the group's"
    alone = trainer_of(tmp_path, Group())
    list(alone.steps())
    assert not torch.allclose(found["fc.weight"], alone.model.fc.weight.detach(), rtol=1e-3)


def test_each_process_has_examples_of_its_own(seen, tmp_path):
    shares = [member["example_starts"] for member in seen]
    whole = trainer_of(tmp_path, Group())._training.starts_E.tolist()
    assert sorted(shares[0] + shares[1]) == sorted(whole)
    assert abs(len(shares[0]) - len(shares[1])) <= 1


def test_validation_is_shared_out_and_summed(trained, seen, tmp_path):
    alone = trainer_of(tmp_path, Group())
    with torch.no_grad():
        for name, stored in load_file(trained / "weights-0.safetensors").items():
            alone.model.get_parameter(name).copy_(stored)
    report = alone.validate()
    wanted = [report.chain.tokens, report.chain.rounds, report.tree.tokens, report.tree.rounds]
    assert [member["validation"] for member in seen] == [wanted] * SIZE


def test_members_know_their_place_and_agree(trained, seen):
    assert [(m["rank"], m["size"], m["leads"]) for m in seen] == [(0, 2, True), (1, 2, False)]
    assert [m["any"] for m in seen] == [[True, True, False]] * SIZE
    assert [m["average"] for m in seen] == [[0.5, 4.0]] * SIZE
    run = trained / "run"
    assert [p.name for p in run.iterdir()] == [f"step-{STEPS}"], "one of them writes"


# A group of one


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is '4', without RANK, MASTER_ADDR, MASTER_PORT; start with torchrun"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', which is no number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', which is no number of processes"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', which is no number of processes"),
    ],
)
def test_an_environment_that_describes_no_group(environment, told):
    rest = {} if environment == {"WORLD_SIZE": "4"} else {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with pytest.raises(ConfigError, match=told):
        join_group(environment | rest)


def test_a_group_of_one_does_nothing(monkeypatch):
    """It needs no process group, and leaves gradients and values as they are."""
    for name in ("all_reduce", "barrier", "destroy_process_group", "init_process_group"):
        monkeypatch.setattr(dist, name, None)
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        group = join_group(environment)
        assert group == Group(0, 1)
        assert group.leads
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4))]
    parameters[0].grad = torch.arange(6.0).view(2, 3)
    kept = parameters[0].grad
    group.average_gradients(parameters)
    assert parameters[0].grad is kept
    assert torch.equal(kept, torch.arange(6.0).view(2, 3))
    assert parameters[1].grad is None
    value = torch.tensor([2.0, 5.0])
    assert group.average(value) is value
    assert group.any(True, torch.device("cpu"))
    assert not group.any(False, torch.device("cpu"))
    group.wait()
    group.leave()
