"""Make the project's own virtual environment: `python3 scripts/setup_env.py .venv [EXTRA ...]`.

Runs on the system's Python with the standard library alone. On a machine without a GPU it takes a CPU build of
torch: TORCH_INDEX names an index to take torch from; without it, whatever index pip has, and if that would bring a
CUDA build, PyTorch's public CPU index. A stamp makes later runs return at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = os.environ.get("TORCH", "torch==2.13.0")  # what the project is tested with; 2.11 and newer work
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SUPPORTED = ((3, 11), (3, 14))


def main() -> None:
    folder, extras = Path(sys.argv[1]), sorted(sys.argv[2:])
    refuse_other_pythons()
    index = os.environ.get("TORCH_INDEX", "")
    stamp = folder / "ddtree.stamp"
    wanted = fingerprint(extras, index)
    done = stamp.read_text().split() if stamp.exists() else []
    if wanted in done:
        return
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    make_environment(folder, python)
    if not runs(python, "-c", "import torch"):
        install_torch(python, index)
    target = str(ROOT) + (f"[{','.join(extras)}]" if extras else "")
    say("installing ddtree" + (f" with {', '.join(extras)}" if extras else ""))
    pip(python, "install", "--quiet", "--editable", target)
    stamp.write_text("\n".join([*done, wanted]))


def refuse_other_pythons() -> None:
    low, high = SUPPORTED
    if not low <= sys.version_info[:2] < high:
        sys.exit(
            f"ddtree needs Python 3.{low[1]} to 3.{high[1] - 1}; this is {sys.version.split()[0]}. "
            "Name another one: make PYTHON=python3.12 ..."
        )


def fingerprint(extras: list[str], index: str) -> str:
    """Changes when the environment would: with the project's dependencies, the extras, torch or Python."""
    parts = [(ROOT / "pyproject.toml").read_text(), *extras, index, TORCH, sys.version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make_environment(folder: Path, python: Path) -> None:
    """An environment that has pip. What an interrupted set-up left is finished."""
    try:
        if not python.exists():
            say(f"making {folder}")
            venv.create(folder, clear=folder.exists())
        if not runs(python, "-m", "pip", "--version"):
            command = [python, "-m", "ensurepip", "--upgrade", "--default-pip"]
            subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        sys.exit(
            f"cannot make {folder}: {reason}. On Debian and Ubuntu `apt install python3-venv` brings what is "
            "missing; or name another Python: make PYTHON=python3.12 ..."
        )


def runs(python: Path, *arguments: str) -> bool:
    return subprocess.run([python, *arguments], capture_output=True).returncode == 0


def install_torch(python: Path, index: str) -> None:
    if not index and not has_gpu() and sys.platform == "linux" and brings_cuda(python):
        say("pip's index has a CUDA build of torch; taking the CPU build from PyTorch's own index")
        if pip(python, "install", "--progress-bar", "on", TORCH, "--index-url", CPU_INDEX, check=False):
            return
        say(f"{CPU_INDEX} cannot be reached; taking the build that pip's index has (several GB)")
    say(f"installing {TORCH}")
    source = ["--index-url", index] if index else []
    pip(python, "install", "--progress-bar", "on", TORCH, *source)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None


def brings_cuda(python: Path) -> bool:
    """Whether the torch that pip would choose depends on CUDA packages. False when pip cannot tell."""
    command = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, "--report", "-", TORCH], capture_output=True, text=True)
    if done.returncode:
        return False
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    return any(need.startswith(("nvidia", "cuda")) for need in metadata.get("requires_dist", []))


def pip(python: Path, *arguments: str, check: bool = True) -> bool:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command)
    if check and done.returncode:
        sys.exit(f"failed: {' '.join(command[1:])}")
    return done.returncode == 0


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


if __name__ == "__main__":
    main()
