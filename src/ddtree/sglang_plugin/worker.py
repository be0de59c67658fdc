"""DDTREE's worker: one round for a batch of requests, on SGLang's models, memory and scheduler.

Prefill is DFLASH's own. A round drafts one block for each request, builds their trees together on the device,
verifies all rows in one pass, walks, moves the accepted keys and values to canonical slots and gives the drafter
the accepted features. No step reads anything back from the device: lengths, trees and choices stay there, and the
host sees committed tokens when the scheduler does."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2, _resolve_dflash_embedding_module
from sglang.srt.speculative.spec_utils import spec_stage_span
from torch import Tensor

from ddtree.errors import UnsupportedError
from ddtree.models.edges import EdgeTables
from ddtree.ops import select_ops
from ddtree.sglang_plugin.backends import mask_layout, require_tree_backend
from ddtree.sglang_plugin.choices import Chooser
from ddtree.sglang_plugin.commit import compact
from ddtree.sglang_plugin.draft import BlockDrafter
from ddtree.sglang_plugin.edges import draft_edges, edge_tables
from ddtree.sglang_plugin.flags import flags_of
from ddtree.sglang_plugin.head import DraftHead
from ddtree.sglang_plugin.launch import refuse_windows
from ddtree.sglang_plugin.seeds import SeedTable, request_seed
from ddtree.sglang_plugin.settings import resolve
from ddtree.sglang_plugin.status import Status
from ddtree.sglang_plugin.trees import Drafted, plain_rows, plant
from ddtree.sglang_plugin.verify import Verified, Verifier, flat_rows, gather_rows
from ddtree.sglang_plugin.window import Window, open_window
from ddtree.tree import Accepted, committed_tokens, cut

__all__ = ["DDTreeWorker"]

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):
    """SGLang's DFLASH worker with rounds of its own. It owns a drafter, a head, a chooser and a verifier."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        spec = get_spec()
        config = target_worker.model_runner.model_config
        self.settings = resolve(
            flags_of(server_args),
            block_size=int(spec.speculative_dflash_block_size),
            num_draft_tokens=int(spec.speculative_num_draft_tokens),
            hybrid=mambaish_config(config) is not None,
        )
        # DFLASH takes its block from the width; DDTREE's blocks and widths differ.
        with spec.override(speculative_num_draft_tokens=self.settings.block_size):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self.speculative_num_draft_tokens = self.settings.width
        self.model_runner.spec_algorithm.settings = self.settings
        edges = self._edge_tables()
        self.status = Status(self.settings, edges is not None)
        self._features = self._feature_width()
        self._drafter = BlockDrafter(self, self.settings.block_size, int(self._mask_token_id))
        draft = parse_dflash_draft_config(draft_hf_config=self.draft_model_runner.model_config.hf_config)
        ops = select_ops(torch.device(self.device))
        self._build_tree = ops.build_tree
        head = DraftHead(
            getattr(self.model_runner.model, "lm_head", None),
            int(config.vocab_size),
            get_parallel().tp_group,
            draft,
            ops,
        )
        self._chooser = Chooser(
            head,
            edges,
            int(config.vocab_size),
            self.settings,
            self._tp_sync,
            self.model_runner.sampler,
            get_exec().deterministic.enable_deterministic_inference,
        )
        self._verifier: Verifier | None = None
        self._seeds: SeedTable | None = None
        self._would_accept = torch.zeros(2, dtype=torch.int64, device=self.device)  # tokens, rounds

    @property
    def embedding(self) -> torch.nn.Module:
        """The table that embeds draft blocks: the drafter's own where it has one, else the target's."""
        return _resolve_dflash_embedding_module(self.draft_model, self.model_runner.model)

    @property
    def noise_embedding_scale(self) -> float:
        return float(self._noise_embed_scale)

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        layout = None
        if self.settings.plan.capabilities.verifies_trees:
            runner = self.model_runner
            decodes = get_spec().speculative_attention_mode == "decode"
            name = runner.decode_attention_backend_str if decodes else runner.prefill_attention_backend_str
            require_tree_backend(name)
            refuse_windows(bool(runner.sliding_window_size))
            layout = mask_layout(name)
        needs = self.settings.plan.capabilities.needs_target_features
        self._verifier = Verifier(self, layout, self._features if needs else 0)
        rows = self.model_runner.req_to_token_pool.req_to_token.shape[0]
        self._seeds = SeedTable(rows, torch.device(self.device))

    def _maybe_build_draft_sampler(self) -> None:
        """No greedy head inside the drafter's graph: trees need more than its best token."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Nothing to warn of: sampled requests are sampled, on every device."""

    def prewarm_sampling(self) -> Any:
        return self.model_runner.prewarm_sampling()

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], **keywords: Any) -> None:
        warning = self.status.observe(num_correct_drafts_per_req)
        if warning is not None:
            logger.warning("DDTREE: %s", warning)

    def describe(self) -> dict[str, Any]:
        """What `/server_info` shows. In shadow mode also what the trees would have committed, read back now."""
        facts = self.status.describe()
        if self.settings.plan.capabilities.commits_spine_only:
            tokens, rounds = self._would_accept.tolist()
            facts["would_accept_length"] = tokens / rounds if rounds else None
        return facts

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> Any:
        """One step of the scheduler: DFLASH's prefill, or a round."""
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            self._admit(batch)
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        return self._round(batch, on_publish, grammar_barrier)

    def _admit(self, batch: Any) -> None:
        assert self._seeds is not None, "the scheduler sets up attention before it serves"
        server_seed = int(self.target_worker.random_seed)
        seeds = [request_seed(r.sampling_params.sampling_seed, str(r.rid), server_seed) for r in batch.reqs]
        self._seeds.admit(batch.req_pool_indices[: len(seeds)], seeds)

    def _round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        assert self._verifier is not None
        assert self._seeds is not None
        draft_input = batch.spec_info
        assert isinstance(draft_input, DFlashDraftInputV2), "a decode batch carries its anchors"
        table = self.model_runner.req_to_token_pool.req_to_token
        window = open_window(batch, draft_input, table, self.settings.width)
        anchors_R = draft_input.bonus_tokens.view(-1).to(torch.int64)
        turn = self._chooser.turn(batch.sampling_info, self._seeds.of(window.rows_R), window.prefix_R)
        drafted = self._draft(batch, anchors_R, window, turn)
        grammar = self._chooser.grammar_tree(batch, drafted.tree)
        before_R = window.prefix_R.clone() if self._need_mamba_verify_commit else None
        with spec_stage_span("ddtree.verify"):
            verified = self._verifier.verify(batch, drafted.tree, window)
        with spec_stage_span("ddtree.choose"):
            choices_RN = self._choices(batch, drafted, verified, turn, grammar, grammar_barrier)
            accepted = self._walk(drafted, choices_RN)
        if batch.return_logprob:
            rows_RP = flat_rows(accepted.path_RP, drafted.tree.rows)
            compute_spec_logprobs(batch, verified.output, choices_RN.flatten(), accept_index=rows_RP)
        with spec_stage_span("ddtree.commit"):
            if self.settings.plan.capabilities.verifies_trees:
                compact(self.target_worker.get_memory_pool()[1], window.slots_RN, accepted)
            new_lengths_R = window.prefix_R + accepted.lengths_R.to(window.prefix_R.dtype)
            if before_R is not None:
                self._update_target_mamba_state_after_verify(
                    batch=batch,
                    seq_lens_pre_verify=before_R,
                    seq_lens_post_verify=new_lengths_R,
                    commit_lens=self._last_row(accepted) + 1,
                )
            if on_publish is not None:
                on_publish(new_lengths_R)
            self._absorb(verified, accepted, window)
        verified.output.hidden_states = None
        return self._result(drafted, accepted, verified, new_lengths_R)

    def _draft(self, batch: Any, anchors_R: Tensor, window: Window, turn: Any) -> Drafted:
        plan = self.settings.plan
        if not plan.capabilities.drafts_blocks:
            return plain_rows(anchors_R)
        with spec_stage_span("ddtree.draft"):
            hidden_RDh = self._drafter.hidden(batch, anchors_R, window)
        with spec_stage_span("ddtree.candidates"):
            candidates = self._chooser.candidates(anchors_R, hidden_RDh, plan.candidates, turn)
        with spec_stage_span("ddtree.tree"):
            return plant(anchors_R, candidates, plan, self.settings.width, self._build_tree)

    def _choices(
        self, batch: Any, drafted: Drafted, verified: Verified, turn: Any, grammar: Any, grammar_barrier: Any
    ) -> Tensor:
        """The target's token after each row, with bias, custom processors and grammar on the rows they belong
        to."""
        output = verified.output
        processor = self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(output.next_token_logits):
            if self._can_skip_verify_logits(batch, batch.sampling_info):
                best_M = processor.deferred_argmax(output.next_token_logits)
                output.next_token_logits = None
                return self._chooser.decide(best_M.view(drafted.tree.tokens_RN.shape).to(torch.int64), turn)
            output.next_token_logits = processor.finish_deferred_gather(output.next_token_logits)
        self._chooser.adjust(batch, output.next_token_logits, drafted.tree, grammar, grammar_barrier)
        return self._chooser.choices(output.next_token_logits, drafted.tree, turn)

    def _walk(self, drafted: Drafted, choices_RN: Tensor) -> Accepted:
        accepted = drafted.walk(choices_RN)
        if self.settings.plan.capabilities.commits_spine_only:
            grown = cut(drafted.tree, accepted, drafted.core_RN)
            self._would_accept += torch.stack([grown.lengths_R.sum(), (grown.lengths_R > 0).sum()])
            accepted = cut(drafted.tree, accepted, drafted.spine_RN)
        return accepted

    def _last_row(self, accepted: Accepted) -> Tensor:
        """The row of the last accepted node: its state is the one that recurrent layers keep."""
        return accepted.path_RP.gather(1, (accepted.lengths_R - 1)[:, None])[:, 0]

    def _absorb(self, verified: Verified, accepted: Accepted, window: Window) -> None:
        """Give the drafter the features of the accepted path, at the slots where its tokens now stand."""
        if verified.features_RNF is None:
            return
        places = accepted.path_RP.shape[1]
        slots_RP = window.slots_RN[:, :places].contiguous()
        write_M = self._draft_write_ids(window.plan(self.model_runner.kv_index_translator, slots_RP))
        positions_RP = window.prefix_R[:, None] + torch.arange(places, device=slots_RP.device)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=gather_rows(verified.features_RNF, accepted.path_RP).flatten(0, 1),
            cache_loc=write_M,
            cache_loc_2d=write_M.view(slots_RP.shape),
            positions=positions_RP.flatten(),
            commit_lens=accepted.lengths_R.to(torch.int32),
        )

    def _result(
        self, drafted: Drafted, accepted: Accepted, verified: Verified, new_lengths_R: Tensor
    ) -> GenerationBatchResult:
        tokens_RP = committed_tokens(drafted.tree, accepted)
        result = verified.result
        return GenerationBatchResult(
            logits_output=verified.output,
            next_token_ids=tokens_RP.flatten(),
            accept_lens=accepted.lengths_R.to(torch.int32),
            can_run_cuda_graph=result.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus_R, new_seq_lens=new_lengths_R
            ),
            speculative_num_draft_tokens=drafted.tree.rows,
            speculative_output_stride=tokens_RP.shape[1],
            new_seq_lens=new_lengths_R,
            routed_experts_output=result.routed_experts_output,
            indexer_topk_output=result.indexer_topk_output,
        )

    def _edge_tables(self) -> EdgeTables | None:
        """The drafter's edge correction, where it has one and the mode drafts. CheckpointError when it does not
        fit."""
        if not self.settings.plan.capabilities.drafts_blocks:
            return None
        target = self.model_runner.model_config
        net = draft_edges(
            self.server_args, int(target.hidden_size), self.draft_model_runner.dtype, torch.device(self.device)
        )
        if net is None:
            return None
        logger.info("DDTREE: the drafter's edge correction is used")
        return edge_tables(net, self.embedding, int(target.vocab_size))

    def _feature_width(self) -> int:
        """Width of the captured features. UnsupportedError when the target captures none of the drafter's
        layers."""
        layers = self.model_runner.spec_aux_config.dflash_target_layer_ids
        if not layers:
            raise UnsupportedError(
                "SGLang captures no hidden states of this target, so the drafter has no context; the drafter's "
                "config.json names its layers in dflash_config.target_layer_ids"
            )
        return len(layers) * int(self.model_runner.model_config.hidden_size)
