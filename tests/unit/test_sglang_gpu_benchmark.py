"""The correctness gate of benchmarks/sglang_gpu.py: which divergences count, and which rounding explains."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("sglang_gpu", BENCHMARKS / "sglang_gpu.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["sglang_gpu"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def comparing(benchmark: ModuleType) -> ModuleType:
    return sys.modules[benchmark.compared.__module__]


def test_equal_answers_do_not_diverge(comparing: ModuleType) -> None:
    answer = comparing.Answer((1, 2, 3), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0))
    found = comparing.compare([answer], [answer])
    assert (found["tokens"], found["divergences"], found["unexplained"]) == (3, 0, 0)


@pytest.mark.parametrize(("gap", "unexplained"), [(0.015, 0), (0.5, 1)])
def test_a_divergence_is_explained_by_a_gap_within_twice_the_rounding(
    comparing: ModuleType, gap: float, unexplained: int
) -> None:
    one = comparing.Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4), (1.0, 1.0, gap, 1.0))
    other = comparing.Answer((1, 2, 9, 9), (-0.11, -0.2, -5.0, -5.0), (1.0, 1.0, gap, 1.0))
    found = comparing.compare([one, one], [other, one])
    assert (found["tokens"], found["divergences"]) == (3 + 4, 1), "nothing after a divergence is compared"
    assert found["unexplained"] == unexplained
    assert found["largest_difference"] == pytest.approx(0.01)
    assert found["gaps"] == [gap]


def test_the_rounding_of_all_prompts_counts_whatever_their_order(comparing: ModuleType) -> None:
    quiet = comparing.Answer((1, 2), (-0.1, -0.2), (1.0, 0.25))
    differs = comparing.Answer((1, 3), (-0.1, -0.2), (1.0, 0.25))
    loud = comparing.Answer((1, 2), (-0.3, -0.4), (1.0, 1.0))
    steady = comparing.Answer((1, 2), (-0.1, -0.2), (1.0, 1.0))
    for pairs in ([(quiet, differs), (steady, loud)], [(steady, loud), (quiet, differs)]):
        found = comparing.compare(*zip(*pairs, strict=True))
        assert (found["divergences"], found["unexplained"]) == (1, 0)


def test_as_many_divergences_as_chance_makes_are_no_fault(comparing: ModuleType) -> None:
    assert comparing.chance_of_as_many(1, 100, 1, 100) == pytest.approx(3 / 4)
    assert comparing.chance_of_as_many(3, 100, 0, 300) == pytest.approx(1 / 64)
    assert comparing.chance_of_as_many(0, 100, 0, 100) == 1


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
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result is written with what there is and names what failed; the next run measures nothing twice."""
    script, out = tmp_path / "arm.py", tmp_path / "result.json"
    script.write_text(ARM)
    command = [str(script), "run", "--target", "t", "--drafter", "d", "--budgets", "16", "32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    work = tmp_path / "result.arms"
    work.mkdir()
    (work / "dies DFLASH").touch()
    with pytest.raises(SystemExit, match="not measured: DFLASH; `run` with the same --out tries these again"):
        benchmark.main()
    result = json.loads(out.read_text())
    assert result["missing"] == ["DFLASH"]
    assert result["right"] == {"DDTREE-16": True, "DDTREE-32": False, "plain again": True}
    assert result["arms"]["DDTREE-16"]["speed"] == {"1": "DDTREE-16"}
    assert "together" not in result["arms"]["plain"]
    (work / "dies DFLASH").unlink()
    benchmark.main()
    assert json.loads(out.read_text())["missing"] == []
    arms = ["plain", "DFLASH", "DDTREE-16", "DDTREE-32", "plain again"]
    assert (work / "started").read_text().splitlines() == [*arms, "DFLASH"]
    out.unlink()
    words = ["compare", "--budgets", "16", "32", "--out", str(out), "--note", "on a busy host"]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    benchmark.main()
    assert json.loads(out.read_text())["note"] == "on a busy host"
    assert len((work / "started").read_text().splitlines()) == 6, "nothing is measured"


def test_nothing_is_compared_without_plain_decoding(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, out = tmp_path / "arm.py", tmp_path / "result.json"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(sys, "argv", [str(script), "run", "--target", "t", "--drafter", "d", "--out", str(out)])
    with pytest.raises(SystemExit, match="no answers of plain decoding"):
        benchmark.main()
    assert not out.exists()
