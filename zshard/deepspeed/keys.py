"""The keys of a DeepSpeed config: which work, which have no meaning here, which are refused.

Every key that DeepSpeed knows is in one of three tables, under its full name with
dots. A key in none of them is an error that names the nearest one: nothing is lost in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

_BATCH = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
_FP16 = (
    "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
    "consecutive_hysteresis min_loss_scale"
)
_OFFLOAD = "device nvme_path ratio"


def _names(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" if section else name for name in names.split()]


WORKS = frozenset(
    [
        *_names("", f"{_BATCH} gradient_clipping steps_per_print communication_data_type"),
        *_names("", "dataloader_drop_last zero_optimization.stage zero_optimization.cpu_offload"),
        *_names("", "managed_gradient_accumulation"),
        *_names("", "gradient_allreduce_op optimizer.type optimizer.params scheduler.type"),
        *_names("", "scheduler.params torch_autocast.enabled torch_autocast.dtype"),
        *_names("", "data_types.grad_accum_dtype data_types.buffer_dtype"),
        *_names("fp16", _FP16),
        *_names("bf16", "enabled check_grad_overflow"),
        *_names("zero_optimization", "cpu_offload_param cpu_offload_params compute_grad_norm"),
        *_names("zero_optimization.offload_param", _OFFLOAD),
        *_names("zero_optimization.offload_optimizer", _OFFLOAD),
    ]
)
"""The keys that have their effect."""

_ZERO_IGNORED = (
    "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm load_from_fp32_weights "
    "elastic_checkpoint sub_group_size cpu_offload_use_pin_memory prefetch_bucket_size "
    "stage3_prefetch_bucket_size param_persistence_threshold stage3_param_persistence_threshold "
    "model_persistence_threshold stage3_model_persistence_threshold max_live_parameters "
    "stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
    "gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save "
    "gather_fp16_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
    "module_granularity_threshold stage3_module_granularity_threshold "
    "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
    "stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module grad_hooks "
    "grad_partitioned param_partitioned"
)
_OFFLOAD_IGNORED = (
    "buffer_count buffer_size max_in_cpu pin_memory pipeline pipeline_read pipeline_write "
    "fast_init super_offload cpuadam_cores_perc"
)
_TOP_IGNORED = (
    "wall_clock_breakdown memory_breakdown dump_state disable_allgather disable_python_gc "
    "log_level vocabulary_size prescale_gradients gradient_predivide_factor fp32_allreduce "
    "sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
    "activation_checkpointing aio flops_profiler comms_logger comms_config monitor_config "
    "tensorboard wandb csv_monitor comet autotuning timers compile checkpoint nebula "
    "datastates_ckpt cuda_visible_devices use_data_before_expert_parallelism "
    "seq_parallel_communication_data_type use_node_local_storage"
)
IGNORED = frozenset(
    [
        *_names("", _TOP_IGNORED),
        *_names("", "optimizer.legacy_fusion torch_autocast.lower_precision_safe_modules"),
        *_names("", "data_types.keep_in_fp32_modules data_types.param_dtype"),
        *_names("zero_optimization", _ZERO_IGNORED),
        *_names("zero_optimization.offload_param", _OFFLOAD_IGNORED),
        *_names("zero_optimization.offload_optimizer", _OFFLOAD_IGNORED),
        *_names("bf16", "immediate_grad_update loss_scale initial_scale_power loss_scale_window"),
        *_names("bf16", "hysteresis min_loss_scale consecutive_hysteresis auto_cast"),
    ]
)
"""The keys that change neither losses nor what a script sees: one warning names those in use."""

_PURE = (
    "zshard keeps float32 copies: omit it, or train in pure bfloat16 with model.bfloat16() and "
    "zshard.AdamW(..., stochastic_rounding=True)"
)
_QUANTIZED = (
    "quantized communication changes numbers: remove it, or train with FSDP(wire='int8') and your "
    "own loop (docs/strategies.md)"
)
_DENSE = "zshard trains all layers and all tokens: remove it"
_PARALLEL = "zshard has data parallelism only: remove it, or set its size to 1"
REFUSED = {
    "amp": "Apex is not supported: use 'bf16', 'fp16' or 'torch_autocast'",
    "sparse_attention": "replace it by attention layers of the model",
    "progressive_layer_drop": _DENSE,
    "curriculum_learning": "change the data in the script",
    "data_efficiency": "change the data in the script",
    "random_ltd": _DENSE,
    "compression_training": "compress the model in the script",
    "quantize_training": "quantize the model in the script",
    "weight_quantization": "quantize the model in the script",
    "eigenvalue": "it belongs to quantized training: remove it",
    "elasticity": "set the batch sizes for the number of ranks that you start",
    "pipeline": _PARALLEL,
    "tensor_parallel": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "data_parallel_size": "zshard shards over all ranks: remove it",
    "hybrid_engine": "call engine.module.generate()",
    "graph_harvesting": "remove it",
    "fp16.fp16_master_weights_and_grads": "zshard keeps float32 copies: omit it",
    "bf16.bf16_master_weights_and_grads": _PURE,
    "bf16.bf16_optimizer_states": _PURE,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.zeropp_loco_param": _QUANTIZED,
    "zero_optimization.zenflow": "it delays updates: remove it",
    "zero_optimization.mics_shard_size": (
        "use the strategy 'hybrid_shard' with FSDP() and your own loop (docs/strategies.md)"
    ),
    "zero_optimization.mics_hierarchical_params_gather": "remove it",
}
"""The keys that would change numbers and are not supported, with what to do instead."""

_KNOWN = WORKS | IGNORED | REFUSED.keys()
SECTIONS = frozenset(name[:i] for name in WORKS for i in (name.find("."), name.rfind(".")) if i > 0)
FREE = ("optimizer.params", "scheduler.params")  # each type has its own: see the builders
_OLD_NAMES = {"bfloat16": "bf16"}
_OFF: tuple[Any, ...] = (None, False, 0, 1, {}, [], "auto", "none", "")


def cleaned(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the config under today's names, without what says nothing: a key that is
    null counts as absent, and one that begins with no letter is a comment ("_comment", "//"). The
    full names of comments come second."""
    found = {_OLD_NAMES.get(key, key): value for key, value in config.items()}
    if isinstance(found.get("zero_optimization"), bool):  # DeepSpeed 0.1
        found["zero_optimization"] = {"stage": int(found["zero_optimization"])}
    comments: list[str] = []
    return _cleaned(found, "", comments), comments


