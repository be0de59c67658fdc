"""Prompts from data sets of the Hugging Face Hub, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree.data.prompts import Prompt
from ddtree.errors import ConfigError, DataError, DownloadError

__all__ = ["fetch_rows", "read_dataset"]

SPLIT, COLUMN = "train", "prompt"


def fetch_rows(dataset: str, config: str | None, split: str) -> Sequence[Mapping[str, Any]]:
    """The rows of one split. ConfigError without the library, DownloadError when the set is out of reach."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(
            f"{dataset} is fetched with the `datasets` library, which is missing: pip install 'ddtree[eval]', or "
            "pass its prompts as a FILE.jsonl"
        ) from None
    try:
        rows: Sequence[Mapping[str, Any]] = load_dataset(dataset, config, split=split)
    except Exception as error:  # each version of the library has its own errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DownloadError(
            f"{dataset}: split {split} cannot be fetched ({reason}); connect, check the name, or pass its prompts "
            "as a FILE.jsonl"
        ) from error
    return rows


def read_dataset(named: str) -> list[Prompt]:
    """Prompts of a set named as ID, ID:SPLIT or ID:SPLIT:COLUMN. DataError for a column that it lacks."""
    dataset, _, rest = named.partition(":")
    split, _, column = rest.partition(":")
    rows = fetch_rows(dataset, None, split or SPLIT)
    column = column or COLUMN
    if len(rows) and column not in rows[0]:
        raise DataError(
            f"{dataset}: has no column {column!r}, but {', '.join(rows[0])}; name one as "
            f"{dataset}:{split or SPLIT}:COLUMN"
        )
    licence = str(getattr(getattr(rows, "info", None), "license", "") or "see the data set's card")
    prompts = []
    for row in rows:
        text = row[column]
        if isinstance(text, str) and text.strip():
            prompts.append(Prompt((("user", text),), dataset, licence))
    if not prompts:
        raise DataError(f"{dataset}: column {column!r} of split {split or SPLIT} holds no text")
    return prompts
