"""Training of the edge correction, beside the drafter and without touching it.

At each position the drafter's best candidates are rescored as the tree does it, given the answer's own token
before: log q(child) + e(parent, child), renormalised with the mass outside the candidates. How unlikely that makes
the answer's next token is minimised, weighted by depth. Hidden states come detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.models.dflash import DraftVocabulary
from ddtree.models.edges import EdgeNet
from ddtree.training.loss import Labels, decay_weights

__all__ = ["CANDIDATES", "edge_loss"]

CANDIDATES = 32  # of a position that are rescored; an answer outside them keeps its probability


def edge_loss(
    net: EdgeNet,
    vocabulary: DraftVocabulary,
    hidden_AbH: Tensor,
    anchors_A: Tensor,
    labels: Labels,
    gamma: float,
    total: Tensor,
) -> Tensor:
    """By how much rescoring makes the labels less likely, in nats, weighted and averaged; below 0 once it helps.

    hidden_AbH: the drafter's hidden states of A whole blocks. anchors_A: the anchors' tokens. total: what the
    weighted sum is divided by, see `loss_total`. float32 scalar.
    """
    state_ADH = hidden_AbH[:, 1:].detach()
    with torch.no_grad():
        logits_ADV = vocabulary.logits(state_ADH.to(vocabulary.head.dtype))
        norm_AD1 = logits_ADV.float().logsumexp(-1, keepdim=True)
        top_ADK, tokens_ADK = logits_ADV.topk(min(CANDIDATES, logits_ADV.shape[-1]), dim=-1)
        log_q_ADK = top_ADK.float() - norm_AD1
        tail_AD1 = (1 - log_q_ADK.exp().sum(-1, keepdim=True)).clamp(min=1e-9)
    before_AD = torch.cat([anchors_A[:, None], labels.tokens_AD[:, :-1]], dim=1)
    parent_AD1h, child_ADKh = vocabulary.embedding[before_AD][:, :, None], vocabulary.embedding[tokens_ADK]
    dtype = net.mix.weight.dtype
    edges_ADK = net(parent_AD1h.to(dtype), state_ADH.to(dtype), child_ADKh.to(dtype))[:, :, 0].float()
    change_AD = torch.logaddexp((log_q_ADK + edges_ADK).logsumexp(-1, keepdim=True), tail_AD1.log())[..., 0]
    hit_ADK = tokens_ADK == labels.tokens_AD[..., None]
    change_AD = change_AD - torch.where(hit_ADK, edges_ADK, 0.0).sum(-1)
    weights_AD = decay_weights(labels.counted_AD, gamma)
    return (change_AD * weights_AD).sum() / total
