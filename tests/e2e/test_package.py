"""The wheel: built, installed where nothing of the checkout can be seen, and holding all that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import ddtree, pathlib, sys
home = pathlib.Path(ddtree.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
from ddtree.models.shipped import SHIPPED
assert (SHIPPED / "smollm2-135m-dflash" / "model.safetensors").stat().st_size > 1_000_000
from starlette.testclient import TestClient
from ddtree.server.app import create_app
from ddtree.server.limits import Limits
def never():
    raise SystemExit
client = TestClient(create_app(never, limits=Limits()))
assert "<title>ddtree</title>" in client.get("/").text
for name in ("style.css", "app.js", "tree.js", "run.js"):
    assert client.get(f"/ui/{name}").status_code == 200
print("whole")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: a build leaves its traces in the tree that it is made from.
    source = folder / "source"
    source.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "src", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "-w", str(folder), str(source)], check=True, capture_output=True, text=True)
    return next(folder.glob("ddtree-*.whl"))


def test_what_the_wheel_holds(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("index.html", "style.css", "app.js", "tree.js", "run.js"):
        assert f"ddtree/server/ui/{name}" in names
    assert "ddtree/models/shipped/smollm2-135m-dflash/model.safetensors" in names
    assert "ddtree/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_it_works_where_it_is_installed(wheel, tmp_path):
    place = tmp_path / "env"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    # The checkout may be on PYTHONPATH: pip would find ddtree there and be content, and so would Python.
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True, env=clean)
    # What ddtree depends on comes from the environment of the tests; ddtree itself must not.
    site = next(place.glob("lib/python*/site-packages"))
    (site / "others.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200)

    probe = run(python, "-c", PROBE)
    assert probe.stdout.strip() == "whole", probe.stderr
    told = run(place / "bin" / "ddtree", "serve", "--help")
    assert told.returncode == 0
    assert "OpenAI" in told.stdout
