"""Verbs that make files say what they made in one JSON document."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ddtree.cli.main import main
from tests.checkpoints import target_config, target_tensors, write_drafter, write_folder
from tests.toys import VOCABULARY, toy_target

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def target(tmp_path):
    model = toy_target("llama")
    write_folder(tmp_path / "target", target_config(model), target_tensors(model))
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(
        tmp_path / "target"
    )
    return tmp_path / "target"


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert end.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_data(target, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\nnonsense\n')
    given = ("data", "--json", "--model", target, "--prompts", prompts, "--skip-broken", "--out", tmp_path / "out")
    made = {"folder": str(tmp_path / "out"), "prompts": 2, "own_prompts": 0, "broken_lines": 1}
    passes = [{"temperature": t, "answers": 2, "new_tokens": 10} for t in (0.0, 0.5)]
    options = ("--max-tokens", "5", "--temperature", "0", "--temperature", "0.5")
    assert told(capsys, *given, *options) == made | {"passes": passes}
    passes = [one | {"new_tokens": 0} for one in passes]
    assert told(capsys, *given, *options) == made | {"passes": passes}, "nothing is made twice"


def test_export(target, tmp_path, capsys):
    drafter = write_drafter(tmp_path / "drafter")
    out = tmp_path / "out"
    document = told(capsys, "export", out, "--json", "--model", target, "--drafter", drafter, "--storage", "int8")
    size = sum(path.stat().st_size for path in out.iterdir())
    assert document == {"folder": str(out), "storage": "int8", "bytes": size}
