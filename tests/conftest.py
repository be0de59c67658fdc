"""What all tests share. One thread for torch: tests run side by side, and toys are too small to share out."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

# Kernels run in Triton's interpreter, which Triton turns to when it is first imported, by whatever library.
# SGLang's tests say themselves where they want it.
if importlib.util.find_spec("sglang") is None:
    os.environ["TRITON_INTERPRET"] = "1"

from ddtree.cli.main import main

torch.set_num_threads(1)


@pytest.fixture
def run(capsys):
    """Run the command line in this process; returns its exit code, standard output and standard error."""

    def command(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return end.value.code or 0, captured.out, captured.err

    return command


@pytest.fixture(scope="session")
def benchmark_module() -> Iterator[Callable[[str], ModuleType]]:
    """A module of benchmarks/ by its name; they import one another as scripts do."""
    folder = str(Path(__file__).resolve().parent.parent / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module
    sys.path.remove(folder)
