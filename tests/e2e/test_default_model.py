"""The command line on the real default model with the drafter that ships for it.

Comparisons are in float32, where rounding leaves the choices alone; what is timed is left to benchmarks.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ddtree import LLM, SamplingParams
from ddtree.cli.common import cache_dir
from ddtree.data.prompts import read_prompts
from ddtree.errors import CheckpointError
from ddtree.models.hub import locate
from ddtree.models.shipped import SHIPPED
from ddtree.provenance import text_hash

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parents[2]
SETS = (("gsm8k_test", 3), ("humaneval", 3), ("mt_bench", 2))
DRAFTER = SHIPPED / "smollm2-135m-dflash"
FRANCE = "What is the capital of France?"
SEA = "Tell me a story about the sea."


@cache
def texts():
    """Eight real prompts: arithmetic, code and talk."""
    folder = ROOT / "benchmarks" / "prompts"
    return [prompt.text for name, count in SETS for prompt in read_prompts(folder / f"{name}.jsonl")[0][:count]]


@cache
def llm():
    return LLM(dtype="float32", cache_dir=cache_dir())


@cache
def answer(prompt, mode="tree", count=256, drafter=llm, **settings):
    """What the model says to a prompt, its own end ignored. drafter: the function that opens the model."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, **settings)
    return drafter().generate(prompt, params, plan=drafter().plan(mode))


@cache
def huggingface():
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = locate("smollm2-135m", cache_dir=cache_dir()).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


# The text


@pytest.mark.parametrize("index", range(8))
@torch.inference_mode()
def test_the_tree_says_what_transformers_says(index):
    """256 new tokens, each the one that transformers finds best after all before it: its greedy text, by induction
    and in one pass."""
    prompt = texts()[index]
    ids, found = llm().encode(prompt), answer(prompt)
    said = list(found.token_ids)
    assert len(said) == 256
    logits_LV = huggingface()(torch.tensor([[*ids, *said[:-1]]])).logits[0]
    assert logits_LV[len(ids) - 1 :].argmax(-1).tolist() == said
    assert found.rounds < 160, "a drafter that is never right would take 255 rounds"


@torch.inference_mode()
def test_every_mode_says_what_transformers_generates():
    """Its own loop, token by token."""
    prompt = texts()[1]
    ids = torch.tensor([llm().encode(prompt)])
    output = huggingface().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=256, pad_token_id=2
    )
    expected = tuple(output[0, ids.shape[1] :].tolist())
    assert len(expected) == 256
    assert answer(prompt).token_ids == expected
    assert answer(prompt, "off").token_ids == expected
    assert answer(prompt, "chain").token_ids == expected
    assert answer(prompt, "shadow", 40).token_ids == expected[:40]


def test_modes_say_the_same_of_code():
    plain, chain, tree = (answer(texts()[5], mode, 128) for mode in ("off", "chain", "tree"))
    assert plain.token_ids == chain.token_ids == tree.token_ids
    assert plain.text == chain.text == tree.text
    assert plain.rounds == 127 > chain.rounds > tree.rounds


def test_sampled_text_depends_on_the_seed_and_not_on_the_mode():
    settings = {"temperature": 0.8, "top_p": 0.9, "count": 40}
    plain, tree = (answer(SEA, mode, seed=7, **settings) for mode in ("off", "tree"))
    assert tree.token_ids == plain.token_ids
    assert len(plain.token_ids) == 40
    assert tree.rounds < plain.rounds
    assert answer(SEA, "tree", seed=8, **settings).token_ids != plain.token_ids


# The drafter


def test_the_shipped_drafter_is_small_and_carries_its_proof():
    files = {path.name: path.stat().st_size for path in DRAFTER.iterdir()}
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 20 * 2**20
    assert set(files) >= {"config.json", "model.safetensors", "parity.safetensors", "training.json", "README.md"}
    assert not re.search(r"/(home|root|tmp|Users|work)/", (DRAFTER / "training.json").read_text(encoding="utf-8"))


def test_the_shipped_drafter_accepts_what_it_did_when_it_was_trained():
    """A wrongly loaded drafter accepts next to nothing: its rounds commit little more than one token each."""
    found = [answer(prompt) for prompt in texts()[:3]]
    assert sum(len(one.token_ids) - 1 for one in found) / sum(one.rounds for one in found) > 2.5


