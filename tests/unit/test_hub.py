"""From a name to a folder: the order of places, atomic building, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import snapshot_download

from ddtree.errors import CheckpointError, ConfigError, DownloadError, StorageError, UnsupportedError
from ddtree.models import hub, install
from ddtree.models.catalog import CATALOG, DEFAULT_MODEL, CatalogModel, WheelSource
from ddtree.models.hub import find, locate
from ddtree.models.install import prepare

MEMBER = bytes(range(256)) * 400
FORK = multiprocessing.get_context("fork")
Progress = Callable[[int, int], None]


@pytest.fixture
def entry(tmp_path: Path) -> CatalogModel:
    """A catalogue entry whose wheel lies in `tmp_path`."""
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", MEMBER)
    source = WheelSource(
        project="tiny",
        version="1.0",
        filename=path.name,
        wheel_bytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="tiny/model.gguf",
        member_bytes=len(MEMBER),
        member_sha256=hashlib.sha256(MEMBER).hexdigest(),
    )
    return CatalogModel("tiny", "owner/tiny", "Apache-2.0", source, converted_bytes=1000, drafter="tiny-dflash")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _fake_conversion(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "model" not in request.keywords:
        monkeypatch.setattr(install, "convert", write_model)


def write_model(source: Path, folder: Path, *, progress: Progress) -> None:
    assert source.read_bytes() == MEMBER
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(MEMBER)
    progress(len(MEMBER), len(MEMBER))


def resolver(tmp_path: Path) -> Callable[[WheelSource], str]:
    return lambda source: (tmp_path / source.filename).as_uri()


def no_network(source: WheelSource) -> str:
    raise DownloadError("there is no network")


def left_over(cache: Path) -> list[str]:
    """What lies beside the models, locks aside."""
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


# Building a catalogue model


def test_a_catalogue_model_is_built_once_and_cleans_up(entry: CatalogModel, cache: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    folder = prepare(entry, cache, resolve=resolver(tmp_path), progress=lambda stage, d, t: stages.append(stage))
    assert folder == cache / "models" / "tiny"
    assert left_over(cache) == ["tiny"]
    assert list(dict.fromkeys(stages)) == ["download", "convert"]
    assert prepare(entry, cache, resolve=no_network) == folder


def test_provenance_names_source_licence_and_hashes(entry: CatalogModel, cache: Path, tmp_path: Path) -> None:
    folder = prepare(entry, cache, resolve=resolver(tmp_path))
    record = json.loads((folder / "provenance.json").read_text())
    assert (record["model"], record["origin"], record["licence"]) == ("tiny", "owner/tiny", "Apache-2.0")
    assert record["source"]["member_sha256"] == entry.wheel.member_sha256
    assert record["files"]["model.safetensors"] == {
        "bytes": len(MEMBER),
        "sha256": hashlib.sha256(MEMBER).hexdigest(),
    }
    assert record["versions"]["gguf"]


def test_of_two_processes_the_second_waits(
    entry: CatalogModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def slow(source: Path, folder: Path, *, progress: Progress) -> None:
        with log.open("a") as file:
            file.write("convert\n")
        patience = time.monotonic() + 10
        while "wait!" not in log.read_text() and time.monotonic() < patience:
            time.sleep(0.01)  # until the other process stands at the lock
        write_model(source, folder, progress=progress)

    def note(stage: str, done: int, total: int) -> None:
        with log.open("a") as file:
            file.write(f"{stage}!\n")

    def child() -> None:
        folder = prepare(entry, cache, resolve=resolver(tmp_path), progress=note)
        assert (folder / "provenance.json").exists()

    monkeypatch.setattr(install, "convert", slow)
    children = [FORK.Process(target=child) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    assert [process.exitcode for process in children] == [0, 0]
    assert log.read_text().splitlines().count("convert") == 1
    assert log.read_text().splitlines().count("wait!") == 1


def test_a_process_killed_while_converting_leaves_no_model(
    entry: CatalogModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(source: Path, folder: Path, *, progress: Progress) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(MEMBER[:100])
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(install, "convert", die)
        child = FORK.Process(target=prepare, args=(entry, cache), kwargs={"resolve": resolver(tmp_path)})
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    assert "tiny" not in left_over(cache)
    folder = prepare(entry, cache, resolve=no_network)  # the download was kept
    assert (folder / "model.safetensors").read_bytes() == MEMBER
    assert left_over(cache) == ["tiny"]


def test_a_folder_without_provenance_is_built_anew(entry: CatalogModel, cache: Path, tmp_path: Path) -> None:
    folder = cache / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("half")
    (folder / "stray").write_text("half")
    prepare(entry, cache, resolve=resolver(tmp_path))
    assert (folder / "config.json").read_text() == "{}"
    assert not (folder / "stray").exists()


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_folder_is_built_anew(entry: CatalogModel, cache: Path, tmp_path: Path, damage: str) -> None:
    weights = prepare(entry, cache, resolve=resolver(tmp_path)) / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(MEMBER[:-1])
    else:
        weights.unlink()
    prepare(entry, cache, resolve=resolver(tmp_path))
    assert weights.read_bytes() == MEMBER


@pytest.mark.parametrize("change", ["conversion", "pin"])
def test_a_folder_of_another_version_is_built_anew(
    entry: CatalogModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    prepare(entry, cache, resolve=resolver(tmp_path))
    if change == "conversion":
        monkeypatch.setattr(install, "_CONVERSION", install._CONVERSION + 1)
    else:
        entry = replace(entry, wheel=replace(entry.wheel, version="1.1"))
    with pytest.raises(DownloadError, match="no network"):
        prepare(entry, cache, resolve=no_network)


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_no_model(
    entry: CatalogModel,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
) -> None:
    def fail(source: Path, folder: Path, *, progress: Progress) -> None:
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(install, "convert", fail)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        prepare(entry, cache, resolve=resolver(tmp_path))
    assert left_over(cache) == [".tiny.downloads"]


def test_too_little_room_is_said_before_anything_is_fetched(
    entry: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    with pytest.raises(StorageError, match=r"too little room .* \(34 MB needed, 5 MB free\): make room") as caught:
        prepare(entry, cache, resolve=no_network)
    assert str(cache) in str(caught.value)
    assert left_over(cache) == []


def test_room_is_asked_only_for_what_is_missing(
    entry: CatalogModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = cache / "models" / ".tiny.downloads"
    downloads.mkdir(parents=True)
    (downloads / "model.gguf").write_bytes(MEMBER)
    missing = entry.wheel.wheel_bytes + entry.converted_bytes + install._SLACK_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=missing))
    assert (prepare(entry, cache, resolve=no_network) / "config.json").exists()


def test_a_disk_that_fills_up_while_converting_is_a_storage_error(
    entry: CatalogModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(source: Path, folder: Path, *, progress: Progress) -> None:
        (folder / "model.safetensors").symlink_to("/dev/full")
        write_model(source, folder, progress=progress)

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(install, "convert", fill)
    with pytest.raises(StorageError, match=r"room on the disk of .* \(\d+ MB needed, [\d,]+ MB free\)"):
        prepare(entry, cache, resolve=resolver(tmp_path))
    assert left_over(cache) == [".tiny.downloads"]


def test_no_permission_names_the_path(entry: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # a folder without permission would not stop root
    with pytest.raises(StorageError, match=r"no permission to write .*models: point DDTREE_CACHE"):
        prepare(entry, cache, resolve=no_network)


def test_a_file_where_the_cache_should_be(entry: CatalogModel, cache: Path) -> None:
    cache.write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot use .*: Not a directory"):
        prepare(entry, cache, resolve=no_network)


# Names


def test_a_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / DEFAULT_MODEL
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    model = locate(DEFAULT_MODEL)
    assert (model.folder, model.name, model.source, model.drafter) == (folder, DEFAULT_MODEL, "local folder", None)


def test_a_local_folder_that_is_no_model_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is empty, but no config\.json"):
        locate(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"holds model\.gguf, but no config.json"):
        locate(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file: pass the folder"):
        locate(str(tmp_path / "model.gguf"))


def test_an_unrelated_folder_with_a_known_name_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"rename it to use the known model {DEFAULT_MODEL}"):
        locate(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["", "smollm", "./models/x", "/nowhere/x", "~nobody-here/x", "a/b/c"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({DEFAULT_MODEL}\): pass a known name, the folder .* hub id"):
        locate(name)


def test_a_revision_is_for_hub_ids_alone(tmp_path: Path) -> None:
    for name in (DEFAULT_MODEL, str(tmp_path)):
        with pytest.raises(ConfigError, match="is no hub id and has no revisions"):
            locate(name, revision="main")


def test_a_known_name_names_its_drafter(
    entry: CatalogModel, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub, "CATALOG", {"tiny": entry})
    downloads = cache / "models" / ".tiny.downloads"
    downloads.mkdir(parents=True)
    shutil.copy(tmp_path / entry.wheel.filename, downloads)
    model = locate("tiny", cache_dir=cache)
    assert (model.folder, model.drafter) == (cache / "models" / "tiny", "tiny-dflash")
    assert model.source == "owner/tiny, model.gguf from PyPI tiny==1.0"


def test_the_default_model_is_known_by_its_own_name() -> None:
    assert DEFAULT_MODEL in CATALOG
    assert all(name == entry.name for name, entry in CATALOG.items())


# The hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A throwaway Hugging Face Hub with one model, owner/model."""

    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    error: str = ""
    fetched: set[str] = field(default_factory=set)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    state = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body: bytes, **headers: str) -> None:
            self.send_response(state.status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if state.error:
                self.send_header("X-Error-Code", state.error)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/owner/model/tree/"):
                files = [
                    {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                    for name, body in state.files.items()
                ]
                self.answer(json.dumps(files).encode())
            elif path.startswith("/api/models/owner/model"):
                self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": []}).encode())
            else:
                name = path.partition(f"/owner/model/resolve/{COMMIT}/")[2]
                body = state.files[name]
                if self.command == "GET":
                    state.fetched.add(name)
                self.answer(body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    use_hub(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str) -> None:
    there = partial(snapshot_download, endpoint=address, cache_dir=tmp_path / "hub")
    monkeypatch.setattr(hub, "snapshot_download", there)


def test_a_hub_model_is_fetched_without_pickles_and_kept(
    fake_hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = {"config.json": b"{}", "model.safetensors": b"weights", "chat_template.jinja": b"{{ x }}"}
    unwanted = {"pytorch_model.bin": b"pickle", "model.pkl": b"pickle", "onnx/model.safetensors": b"copy"}
    fake_hub.files = wanted | unwanted
    model = locate("owner/model")
    assert fake_hub.fetched == set(wanted)
    assert {path.name: path.read_bytes() for path in model.folder.iterdir()} == wanted
    assert (model.name, model.source, model.drafter) == ("owner/model", f"hub owner/model at {COMMIT}", None)
    use_hub(monkeypatch, tmp_path, "http://127.0.0.1:9")  # from here on out of reach
    assert locate("owner/model").folder == model.folder
    assert locate("owner/model", revision=COMMIT).folder == model.folder


def test_a_snapshot_that_lacks_a_shard_is_not_taken_for_whole(
    fake_hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    fake_hub.files = {"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b"a"}
    with pytest.raises(DownloadError, match=r"lacks model-2\.safetensors: connect and run the command again"):
        locate("owner/model")


def test_a_hub_model_of_pickles_alone_is_refused(fake_hub: Hub) -> None:
    fake_hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(UnsupportedError, match="pickled weights are not loaded"):
        locate("owner/model")


def test_a_hub_repository_without_config_is_refused(fake_hub: Hub) -> None:
    fake_hub.files = {"model.safetensors": b"weights", "README.md": b"hello"}
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        locate("owner/model")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, "RepoNotFound", "no model on the Hugging Face Hub: check the spelling"),
        (403, "GatedRepo", "is gated on the Hugging Face Hub: accept its terms"),
        (404, "RevisionNotFound", "has no revision 'v2'"),
    ],
)
def test_what_the_hub_refuses_is_explained(fake_hub: Hub, status: int, error: str, message: str) -> None:
    fake_hub.status, fake_hub.error = status, error
    with pytest.raises(DownloadError, match=message) as caught:
        locate("owner/model", revision="v2")
    assert "\n" not in str(caught.value)


def test_no_network_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, tmp_path, "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="out of reach and owner/model is not whole in its cache: connect"):
        locate("owner/model")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), StorageError, "point HF_HOME at a folder on a larger disk"),
        (PermissionError(errno.EACCES, "no", "/x"), StorageError, "no permission to write /x: point HF_HOME"),
        (RuntimeError("peer closed\nlong story"), DownloadError, "cannot fetch owner/model: peer closed: connect"),
    ],
)
def test_other_failures_of_the_hub_library_are_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: type[Exception], message: str
) -> None:
    def fail(name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(expected, match=message):
        locate("owner/model")


def test_a_name_that_the_hub_forbids() -> None:
    for look in (locate, find):
        with pytest.raises(ConfigError, match="'a--b/c' is not a hub id"):
            look("a--b/c")


# The real thing


@pytest.mark.model
def test_the_default_model_answers_in_english() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = locate(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    network = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    assert model.drafter == "smollm2-135m-dflash"
    assert network.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.tokenize("room 1234") == ["room", "Ġ", "1", "2", "3", "4"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = network.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
