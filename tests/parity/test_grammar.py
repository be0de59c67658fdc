"""Grammars in the engine: trees whose branches cross the grammar's boundaries say what plain decoding says."""

from __future__ import annotations

import json
from functools import cache

import pytest

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import BatchEngine
from ddtree.models.load import LoadedDrafter
from ddtree.server.grammar import Grammars
from ddtree.speculation.params import SamplingParams
from ddtree.speculation.plan import fixed_plan
from tests.drafters import LAYERS, OracleDrafter, draft_with, pieces, records_of, tokens_of
from tests.toys import toy_drafter, toy_target
from tests.unit.fake_service import tokenizer

VOCABULARY = 300  # more than the tokenizer has, as many models do
BLOCK = 8
PLANS = {mode: fixed_plan(mode, BLOCK, 16) for mode in ("off", "chain", "tree", "shadow")}
EOS = tokenizer().backend.eos_token_id
PROMPT = tokenizer().encode("Say something.")
ITEMS = {"type": "array", "items": {"enum": ["on", "off", None, 12]}, "minItems": 3, "maxItems": 5}
TOOLS = {"go": {"type": "object", "properties": {"to": {"enum": ["here", "there"]}}, "required": ["to"]}}
CLOSED = {"go": TOOLS["go"] | {"additionalProperties": False}}
# A thought of its own, then a call: the grammar changes inside what one round may accept.
THOUGHT = '%llguidance {}\nstart: "<think>" /[a-c]{2}/ "</think>" call\n'


@cache
def grammars():
    return Grammars(tokenizer().backend, VOCABULARY, [EOS])


def grammar_of(kind):
    if kind == "items":
        return grammars().json_schema(ITEMS)
    if kind == "calls":
        return grammars().tool_calls(CLOSED, required=True, parallel=True)
    call = json.dumps(
        {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]} | {"additionalProperties": False}
    )
    return grammars().checked(f"{THOUGHT}call: %json {call}\n")


@cache
def engine():
    target = toy_target("qwen3", layers=2, vocabulary=VOCABULARY, eos_ids=(EOS,))
    drafter = toy_drafter(target, layers=1, layer_ids=LAYERS, block_size=BLOCK, mask_token_id=VOCABULARY - 1)
    return BatchEngine(target, LoadedDrafter(*drafter), EngineConfig(max_context=512), tokenizer().decode)


@pytest.mark.parametrize("kind", ["items", "calls", "thought"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}])
def test_every_mode_says_what_plain_decoding_says(kind, sampling):
    def params():
        return SamplingParams(max_tokens=160, constraint=grammar_of(kind).constraint(), **sampling)

    plain = tokens_of(pieces(engine(), PROMPT, params(), PLANS["off"]))
    longest = 0
    for seed in range(3):
        for mode in ("chain", "tree", "shadow"):
            # An oracle that is often right, with decoys beside the truth that the grammar would refuse.
            oracle = OracleDrafter([[*PROMPT, *plain]], VOCABULARY, seed=seed, chances=(0.7, 0.15, 0.1))
            draft_with(engine(), oracle)
            answer = pieces(engine(), PROMPT, params(), PLANS[mode])
            assert tokens_of(answer) == plain
            longest = max(longest, *(len(record.path) for record in records_of(answer)))
    assert longest > 3, "paths were long enough to cross something"
    if plain[-1] == EOS:
        text = tokenizer().decode(plain)
        if kind == "items":
            assert set(json.loads(text)) <= {"on", "off", None, 12}
        else:
            assert text.endswith("</tool_call>" if kind == "calls" else "}")
