"""The correctness gate of benchmarks/sglang_gpu.py: which divergences count, and which rounding explains."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def comparing(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("sglang_compare")


@pytest.fixture(scope="module")
def command(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("sglang_gpu")


def arms(comparing: ModuleType, gap: float, other: tuple[float, ...]) -> dict[str, object]:
    """Plain decoding, whose rounding is 0.1, and an arm that leaves it at the third token of its first prompt."""
    plain = comparing.Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4), (1.0, 1.0, gap, 1.0))
    alone = comparing.Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.5), (1.0, 1.0, gap, 1.0))
    leaves = comparing.Answer((1, 2, 9, 9), (-0.1, -0.2, -5.0, -5.0), (1.0, 1.0, gap, 1.0))
    stays = comparing.Answer((1, 2, 3, 4), other, (1.0, 1.0, 1.0, 1.0))
    told = {"together": [asdict(plain)] * 2, "alone": [asdict(plain), asdict(alone)], "speed": 1}
    return {"plain": told, "tree": {"together": [asdict(leaves), asdict(stays)], "speed": 2}}


def test_equal_answers_do_not_diverge(comparing: ModuleType) -> None:
    answer = comparing.Answer((1, 2, 3), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0))
    found = comparing.compare([answer], [answer])
    assert (found["tokens"], found["divergences"], found["largest_difference"]) == (3, 0, 0)


@pytest.mark.parametrize(("gap", "unexplained"), [(0.19, 0), (0.21, 1)])
def test_a_divergence_is_explained_by_a_gap_within_twice_plains_own_rounding(
    comparing: ModuleType, gap: float, unexplained: int
) -> None:
    result = comparing.compared(arms(comparing, gap, (-0.1, -0.2, -0.3, -0.4)))
    found = result["arms"]["tree"]["against_plain"]
    assert (found["tokens"], found["divergences"]) == (3 + 4, 1), "nothing after a divergence is compared"
    assert (found["unexplained"], found["gaps"]) == (unexplained, [gap])
    assert result["arms"]["plain"]["control"]["largest_difference"] == pytest.approx(0.1)
    assert result["arms"]["tree"]["speed"] == 2
    assert result["right"] == {"tree": not unexplained}


def test_an_arm_that_disturbs_one_prompt_is_wrong_and_excuses_no_other(comparing: ModuleType) -> None:
    """A cache that lost a key moves one prompt's log-probabilities by more than rounding does."""
    result = comparing.compared(arms(comparing, 0.5, (-0.1, -0.2, -2.3, -0.4)))
    assert result["arms"]["tree"]["against_plain"]["unexplained"] == 1
    result = comparing.compared(arms(comparing, 0.1, (-0.1, -0.2, -2.3, -0.4)))
    assert result["arms"]["tree"]["against_plain"]["unexplained"] == 0
    assert result["right"] == {"tree": False}


NAN = float("nan")


def test_log_probabilities_that_are_no_numbers_are_not_right(comparing: ModuleType) -> None:
    result = comparing.compared(arms(comparing, 0.1, (-0.1, NAN, -0.3, -0.4)))
    assert result["right"] == {"tree": False}
    assert comparing.compared(arms(comparing, NAN, (-0.1, -0.2, -0.3, -0.4)))["right"] == {"tree": False}
    some = arms(comparing, 0.1, (-0.1, -0.2, -0.3, -0.4))
    some["plain"]["alone"][1]["log_probs"] = (-0.1, NAN, -0.3, -0.4)
    with pytest.raises(SystemExit, match="plain decoding's log-probabilities are no numbers"):
        comparing.compared(some)


@pytest.mark.parametrize("ends", [0, 3])
def test_an_answer_that_only_stops_too_early_is_not_right(comparing: ModuleType, ends: int) -> None:
    """Its tokens are plain's, as far as they go."""
    some = arms(comparing, 0.1, (-0.1, -0.2, -0.3, -0.4))
    some["tree"]["together"][1] = {name: row[:ends] for name, row in some["tree"]["together"][1].items()}
    result = comparing.compared(some)
    assert result["arms"]["tree"]["against_plain"]["other_ends"] == 1
    assert result["right"] == {"tree": False}


