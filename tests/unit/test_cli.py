"""The command line: what it refuses and how, what its documents hold, and the trees that it draws."""

from __future__ import annotations

import builtins
import importlib.metadata
import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ddtree import provenance as provenance_module
from ddtree.cli import common
from ddtree.cli.common import print_json
from ddtree.cli.main import app
from ddtree.cli.show import draw_tree, most_branching
from ddtree.engine.request import RoundRecord
from ddtree.errors import RequestError
from ddtree.provenance import provenance
from tests.checkpoints import target_config, target_tensors, write_drafter, write_folder
from tests.toys import MASK, VOCABULARY, toy_target

END = 59
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}w3 w4"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target with a tokenizer of words and a chat template, and a drafter for it, as they lie on a disk."""
    root = tmp_path_factory.mktemp("models")
    target = toy_target("qwen3", eos_ids=(END,))
    write_folder(root / "target", target_config(target), target_tensors(target))
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{END}", chat_template=TEMPLATE)
    fast.save_pretrained(root / "target")
    write_drafter(root / "drafter")
    return root


@pytest.fixture
def generate(run, models):
    def command(*options, prompt="w1 w2 w3"):
        chosen = [] if "--model" in options else ["--model", models / "target"]
        chosen += [] if "--drafter" in options else ["--drafter", models / "drafter"]
        return run("generate", prompt, *chosen, "--threads", "1", *options)

    return command


def refused(result, code, *parts):
    """One line on standard error that names what is wrong; nothing on standard output, and no traceback."""
    found, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert (found, out) == (code, "")
    assert len(lines) == 1, err
    assert lines[0].startswith("ddtree: ")
    for part in parts:
        assert part in lines[0]


# Usage


def test_every_verb_has_help(run):
    verbs = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert verbs == [
        "demo",
        "pull",
        "generate",
        "chat",
        "serve",
        "info",
        "data",
        "train",
        "export",
        "doctor",
        "eval",
        "compare",
    ]
    code, out, _ = run("--help")
    assert code == 0
    assert all(verb in out for verb in verbs)
    for verb, command in zip(verbs, app.registered_commands, strict=True):
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert command.callback.__doc__.split()[0] in out


def test_doctor_says_that_sglang_is_not_installed(run, monkeypatch):
    from ddtree.sglang_plugin import contract

    monkeypatch.setattr(contract, "installed_version", lambda: None)
    code, out, err = run("doctor", "sglang")
    assert code == 3
    assert "pip install sglang==" in " ".join(out.split())
    assert "not ready: SGLang" in err
    assert run("doctor", "vllm")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["generate"], "prompt"),
        (["generate", "w1", "--nonsense"], "--nonsense"),
        (["generate", "w1", "--max-tokens", "many"], "--max-tokens"),
        (["generate", "w1", "--threads", "-1"], "--threads"),
        (["export"], "out"),
        (["data", "--own", "-1", "--out", "x"], "--own"),
        (["data"], "--out"),
        (["demo", "--max-tokens", "1"], "--max-tokens"),
    ],
)
def test_wrong_usage(run, arguments, named):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "--help" in err
    assert "Traceback" not in err


# What is refused


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--temperature", "-1"], ["temperature must be a number from 0", "got -1.0", "use 0 for greedy"]),
        (["--temperature", "nan"], ["temperature", "got nan"]),
        (["--temperature", "inf"], ["temperature", "got inf"]),
        (["--temperature", "1e-9"], ["temperature 1e-09 is too small", "use 0"]),
        (["--top-k", "-1"], ["top_k must be an integer", "use 0 to keep every token"]),
        (["--top-p", "1.5"], ["top_p must be a number from 0 to 1", "use 1 to keep every token"]),
        (["--min-p", "-0.1"], ["min_p must be a number from 0 to 1"]),
        (["--repetition-penalty", "0"], ["repetition_penalty must be", "use 1 to turn it off"]),
        (["--presence-penalty", "nan"], ["presence_penalty must be"]),
        (["--frequency-penalty", "1e9"], ["frequency_penalty must be"]),
        (["--seed", str(2**70)], ["seed must be an integer", "leave it out"]),
        (["--max-tokens", "0"], ["max_tokens must be", "ask for at least one token"]),
        (["--stop", ""], ["stop holds an empty string", "leave it out"]),
        (["--budget", "0"], ["budget must lie between 1 and 255", "got 0", "use mode off"]),
        (["--budget", "1000000000"], ["budget must lie between 1 and 255", "got 1000000000"]),
        (["--mode", "trees"], ["mode must be one of off, chain, tree, shadow", "got 'trees'"]),
        (["--block-size", "1"], ["block size must lie between 2 and 256", "got 1"]),
        (["--block-size", "7"], ["block size 7 exceeds the drafter's 6"]),
        (["--dtype", "int8"], ["dtype must be one of auto, bfloat16", "got 'int8'"]),
        (["--device", "cuda"], ["device cuda was asked for", "use --device cpu"]),
        (["--max-context", "1"], ["max_context must be at least 2"]),
        (["--max-context", "5000"], ["max_context 5000 exceeds the 4096 positions", "ask for less"]),
        (["--max-context", "5"], ["the prompt has 5 tokens, but the context holds 5", "shorten it"]),
        (["--model", "smollm3"], ["unknown model 'smollm3'", "smollm2-135m", "pass a known name"]),
        (["--drafter", "no/such/folder"], ["no/such/folder"]),
    ],
)
def test_options_that_cannot_be_honoured(generate, options, parts):
    refused(generate(*options), 2, *parts)


