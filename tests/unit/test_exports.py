"""Every module says what others may use: `__all__` names what is there, and no module takes anything else."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil

import pytest

import ddtree

MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages(ddtree.__path__, "ddtree.") if name != "ddtree.__main__"
)


def load(name):
    """The module. Those of the SGLang plugin that need SGLang are tested in its own environment (tests/sglang);
    Triton is there on Linux alone."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in ("sglang", "triton"):
            pytest.skip(f"needs {error.name}")
        raise


def test_there_are_modules():
    assert len(MODULES) > 80


@pytest.mark.parametrize("name", MODULES)
def test_what_is_offered_is_there(name):
    module = load(name)
    offered = getattr(module, "__all__", [])
    assert all(hasattr(module, one) for one in offered)
    assert offered or module.__doc__, "an empty package at least says what it is for"


@pytest.mark.parametrize("name", MODULES)
def test_only_what_is_offered_is_taken(name):
    module = load(name)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ddtree."):
            offered = set(getattr(load(node.module), "__all__", []))
            taken = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES}
            assert taken <= offered, f"{node.module} does not offer {sorted(taken - offered)}"
