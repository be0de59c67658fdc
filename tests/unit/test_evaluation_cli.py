"""`ddtree eval` from end to end on the default model, and what it refuses."""

from __future__ import annotations

import json

import pytest

from ddtree.cli.main import main
from ddtree.data.prompts import Prompt
from ddtree.errors import DataError
from ddtree.evaluation.bench import Plan, offline_documents
from ddtree.evaluation.tasks import Task
from ddtree.models.load import LoadedDrafter
from tests.checkpoints import write_drafter
from tests.toys import random_tokens, toy_drafter, toy_target


def told(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(["eval", *map(str, arguments)])
    found = capsys.readouterr()
    assert end.value.code == code, found.err
    return found.out if code == 0 else " ".join(found.err.split())


@pytest.mark.parametrize(
    ("arguments", "told_so"),
    [
        (["--task", "nothing"], "unknown task 'nothing'"),
        (["--budget", "0"], "between 1 and 1024 nodes"),
        (["--budget", "2000"], "between 1 and 1024 nodes"),
        (
            ["--budget", "256", "--online"],
            "between 1 and 255 nodes (what the engine verifies in one round; --offline",
        ),
        (["--budget", "4;8"], "got '4;8'"),
        (["--budget", ","], "no budget was given"),
        (["gsm8k", "--task", "GSM8K"], "two tasks are called gsm8k"),
        (["--log", "run"], "--log draws a run's curves, so it needs --out"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--device", "tpu"], "device 'tpu' is not supported"),
    ],
)
def test_refused_before_anything_is_measured(capsys, arguments, told_so):
    assert told_so in told(capsys, *arguments, code=3 if "tpu" in arguments else 2)


def test_out_is_no_file(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert "is a file; name a folder" in told(capsys, "--out", tmp_path / "out", code=2)


def test_broken_lines(tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"prompt": 2}\n')
    assert "line 2" in told(capsys, "--task", tmp_path / "mine.jsonl", code=7)


@pytest.mark.model
def test_a_drafter_for_another_target(tmp_path, capsys):
    write_drafter(tmp_path / "toy")
    assert str(tmp_path / "toy") in told(capsys, "--drafter", tmp_path / "toy", "--limit", 1, code=4)


@pytest.mark.model
def test_known_answers_and_the_engine_agree(tmp_path, capsys):
    """Greedy, every figure is equal. Seeded, in float32 on these prompts too."""
    common = [
        "gsm8k",
        "--task",
        "coding",
        "--limit",
        1,
        "--max-tokens",
        24,
        "--budget",
        "4,16",
        "--dtype",
        "float32",
    ]
    common += ["--temperature", 0, "--temperature", 1, "--answers", tmp_path, "--no-shadow", "--json"]
    offline, online = (json.loads(told(capsys, *common, method))["runs"] for method in ("--offline", "--online"))
    assert [run["temperature"] for run in online] == [0, 1]
    for known, real in zip(offline, online, strict=True):
        assert (known["method"], real["method"]) == ("offline", "online")
        for name in ("coding", "gsm8k"):
            task, other = known["tasks"][name], real["tasks"][name]
            assert (task["prompts"], task["answer_tokens"], other["differing_answers"]) == (1, 24, 0)
            assert task["prompt_hash"] == other["prompt_hash"]
            arms = [arm for arm in other if isinstance(other[arm], dict) and "mean" in other[arm]]
            assert len(arms) == 3 * (1 + (known["temperature"] > 0))
            for arm in arms:
                assert task[arm] | {"expected": None} == other[arm]
            assert min(task["tree-16"]["mean"], task["chain"]["mean"]) > 1.2
            low, high = task["chain"]["interval"]
            assert low <= task["chain"]["mean"] <= high


# On toys


class WordTokenizer:
    """A prompt is its words, each a number, after a one."""

    can_chat = True

    def encode(self, text):
        return [int(word) for word in text.split()]

    def chat_ids(self, messages):
        return [1, *self.encode(messages[0]["content"])]

    def decode_all(self, tokens):
        return " ".join(map(str, tokens))


def toy_task(*lengths):
    texts = (" ".join(map(str, random_tokens(length, length))) for length in lengths)
    return Task("toys", tuple(Prompt((("user", text),), "test", "none") for text in texts))


def documents(task, tmp_path, max_positions, **changes):
    target = toy_target(max_positions=max_positions)
    plan = {"budgets": (4, 8), "max_tokens": 10, "temperature": 0.0, "seed": 0, "coupling": 1.25}
    plan |= {"shadow": False, "batch": 0, "answers": tmp_path}
    drafters = {name: LoadedDrafter(*toy_drafter(target, seed=seed)) for seed, name in enumerate("ab")}
    reports = []
    found = offline_documents(
        "toy",
        target,
        drafters,
        WordTokenizer(),
        [task],
        Plan(**plan | changes),
        lambda *report: reports.append(report),
    )
    return found, reports


def test_prompts_that_do_not_fit_are_left_out_and_counted(tmp_path):
    (first, second), reports = documents(toy_task(5, 30, 8, 9), tmp_path, 36)
    assert [first["drafter"], second["drafter"]] == ["a", "b"]
    task = first["tasks"]["toys"]
    assert (task["prompts"], task["left_out"]) == (3, {"too long": 1})
    assert len(task["chain"]["per_prompt"]) == 3
    assert reports[-1] == ("toys: drafts", 3, 3)
    assert any("MiB" in stage for stage, _, _ in reports)


def test_no_prompt_fits(tmp_path):
    with pytest.raises(DataError, match=r"task toys: no prompt leaves room for 10 new tokens within 16"):
        documents(toy_task(30, 31), tmp_path, 16)


def test_a_document_says_how_it_was_measured(tmp_path):
    (first, _), _ = documents(toy_task(5, 8), tmp_path, 64, temperature=0.5, seed=4)
    assert (first["temperature"], first["seed"], first["coupling"]) == (0.5, 4, 1.25)
    assert (first["model"], first["dtype"], first["device"], first["block_size"]) == ("toy", "float64", "cpu", 8)
    assert set(first["tasks"]["toys"]["calibration"]) == {"coupled", "uncoupled"}
    json.dumps(first, allow_nan=False)
    greedy = documents(toy_task(5, 8), tmp_path, 64)[0][0]
    assert (greedy["seed"], greedy["coupling"]) == (None, None)
    assert greedy["tasks"]["toys"]["prompt_hash"] == first["tasks"]["toys"]["prompt_hash"]