def test_an_unknown_device_is_unsupported(generate):
    for name in ("tpu", "cpu:x"):
        refused(generate("--device", name), 3, f"device '{name}' is not supported; use auto, cpu or cuda")


def test_an_empty_prompt(generate):
    refused(generate("--raw", prompt=""), 2, "the prompt is empty")


def test_a_model_without_a_drafter(run, models):
    refused(
        run("generate", "w1", "--model", models / "target"), 2, "no drafter is shipped for target", "--mode off"
    )
    code, out, _ = run("generate", "w1", "--model", models / "target", "--mode", "off", "--max-tokens", "3")
    assert (code, len(out.split())) == (0, 3)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"num_target_layers": 4},
            "num_target_layers is 4 but the target has 3; this drafter is for another target",
        ),
        ({"hidden_size": 32}, "hidden_size 32 differs from the target's 24"),
        ({"vocab_size": 50}, "vocab_size 50 differs from the target's 61"),
        ({"nested": {"target_layer_ids": [0, 3]}}, "target_layer_ids [3] do not exist in a target of 3 layers"),
        (
            {"nested": {"target_layer_ids": [0]}},
            "fc.weight has shape (24, 48), but the configuration asks for (24, 24)",
        ),
        ({"nested": {"mask_token_id": END}}, "mask_token_id 59 is the target's end-of-sequence"),
        ({"nested": {"mask_token_id": VOCABULARY}}, "mask_token_id 61 has no row in the embedding"),
        ({"num_hidden_layers": 3}, "tensors are missing: layers.2."),
        ({"num_hidden_layers": 1}, "tensors belong to no part of this model: layers.1."),
        ({"block_size": None}, "block_size is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number"),
    ],
)
def test_a_drafter_for_something_else(generate, tmp_path, changes, part):
    write_drafter(tmp_path / "other", **changes)
    refused(generate("--drafter", tmp_path / "other"), 4, str(tmp_path / "other"), part)


@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize(
    ("name", "damage", "part"),
    [
        ("model.safetensors", lambda b: b[:-100], "truncated or damaged"),
        ("model.safetensors", lambda b: b"", "truncated or damaged"),
        ("model.safetensors", lambda b: b"\xff" * 100, "truncated or damaged"),
        ("model.safetensors", None, "holds no *.safetensors file"),
        ("config.json", lambda b: b[:-20], "not valid JSON"),
        ("config.json", lambda b: b"\xff\xfe", "not valid JSON"),
        ("config.json", lambda b: b"[1]", "an object is needed"),
        ("config.json", lambda b: b.replace(b"hidden_size", b"hidden"), "hidden_size is missing"),
        ("config.json", None, "no config.json"),
    ],
)
def test_damaged_files(generate, models, tmp_path, which, name, damage, part):
    folder = shutil.copytree(models / which, tmp_path / which)
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    refused(generate(f"--{which}" if which == "drafter" else "--model", folder), 4, str(folder), part)


def test_a_target_without_a_tokenizer(generate, models, tmp_path):
    folder = shutil.copytree(models / "target", tmp_path / "target")
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").unlink()
    refused(generate("--model", folder), 4, f"{folder}: no usable tokenizer")