def test_a_drafter_that_was_altered_is_refused(tmp_path):
    """The stored logits notice one wrong key: rope, which changes no shape."""
    folder = tmp_path / "altered"
    folder.mkdir()
    for path in DRAFTER.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((DRAFTER / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="drafted logits differ from those stored at training"):
        LLM(drafter=str(folder), dtype="float32", cache_dir=cache_dir())


def test_an_exported_drafter_is_as_good(run, tmp_path):
    """z-lab's bfloat16 layout: no trace of int8, the same text, and as many rounds but for noise."""
    code, _, err = run("export", tmp_path / "bf16")
    assert (code, "MiB, bfloat16" in err) == (0, True)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    assert config["dflash_config"]["mask_token_id"] == 16
    with safe_open(tmp_path / "bf16" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.4.self_attn.q_proj.weight"} <= names
    assert len(names) == 3 + 5 * 11

    @cache
    def exported():
        return LLM(drafter=str(tmp_path / "bf16"), dtype="float32", cache_dir=cache_dir())

    mine, theirs = ([answer(p, count=96, drafter=which) for p in texts()[:2]] for which in (llm, exported))
    assert [one.token_ids for one in mine] == [one.token_ids for one in theirs]
    assert sum(one.rounds for one in theirs) == pytest.approx(sum(one.rounds for one in mine), rel=0.06)


# The command line

TYPES = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "rounds": int,
    "acceptance_length": float,
    "tokens_per_second": float,
    "prompt_tokens": int,
    "prompt_hash": str,
    "model": str,
    "mode": str,
    "budget": int,
    "block_size": int,
    "temperature": float,
    "seed": type(None),
    "dtype": str,
    "device": str,
    "prefill_s": float,
    "decode_s": float,
}


def test_the_document_of_an_answer(run):
    """Its keys are those that the reference lists, and its figures fit together."""
    code, out, err = run("generate", FRANCE, "--json", "--dtype", "float32", "--show-tree", "--threads", "1")
    assert (code, err.strip()) == (0, "")
    found = json.loads(out)
    assert {key: type(value) for key, value in found.items() if key != "trees"} == TYPES
    section = (ROOT / "docs/reference/json.md").read_text(encoding="utf-8").split("## ")[1]
    documented = {
        key for row in re.findall(r"^\| (`.*?) \|", section, re.M) for key in re.findall(r"`(\w+)`", row)
    }
    assert documented == {*TYPES, "would_commit", "trees"}
    tokenizer = llm().tokenizer
    assert found["text"] == tokenizer.decode(found["token_ids"]) == "The capital of France is Paris."
    assert found["token_ids"][-1] == 2
    assert found["finish_reason"] == "stop"
    assert (found["model"], found["mode"], found["budget"], found["block_size"]) == (
        "smollm2-135m",
        "tree",
        16,
        16,
    )
    prompt = llm().encode(FRANCE)
    assert found["prompt_tokens"] == len(prompt)
    assert found["prompt_hash"] == text_hash([tokenizer.decode_all(prompt)])
    assert found["acceptance_length"] == (len(found["token_ids"]) - 1) / found["rounds"]
    assert found["tokens_per_second"] == pytest.approx((len(found["token_ids"]) - 1) / found["decode_s"])
    assert len(found["trees"]) == found["rounds"]
    assert [token for tree in found["trees"] for token in tree["emitted"]] == found["token_ids"][1:]
    for tree in found["trees"]:
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["depths"]) == len(tree["scores"])
        assert tree["tokens"][0] in found["token_ids"]


def test_streamed_text_a_stop_string_and_a_tree(run, monkeypatch):
    """The prompt from standard input; the text on standard output and everything about it on standard error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(FRANCE))
    options = ("--dtype", "float32", "--threads", "1")
    code, out, err = run("generate", "-", "--stop", " Paris", *options)
    assert (code, out) == (0, "The capital of France is\n")
    assert re.search(
        r"tree of 16 · \d+ tokens · \d+ rounds · acceptance [\d.]+ · [\d.]+ tokens/s · ended by stop", err
    )
    code, out, err = run("generate", FRANCE, "--show-tree", "--max-tokens", "6", *options)
    said, *tree = out.splitlines()
    assert said == "The capital of France is Paris"
    assert tree[0].endswith("anchor")
    assert any("●" in line for line in tree)
    assert "ended by length" in err


def test_a_prompt_that_is_too_long(run):
    code, out, err = run("generate", " ".join(["word"] * 80), "--max-context", "64", "--threads", "1")
    assert (code, out) == (2, "")
    assert re.search(r"^ddtree: the prompt has \d+ tokens, but the context holds 64 .*; shorten it", err, re.M)


def test_the_second_turn_of_a_chat_knows_the_first(run, monkeypatch):
    said = f"{FRANCE}\nRepeat your last answer.\n/new\nRepeat your last answer.\n\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    code, out, err = run("chat", "--dtype", "float32", "--threads", "1", "--max-tokens", "12")
    first, second, third = out.splitlines()
    assert code == 0
    assert first == second == "The capital of France is Paris."
    assert "Paris" not in third, "/new forgets"
    assert len(re.findall("ended by", err)) == 3


@pytest.mark.skipif(os.name != "posix", reason="signals of a terminal")
def test_ctrl_c_in_mid_stream():
    """The text so far stays, one line says what was measured, and the exit code is that of an interrupt."""
    command = [sys.executable, "-m", "ddtree", "generate", SEA, "--max-tokens", "4000", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # What runs in the background of a shell is started deaf to interrupts, and so would this be.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        begun = os.read(process.stdout.fileno(), 4096)
        assert begun
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    text, notes = (begun + rest).decode(), errors.decode()
    assert "Traceback" not in notes
    assert "ended by cancelled" in notes
    assert len(text.strip()) > 0
    assert text.endswith("\n")
    whole = llm().generate(SEA, SamplingParams(max_tokens=40)).text
    assert whole.startswith(text.rstrip("\n")) or text.startswith(whole)