def test_arms_that_were_asked_for_other_things_are_not_compared(comparing: ModuleType) -> None:
    some = arms(comparing, 0.1, (-0.1, -0.2, -0.3, -0.4))
    some["tree"]["asked"] = {"tokens": "64"}
    with pytest.raises(SystemExit, match=r"tree was measured with .*64.* they cannot be compared"):
        comparing.compared(some)


def test_as_many_divergences_as_chance_makes_are_no_fault(comparing: ModuleType) -> None:
    assert comparing.chance_of_as_many(1, 100, 1, 100) == pytest.approx(3 / 4)
    assert comparing.chance_of_as_many(3, 100, 0, 300) == pytest.approx(1 / 64)
    assert comparing.chance_of_as_many(0, 100, 0, 100) == 1


def test_divergences_that_rounding_explains_one_by_one_are_too_many_together(comparing: ModuleType) -> None:
    """Six ties in a row that all turn, where plain decoding turns none in four times as many tokens."""
    plain = asdict(comparing.Answer((1, 2, 3, 4), (-0.1,) * 4, (0.0,) * 4))
    other = asdict(comparing.Answer((9, 2, 3, 4), (-0.1,) * 4, (0.0,) * 4))
    told = {"plain": {"together": [plain] * 6, "alone": [plain] * 6}, "tree": {"together": [other] * 6}}
    result = comparing.compared(told)
    found = result["arms"]["tree"]["against_plain"]
    assert (found["unexplained"], found["tokens"]) == (0, 6)
    assert found["chance"] == pytest.approx((6 / 30) ** 6)
    assert result["right"] == {"tree": False}


ARM = """
import json, pathlib, sys
name, out = sys.argv[-1], pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
work = out.with_suffix(".arms")
work.mkdir(exist_ok=True)
with (work / "started").open("a") as started:
    print(name, file=started)
if (work / ("dies " + name)).exists():
    sys.exit(1)
wrong = 9 if name == "DDTREE-32" else 2
answers = [{"tokens": [1, token, 3], "log_probs": [-0.1] * 3, "gaps": [1.0] * 3} for token in (2, wrong)]
arm = {"together": answers, "alone": answers, "speed": {"1": name}}
(work / (name + ".json")).write_text(json.dumps(arm))
"""


def test_an_arm_that_dies_costs_no_other_and_is_tried_again(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result is written with what there is and names what failed; the next run measures nothing twice."""
    script, out = tmp_path / "arm.py", tmp_path / "result.json"
    script.write_text(ARM)
    words = [str(script), "run", "--target", "t", "--drafter", "d", "--budgets", "16", "32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    work = tmp_path / "result.arms"
    work.mkdir()
    (work / "dies DFLASH").touch()
    with pytest.raises(SystemExit, match="not measured: DFLASH; `run` with the same --out tries these again"):
        command.main()
    result = json.loads(out.read_text())
    assert result["missing"] == ["DFLASH"]
    assert result["right"] == {"DDTREE-16": True, "DDTREE-32": False, "plain again": True}
    assert result["arms"]["DDTREE-16"]["speed"] == {"1": "DDTREE-16"}
    assert "together" not in result["arms"]["plain"]
    (work / "dies DFLASH").unlink()
    command.main()
    assert json.loads(out.read_text())["missing"] == []
    arms = ["plain", "DFLASH", "DDTREE-16", "DDTREE-32", "plain again"]
    assert (work / "started").read_text().splitlines() == [*arms, "DFLASH"]
    out.unlink()
    words = ["compare", "--budgets", "16", "32", "--out", str(out), "--note", "on a busy host"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    command.main()
    assert json.loads(out.read_text())["note"] == "on a busy host"
    assert len((work / "started").read_text().splitlines()) == 6, "nothing is measured"


def test_nothing_is_compared_without_plain_decoding(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, out = tmp_path / "arm.py", tmp_path / "result.json"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(sys, "argv", [str(script), "run", "--target", "t", "--drafter", "d", "--out", str(out)])
    with pytest.raises(SystemExit, match="no answers of plain decoding"):
        command.main()
    assert not out.exists()