def test_verbs_that_make_things_refuse_too(run, models, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n{"prompt": ""}\n')
    data = ("data", "--out", tmp_path / "out", "--model", models / "target")
    refused(run(*data), 2, "nothing to answer", "--prompts FILE or --dataset ID, or --own N")
    refused(run(*data, "--prompts", tmp_path / "none"), 7, "none: no such file")
    refused(run(*data, "--prompts", tmp_path), 7, f"{tmp_path}: is a folder; give a JSONL file")
    refused(run(*data, "--prompts", prompts), 7, "prompts.jsonl, line 2: needs a non-empty", "--skip-broken")
    refused(run(*data, "--own", "1", "--device", "cpu:x"), 2, "device 'cpu:x' is not supported")
    refused(run(*data, "--own", "1", "--dtype", "int8"), 2, "dtype must be one of auto, bfloat16")
    for part in ("3/2", "0/2", "1", "a/b", "1/2/3", "-1/2", "", "²/3", f"1/{'9' * 5000}"):
        refused(
            run(*data, "--own", "1", "--part", part), 2, "--part must be i/n with 1 <= i <= n", f"got {part!r}"
        )
    train = ("train", "--data", tmp_path / "none", "--out", tmp_path / "out")
    refused(run("train"), 2, "data and out must be given")
    for pair, parts in {
        "steps": ["--set needs key=value", "got 'steps'"],
        "=3": ["--set needs key=value"],
        "stepz=3": ["unknown keys stepz; did you mean steps?"],
        "steps=0": ["steps must lie between 1 and"],
        "steps=few": ["steps must be of type int: got 'few'"],
        "device=tpu": ["device 'tpu' is not supported"],
        "optimizer=sgd": ["optimizer must be one of adamw, muon"],
    }.items():
        refused(run(*train, "--set", pair), 2, *parts)
    refused(run(*train, "--config", tmp_path / "none.toml"), 2, "none.toml: no such file")
    refused(run(*train, "--config", tmp_path), 2, f"{tmp_path}: is a folder; give the path of a TOML recipe")
    refused(run(*train, "--set", f"target={models / 'target'}"), 7, "make answers first with `ddtree data`")
    chosen = ("--model", models / "target", "--drafter", models / "drafter")
    refused(run("export", tmp_path, *chosen), 2, f"{tmp_path}: already exists")
    refused(run("export", tmp_path / "e", *chosen, "--storage", "fp4"), 2, "--storage must be bfloat16 or int8")
    refused(run("export", prompts / "e", *chosen), 6, "cannot be written")
    refused(run("pull", models / "target", "--revision", "main"), 2, "is no hub id and has no revisions")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl"], "nothing is left by what was refused"


# How errors end


def in_process_of_its_own(*arguments, **options):
    command = [sys.executable, "-m", "ddtree", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | options)


def test_a_traceback_only_with_debug(tmp_path):
    """In processes of their own: exit codes are what a shell sees."""
    wrong = ("generate", "w1", "--mode", "trees")
    plain, debug = in_process_of_its_own(*wrong), in_process_of_its_own("--debug", *wrong)
    refused((plain.returncode, plain.stdout, plain.stderr), 2, "mode must be one of")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert "ConfigError: mode must be one of" in debug.stderr
    missing = in_process_of_its_own("data", "--out", tmp_path, "--prompts", tmp_path / "none")
    refused((missing.returncode, missing.stdout, missing.stderr), 7, "no such file")
    assert in_process_of_its_own("--help").returncode == 0


def test_ctrl_c_is_no_error(run, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree.cli.generate.open_llm", interrupted)
    code, out, err = run("generate", "w1")
    assert (code, out) == (130, "")
    assert "Traceback" not in err


# Documents


def strict(text):
    """The one JSON document in a text; NaN and infinities are no JSON."""

    def never(constant):
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=never)


def test_documents_hold_no_nan(capsys):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="JSON compliant"):
            print_json({"a": [1, {"b": value}]})
    assert capsys.readouterr().out == ""
    print_json({"a": "ä\u2028", "b": None})
    assert strict(capsys.readouterr().out) == {"a": "ä\u2028", "b": None}


