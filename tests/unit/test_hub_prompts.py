"""Prompts of a hub's data sets, by a stand-in for the library."""

from __future__ import annotations

import sys
import types

import pytest

from ddtree.data.hub_prompts import read_dataset
from ddtree.errors import ConfigError, DataError, DownloadError


class Rows(list):
    info = types.SimpleNamespace(license="MIT")


ROWS = Rows([{"question": "Why?", "prompt": "How?"}, {"question": " ", "prompt": "When?"}])


@pytest.fixture
def asked(monkeypatch):
    """What the library was asked for."""
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        if name == "out/of-reach":
            raise OSError("no route to host\nmore")
        return ROWS if name != "no/licence" else list(ROWS)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_set_by_its_name_split_and_column(asked):
    assert [p.text for p in read_dataset("a/b")] == ["How?", "When?"]
    (only,) = read_dataset("a/b:test:question")
    assert (only.text, only.source, only.license) == ("Why?", "a/b", "MIT")
    assert read_dataset("no/licence:test")[0].license == "see the data set's card"
    assert asked == [("a/b", None, "train"), ("a/b", None, "test"), ("no/licence", None, "test")]


def test_what_is_missing_is_named(asked, monkeypatch):
    with pytest.raises(
        DataError, match=r"a/b: has no column 'x', but question, prompt; name one as a/b:test:COLUMN"
    ):
        read_dataset("a/b:test:x")
    with pytest.raises(DownloadError, match=r"out/of-reach: split train cannot be fetched \(no route to host\)"):
        read_dataset("out/of-reach")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'ddtree\[eval\]'"):
        read_dataset("a/b")


def test_a_column_without_text_is_refused(asked, monkeypatch):
    monkeypatch.setattr("tests.unit.test_hub_prompts.ROWS", Rows([{"prompt": 3}]))
    with pytest.raises(DataError, match="column 'prompt' of split train holds no text"):
        read_dataset("a/b")
