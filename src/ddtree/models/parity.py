"""A checkpoint's own proof: inputs and a few of the logits that they gave where it was made.

`parity.safetensors` holds features_LF of L context positions, the anchor token, sampled vocabulary columns and
the logits_DC that the drafter gave for them in float32. A loader that reads one key wrongly fails here, and not
as a slow server later.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.errors import CheckpointError
from ddtree.models.block import draft_hidden
from ddtree.models.dflash import DFlashModel, DraftVocabulary

__all__ = ["PARITY_FILE", "check_parity", "write_parity"]

PARITY_FILE = "parity.safetensors"
# bfloat16 has 8 bits of mantissa; a wrong rope, norm or layer is off by far more than this share of the spread.
TOLERANCE = 0.15


@torch.inference_mode()
def write_parity(folder: Path, model: DFlashModel, vocabulary: DraftVocabulary, seed: int = 0) -> None:
    """Store the drafter's answer to random features beside its weights."""
    generator = torch.Generator().manual_seed(seed)
    features_LF = torch.randn(12, model.fc.in_features, generator=generator)
    # Long enough that a window hides something; the features repeat, so that the file stays small.
    widest = max((view.window or 0 for view in model.spec.views), default=0)
    length = torch.tensor(max(12, widest + 8))
    anchor = torch.randint(vocabulary.used, (1,), generator=generator)
    columns_C = torch.randperm(vocabulary.used, generator=generator)[:64]
    logits_DC = _logits(model, vocabulary, _repeated(features_LF, length), anchor, columns_C)
    tensors = {"features": features_LF, "anchor": anchor, "columns": columns_C, "logits": logits_DC.contiguous()}
    tensors["length"] = length
    save_file(tensors, folder / PARITY_FILE)


@torch.inference_mode()
def check_parity(folder: Path, model: DFlashModel, vocabulary: DraftVocabulary) -> None:
    """Compare with the stored logits, where there are any. CheckpointError when they differ beyond rounding."""
    path = folder / PARITY_FILE
    if not path.exists():
        return
    try:
        stored = load_file(path)
        wanted_DC = stored["logits"]
        features_LF = stored["features"]
        features_LF = _repeated(features_LF, stored.get("length", torch.tensor(features_LF.shape[0])))
        got_DC = _logits(model, vocabulary, features_LF, stored["anchor"], stored["columns"])
    except (SafetensorError, KeyError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"{path}: unreadable ({error}); fetch the file again") from None
    if got_DC.shape != wanted_DC.shape:
        raise CheckpointError(f"{path}: holds logits of shape {tuple(wanted_DC.shape)}, got {tuple(got_DC.shape)}")
    worst = float((got_DC - wanted_DC).abs().max() / wanted_DC.std())
    if not worst <= TOLERANCE:
        raise CheckpointError(
            f"{path}: drafted logits differ from those stored at training by {worst:.2f} standard deviations "
            f"(at most {TOLERANCE}); the weights or the configuration were altered"
        )


def _repeated(features_LF: Tensor, length: Tensor) -> Tensor:
    return features_LF[torch.arange(int(length)) % features_LF.shape[0]]


def _logits(
    model: DFlashModel, vocabulary: DraftVocabulary, features_LF: Tensor, anchor: Tensor, columns_C: Tensor
) -> Tensor:
    device = model.fc.weight.device
    hidden_Dh = draft_hidden(model, vocabulary, features_LF[None].to(device), anchor.to(device))[0, 1:]
    return (hidden_Dh.float() @ vocabulary.head[columns_C.to(device)].float().T).cpu()
