"""Edge correction: what a drafter's factorised guess for a position gains from knowing the token before it.

A block-diffusion drafter guesses all positions at once, so its guess for one does not know what was guessed for
the one before. e(parent, child) is added to the child's log-probability under that parent: a small net of the
parent's embedding and the drafter's hidden state at the child's position, times a projection of the child's
embedding. It lies in `edges.safetensors` beside a checkpoint; without that file the checkpoint drafts as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddtree.errors import CheckpointError

__all__ = ["EDGES_FILE", "EdgeNet", "EdgeTables", "load_edges", "save_edges"]

EDGES_FILE = "edges.safetensors"


class EdgeNet(nn.Module):
    """The learned part. hidden: width of embeddings and hidden states; inner: of the net; rank: of the product."""

    def __init__(self, hidden: int, inner: int, rank: int) -> None:
        super().__init__()
        self.parent = nn.Linear(hidden, inner, bias=False)
        self.state = nn.Linear(hidden, inner, bias=False)
        self.mix = nn.Linear(inner, rank, bias=False)
        self.child = nn.Linear(hidden, rank, bias=False)

    @property
    def table_width(self) -> int:
        """Numbers that `EdgeTables` keeps for each token."""
        return self.mix.in_features + self.mix.out_features

    def forward(self, parent_RDPh: Tensor, state_RDh: Tensor, child_RDKh: Tensor) -> Tensor:
        """e for each parent and child of D positions. embeddings come as they are; states are the drafter's hidden
        states, after its final norm. [R, D, P, K]."""
        parents_RDPi, children_RDKr = self.parent(_even(parent_RDPh)), self.child(_even(child_RDKh))
        return score_edges(self, parents_RDPi, state_RDh, children_RDKr)


class EdgeTables:
    """An EdgeNet ready to draft with: what depends on a token alone is computed once, for the whole vocabulary."""

    def __init__(self, net: EdgeNet, embedding: Iterable[Tensor]) -> None:
        """embedding: the tokens' rows in the order of their ids, in one part or in several, [., h] each."""
        self.net = net
        parents, children = [], []
        with torch.inference_mode():
            for part_Th in embedding:
                even_Th = _even(part_Th).to(net.mix.weight.dtype)
                parents.append(net.parent(even_Th))
                children.append(net.child(even_Th))
            self._parents_Vi, self._children_Vr = torch.cat(parents), torch.cat(children)

    def __call__(self, anchors_R: Tensor, tokens_RDK: Tensor, state_RDh: Tensor) -> Tensor:
        """e(i, j) of candidate i of depth d - 1 and candidate j of depth d; before depth 0 stands the anchor.
        float32 [R, D, K, K]."""
        first_R1K = anchors_R[:, None, None].expand(-1, 1, tokens_RDK.shape[2])
        before_RDK = torch.cat([first_R1K, tokens_RDK[:, :-1]], dim=1)
        parents_RDKi, children_RDKr = self._parents_Vi[before_RDK], self._children_Vr[tokens_RDK]
        state_RDh = state_RDh.to(self.net.mix.weight.dtype)
        return score_edges(self.net, parents_RDKi, state_RDh, children_RDKr).float()


def score_edges(net: EdgeNet, parents_RDPi: Tensor, state_RDh: Tensor, children_RDKr: Tensor) -> Tensor:
    """The part of the net that no table can hold. [R, D, P, K]."""
    inner_RDPi = F.silu(parents_RDPi + net.state(state_RDh)[:, :, None])
    return net.mix(inner_RDPi) @ children_RDKr.transpose(-1, -2)


def _even(embedding: Tensor) -> Tensor:
    """Embeddings of one length: rare tokens have short ones."""
    return F.rms_norm(embedding, embedding.shape[-1:])


def save_edges(folder: Path, net: EdgeNet) -> None:
    """Write the net beside a checkpoint, in bfloat16."""
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in net.state_dict().items()}
    save_file(tensors, folder / EDGES_FILE, {"format": "pt"})


def load_edges(folder: Path, hidden: int, dtype: torch.dtype, device: torch.device) -> EdgeNet | None:
    """The net beside a checkpoint, None where there is none. CheckpointError when it does not fit `hidden`, or is
    damaged."""
    path = folder / EDGES_FILE
    if not path.exists():
        return None
    try:
        tensors = load_file(path)
        inner, rank = tensors["mix.weight"].shape[::-1]
        net = EdgeNet(hidden, inner, rank)
        net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        # One NaN and no candidate is left of a position: a drafter that drafts nothing, and nobody is told.
        for name, parameter in net.named_parameters():
            if not parameter.isfinite().all():
                raise ValueError(f"{name} holds numbers that are not finite")
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: not an edge net for hidden size {hidden} ({reason}); fetch the file again, or remove it to "
            "draft without edge correction"
        ) from None
    return net.to(device, dtype).eval()
