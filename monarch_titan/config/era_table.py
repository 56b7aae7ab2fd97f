"""Every option of the TOML era, TorchTitan 0.1 to 0.2.2, and where it went in 0.3.0: one line each.

Read it beside TorchTitan's own ``JobConfig`` of 0.2.2 and ``config_manager.py`` of 0.1.0: all of their keys are here,
and those of the Flux and TorchFT extensions, which TorchTitan published itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What becomes of one option."""

    to: str = ""
    """Where it went: a path of 0.3.0's configuration. Empty if it has no place there."""

    types: tuple[type, ...] = ()
    """What the value must be where 0.3.0 does not check it; anything if empty."""

    value: Callable[[Any], Any] | None = None
    """The new value for the old one; raises ValueError with the rule that the old one breaks."""

    only: tuple[Any, ...] | None = None
    """The values that can be had; any other is refused. None if all can."""

    when: tuple[str, tuple[Any, ...]] | None = None
    """Another option and the values of it with which this one means anything."""

    reason: str = ""
    """Why a value is not applied or refused, or a remark about one that is."""


def to(path: str, **more: Any) -> Rule:
    return Rule(to=path, **more)


def gone(*types: type, reason: str) -> Rule:
    """An option without a place whose loss changes no training."""
    return Rule(types=types, reason=reason)


def only(value: Any, reason: str) -> Rule:
    """An option without a place, of which one value asks for nothing and no other can be had."""
    return Rule(only=(value,), types=(int, float) if type(value) is int else (type(value),), reason=reason)


def same(section: str, names: str) -> dict[str, Rule]:
    """Options that kept their section and name."""
    return {f"{section}.{name}": Rule(to=f"{section}.{name}") for name in names.split()}


def moved(old: str, new: str, names: str) -> dict[str, Rule]:
    """Options that kept their name in another section."""
    return {f"{old}.{name}": Rule(to=f"{new}.{name}") for name in names.split()}


# Values --------------------------------------------------------------------------------------------------------------


def folder_of(path: Any) -> Any:
    """The folder of a tokenizer's file: 0.3.0 wants the folder."""
    is_file = isinstance(path, str) and os.path.splitext(path)[1] in (".model", ".json")
    return os.path.dirname(path) or "." if is_file else path


def renamed_modules(names: Any) -> Any:
    """Names of modules, in lists of any depth: the model's last layer was called ``output`` and is ``lm_head``."""
    if isinstance(names, list):
        return [renamed_modules(name) for name in names]
    return "lm_head" if names == "output" else names


def or_none(method: Any) -> Any:
    """No method was null; it has a name now."""
    return "none" if method is None else method


def group_for(backend: Any) -> Any:
    """``nccl`` becomes ``auto``: NCCL or RCCL with an accelerator, gloo on a machine without."""
    return "auto" if backend == "nccl" else backend


def rowwise(recipe: Any) -> Any:
    """The recipe, unless it is the one that is gone."""
    if recipe == "tensorwise":
        raise ValueError('be "rowwise" or "rowwise_with_gw_hp": TorchTitan 0.3.0 has no tensorwise scaling')
    return recipe


ADAMW = "optimizer.param_groups.0"
LINEAR, EXPERTS = "torchtitan.converters.float8_linear", "torchtitan.converters.float8_grouped_experts"
MX = "torchtitan.converters.mxfp8_grouped_experts"
MODE = "activation_checkpoint.mode"

ALL_GATHER = "TorchTitan 0.3.0 has no float8 all-gather in FSDP; [float8_comm] is to bring it back (not built yet)"
SKIPPED_NOT_CHOSEN = (
    "MXFP8 of 0.3.0 takes the modules to convert, not those to skip: [torchtitan.converters.mxfp8_linear] fqns"
)
DERIVED = "the plugin gives each replica its own"


def _float8_linear(section: str) -> dict[str, Rule]:
    return {
        f"{section}.filter_fqns": to(f"{LINEAR}.filter_fqns", value=renamed_modules, reason="output is called lm_head"),
        f"{section}.recipe_name": to(f"{LINEAR}.recipe_name", value=rowwise),
        f"{section}.emulate": to(f"{LINEAR}.emulate"),
        f"{section}.enable_fsdp_float8_all_gather": gone(bool, reason=ALL_GATHER),
        f"{section}.precompute_float8_dynamic_scale_for_fsdp": gone(bool, reason=ALL_GATHER),
        f"{section}.force_recompute_fp8_weight_in_bwd": gone(bool, reason="torchao does this by itself"),
    }


