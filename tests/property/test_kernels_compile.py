"""Kernels compile for GPUs: the interpreter runs what no compiler would take. No GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ddtree.ops.triton.tree import _grow

pointers = ["*i64", "*fp32", "*i64", "*i64", "*i64", "*i64", "*i64", "*fp32", "*i64"]
types = [*pointers, "i32", "i32", "i32", "i32", "constexpr"]
signature = dict(zip(_grow.arg_names, types, strict=True))
for waiting in (16, 256):
    source = ASTSource(fn=_grow, signature=signature, constexprs={"WAITING": waiting})
    found = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 1})
    print("binary of", len(found.asm["cubin"]), "bytes, shared memory", found.metadata.shared)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_the_tree_kernel_compiles_and_stays_in_registers(capability, tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("shared memory 0") == 2, done.stdout
