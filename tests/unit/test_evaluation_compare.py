"""The verdict on two measurements, and what cannot be paired."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddtree.cli.main import main
from ddtree.errors import ConfigError, DataError
from ddtree.evaluation.compare import common_arms, compare, percent
from ddtree.evaluation.metrics import Interval
from ddtree.evaluation.result import read_result
from ddtree.models.shipped import SHIPPED
from ddtree.provenance import source_hash

ARMS = ("chain", "tree-16", "tree-64", "tree-256", "shadow-64")


def document(tasks, drafter="A", **changes):
    """tasks: name -> tokens a round of each prompt, by arm or for all of them."""
    found = {}
    for name, rates in tasks.items():
        by_arm = rates if isinstance(rates, dict) else dict.fromkeys(ARMS, rates)
        found[name] = {"prompts": 3, "prompt_hash": f"hash of {name}", "calibration": {}} | {
            arm: {"per_prompt": [[round(60 * rate), 60] for rate in some]} for arm, some in by_arm.items()
        }
    common = {"model": "m", "temperature": 0.0, "seed": None, "max_tokens": 256}
    return {"drafter": drafter, "tasks": found} | common | changes


def rates(mean, seed, count=60, spread=0.8):
    draw = random.Random(seed)
    return [max(mean + draw.gauss(0, spread), 1.0) for _ in range(count)]


def scaled(some, factor, seed=9, spread=0.02):
    draw = random.Random(seed)
    return [rate * (factor + draw.gauss(0, spread)) for rate in some]


MATHS, CODE, CHAT = rates(4, 1), rates(3, 2), rates(2.5, 3)


def judged(factors, arm=None, spread=0.02):
    a = document({"maths": MATHS, "code": CODE, "chat": CHAT})
    b = document(
        {
            name: scaled(some, factor, spread=spread)
            for (name, some), factor in zip(
                (("maths", MATHS), ("code", CODE), ("chat", CHAT)), factors, strict=True
            )
        },
        "B",
    )
    return compare(a, b, ("A", "B"), arm)


def test_better_everywhere():
    found = judged((1.12, 1.12, 1.12))
    assert found.verdict.startswith("B is better by 1")
    assert ";" not in found.verdict
    assert found.overall.value == pytest.approx(1.12, abs=0.02)


def test_better_but_for_one_task():
    found = judged((1.3, 1.0, 1.2), spread=0.05)
    assert found.verdict.startswith("B is better by ")
    assert found.verdict.endswith("; on code it is not")


def test_better_and_on_one_task_worse():
    verdict = judged((1.3, 0.9, 1.2)).verdict
    assert verdict.startswith("B is better by ")
    assert "; on code it is worse by 11" in verdict, "against B, from A's side it is 1 / 0.9"


def test_worse():
    found = judged((0.8, 0.8, 1.0), spread=0.05)
    assert found.verdict.startswith("A is better by ")
    assert found.verdict.endswith("; on chat it is not")


def test_no_difference_and_where_there_is_one():
    verdict = judged((1.05, 1 / 1.05, 1.0)).verdict
    assert verdict.startswith("no difference shown: B against A ")
    assert "; on maths B is better by " in verdict
    assert "; on code A is better by " in verdict
    assert "chat" not in verdict


def test_tasks_weigh_the_same():
    """A set of one prompt in ten counts as much as the other nine together."""
    a = document({"long": [4.0] * 90, "short": [4.0] * 10})
    b = document({"long": [4.0] * 90, "short": [8.0] * 10}, "B")
    assert compare(a, b, ("A", "B")).overall.value == pytest.approx(2**0.5)


def test_pairing_finds_what_means_alone_hide():
    """Prompts differ by far more than the drafters do."""
    wild = [1.5, 9.0] * 20
    a, b = document({"maths": wild}), document({"maths": scaled(wild, 1.05, spread=0.005)}, "B")
    assert compare(a, b, ("A", "B")).verdict.startswith("B is better by 5")


def test_which_arm():
    assert judged((1.1, 1.1, 1.1)).arm == "tree-64"
    assert judged((1.1, 1.1, 1.1), "chain").arm == "chain"
    with pytest.raises(ConfigError, match="arm 'tree-3' is not in both; those are chain, tree-16"):
        judged((1.1, 1.1, 1.1), "tree-3")
    few = {"maths": {"chain": MATHS, "tree-8": MATHS, "tree-16": MATHS, "shadow-16": MATHS}}
    assert compare(document(few), document(few, "B"), ("A", "B")).arm == "tree-16"


def test_arms_in_common():
    a = document({"maths": {"chain": MATHS, "tree-8": MATHS}, "code": {"chain": CODE}})
    assert common_arms(a, document({"maths": MATHS})) == ["chain"]
    with pytest.raises(DataError, match="no arm in common"):
        compare(document({"maths": {"tree-8": MATHS}}), document({"maths": MATHS}), ("A", "B"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"temperature": 1.0}, "temperature is 0.0 and 1.0"),
        ({"max_tokens": 128}, "max_tokens is 256 and 128"),
        ({"model": "other"}, "model is 'm' and 'other'"),
        ({"seed": 4}, "seed is None and 4"),
    ],
)
def test_measured_in_another_way(changes, told):
    with pytest.raises(DataError, match=told):
        compare(document({"maths": MATHS}), document({"maths": MATHS}, "B", **changes), ("A", "B"))


def test_other_prompts_cannot_be_paired():
    """Another chat template is enough: 25 % against 60 % for one and the same pair came of that."""
    b = document({"maths": MATHS}, "B")
    b["tasks"]["maths"]["prompt_hash"] = "another"
    with pytest.raises(DataError, match="task maths: the rendered prompts differ"):
        compare(document({"maths": MATHS}), b, ("A", "B"))
    with pytest.raises(DataError, match="no task is in both: maths and code"):
        compare(document({"maths": MATHS}), document({"code": CODE}), ("A", "B"))


def test_figures_of_fewer_prompts_cannot_be_paired():
    with pytest.raises(DataError, match="task maths: figures of 60 and of 59 prompts cannot be paired"):
        compare(document({"maths": MATHS}), document({"maths": MATHS[:-1]}), ("A", "B"))


def test_no_rounds_at_all():
    a = document({"maths": MATHS})
    for arm in ARMS:
        a["tasks"]["maths"][arm]["per_prompt"] = [[0, 0]] * 60
    with pytest.raises(DataError, match="no answer took a round"):
        compare(a, document({"maths": MATHS}), ("A", "B"))


def test_percent():
    assert percent(Interval(1.12, 1.09, 1.15)) == "12 % [9, 15]"
    assert percent(Interval(1.012, 1.005, 1.02)) == "1.2 % [0.5, 2.0]"
    assert percent(Interval(0.98, 0.9, 1.06), signed=True) == "-2 % [-10, +6]"


# Files and the command line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{broken", "no result of `ddtree eval`"),
        ("[1]", "it has no tasks"),
        ('{"tasks": 3}', "it has no tasks"),
        ('{"tasks": {"maths": [3]}}', "task maths does not say which prompts it had"),
        ('{"tasks": {"maths": {"chain": {}}}}', "task maths does not say which prompts it had"),
        ('{"runs": [{}, {}]}', "holds 2 runs"),
    ],
)
def test_files_that_are_no_results(tmp_path, content, told):
    path = tmp_path / "eval-a.json"
    path.write_text(content)
    with pytest.raises(DataError, match=told):
        read_result(path)
    with pytest.raises(DataError, match=r"nowhere: neither a result .* nor its folder is there"):
        read_result(tmp_path / "nowhere")


def test_a_folder_holds_one_result(tmp_path):
    with pytest.raises(DataError, match="found none"):
        read_result(tmp_path)
    for name in ("eval-a-t0.json", "eval-a-t1.json"):
        (tmp_path / name).write_text(json.dumps(document({"maths": MATHS})))
    with pytest.raises(DataError, match=r"found eval-a-t0\.json, eval-a-t1\.json"):
        read_result(tmp_path)
    (tmp_path / "eval-a-t1.json").unlink()
    assert read_result(tmp_path)["drafter"] == "A"


def told(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(["compare", *map(str, arguments)])
    assert end.value.code == code
    return capsys.readouterr()


@pytest.fixture
def results(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(document({"maths": MATHS, "code": CODE}, "old")))
    b.write_text(json.dumps(document({"maths": scaled(MATHS, 1.2), "code": scaled(CODE, 0.9)}, "new")))
    return a, b


def test_the_command(results, capsys):
    shown = told(capsys, *results).out
    assert "new against old" in shown
    assert "overall" in shown
    assert "on code it is worse by" in shown
    assert "shadow" not in shown
    found = json.loads(told(capsys, *results, "--json").out)
    assert (found["a"], found["b"], found["arm"]) == ("old", "new", "tree-64")
    assert found["arms"]["chain"]["tasks"]["maths"]["ratio"] == pytest.approx(1.2, abs=0.02)
    low, high = found["arms"]["tree-64"]["overall"]["interval"]
    assert low < found["arms"]["tree-64"]["overall"]["ratio"] < high
    assert found["verdict"] in " ".join(shown.split())


def test_the_same_drafter_twice_is_a_and_b(results, tmp_path, capsys):
    again = tmp_path / "c.json"
    again.write_text(results[0].read_text())
    shown = told(capsys, results[0], again)
    assert "no difference shown: B against A +0.0 %" in shown.out
    assert "B is" in shown.err


@pytest.mark.model
def test_two_drafters_are_measured_first(tmp_path, capsys):
    """A copy that cannot see its context is worse, and the verdict has its sign right."""
    worse = tmp_path / "worse"
    shutil.copytree(SHIPPED / "smollm2-135m-dflash", worse)
    tensors = load_file(worse / "model.safetensors")
    for name in [name for name in tensors if name.endswith("self_attn.o_proj.weight")]:
        tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, worse / "model.safetensors")
    (worse / "parity.safetensors").unlink()
    options = ["--task", "gsm8k", "--limit", 4, "--max-tokens", 24, "--answers", tmp_path / "answers", "--json"]
    found = json.loads(told(capsys, "shipped", worse, *options).out)
    assert found["verdict"].startswith("smollm2-135m-dflash is better by ")
    assert [one["source"] for one in found["measured"]] == [source_hash()] * 2
    assert found["arms"]["tree-64"]["overall"]["ratio"] < 1


def test_a_result_and_a_drafter(results, tmp_path, capsys):
    shown = told(capsys, results[0], "shipped", code=2).err
    assert "shipped is a drafter and the other is not" in " ".join(shown.split())
