"""The default model behind a service: several chats at once say what each says alone, and second turns hit."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ddtree import LLM, EngineConfig, SamplingParams
from ddtree.engine.service import Submission

pytestmark = pytest.mark.model

QUESTIONS = ("Why is the sky blue?", "Name three rivers in Europe.", "What is 17 times 23?")
PARAMS = SamplingParams(max_tokens=20)
PATIENCE_S = 240


@pytest.fixture(scope="module")
def llm():
    cache = os.environ.get("DDTREE_CACHE")
    config = EngineConfig(max_sequences=3, max_context=512)
    return LLM(dtype="float32", config=config, cache_dir=Path(cache) if cache else None)


def ask(service, prompts):
    """All prompts at once; their completions."""
    ends, left = {}, threading.Semaphore(0)

    def end(i, result):
        ends[i] = result
        left.release()

    for i, prompt in enumerate(prompts):
        service.submit(Submission(tuple(prompt), PARAMS), lambda piece: None, lambda result, i=i: end(i, result))
    for _ in prompts:
        assert left.acquire(timeout=PATIENCE_S)
    return [ends[i] for i in range(len(prompts))]


def test_chats_of_two_turns(llm):
    """In float32, where rounding leaves the choices alone."""
    first = [llm.encode(question) for question in QUESTIONS]
    alone = [llm.generate(ids, PARAMS) for ids in first]
    llm.engine.blocks.forget()
    service = llm.service(max_queue=0)
    try:
        together = ask(service, first)
        assert [done.token_ids for done in together] == [done.token_ids for done in alone]
        before = service.snapshot().prefix_hit_tokens
        turns = [
            [
                {"role": "user", "content": question},
                {"role": "assistant", "content": done.text},
                {"role": "user", "content": "Tell me more."},
            ]
            for question, done in zip(QUESTIONS, together, strict=True)
        ]
        second = [llm.encode(turn) for turn in turns]
        again = ask(service, second)
        numbers = service.snapshot()
        assert numbers.prefix_hit_tokens - before >= 3 * 32
        assert numbers.pages_used == 0
    finally:
        service.close()
    llm.engine.blocks.forget()
    assert [done.token_ids for done in again] == [llm.generate(ids, PARAMS).token_ids for ids in second]
    assert llm.drafter_name == "smollm2-135m-dflash"
