"""More launches of the real SGLang: the production attention kernels, pages, chunks, other modes, its own
seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree.sglang_plugin.settings import Flags
from tests.sglang import models
from tests.sglang.engines import forget, said, serving

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [20, 21]]
COUNT, BLOCK = 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("more")
    for family in ("llama", "qwen3"):
        models.write_target(made / family, family)
    models.write_drafter(made / "drafter", BLOCK)
    return made


def foreseen(folder: Path, family: str, decoy: int = 3, rig: str = "rig") -> list[list[int]]:
    truths = [models.greedy(folder / family, prompt, COUNT + BLOCK) for prompt in PROMPTS]
    proposals = {tuple(p): models.foresight(t, decoy) for p, t in zip(PROMPTS, truths, strict=True)}
    models.write_oracle(folder / rig, proposals)
    return [truth[:COUNT] for truth in truths]


def facts_of(engine: Any) -> dict[str, Any]:
    return engine.get_server_info()["internal_states"][0]["ddtree"]


def test_production_kernels_with_pages_of_four_and_chunked_prefill(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's triton backend, FULL masks, under the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    truths = foreseen(folder, "llama")
    fields = {"attention_backend": "triton", "page_size": 4, "chunked_prefill_size": 8}
    with serving(folder / "rig", folder / "llama", folder / "drafter", Flags(budget=19), **fields) as engine:
        answers = said(engine, PROMPTS, COUNT)
        assert [a["output_ids"] for a in answers] == truths
        assert all(a["meta_info"]["spec_accept_length"] > 3.5 for a in answers)
        for fault in ("causal", "no move"):
            (folder / "rig" / "fault").write_text(fault)
            forget(engine)
            assert [a["output_ids"] for a in said(engine, PROMPTS, COUNT)] != truths
            (folder / "rig" / "fault").unlink()
        forget(engine)
        (first,) = said(engine, PROMPTS[:1], COUNT)
        # Only full pages are reused: the hit ends inside the answer, and the rest is computed anew.
        (again,) = said(engine, [[*PROMPTS[0], *first["output_ids"][:17]]], 6)
        assert again["meta_info"]["cached_tokens"] % 4 == 0
        assert again["meta_info"]["cached_tokens"] >= 16
        assert again["output_ids"] == truths[0][17:23]


def test_chain_with_a_draft_window(folder: Path) -> None:
    truths = foreseen(folder, "llama", decoy=1000)
    fields = {"speculative_draft_window_size": 16}
    with serving(folder / "rig", folder / "llama", folder / "drafter", Flags(mode="chain"), **fields) as engine:
        answers = said(engine, PROMPTS, COUNT)
        assert [a["output_ids"] for a in answers] == truths
        assert all(a["meta_info"]["spec_accept_length"] > 5 for a in answers)
        facts = facts_of(engine)
        assert (facts["mode"], facts["rows"], facts["budget"]) == ("chain", BLOCK, None)


def test_off_decodes_plainly_under_the_same_launch_command(folder: Path) -> None:
    truths = foreseen(folder, "qwen3")
    with serving(folder / "rig", folder / "qwen3", folder / "drafter", Flags(mode="off")) as engine:
        answers = said(engine, PROMPTS, COUNT)
        assert [a["output_ids"] for a in answers] == truths
        assert facts_of(engine)["acceptance_length"] == 1
        assert facts_of(engine)["rows"] == 1


def test_seeded_answers_equal_plain_sglang_in_its_deterministic_mode(folder: Path) -> None:
    """The same seeds, with and without DDTREE, filters included; without a seed given SGLang has one of its
    own."""
    foreseen(folder, "qwen3")
    settings: list[dict[str, Any]] = [
        {"temperature": 20.0},
        {"temperature": 20.0, "top_k": 5},
        {"temperature": 20.0, "top_p": 0.7},
        {"temperature": 1.0, "sampling_seed": 5},
    ]
    answers: dict[str, list[list[int]]] = {}
    accepted = 0.0
    for name, drafter in (("plain", None), ("ddtree", folder / "drafter")):
        fields = {"enable_deterministic_inference": True, "sampling_backend": "pytorch"}
        with serving(folder / "rig", folder / "qwen3", drafter, Flags(budget=31), **fields) as engine:
            answers[name] = []
            for setting in settings:
                batch = said(engine, PROMPTS, COUNT, **{"sampling_seed": 11, **setting})
                answers[name] += [a["output_ids"] for a in batch]
                accepted = max(accepted, *(a["meta_info"].get("spec_accept_length", 0) for a in batch))
    assert answers["ddtree"] == answers["plain"]
    assert accepted > 2, "drafts are coupled to SGLang's noise"
    assert len({tuple(answer) for answer in answers["plain"]}) == len(answers["plain"])
