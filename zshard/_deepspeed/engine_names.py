"""DeepSpeedEngine's public names that zshard's engine lacks, and what to use in place of each.

The one idea: a name without a meaning here is an AttributeError that says what to write instead.
`tools/names_of_engine.py` compares these names, and those that work, with DeepSpeed's.
"""

from __future__ import annotations

_CONFIG = "engine.config is the config as a dict, and docs/deepspeed.md says what each key is here"
_MODEL_PARALLEL = "zshard has data parallelism only"
_EXPERTS = "zshard has no expert parallelism; experts that all ranks have need nothing of it"
_REDUCES = "engine.backward() reduces gradients by itself; engine.no_sync() puts it off"
_COMPILE = "zshard has no DeepCompile: engine.compile() compiles the model by torch.compile"
_PROFILE = "zshard has no timers of its own: use torch.profiler, which shows each unit"
_LOADER = "pass collate_fn= or a data_sampler of your own to engine.deepspeed_io()"
_GROUP = "engine.module.process_group is the group of the ranks"
_SAVE = "use engine.save_checkpoint() and engine.load_checkpoint()"
_OFFLOAD = "offload is set by the config, in 'offload_param' and 'offload_optimizer'"
_INTERNAL = "it is DeepSpeed's own bookkeeping, and zshard has nothing in its place"
_NOT_HERE = "the config key that asks for it is refused"

_GROUPS = {
    _CONFIG: """
        aio_config amp_params autotuning_enabled autotuning_end_profile_step autotuning_metric
        autotuning_metric_path autotuning_model_info autotuning_model_info_path
        autotuning_profile_model_info autotuning_start_profile_step
        bf16_master_weights_and_gradients bf16_optimizer_states checkpoint_serialization_enabled
        checkpoint_tag_validation_enabled checkpoint_tag_validation_fail checkpoint_writer_enabled
        communication_data_type cpuadam_cores_perc dump_state dynamic_loss_scale_args
        flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth
        flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor
        flops_profiler_top_modules fp16_auto_cast fp16_master_weights_and_gradients
        gradient_average gradient_predivide_factor initial_dynamic_scale is_sanity_checks_enabled
        memory_breakdown mics_shard_size optimizer_legacy_fusion postscale_gradients
        save_non_zero_checkpoint save_zero_checkpoint sparse_gradients_enabled super_offload
        swap_tensor_config torch_autocast_lower_precision_safe_modules use_node_local_storage
        zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
        zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload
        zero_elastic_checkpoint zero_force_ds_cpu_optimizer
        zero_gather_16bit_weights_on_model_save zero_grad_hooks zero_hpz_partition_size
        zero_ignore_unused_parameters zero_legacy_stage1 zero_load_from_fp32_weights
        zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance
        zero_model_persistence_threshold zero_module_granularity_threshold
        zero_multi_rank_bucket_allreduce zero_nvme_offload_optimizer zero_offload_optimizer
        zero_offload_param zero_overlap_comm zero_param_persistence_threshold zero_partial_offload
        zero_prefetch_bucket_size zero_quantized_gradients zero_quantized_nontrainable_weights
        zero_quantized_weights zero_reduce_bucket_size zero_reduce_scatter
        zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory zero_sub_group_size
        zero_use_cpu_optimizer zeropp_loco_param""",
    _NOT_HERE: """
        amp_enabled block_eigenvalue compression_scheduler curriculum_enabled_legacy
        curriculum_learning_config curriculum_learning_enabled curriculum_params_legacy
        curriculum_scheduler_legacy data_efficiency_config data_efficiency_enabled
        data_sampling_config data_sampling_enabled eigenvalue eigenvalue_enabled
        eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num
        eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose
        elasticity_enabled get_pld_theta graph_harvesting is_elastic_model_parallel_supported
        pld_enabled pld_gamma pld_params pld_theta progressive_layer_drop quantize_training
        quantizer random_ltd_config random_ltd_enabled random_ltd_initialize random_ltd_scheduler
        set_custom_curriculum_learning_schedule zenflow_config""",
    _MODEL_PARALLEL: """
        autotp_size get_model_parallel_rank get_sequence_parallel_group get_tensor_parallel_rank
        is_first_weights_partition_group loaded_checkpoint_mp_world_size mesh_device
        mp_world_size mpu pipeline_parallelism seq_dp_world_size seq_parallel_group
        sequence_parallel_size tensor_parallel_config""",
    _GROUP: "data_parallel_group dist_backend seq_data_parallel_group use_ds_comm",
    _EXPERTS: """
        all_to_all_group expert_data_parallel_group expert_parallel_group gate_modules
        has_moe_layers local_all_to_all_group load_moe_state_dict moe_layers num_experts
        print_forward_breakdown""",
    _REDUCES: """
        all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_gradients
        allreduce_no_retain buffered_allreduce_fallback enable_backward_allreduce flatten
        inside_no_sync_ctxt sparse_all_gather sparse_allreduce sparse_allreduce_bucket
        sparse_allreduce_no_retain sparse_tensor_module_names unflatten""",
    _COMPILE: """
        compile_autosp compile_zero_optimization_stage get_autosp_backend get_compile_time
        get_deepcompile_backend get_deepspeed_compile_backend is_deepcompile_active
        is_deepcompile_enabled register_compile_pass""",
    _PROFILE: """
        engine_timers engine_timers_cache flops flops_profiler fwd_duration get_wall_clock_timers
        monitor summary_events timers tput_timer""",
    _LOADER: "collate_fn first_dataloader_check set_data_post_process_func training_data",
    _SAVE: "checkpoint_engine load_universal_checkpoint loaded_checkpoint_dp_world_size",
    _OFFLOAD: "empty_partition_cache offload_states reload_states",
    _INTERNAL: """
        dont_change_device gas_boundary_ctr losses module_forward_post_hook
        module_forward_pre_hook optimized_linear_base_weight_sharding
        optimized_linear_lora_enabled param_names scale_wrt_gas torch_autocast_z0_gradscaler
        update_interval warn_unscaled_loss""",
    "use engine.optimizer": "basic_optimizer client_optimizer",
    "use engine.lr_scheduler": "client_lr_scheduler",
    "engine.backward(loss) scales the loss": "scale",
    "engine.step() clips, by 'gradient_clipping' of the config": "clip_fp32_gradients",
    "read engine.optimizer.param_groups": "get_type",
}

REFUSED = {name: remedy for remedy, names in _GROUPS.items() for name in names.split()}
"""By name, the remedy."""


def missing(name: str) -> str:
    """The text of the AttributeError for a name that neither the engine nor the model has."""
    if name in REFUSED:
        return f"the engine of zshard.initialize() has no '{name}': {REFUSED[name]}"
    return (
        f"the engine of zshard.initialize() has no attribute '{name}', and neither has the model: "
        "docs/deepspeed.md lists what it has"
    )