@pytest.mark.parametrize("mode", ["off", "chain", "tree", "shadow"])
def test_the_document_of_an_answer(generate, mode):
    options = ("--json", "--mode", mode, "--dtype", "float32", "--budget", "9", "--max-tokens", "30")
    code, out, err = generate(*options, "--temperature", "0.8", "--show-tree", "--seed", "-5")
    found = strict(out)
    assert (code, err.strip()) == (0, "")
    assert found["text"] == " ".join(f"w{token}" for token in found["token_ids"] if token != END)
    assert found["acceptance_length"] == (len(found["token_ids"]) - 1) / found["rounds"]
    assert found["seed"] == 2**64 - 5
    assert (found["mode"], found["budget"]) == (mode, {"off": 0, "chain": 5}.get(mode, 9))
    assert [token for tree in found["trees"] for token in tree["emitted"]] == found["token_ids"][1:]
    assert ("would_commit" in found) == (mode == "shadow")
    again = strict(generate(*options, "--temperature", "0.8", "--seed", "-5")[1])
    assert again["token_ids"] == found["token_ids"]
    assert "trees" not in again


def test_a_document_without_a_round(generate):
    found = strict(generate("--json", "--max-tokens", "1", "--temperature", "1")[1])
    assert (found["rounds"], found["acceptance_length"], found["tokens_per_second"]) == (0, None, None)
    assert isinstance(found["seed"], int), "a seed is drawn and told, so that the answer can be repeated"


def test_other_documents(run, models):
    target = models / "target"
    pulled = strict(run("pull", target, "--json")[1])
    assert pulled == {"name": "target", "folder": str(target), "source": "local folder", "drafter": None}
    info = strict(run("info", "--model", target, "--drafter", models / "drafter", "--json")[1])
    assert set(info) >= {"device", "hardware", "dtype", "default_budget", "versions", "model", "drafter", "mode"}
    assert "missing" not in info
    demo = strict(
        run(
            "demo",
            "--model",
            target,
            "--drafter",
            models / "drafter",
            "--max-tokens",
            "3",
            "--threads",
            "1",
            "--json",
        )[1]
    )
    assert set(demo["modes"]) == {"off", "chain", "tree"}
    for arm in demo["modes"].values():
        assert arm["identical_float32"] == arm["compared_float32"] > 0


@pytest.fixture(scope="module")
def plain_argv():
    return ["/home/someone/bin/ddtree", "train", "--out", "/home/someone/run", "--set", "steps=3", "relative/run"]


def test_provenance_names_no_folder_of_this_machine(plain_argv):
    found = provenance(plain_argv)
    assert found["argv"] == ["ddtree", "train", "--out", "run", "--set", "steps=3", "relative/run"]
    assert set(found) == {"commit", "dirty", "source", "argv", "time", "python", "versions", "device"}
    text = json.dumps(provenance())
    assert not any(folder in text for folder in (sys.prefix, str(Path.cwd()), "/home/"))


def test_the_source_hash_follows_the_code_alone(tmp_path, monkeypatch):
    """A copy elsewhere has the same; a byte or a name that changes, another. What is not Python does not count."""
    package = tmp_path / "copy"
    shutil.copytree(Path(provenance_module.__file__).parent, package, ignore=shutil.ignore_patterns("shipped"))
    before = provenance_module.source_hash()
    monkeypatch.setattr(provenance_module, "__file__", str(package / "provenance.py"))
    assert provenance_module.source_hash() == before
    (package / "notes.txt").write_text("none of it")
    assert provenance_module.source_hash() == before
    (package / "errors.py").rename(package / "faults.py")
    renamed = provenance_module.source_hash()
    (package / "faults.py").write_text("x = 1\n")
    assert len({before, renamed, provenance_module.source_hash()}) == 3


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--out=/home/someone/run", "--out=run"),
        ("target=/home/some one/model", "target=model"),
        ("--set=target='/home/someone/model'", "--set=target=model"),
        ("--set=mode=a/b", "--set=mode=a/b"),
        ("--index=https://host/simple", "--index=https://host/simple"),
        ("--flag=", "--flag="),
    ],
)
def test_provenance_of_folders_inside_arguments(argument, told):
    assert provenance([argument])["argv"] == [told]