TABLE: dict[str, Rule] = {
    # [job]
    "job.dump_folder": to("dump_folder"),
    "job.description": to("monarch.description"),
    "job.print_config": to("debug.print_config"),
    "job.print_args": to("debug.print_config"),  # 0.1
    "job.save_config_file": to("debug.save_config_file"),
    "job.config_file": gone(str, reason="the file is what you named"),
    "job.use_for_integration_test": gone(bool, reason="it selected TorchTitan's own tests"),
    "job.custom_config_module": gone(str, reason="0.3.0 has configuration functions for this: [torchtitan] module"),
    "experimental.custom_args_module": gone(
        str, reason="0.3.0 has configuration functions for this: [torchtitan] module"
    ),
    "experimental.custom_import": gone(str, reason="0.3.0 has configuration functions for this: [torchtitan] module"),
    # [profiling]
    **moved(
        "profiling",
        "profiler",
        "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot "
        "save_memory_snapshot_folder",
    ),
    # [metrics]
    **same(
        "metrics",
        "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    ),
    # [model]: name, flavor and converters are read together, in era.py
    "model.name": to("torchtitan.module"),
    "model.flavor": to("torchtitan.flavor"),
    "model.converters": to("torchtitan.converters"),
    "model.hf_assets_path": to("hf_assets_path"),
    "model.tokenizer_path": to("hf_assets_path", value=folder_of, reason="a folder now"),
    "model.print_after_conversion": gone(bool, reason="TorchTitan 0.3.0 logs the model by itself"),
    # [optimizer]
    "optimizer.name": to(f"{ADAMW}.optimizer_name"),
    "optimizer.lr": to(f"{ADAMW}.optimizer_kwargs.lr", types=(int, float)),
    "optimizer.beta1": to(f"{ADAMW}.optimizer_kwargs.betas.0", types=(int, float)),
    "optimizer.beta2": to(f"{ADAMW}.optimizer_kwargs.betas.1", types=(int, float)),
    "optimizer.eps": to(f"{ADAMW}.optimizer_kwargs.eps", types=(int, float)),
    "optimizer.weight_decay": to(f"{ADAMW}.optimizer_kwargs.weight_decay", types=(int, float)),
    "optimizer.implementation": to("optimizer.implementation"),
    "optimizer.early_step_in_backward": only(False, reason="be false: TorchTitan 0.3.0 steps after the backward pass"),
    # [lr_scheduler]
    **same("lr_scheduler", "warmup_steps total_steps decay_ratio decay_type min_lr_factor"),
    "lr_scheduler.lr_min": to("lr_scheduler.min_lr_factor"),  # 0.1
    # [training]
    **same(
        "training",
        "local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype mixed_precision_param "
        "mixed_precision_reduce gc_freq gc_debug",
    ),
    **moved("training", "dataloader", "dataset dataset_path"),
    **moved("training.dataloader", "dataloader", "num_workers persistent_workers pin_memory prefetch_factor"),
    "training.compile": to("compile.enable"),  # 0.1
    **moved("training", "debug", "seed deterministic"),  # to 0.2.0
    "training.debug_moe_force_load_balance": to("debug.moe_force_load_balance"),  # 0.2.0
    # [parallelism]
    **same(
        "parallelism",
        "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward tensor_parallel_degree "
        "pipeline_parallel_degree pipeline_parallel_first_stage_less_layers "
        "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
        "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size context_parallel_degree "
        "context_parallel_load_balancer expert_parallel_degree",
    ),
    "parallelism.module_fqns_per_model_part": to(
        "parallelism.module_fqns_per_model_part", value=renamed_modules, reason="output is called lm_head"
    ),
    "parallelism.enable_async_tensor_parallel": to("compile.enable_async_tensor_parallel"),
    "parallelism.expert_parallel_comm_backend": to("torchtitan.moe_comm_backend"),
    "parallelism.expert_tensor_parallel_degree": only(
        1, reason="be 1: TorchTitan 0.3.0 has no tensor parallel experts"
    ),
    "parallelism.pipeline_parallel_split_points": only(
        [], reason="be empty: 0.3.0 takes whole stages, parallelism.module_fqns_per_model_part"
    ),
    "parallelism.disable_loss_parallel": gone(bool, reason="TorchTitan 0.3.0 decides this by itself"),
    "parallelism.enable_compiled_autograd": gone(bool, reason="TorchTitan 0.3.0 does not use compiled autograd"),
    "parallelism.context_parallel_rotate_method": gone(str, reason="TorchTitan 0.3.0 has one method"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": gone(
        bool, reason="TorchTitan 0.3.0 decides this by its schedule"
    ),
    # [checkpoint]
    **same(
        "checkpoint",
        "enable folder interval initial_load_path initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode keep_latest_k "
        "load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
    ),
    "checkpoint.enable_checkpoint": to("checkpoint.enable"),  # 0.1
    "checkpoint.last_save_model_weights_only": to("checkpoint.last_save_model_only"),  # 0.1
    "checkpoint.initial_load_model_weights_only": to("checkpoint.initial_load_model_only"),  # 0.1
    "checkpoint.enable_ft_dataloader_checkpoints": gone(
        bool, reason="healed replicas take their data position from their peers"
    ),
    # [activation_checkpoint]
    "activation_checkpoint.mode": to(MODE),
    "activation_checkpoint.selective_ac_option": Rule(
        types=(str, int),
        when=(MODE, ("selective",)),
        reason='0.3.0 selects by operator, as "op" did, and no longer whole layers',
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": to(
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns", when=(MODE, ("selective",))
    ),
    "activation_checkpoint.early_stop": gone(bool, reason="0.3.0 leaves this to torch"),
    **{
        f"activation_checkpoint.{name}": to(f"activation_checkpoint.{name}", when=(MODE, ("memory_budget",)))
        for name in ("memory_budget", "visualize_memory_budget_pareto")
    },
    **{
        f"activation_checkpoint.{name}": to(
            f"activation_checkpoint.{name}", when=(MODE, ("selective", "full", "memory_budget"))
        )
        for name in ("preserve_rng_state", "determinism_check", "debug")
    },
    # [compile]
    **same("compile", "enable components backend"),
    # [quantize], and [float8] and [mx] of 0.1
    **_float8_linear("quantize.linear.float8"),
    **_float8_linear("float8"),
    "quantize.grouped_mm.float8.fqns": gone(
        list, str, reason="0.3.0 converts all routed experts: [torchtitan.converters.float8_grouped_experts]"
    ),
    "quantize.grouped_mm.mx.fqns": gone(
        list, str, reason="0.3.0 converts all routed experts: [torchtitan.converters.mxfp8_grouped_experts]"
    ),
    "quantize.grouped_mm.mx.recipe_name": gone(str, reason="0.3.0 has one recipe"),
    "quantize.linear.mx.filter_fqns": gone(list, reason=SKIPPED_NOT_CHOSEN),
    "quantize.linear.mx.recipe_name": gone(str, reason="0.3.0 has one recipe"),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": gone(str, reason="0.3.0 chooses the kernel by itself"),
    "mx.filter_fqns": gone(list, reason=SKIPPED_NOT_CHOSEN),
    "mx.recipe_name": gone(str, reason="0.3.0 has one recipe"),
    "mx.use_fp8_dim1_cast_triton_kernel": gone(bool, reason="0.3.0 chooses the kernel by itself"),
    # [comm]
    **same(
        "comm",
        "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    ),
    # [memory_estimation]
    "memory_estimation.enable": gone(bool, reason="monarch-titan validate estimates memory"),
    "memory_estimation.enabled": gone(bool, reason="monarch-titan validate estimates memory"),  # 0.1
    "memory_estimation.disable_fake_mode": gone(bool, reason="monarch-titan validate estimates memory"),
    # [fault_tolerance]
    **same("fault_tolerance", "enable sync_steps num_fragments process_group_timeout_ms"),
    "fault_tolerance.semi_sync_method": to("fault_tolerance.semi_sync_method", value=or_none),
    "fault_tolerance.process_group": to(
        "fault_tolerance.process_group", value=group_for, reason="auto is nccl with an accelerator and gloo without"
    ),
    "fault_tolerance.min_replica_size": to("monarch.min_replicas"),
    "fault_tolerance.replica_id": only(0, reason=f"be left out: {DERIVED}"),
    "fault_tolerance.group_size": gone(
        int, reason="it is the number of replica groups: monarch.num_replicas"
    ),  # checked in era.py
    "fault_tolerance.should_quantize": only(False, reason="be false: outer steps in FP8 are not built yet"),
    "fault_tolerance.fragment_sync_delay": only(0, reason="be 0: delayed fragments are not built yet"),
    "fault_tolerance.fragment_update_alpha": only(0, reason="be 0: partial updates of fragments are not built yet"),
    "fault_tolerance.module_fqns_per_model_fragment": only([], reason="be empty: fragments are cut by num_fragments"),
    # [validation]
    **moved("validation", "validator", "enable freq steps"),
    **moved("validation", "validator.dataloader", "dataset dataset_path"),
    **moved(
        "validation.dataloader",
        "validator.dataloader",
        "num_workers persistent_workers pin_memory prefetch_factor",
    ),
    "validation.local_batch_size": gone(int, reason="0.3.0 validates with training.local_batch_size"),
    "validation.seq_len": gone(int, reason="0.3.0 validates with training.seq_len"),
    # [debug]
    **same("debug", "seed deterministic deterministic_warn_only moe_force_load_balance"),
}

FLUX: dict[str, Rule] = {
    "training.classifier_free_guidance_prob": to("dataloader.prompt_dropout_prob"),
    "training.img_size": to("dataloader.img_size"),
    "training.test_mode": to("tokenizer.test_mode"),
    "encoder.t5_encoder": to("encoder.t5_encoder"),
    "encoder.clip_encoder": to("encoder.clip_encoder"),
    "encoder.autoencoder_path": to("encoder.autoencoder_path"),
    "encoder.max_t5_encoding_len": to("tokenizer.max_t5_encoding_len"),
    **moved(
        "validation",
        "validator.sampling",
        "enable_classifier_free_guidance classifier_free_guidance_scale denoising_steps",
    ),
    **moved("validation", "validator", "save_img_count save_img_folder all_timesteps"),
    "validation.eval_freq": to("validator.freq"),
    **same("inference", "save_img_folder prompts_path local_batch_size img_size"),
}
"""More options, with ``[model] name = "flux"``."""

ENCODERS = {
    "encoder.t5_encoder": "tokenizer.t5_tokenizer_path",
    "encoder.clip_encoder": "tokenizer.clip_tokenizer_path",
}
"""Flux's encoders chose their tokenizers too."""

MODELS = {name: name for name in ("llama3", "deepseek_v3", "qwen3", "gpt_oss", "flux")} | {"llama3_ft": "llama3"}
"""``model.name`` and TorchTitan 0.3.0's module."""

NO_MODELS = {
    "llama4": "TorchTitan 0.3.0 has no Llama 4",
    "vlm": "TorchTitan 0.3.0 has no such vision-language model; qwen3_5 and kimi_k2_7 are its multimodal ones",
}
"""Models that cannot be had, and why."""

CONVERTERS = {
    "float8": "float8_linear",  # 0.1, and files that kept the name
    "quantize.linear.float8": "float8_linear",
    "quantize.grouped_mm.float8": "float8_grouped_experts",
    "quantize.grouped_mm.mx": "mxfp8_grouped_experts",
}
"""``model.converters`` and ours."""

NO_CONVERTERS = {"mx": SKIPPED_NOT_CHOSEN, "quantize.linear.mx": SKIPPED_NOT_CHOSEN}

DEFAULTS: dict[str, Any] = {
    "dataloader.dataset": "c4_test",
    "profiler.save_traces_folder": "profile_traces",
    "profiler.save_memory_snapshot_folder": "memory_snapshot",
    "training.disable_cuda_graphs": True,  # the era had no CUDA graphs
}
"""What the era meant by silence, where 0.3.0 means something else."""

FAULT_TOLERANCE_DEFAULTS: dict[str, Any] = {
    "fault_tolerance.semi_sync_method": "none",
    "fault_tolerance.sync_steps": 5,
    "fault_tolerance.process_group": "gloo",
    "fault_tolerance.process_group_timeout_ms": 10_000,
}
"""The same, for a file that has a section ``[fault_tolerance]``."""
