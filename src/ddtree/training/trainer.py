"""Training a drafter: data in, checkpoints out.

A step is: pick a pack, capture its features, draft all its blocks, weigh the cross-entropy, update. The trainer
owns the model and its optimisers; everything else is passed in or derived from the step's number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.errors import ConfigError, DataError, DivergedError
from ddtree.models.block import block_tokens
from ddtree.models.dflash import DFlashModel, DraftVocabulary
from ddtree.models.edges import EdgeTables
from ddtree.models.load import LoadedDrafter
from ddtree.models.save import save_drafter
from ddtree.models.target import TargetModel
from ddtree.provenance import provenance
from ddtree.training.acceptance import Acceptance, measure_example
from ddtree.training.attention import TILE, BlockLayout, block_masks, draft_blocks
from ddtree.training.capture import Captured, Features, feature_widths
from ddtree.training.checkpoint import (
    TrainState,
    model_tensors,
    optimizer_tensors,
    prune,
    restore,
    write_state,
)
from ddtree.training.config import TrainConfig, check_resumable
from ddtree.training.edges import edge_loss
from ddtree.training.examples import Examples, Pack, pack_for_step, split_examples
from ddtree.training.feature_store import FeatureStore, feature_key, on_device, on_disk
from ddtree.training.loss import Labels, Objective, draft_loss, loss_total
from ddtree.training.optimizer import learning_rate, make_optimizers, set_learning_rate
from ddtree.training.parallel import Group
from ddtree.training.reports import StepReport, ValidationReport
from ddtree.training.start import new_edges

__all__ = ["Trainer"]


class Trainer:
    """A run in progress on one process. `steps` trains and reports; validate and save at any report."""

    def __init__(
        self,
        config: TrainConfig,
        target: TargetModel,
        drafter: tuple[dict[str, Any], DFlashModel],
        examples: Examples,
        group: Group = Group(),  # noqa: B008  (frozen)
    ) -> None:
        self.config = config
        self.group = group
        self.step = 0
        self.drafter_config, self.model = drafter
        self.edges = new_edges(config, target)
        self._trained = nn.ModuleDict({"drafter": self.model})
        if self.edges is not None:
            self._trained["edges"] = self.edges
        self._target = target
        self._vocabulary = DraftVocabulary(
            target.embed_tokens.weight, target.lm_head.weight, target.spec.vocab_size
        )
        held_out = min(config.validation_examples, len(examples) // 10)
        if not held_out:
            raise DataError(f"{len(examples)} examples leave none to validate on; at least 10 are needed")
        self._training, self._held_out = split_examples(examples, held_out)
        if not len(self._training):
            raise DataError("all examples answer one prompt, which leaves none to train on; add prompts")
        # Each process trains on its share, so that the features of all fit into the GPUs together.
        self._training = self._training.take(torch.arange(group.rank, len(self._training), group.size))
        self._data = examples.key
        self._tokens_T = examples.tokens_T.to(target.device)
        ids = self.model.spec.layer_ids
        self._objective = Objective(
            config.decay_gamma, config.dpace_alpha, config.soft_share, config.soft_temperature
        )
        soft = config.soft_share > 0
        self._features = Features(target, self._training, ids, self._feature_store(ids, soft), soft)
        self._held_out_features = Features(target, self._held_out, ids)
        self._optimizers = make_optimizers(self._trained, config)
        self._draft = torch.compile(draft_blocks, dynamic=False) if config.compile else draft_blocks
        self._fused = target.device.type == "cuda"
        rows = config.anchors * config.block_size
        if self._fused and (config.context_tokens % TILE or rows % TILE or TILE % config.block_size):
            raise ConfigError(
                f"on a GPU context_tokens and anchors * block_size must be multiples of {TILE}, and block_size a "
                f"divisor of it: got {config.context_tokens}, {rows} and {config.block_size}"
            )

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return self._target.device

    @property
    def feature_gib(self) -> float:
        """What the features of all examples of this process take, in GiB, wherever they are kept."""
        width = sum(feature_widths(self._target, self.model.spec.layer_ids, self.config.soft_share > 0))
        return self._training.token_count * width * self._target.dtype.itemsize / 2**30

    def steps(self) -> Iterator[StepReport]:
        """Train to the end of the recipe; yields a report each `log_every` steps and after the last."""
        while self.step < self.config.steps:
            logged = (self.step + 1) % self.config.log_every == 0 or self.step + 1 == self.config.steps
            report = self._train_step(logged)
            self.step += 1
            if report is not None:
                yield report

    def validate(self) -> ValidationReport:
        """Acceptance of chain and tree on the held-out examples, shared out among the processes."""
        budget = self.config.budget
        found = {None: Acceptance(0, 0), budget: Acceptance(0, 0)}
        tables = None if self.edges is None else EdgeTables(self.edges, [self._vocabulary.embedding])
        with self._arithmetic():
            for index in range(self.group.rank, len(self._held_out), self.group.size):
                for key, value in self._measure(index, (None, budget), tables).items():
                    found[key] = found[key] + value
        counts = torch.tensor(
            [[a.tokens, a.rounds] for a in (found[None], found[budget])],
            dtype=torch.float64,
            device=self._target.device,
        )
        chain, tree = (self.group.average(counts) * self.group.size).round().long().tolist()
        return ValidationReport(self.step, Acceptance(*chain), Acceptance(*tree), budget)

    def save(self, run: Path) -> Path:
        """Write a checkpoint of this step: the drafter, and the state to resume from."""
        folder = run / f"step-{self.step}"
        if self.group.leads:
            recipe = asdict(self.config)
            card = {"training.json": {"recipe": _public(recipe), "step": self.step, **provenance()}}
            save_drafter(folder, self.drafter_config, self.model, self._vocabulary, edges=self.edges, extra=card)
            tensors = model_tensors(self._trained) | optimizer_tensors(self._optimizers)
            write_state(folder / "state", TrainState(self.step, recipe, tensors, self._data))
            prune(run)
        self.group.wait()
        return folder

    def resume(self, state: TrainState) -> None:
        """Go on from a state: the next step's loss is the one an unbroken run would have had. ConfigError when the
        recipe is for another drafter or other data than the run began with."""
        check_resumable(self.config, state.recipe)
        if state.data not in ("", self._data):  # states of old did not say
            raise ConfigError(
                f"{self.config.data}: other answers than this run began with; give it those, or begin another run "
                "with --out"
            )
        restore(state, self._trained, self._optimizers)
        self.step = state.step

    def _feature_store(self, layer_ids: tuple[int, ...], with_hidden: bool) -> FeatureStore | None:
        """Where the recipe keeps captured features; None captures them anew each step."""
        config, target = self.config, self._target
        width = sum(feature_widths(target, layer_ids, with_hidden))
        tokens, count = self._training.token_count, len(self._training)
        if config.feature_cache_dir:
            key = feature_key(target, layer_ids, with_hidden, self._training)
            return on_disk(Path(config.feature_cache_dir), key, tokens, count, width, target.dtype)
        if config.feature_cache_gib > 0:
            return on_device(tokens, count, width, target.dtype, target.device, config.feature_cache_gib)
        return None

    def _pack(self, part: int) -> Pack:
        """The pack of one part of this step, where gradients add up over several."""
        config = self.config
        return pack_for_step(
            self._training,
            self.step * config.accumulation + part,
            context_tokens=config.context_tokens,
            anchors=config.anchors,
            seed=config.seed,
            rank=self.group.rank,
        )

    def _train_step(self, logged: bool) -> StepReport | None:
        set_learning_rate(self._optimizers, learning_rate(self.config, self.step))
        parts = [self._backward(self._pack(part)) for part in range(self.config.accumulation)]
        self.group.average_gradients(self._trained.parameters())
        norm, *_ = [
            nn.utils.clip_grad_norm_(module.parameters(), self.config.clip_norm)
            for module in self._trained.values()
        ]
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return self._report(parts, norm) if logged else None

    def _backward(self, pack: Pack) -> tuple[Tensor, Tensor, Tensor]:
        """Add a pack's gradients. Returns the losses of drafter and edges, and of each position how many labels
        counted and ranked first: [2], [D], [D]."""
        captured = self._features.of_pack(pack)
        pack = pack.to(self._target.device)
        labels = self._labels(pack, captured)
        # Every process divides by the same number, so their mean is the loss of all blocks together.
        total = self.group.average(loss_total(labels.counted_AD, self._objective.gamma))
        with self._arithmetic():
            hidden_Abh = self._hidden(pack, captured.features_TF)
            head_Vh = self._vocabulary.head
            loss, correct_AD = draft_loss(hidden_Abh, head_Vh, labels, self._objective, total)
            losses_2 = torch.stack([loss, self._edge_loss(pack, hidden_Abh, labels)])
        (losses_2.sum() / self.config.accumulation).backward()
        counted_AD = labels.counted_AD
        return losses_2.detach(), counted_AD.sum(0), (correct_AD & counted_AD).sum(0)

    def _edge_loss(self, pack: Pack, hidden_Abh: Tensor, labels: Labels) -> Tensor:
        """The edges' own loss on some of the blocks, evenly spread; 0 without edges."""
        if self.edges is None:
            return hidden_Abh.new_zeros((), dtype=torch.float32)
        some = slice(None, None, -(-hidden_Abh.shape[0] // self.config.edge_blocks))
        anchors_A = self._tokens_T[pack.source_T[pack.anchors_A[some]]]
        labels = Labels(labels.tokens_AD[some], labels.counted_AD[some])
        gamma = self._objective.gamma
        total = self.group.average(loss_total(labels.counted_AD, gamma))
        return edge_loss(self.edges, self._vocabulary, hidden_Abh[some], anchors_A, labels, gamma, total)

    def _report(self, parts: list[tuple[Tensor, Tensor, Tensor]], norm: Tensor) -> StepReport:
        """What a step did, over all processes. DivergedError when that is no longer a number."""
        losses_2, counted_D, correct_D = (torch.stack(columns) for columns in zip(*parts, strict=True))
        sums = torch.cat([losses_2.mean(0), counted_D.sum(0).float(), correct_D.sum(0).float()])
        loss, edge, *counts = self.group.average(sums).tolist()
        if not torch.isfinite(norm) or not math.isfinite(loss + edge):
            raise DivergedError(
                f"step {self.step}: the loss or its gradient is not a number; lower learning_rate and resume from "
                "the last checkpoint"
            )
        depth = self.config.block_size - 1
        accuracy = tuple(c / max(n, 1) for n, c in zip(counts[:depth], counts[depth:], strict=True))
        blocks = round(counts[0] * self.group.size)  # a block that counts at all counts at its first position
        rate = learning_rate(self.config, self.step)
        return StepReport(self.step + 1, loss, edge, float(norm), rate, blocks, accuracy)

    def _hidden(self, pack: Pack, features_TF: Tensor) -> Tensor:
        block_size, anchors_A = self.config.block_size, pack.anchors_A
        ids_Ab = block_tokens(self._tokens_T[pack.source_T[anchors_A]], block_size, self.config.mask_token_id)
        embedded_Mh = self._vocabulary.embedding[ids_Ab.flatten()]
        offset_b = torch.arange(block_size, device=anchors_A.device)
        positions_M = (pack.positions_T[anchors_A][:, None] + offset_b).flatten()
        layout = BlockLayout(pack.positions_T, pack.example_T, anchors_A, block_size)
        masks = block_masks(layout, self.model.spec.views, self._fused)
        hidden_Mh = self._draft(self.model, features_TF, pack.positions_T, embedded_Mh, positions_M, masks)
        return hidden_Mh.view(-1, block_size, hidden_Mh.shape[-1])

    def _labels(self, pack: Pack, captured: Captured) -> Labels:
        """The tokens after each anchor, and what the target thought of each; none past the end of the example, or
        for padding."""
        depth = self.config.block_size - 1
        place_AD = pack.anchors_A[:, None] + 1 + torch.arange(depth, device=pack.anchors_A.device)
        inside_AD = place_AD < pack.source_T.numel()
        place_AD = place_AD.clamp(max=pack.source_T.numel() - 1)
        same_AD = pack.example_T[place_AD] == pack.example_T[pack.anchors_A][:, None]
        counted_AD = inside_AD & same_AD & pack.real_A[:, None]
        teacher_ADh = captured.hidden_Th[place_AD - 1] if self._objective.soft_share else None
        return Labels(self._tokens_T[pack.source_T[place_AD]], counted_AD, teacher_ADh)

    def _measure(
        self, index: int, budgets: tuple[int | None, ...], edges: EdgeTables | None
    ) -> dict[int | None, Acceptance]:
        examples = self._held_out
        start, end = int(examples.starts_E[index]), int(examples.ends_E[index])
        length = torch.arange(end - start)
        pack = Pack((index,), length + start, length, torch.zeros_like(length), length[:0], length[:0] > 0)
        features_TF = self._held_out_features.of_pack(pack).features_TF
        tokens_T = examples.tokens_T[start:end].to(self._target.device)
        prompt = int(examples.prompts_E[index]) - start
        drafter = LoadedDrafter(self.model, self._vocabulary, edges)
        return measure_example(drafter, tokens_T, features_TF, prompt, budgets)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        """The forward pass in the target's dtype, when that is not the masters'."""
        if self._target.dtype == self.model.dtype:
            return nullcontext()
        return torch.autocast(self._target.device.type, self._target.dtype)


def _public(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without the folders of this machine; a target may also be a known name or a hub id."""
    target = Path(recipe["target"])
    folders = {"data", "out", "target"} if target.is_absolute() or target.exists() else {"data", "out"}
    return {key: Path(value).name if key in folders else value for key, value in recipe.items()}