def test_from_prompts_to_a_drafter_in_use(run, models, tmp_path, monkeypatch):
    """data, train, train again, export, generate: each verb reads what the one before it wrote."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 20}"}) + "\n" for i in range(30)) + "broken\n")
    target = ("--model", models / "target")
    code, out, err = run(
        "data", "--out", tmp_path / "answers", "--prompts", prompts, *target, "--max-tokens", "12", "--skip-broken"
    )
    assert (code, out) == (0, "")
    assert "prompts.jsonl: 1 broken lines left out" in err
    sizes = {
        "steps": 4,
        "layers": 1,
        "block_size": 4,
        "mask_token_id": MASK,
        "context_tokens": 64,
        "anchors": 16,
        "edge_rank": 4,
    }
    sizes |= {"log_every": 1, "validation_examples": 2, "checkpoint_every": 2, "target": models / "target"}
    flags = [f"--set={key}={value}" for key, value in sizes.items()]
    data = ("data", "--prompts", prompts, *target, "--skip-broken")
    code, out, err = run(*data, "--out", prompts / "answers")
    assert (code, "cannot be written" in err, "Traceback" in err) == (6, True, False)
    code, out, err = run(*data, "--out", tmp_path / "answers", "--max-tokens", "9")
    assert (code, "was made with max_tokens 12, not 9" in err) == (7, True)
    train = ("train", "--data", tmp_path / "answers", *flags, "--out")
    code, out, err = run(*train, prompts / "run")
    assert (code, out, "log.jsonl: cannot be written" in err) == (6, "", True)
    train = (*train, tmp_path / "run")
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    code, out, err = run(*train, "--stop-after-s", "1e-9", "--json", "--threads", "2")
    first = strict(out)
    assert threads == [2]
    assert code == 0
    assert [row["step"] for row in first["steps"]] == [1]
    assert first["checkpoint"] == str(tmp_path / "run" / "step-1")
    code, out, err = run(*train, "--json")
    second = strict(out)
    assert threads == [2], "torch's own number, or the sums of a resumed run would differ"
    assert "resuming from step-1" in err
    assert [row["step"] for row in second["steps"]] == [2, 3, 4]
    code, out, err = run(*train, "--json")
    assert strict(out) == {"steps": [], "validations": [], "checkpoint": str(tmp_path / "run" / "step-4")}
    assert "step 4 of 4: nothing left to do" in err
    code, out, err = run("generate", *target, "--drafter", tmp_path / "run", "w1")
    assert (code, f"it is a training run, pass {tmp_path / 'run' / 'step-4'}" in err) == (4, True), err
    assert set(second["steps"][0]) == {
        "step",
        "loss",
        "edge_loss",
        "gradient_norm",
        "learning_rate",
        "accuracy",
        "seconds",
    }
    assert set(second["validations"][-1]) == {"step", "chain", "tree-64", "tokens"}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log if "loss" in row] == [1, 2, 3, 4]
    for storage in ("bfloat16", "int8"):
        drafter = ("--drafter", tmp_path / "run" / "step-4")
        assert run("export", tmp_path / storage, *target, *drafter, "--storage", storage)[0] == 0
        assert json.loads((tmp_path / storage / "training.json").read_text())["step"] == 4
        assert (tmp_path / storage / "edges.safetensors").exists()
        options = ("--drafter", tmp_path / storage, "--threads", "1", "--dtype", "float32", "--max-tokens", "9")
        code, text, err = run("generate", "w5", *target, *options)
        assert (code, text.split()[0][0]) == (0, "w")
        assert "tree of 16" in err


# Chat


def test_a_chat_knows_its_turns(run, models, monkeypatch):
    """/new forgets them, /undo the last, and a stopped or refused answer is not kept."""
    asked, said = [], iter(["w1", "w2", "stop", "w3", "/undo", "long", "w4", "/new", "w5", " "])

    def answer(llm, ids, params, plan):
        words = llm.tokenizer.decode(ids).split()[:-2]
        asked.append(words)
        if words[-1] == "w0":  # neither "stop" nor "long" is a word of this model
            raise KeyboardInterrupt if len(asked) == 3 else RequestError("the prompt has 99 tokens")
        empty = SimpleNamespace(text=f"w{10 + len(asked)}", token_ids=(), rounds=0, finish_reason="stop")
        return SimpleNamespace(**vars(empty), acceptance_length=None, would_commit=None, tokens_per_second=None)

    monkeypatch.setattr("ddtree.cli.chat.stream_answer", answer)
    monkeypatch.setattr(builtins, "input", lambda *prompt: next(said))
    options = ("--model", models / "target", "--drafter", models / "drafter", "--threads", "1", "--system", "w9")
    code, _, err = run("chat", *options)
    assert code == 0
    assert asked == [
        ["w9", "w1"],
        ["w9", "w1", "w11", "w2"],
        ["w9", "w1", "w11", "w2", "w12", "w0"],
        ["w9", "w1", "w11", "w2", "w12", "w3"],
        ["w9", "w1", "w11", "w2", "w12", "w0"],
        ["w9", "w1", "w11", "w2", "w12", "w4"],
        ["w9", "w5"],
    ]
    assert "that turn is not kept" in err
    assert "the prompt has 99 tokens; /new starts over" in err


# Trees


def record(tokens, parents, path, scores=None, bonus=99, emitted=None):
    """A round by hand; depths follow from the parents."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    scores = scores or [-0.5 * i for i in range(len(tokens))]
    said = [*(tokens[node] for node in path[1:]), bonus] if emitted is None else emitted
    return RoundRecord(
        "tree", tuple(tokens), tuple(parents), tuple(depths), tuple(scores), tuple(path), tuple(said), None
    )


