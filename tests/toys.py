"""Tiny models for tests: random targets and drafters in float64, made in milliseconds."""

from __future__ import annotations

import torch

from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.drafter_spec import DrafterSpec
from ddtree.models.edges import EdgeNet, EdgeTables
from ddtree.models.rope import Rope
from ddtree.models.spec import DecoderSpec, RopeSpec, TargetSpec
from ddtree.models.target import TargetModel
from ddtree.ops import FULL_VIEW, View
from ddtree.tree import Candidates, factorised_candidates

VOCABULARY = 61
MASK = 60


def decoder_spec(qk_norm: bool, layers: int = 3, max_positions: int = 4096) -> DecoderSpec:
    return DecoderSpec(
        hidden=24,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=6,
        intermediate=32,
        norm_eps=1e-6,
        rope=RopeSpec(10000.0, 6, "default"),
        qk_norm=qk_norm,
        attention_bias=False,
        mlp_bias=False,
        max_positions=max_positions,
    )


def randomise(model: torch.nn.Module, seed: int, spread: float) -> None:
    """Normal matrices, and norms near one: no tensor keeps the value a fresh module has."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * spread if parameter.ndim > 1 else 1 + 0.1 * noise)


def toy_target(
    family: str = "llama",
    *,
    seed: int = 0,
    layers: int = 3,
    vocabulary: int = VOCABULARY,
    eos_ids: tuple[int, ...] = (),
    tied: bool = False,
    spread: float = 0.35,
    dtype: torch.dtype = torch.float64,
    max_positions: int = 4096,
) -> TargetModel:
    """A target whose greedy text is long and irregular: nothing in it is trained."""
    decoder = decoder_spec(family == "qwen3", layers, max_positions)
    model = TargetModel(TargetSpec(family, decoder, vocabulary, tied, eos_ids, None)).to(dtype)
    randomise(model, seed, spread)
    model.rope = Rope(decoder)
    return model.eval()


def toy_drafter(
    target: TargetModel,
    *,
    seed: int = 1,
    block_size: int = 8,
    layers: int = 2,
    layer_ids: tuple[int, ...] = (0, 2),
    view: View = FULL_VIEW,
    mask_token_id: int = MASK,
) -> tuple[DFlashModel, DraftVocabulary]:
    """A random drafter for a toy target, with the target's own tables."""
    spec = DrafterSpec(
        decoder=decoder_spec(True, layers, target.spec.decoder.max_positions),
        block_size=block_size,
        mask_token_id=mask_token_id,
        layer_ids=layer_ids,
        views=(view,) * layers,
        vocab_size=target.spec.vocab_size,
        packed=False,
    )
    model = DFlashModel(spec).to(target.dtype)
    randomise(model, seed, 0.3)
    model.rope = Rope(spec.decoder)
    vocabulary = DraftVocabulary(target.embed_tokens.weight, target.lm_head.weight, target.spec.vocab_size)
    return model.eval(), vocabulary


def top_candidates(log_probs_RDV: torch.Tensor, count: int) -> Candidates:
    """The best tokens of each depth, without a drafter."""
    log_probs_RDK, tokens_RDK = log_probs_RDV.topk(count, dim=-1)
    return factorised_candidates(tokens_RDK, log_probs_RDK)


def random_tokens(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


def toy_edges(vocabulary: DraftVocabulary, *, seed: int = 0, spread: float = 0.4) -> EdgeTables:
    """A random edge correction, strong enough to reorder candidates."""
    net = EdgeNet(vocabulary.embedding.shape[1], inner=16, rank=8).to(vocabulary.embedding.dtype)
    randomise(net, seed, spread)
    return EdgeTables(net, [vocabulary.embedding])
