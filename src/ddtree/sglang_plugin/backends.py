"""Which of SGLang's attention backends can verify a tree, and how each reads its mask.

Read from SGLang 0.5.23: triton takes `custom_mask` of a verification always, flashinfer packs it. The others run
the rows as a chain, whatever the mask says, so a tree on them would be verified wrong without a word."""

from __future__ import annotations

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.masks import MaskLayout

__all__ = ["allow_tree_backend", "mask_layout", "require_tree_backend"]

_LAYOUTS: dict[str, MaskLayout] = {"triton": MaskLayout.FULL, "flashinfer": MaskLayout.FULL}
_REASONS = {
    "fa3": "its tree path opens only with speculative_eagle_topk > 1, which DFLASH's infrastructure holds at 1",
    "fa4": "it has no tree masks",
    "trtllm_mha": "it has no tree masks",
    "torch_native": "it cannot verify drafts",
}


def allow_tree_backend(name: str, layout: MaskLayout) -> None:
    """Let another backend verify trees: for backends that other plugins bring."""
    _LAYOUTS[name] = layout


def mask_layout(name: str) -> MaskLayout:
    """The mask of a backend that `require_tree_backend` let pass."""
    return _LAYOUTS[name]


def require_tree_backend(name: str | None) -> None:
    """ConfigError when the target's attention backend would verify a tree as a chain."""
    if name in _LAYOUTS:
        return
    why = _REASONS.get(str(name), "it is not known to read the tree masks of a verification")
    raise ConfigError(
        f"attention backend {name} cannot verify trees: {why}; use --attention-backend "
        f"{' or '.join(sorted(_LAYOUTS))}, or --speculative-ddtree-mode chain"
    )