def _cleaned(section: Mapping[str, Any], path: str, comments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        if not str(key)[:1].isalpha():
            comments.append(name)
        elif (name in SECTIONS or name in FREE) and isinstance(value, Mapping):
            found[key] = _cleaned(value, name, comments)
        elif value is not None or path in FREE:
            found[key] = value
    return found


def check_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the keys in use that have no meaning here.

    Raises ValueError for an unknown key, TypeError for a section that is not a dict,
    NotImplementedError for a key that would change numbers and is not supported.
    """
    ignored = []
    for name, value in _items(config, ""):
        if name in REFUSED:
            if not _is_off(value):
                raise NotImplementedError(
                    f"the DeepSpeed config has '{name}', which is not supported: {REFUSED[name]}"
                )
        elif name in IGNORED:
            ignored += [] if _is_off(value) else [name]
        elif name not in WORKS:
            raise ValueError(_unknown(name))
    return ignored


def _items(section: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section by their full names, with values."""
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        if name not in SECTIONS and name not in FREE:
            yield name, value
        elif not isinstance(value, Mapping):
            raise TypeError(f"'{name}' in the DeepSpeed config must be a dict, got {value!r}")
        elif name not in FREE:
            yield from _items(value, name)


def _is_off(value: Any) -> bool:
    """Whether a value asks for nothing: false, a section that is not enabled, a size of 1."""
    if isinstance(value, Mapping):
        inner = value.get("enabled", value.get("autotp_size"))
        return not value or (inner is not None and _is_off(inner))
    return value is not True and value in _OFF


def _unknown(name: str) -> str:
    path, _, key = name.rpartition(".")
    parts = [each.rpartition(".") for each in (*_KNOWN, *SECTIONS)]
    beside = [last for before, _, last in parts if before == path]
    where = f"in '{path}' of the DeepSpeed config" if path else "in the DeepSpeed config"
    near = difflib.get_close_matches(key, beside, 1)
    if near:
        return f"unknown key '{key}' {where}: did you mean '{near[0]}'?"
    elsewhere = sorted(each for each in _KNOWN if each.rpartition(".")[2] == key)
    if elsewhere:
        return f"unknown key '{key}' {where}: it belongs to '{elsewhere[0].rpartition('.')[0]}'"
    return f"unknown key '{key}' {where}: remove it (docs/deepspeed.md lists all keys)"
