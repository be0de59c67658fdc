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


def test_equal_answers_do_not_diverge(benchmark: ModuleType) -> None:
    answer = benchmark.Answer((1, 2, 3), (-0.1, -0.2, -0.3), (1.0, 1.0, 1.0))
    found = benchmark.compare([answer], [answer])
    assert (found["tokens"], found["divergences"], found["unexplained"]) == (3, 0, 0)


@pytest.mark.parametrize(("gap", "unexplained"), [(0.015, 0), (0.5, 1)])
def test_a_divergence_is_explained_by_a_gap_within_twice_the_rounding(
    benchmark: ModuleType, gap: float, unexplained: int
) -> None:
    one = benchmark.Answer((1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4), (1.0, 1.0, gap, 1.0))
    other = benchmark.Answer((1, 2, 9, 9), (-0.11, -0.2, -5.0, -5.0), (1.0, 1.0, gap, 1.0))
    found = benchmark.compare([one, one], [other, one])
    assert (found["tokens"], found["divergences"]) == (3 + 4, 1), "nothing after a divergence is compared"
    assert found["unexplained"] == unexplained
    assert found["largest_difference"] == pytest.approx(0.01)
    assert found["gaps"] == [gap]


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
    with pytest.raises(SystemExit, match=r"failed: DFLASH .*the same command tries these again"):
        benchmark.main()
    result = json.loads(out.read_text())
    assert result["failed"] == ["DFLASH"]
    assert result["right"] == {"DDTREE-16": True, "DDTREE-32": False, "plain again": True}
    assert result["arms"]["DDTREE-16"]["speed"] == {"1": "DDTREE-16"}
    assert "together" not in result["arms"]["plain"]
    (work / "dies DFLASH").unlink()
    benchmark.main()
    assert json.loads(out.read_text())["failed"] == []
    arms = ["plain", "DFLASH", "DDTREE-16", "DDTREE-32", "plain again"]
    assert (work / "started").read_text().splitlines() == [*arms, "DFLASH"]


def test_nothing_is_compared_without_plain_decoding(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, out = tmp_path / "arm.py", tmp_path / "result.json"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(sys, "argv", [str(script), "run", "--target", "t", "--drafter", "d", "--out", str(out)])
    with pytest.raises(SystemExit, match="plain decoding failed"):
        benchmark.main()
    assert not out.exists()
