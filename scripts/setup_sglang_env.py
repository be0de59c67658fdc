"""Make the environment for the tests with the real SGLang: `python3 scripts/setup_sglang_env.py .venv-sglang`.

SGLang pins its own torch and transformers, so it lives beside the project's environment, never in it. On a CPU
most of what SGLang declares (CUDA kernels, video and audio codecs) can be neither installed nor used: the list
below is what its imports need there. Stand-ins for its compiled operators are in tests/sglang/stubs. A stamp makes
later runs return at once; the first takes about two minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from setup_env import CPU_INDEX, ROOT, brings_cuda, make_environment, pip, refuse_other_pythons, runs, say

SGLANG = "sglang==0.5.23"
TORCH = "torch==2.13.0"
# What SGLang imports on a CPU; the exact versions are those that it pins itself.
NEEDS = [
    "numpy",
    "orjson",
    "psutil",
    "pyzmq",
    "requests",
    "aiohttp",
    "fastapi",
    "uvicorn>=0.51",
    "uvloop",
    "pybase64",
    "pydantic",
    "python-multipart",
    "prometheus-client",
    "packaging",
    "partial_json_parser",
    "pillow",
    "msgspec",
    "setproctitle",
    "tqdm",
    "transformers==5.19.0",
    "tokenizers==0.23.2",
    "sentencepiece==0.2.1",
    "einops",
    "interegular",
    "IPython",
    "tiktoken",
    "regex",
    "xxhash",
    "zstandard",
    "scipy",
    "gguf",
    "watchfiles",
    "distro",
    "compressed-tensors==0.18.0",
    "dill",
    "openai==2.8.0",
    "openai-harmony==0.0.4",
    "llguidance<2",
    "anthropic>=0.20.0",
    "mistral_common>=1.11.5",
    "cffi",
    "safetensors",
]
# Their own dependencies are GPU builds, or already in the list above.
WITHOUT_DEPENDENCIES = ["triton", "apache-tvm-ffi==0.1.11", "xgrammar==0.2.7", "soundfile==0.13.1", SGLANG]
STUBS = ROOT / "tests" / "sglang" / "stubs"
TESTS = ["pytest>=8.3", "pytest-timeout>=2.3"]


def main() -> None:
    folder = Path(sys.argv[1])
    refuse_other_pythons()
    stamp = folder / "ddtree.stamp"
    wanted = fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    python = folder / "bin" / "python"
    if folder.exists():
        say(f"{folder} belongs to other requirements; making it anew")
        shutil.rmtree(folder)
    make_environment(folder, python)
    index = os.environ.get("TORCH_INDEX", "")
    if not runs(python, "-c", "import torch"):
        source = ["--index-url", index or CPU_INDEX] if index or brings_cuda(python) else []
        say(f"installing {TORCH}")
        pip(python, "install", "--quiet", TORCH, *source)
    say(f"installing {SGLANG} and what it needs on a CPU")
    pip(python, "install", "--quiet", TORCH, *NEEDS, *TESTS)
    pip(python, "install", "--quiet", "--no-deps", *WITHOUT_DEPENDENCIES)
    say("installing ddtree")
    pip(python, "install", "--quiet", "--editable", str(ROOT))
    pip(python, "install", "--quiet", "--no-deps", "--editable", str(STUBS))
    stamp.write_text(wanted)


def fingerprint() -> str:
    """Changes when the environment would: with this list, the project's own dependencies or Python."""
    parts = [Path(__file__).read_text(), (ROOT / "pyproject.toml").read_text(), sys.version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