def drawn(one, decode=lambda tokens: " ".join(f"w{token}" for token in tokens)):
    console = Console(file=io.StringIO(), width=100)
    console.print(draw_tree(one, decode))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_tree_with_its_committed_path():
    scores = [0.0, math.log(0.5), math.log(0.25), math.log(0.125), math.log(0.1)]
    lines = drawn(record([7, 1, 2, 3, 4], [0, 0, 0, 1, 2], [0, 2, 4], scores))
    assert lines == [
        "'w7'  anchor",
        "├── ○ 'w1'  50.0%",
        "│   └── ○ 'w3'  12.5%",
        "└── ● 'w2'  25.0%",
        "    └── ● 'w4'  10.0%",
        "        └── 'w99'  chosen by the target itself",
    ]


def test_trees_of_one_node_and_rounds_cut_short():
    assert drawn(record([7], [0], [0])) == ["'w7'  anchor", "└── 'w99'  chosen by the target itself"]
    cut = record([7, 1, 2], [0, 0, 1], [0, 1, 2], emitted=[1, 2])
    assert drawn(cut)[-1] == "    └── ● 'w2'  36.8%", "the answer ended inside the path: the bonus was not said"


def test_large_trees_show_their_best_nodes_and_all_committed_ones():
    count = 100
    parents = [0] * 98 + [97, 98]
    lines = drawn(record(list(range(count)), parents, [0, 97, 98, 99], [0.0] * count))
    text = "\n".join(lines)
    assert all(f"● 'w{node}'" in text for node in (97, 98, 99))
    assert "'w39'" in text
    assert "'w40'" not in text
    assert lines[-1].endswith(f"and {count - 40 - 3} less probable nodes")
    assert "less probable" not in "\n".join(drawn(record(list(range(40)), [0] * 40, [0])))


def test_tokens_are_shown_as_they_are():
    """Line ends are made visible, and nothing in a token is taken for markup."""
    texts = {7: "[bold]x[/]", 1: "\n", 2: "\t", 99: "[red]"}
    lines = drawn(record([7, 1, 2], [0, 0, 0], [0, 1]), lambda tokens: texts[tokens[0]])
    assert lines[0] == "'[bold]x[/]'  anchor"
    assert "'⏎'" in lines[1]
    assert "'[red]'" in lines[2]
    assert "'⇥'" in lines[3]


def test_the_round_to_show_leaves_the_drafters_first_choices():
    spine = record([7, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 3])
    early = record([7, 1, 2, 3], [0, 0, 0, 2], [0, 2])
    late = record([7, 1, 2, 3, 4], [0, 0, 1, 1, 3], [0, 1, 3])
    root = record([7], [0], [0])
    assert most_branching([]) is None
    assert most_branching([root, root]) is None
    assert most_branching([root, spine]) is spine
    assert most_branching([spine, early]) is early
    assert most_branching([late, early, spine]) is late
    assert most_branching([early, spine, late]) is late


def test_the_version_is_told(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"ddtree {importlib.metadata.version('ddtree')}\n")


def test_progress_in_a_log_is_a_line_now_and_then(capsys):
    """A bar needs a terminal; what is over within seconds says nothing."""
    now = [0.0]
    report = common.lines(lambda: now[0])
    for now[0], done in ((0, 0), (20, 100), (30, 150), (59, 200), (60, 300), (100, 1000)):
        report("answers", done, 1000)
    assert capsys.readouterr().err.splitlines() == [
        "answers: 150 of 1,000, 2.8 min left",
        "answers: 300 of 1,000, 2.3 min left",
        "answers: 1,000 of 1,000, 0.0 min left",
    ]
