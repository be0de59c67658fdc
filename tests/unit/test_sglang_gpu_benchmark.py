"""The correctness gate of benchmarks/sglang_gpu.py: which divergences count, and which rounding explains."""

from __future__ import annotations

import importlib.util
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
