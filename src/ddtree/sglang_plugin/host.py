"""What DDTREE uses of SGLang 0.5.23, as data: every function with what is passed to it, every attribute, and the
places that ask for algorithms by name. `contract` checks it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HOOKED", "HOST", "NAME_TESTS", "SUPPORTED", "Uses"]

SUPPORTED = "0.5.23"


@dataclass(frozen=True, slots=True)
class Uses:
    """One thing of the host. name: a function, class, method or assigned name in the module. passes: keywords that
    DDTREE passes to it; a required parameter that is not among them, and not positional, is a difference.
    attributes: what DDTREE reads of instances of the class."""

    module: str
    name: str
    passes: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()


_SPEC = "sglang.srt.speculative."
_WORKER = "DFlashWorkerV2."
HOST = (
    Uses("sglang.srt.plugins", "load_plugins", ()),
    Uses("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    Uses("sglang.srt.plugins.hook_registry", "HookRegistry", attributes=("_patched",)),
    Uses("sglang.srt.server_args", "ServerArgs.add_cli_args", ("parser",)),
    Uses("sglang.srt.server_args", "ServerArgs.from_cli_args", ("args",)),
    Uses("sglang.srt.arg_groups.choices", "DRAFT_ATTENTION_BACKEND_CHOICES"),
    Uses("sglang.srt.arg_groups.model_override_base", "attention_backends_of", ("cfg",)),
    Uses("sglang.srt.arg_groups.model_override_base", "model_config_of", ("server_args",)),
    Uses("sglang.srt.configs.hybrid_arch", "mambaish_config", ("model_config",)),
    Uses("sglang.srt.runtime_context", "get_exec", ()),
    Uses("sglang.srt.runtime_context", "get_parallel", ()),
    Uses("sglang.srt.runtime_context", "get_spec", ()),
    Uses(_SPEC + "spec_info", "SpeculativeAlgorithm.register", ("name", "supports_overlap", "spec_class")),
    Uses(_SPEC + "spec_info", "SpeculativeAlgorithm.create_future_map"),
    Uses(
        _SPEC + "spec_info",
        "create_dummy_verify_input",
        ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
    ),
    Uses(_SPEC + "spec_registry", "CustomSpecAlgo"),
    Uses(_SPEC + "spec_utils", "spec_need_hidden_states", ()),
    Uses(_SPEC + "spec_utils", "draft_tp_context", ("layout",)),
    Uses(_SPEC + "spec_utils", "spec_stage_span", ("name",)),
    Uses(_SPEC + "spec_utils", "GrammarTree.from_device"),
    Uses(_SPEC + "spec_utils", "build_grammar_vocab_mask", ("reqs", "tree", "sampling_info", "device", "barrier")),
    Uses(_SPEC + "dflash_utils", "parse_dflash_draft_config", ("draft_hf_config",)),
    Uses(_SPEC + "dflash_utils", "resolve_dflash_verify_mask_policy", ("attn_backend",)),
    Uses(_SPEC + "dflash_utils", "validate_dflash_request", ("req", "enable_overlap")),
    Uses(
        _SPEC + "dflash_utils",
        "apply_dflash_verify_logits_adjustments",
        ("next_token_logits", "sampling_info", "draft_token_num"),
    ),
    Uses(
        _SPEC + "dflash_info",
        "DFlashVerifyInput",
        attributes=(
            "draft_token",
            "positions",
            "draft_token_num",
            "custom_mask",
            "capture_hidden_mode",
            "kv_loc_plan",
        ),
    ),
    Uses(_SPEC + "dflash_info", "DFlashVerifyInput.prepare_for_verify", ("batch", "target_worker")),
    Uses(_SPEC + "dflash_info_v2", "DFlashDraftInputV2", attributes=("bonus_tokens", "nxt_kv_lens_cpu")),
    Uses(_SPEC + "dflash_info_v2", "DFlashDraftInputV2.prepare_for_decode", ("batch",)),
    Uses(_SPEC + "draft_worker_common", "make_draft_block_spec_info", ("draft_token_num", "device")),
    Uses(_SPEC + "spec_tp_sync", "SpecTpSync.sync", ("site", "values")),
    Uses(_SPEC + "spec_tp_sync", "SpecTpSyncSite", attributes=("DFLASH_ACCEPT_SAMPLE", "DFLASH_ACCEPT_GREEDY")),
    Uses(_SPEC + "dflash_worker_v2", "_resolve_dflash_embedding_module", ("draft_model", "target_model")),
    Uses(
        _SPEC + "dflash_worker_v2",
        "DFlashWorkerV2",
        attributes=(
            "server_args",
            "model_runner",
            "device",
            "use_compact_draft_cache",
            "draft_parallel_layout",
            "draft_model_runner",
            "draft_model",
            "block_size",
            "_tp_sync",
            "_mask_token_id",
            "_noise_embed_scale",
            "_need_mamba_verify_commit",
            "_target_logits_processor",
        ),
    ),
    Uses(
        _SPEC + "dflash_worker_v2",
        _WORKER + "forward_batch_generation",
        ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
    ),
    Uses(
        _SPEC + "dflash_worker_v2", _WORKER + "__init__", ("server_args", "gpu_id", "nccl_port", "target_worker")
    ),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "init_attention_backends", ()),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_maybe_build_draft_sampler", ()),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_validate_phase1_sampling_support", ("batch",)),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "prewarm_sampling", ()),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_can_skip_verify_logits", ("batch", "sampling_info")),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_draft_write_ids", ("plan",)),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_ensure_draft_block_buffers", ("bs",)),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_compute_compact_draft_seq_lens", ("seq_lens",)),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_compute_compact_draft_seq_lens_host", ("host_seq_lens", "out")),
    Uses(
        _SPEC + "dflash_worker_v2",
        _WORKER + "_rebuild_compact_draft_cache",
        (
            "req_pool_indices",
            "prefix_lens",
            "draft_prefix_lens",
            "verify_out_cache_loc_2d",
            "bs",
            "block_size",
        ),
    ),
    Uses(
        _SPEC + "dflash_worker_v2",
        _WORKER + "_append_target_hidden_to_draft_kv_by_loc",
        ("target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens"),
    ),
    Uses(
        _SPEC + "dflash_worker_v2",
        _WORKER + "_update_target_mamba_state_after_verify",
        ("batch", "seq_lens_pre_verify", "seq_lens_post_verify", "commit_lens"),
    ),
    Uses(_SPEC + "dflash_worker_v2", _WORKER + "_make_next_draft_input_decode", ("bonus_tokens", "new_seq_lens")),
    Uses(_SPEC + "base_spec_worker", "BaseSpecWorker.on_verify_complete_cpu"),
    Uses("sglang.srt.layers.logprob_processor", "compute_spec_logprobs"),
    Uses(
        "sglang.srt.layers.sampler",
        "Sampler._sample_from_probs",
        ("probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    Uses("sglang.kernels.ops.sampling.murmur_hash", "murmur_hash32", ("seed", "positions", "col_indices")),
    Uses("sglang.kernels.ops.speculative.cache_locs", "assign_extend_cache_locs_func"),
    Uses("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.move_kv_cache", ("tgt_loc", "src_loc")),
    Uses("sglang.srt.mem_cache.kv_loc_plan", "KVLocPlan.bind", ("batch", "reader")),
    Uses(
        "sglang.srt.mem_cache.kv_loc_plan",
        "KVLocPlan.reads_from",
        ("source", "seq_lens", "seq_lens_cpu", "read_extent"),
    ),
    Uses(
        "sglang.srt.mem_cache.kv_index_translator",
        "KVIndexTranslator.plan",
        ("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Uses("sglang.srt.model_executor.model_runner", "ModelRunner", attributes=("dtype", "model_config")),
    Uses("sglang.srt.model_executor.forward_batch_info", "enable_num_token_non_padded"),
    Uses(
        "sglang.srt.managers.utils",
        "GenerationBatchResult",
        attributes=(
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "can_run_cuda_graph",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "speculative_output_stride",
            "new_seq_lens",
            "routed_experts_output",
            "indexer_topk_output",
        ),
    ),
    Uses(
        "sglang.srt.managers.scheduler_components.internal_state",
        "SchedulerInternalStateController._add_speculative",
        ("state",),
    ),
    Uses("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner.get_spec_info"),
)

# Functions that DDTREE's hooks stand around.
HOOKED = (
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    "sglang.srt.server_args.ServerArgs.from_cli_args",
    "sglang.srt.speculative.spec_utils.spec_need_hidden_states",
    "sglang.srt.speculative.spec_info.create_dummy_verify_input",
    "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
    "sglang.srt.speculative.dflash_utils.validate_dflash_request",
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
)

# Files under sglang/srt that hold the name "DFLASH" as a string, which a plugin cannot answer, and what becomes of
# DDTREE there. `same`: what happens is right; `hooked`: the plugin answers; `refused`: by SGLang or by
# ddtree, with a message; `elsewhere`: about targets or features that DDTREE refuses or does not touch.
NAME_TESTS = {
    "arg_groups/attention_hook.py": "refused: replay of recurrent state with ragged verification",
    "arg_groups/cp_tp_group_sharing_hook.py": "refused: context-parallel groups shared with tensor parallelism",
    "arg_groups/kv_cache_hook.py": "refused: unified memory and native FP4 caches",
    "arg_groups/layernorm_sp_hook.py": "refused: sequence-parallel layer norms",
    "arg_groups/lora_hook.py": "refused: LoRA",
    "arg_groups/model_overrides/minimax_m3.py": "refused: MiniMax M3",
    "arg_groups/model_overrides/nemotron_h.py": "same: settle chooses the drafter's backend",
    "arg_groups/speculative_hook.py": "same: settle does what is done there; block verification is refused",
    "arg_groups/validation_hook.py": "elsewhere: capture without a drafter",
    "disaggregation/mooncake/conn.py": "refused: disaggregation",
    "mem_cache/kv_cache_configurator.py": "elsewhere: replay of recurrent state",
    "speculative/dflash_worker_v2.py": "same: labels in messages",
    "speculative/spec_utils.py": "hooked: spec_need_hidden_states",
}
