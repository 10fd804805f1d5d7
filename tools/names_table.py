"""What each public name of torch's FSDP1, FSDP2 and DDP is in zshard: the entries of docs/names.md.

The one idea: an entry is a status and what backs it: a test for what works or has no effect, a
remedy for what is an error. `tools/names.py` compares the names with torch's and writes the page;
`tests/compat/test_names_table.py` tries each error.
"""

from __future__ import annotations

from typing import NamedTuple

from zshard._compat.attributes import REFUSED

WORKS, IDLE, ERROR = "works", "no effect", "error"


class Entry(NamedTuple):
    """A name's status, its test (none for an error), and a note."""

    status: str
    test: str = ""
    note: str = ""


def works(test: str, note: str = "") -> Entry:
    return Entry(WORKS, f"tests/{test}", note)


def idle(test: str, note: str) -> Entry:
    """Accepted and checked, without an effect on numbers."""
    return Entry(IDLE, f"tests/{test}", note)


def error(note: str) -> Entry:
    return Entry(ERROR, "", note)


def refused(*names: str) -> dict[str, Entry]:
    """Attributes that are an AttributeError, which says what to use instead."""
    return {name: error(REFUSED[name]) for name in names}


FSDP1 = "compat/test_fsdp1_names.py"
FSDP2 = "compat/test_fsdp2_names.py"
DDP = "compat/test_ddp_names.py"
API = "wrap/test_api.py"
PRECISION = "training/test_mixed_precision.py"
WRAP = "wrap/test_wrap.py"
TYPES = f"{FSDP1}::test_a_state_dict_type_is_set_until_the_next"
GIVEN = f"{FSDP1}::test_torchs_types_and_configs_are_returned_as_they_were_passed"
RANK_0 = "state_dict/test_state_dict_type.py::test_rank_0_only"
OLDER = f"{FSDP1}::test_older_functions_for_optimizer_state"
OWN = f"{FSDP1}::test_attributes"
SWITCH = f"{FSDP2}::test_training_with_all_switches_has_the_bits_of_ddp"
CHECKED = f"{FSDP2}::test_a_switch_takes_a_bool"
TRAINS = f"{DDP}::test_training_has_the_bits_of_ddp"
BUFFERS = f"{DDP}::test_buffers_are_broadcast_as_by_ddp"
THEIRS = f"{DDP}::test_attributes_are_those_of_ddp"
OBJECTS = f"{API}::test_torchs_argument_objects_are_taken"
GATHERS = "units/test_collectives.py::test_gathers_begin_when_asked"
NAMED_STATE = "state_dict/test_optim_names.py::test_fsdp1s_spellings"
DTYPES = f"{PRECISION}::test_who_sees_which_dtype"
OUTPUTS = f"{PRECISION}::test_outputs_are_cast_and_inputs_if_wanted"
NO_SYNC = "training/test_no_sync.py"
BLOCKS = f"{WRAP}::test_every_spelling_of_a_policy_finds_the_blocks"
MANUAL = "wrap/test_manual_wrap.py::test_wrap_takes_the_contexts_arguments_and_its_own"
FULLY = "compat/test_fully_shard.py"
FULLY_TRAINS = f"{FULLY}::test_training_has_the_bits_of_ddp_and_fsdp"
SCRIPT = f"{FULLY}::test_a_script_of_fsdp2_trains_as_with_torch"
POLICIES = "compat/test_fully_shard_errors.py::test_policies_that_ask_for_nothing_new_pass"

_FLAT_CPU = "on the CPU either way"
_NO_SHARDED_TENSOR = "save with zshard.save(), which writes each rank's shards"
_NO_DTENSOR = "zshard takes no DTensors: pass mesh= the dimensions to shard and replicate over"
_AFTER = "gradients are reduced during backward"
_UNITS = "zshard reduces one unit at a time: auto_wrap_policy"
_STRATEGY = f"{API}::test_spellings_of_a_strategy"

NAMES: dict[str, dict[str, Entry]] = {
    "torch.distributed.fsdp": {
        "BackwardPrefetch": works(OBJECTS),
        "CPUOffload": works(OBJECTS),
        "CPUOffloadPolicy": works(POLICIES),
        "DataParallelMeshDims": error(_NO_DTENSOR),
        "FSDPModule": works(f"{FSDP2}::test_what_was_sharded_is_found_by_isinstance"),
        "FlatParameter": works(
            f"{FSDP2}::test_mistakes_are_named", "isinstance() is false for every parameter"
        ),
        "FullOptimStateDictConfig": works(NAMED_STATE),
        "FullStateDictConfig": works(RANK_0),
        "FullyShardedDataParallel": works("compat/test_fsdp1_scripts.py"),
        "LocalOptimStateDictConfig": works(TYPES),
        "LocalStateDictConfig": works(TYPES),
        "MixedPrecision": works(DTYPES),
        "MixedPrecisionPolicy": works(OUTPUTS),
        "OffloadPolicy": works(POLICIES),
        "OptimStateDictConfig": works(GIVEN),
        "OptimStateKeyType": works(OLDER),
        "ShardedOptimStateDictConfig": works(GIVEN),
        "ShardedStateDictConfig": works(TYPES),
        "ShardingStrategy": works(_STRATEGY),
        "StateDictConfig": works(TYPES),
        "StateDictSettings": works(TYPES),
        "StateDictType": works(TYPES),
        "UnshardHandle": works(SWITCH),
        "fully_shard": works(FULLY_TRAINS),
        "register_fsdp_forward_method": works(f"{FSDP2}::test_register_fsdp_forward_method"),
        "share_comm_ctx": idle(
            f"{FSDP2}::test_mistakes_are_named", "models over the same ranks share a transport"
        ),
    },
    "Enums and dataclasses": {
        "BackwardPrefetch.BACKWARD_POST": works(GATHERS),
        "BackwardPrefetch.BACKWARD_PRE": works(GATHERS),
        "CPUOffload.offload_params": works(OBJECTS, "no effect on CPU ranks"),
        "CPUOffloadPolicy.pin_memory": idle(POLICIES, "host memory for a GPU is always pinned"),
        "DataParallelMeshDims.replicate": error(_NO_DTENSOR),
        "DataParallelMeshDims.shard": error(_NO_DTENSOR),
        "FullOptimStateDictConfig.offload_to_cpu": idle(NAMED_STATE, _FLAT_CPU),
        "FullOptimStateDictConfig.rank0_only": works(NAMED_STATE),
        "FullStateDictConfig.offload_to_cpu": idle(TYPES, "see docs/checkpoints.md"),
        "FullStateDictConfig.rank0_only": works(RANK_0),
        "LocalOptimStateDictConfig.offload_to_cpu": idle(GIVEN, _FLAT_CPU),
        "LocalStateDictConfig.offload_to_cpu": idle(TYPES, "shards stay where they are"),
        "MixedPrecision._module_classes_to_ignore": works(DTYPES),
        "MixedPrecision.buffer_dtype": works(DTYPES),
        "MixedPrecision.cast_forward_inputs": works(
            f"{FSDP1}::test_inner_units_cast_their_arguments_only_if_asked_to"
        ),
        "MixedPrecision.cast_root_forward_inputs": works(OUTPUTS),
        "MixedPrecision.keep_low_precision_grads": error("gradients have the parameters' dtype"),
        "MixedPrecision.param_dtype": works(DTYPES),
        "MixedPrecision.reduce_dtype": works(f"{PRECISION}::test_gradients_are_summed_in_float32"),
        "MixedPrecisionPolicy.cast_forward_inputs": works(OUTPUTS),
        "MixedPrecisionPolicy.output_dtype": works(OUTPUTS),
        "MixedPrecisionPolicy.param_dtype": works(OUTPUTS),
        "MixedPrecisionPolicy.reduce_dtype": works(
            f"{PRECISION}::test_gradients_are_summed_in_float32"
        ),
        "OptimStateDictConfig.offload_to_cpu": idle(GIVEN, _FLAT_CPU),
        "OptimStateKeyType.PARAM_ID": works(OLDER),
        "OptimStateKeyType.PARAM_NAME": works(OLDER),
        "ShardedOptimStateDictConfig._use_dtensor": idle(GIVEN, "tensors are plain, and full"),
        "ShardedOptimStateDictConfig.offload_to_cpu": idle(GIVEN, _FLAT_CPU),
        "ShardedStateDictConfig._use_dtensor": idle(TYPES, "shards are plain tensors"),
        "ShardedStateDictConfig.offload_to_cpu": idle(TYPES, "shards stay where they are"),
        "ShardingStrategy.FULL_SHARD": works(_STRATEGY),
        "ShardingStrategy.HYBRID_SHARD": works(_STRATEGY),
        "ShardingStrategy.NO_SHARD": works(_STRATEGY),
        "ShardingStrategy.SHARD_GRAD_OP": works(_STRATEGY),
        "ShardingStrategy._HYBRID_SHARD_ZERO2": works(_STRATEGY),
        "StateDictConfig.offload_to_cpu": idle(TYPES, "see FullStateDictConfig"),
        "StateDictSettings.optim_state_dict_config": works(GIVEN),
        "StateDictSettings.state_dict_config": works(TYPES),
        "StateDictSettings.state_dict_type": works(TYPES),
        "StateDictType.FULL_STATE_DICT": works(TYPES),
        "StateDictType.LOCAL_STATE_DICT": works(
            "state_dict/test_sharded_state_dict.py", "as SHARDED_STATE_DICT"
        ),
        "StateDictType.SHARDED_STATE_DICT": works("state_dict/test_sharded_state_dict.py"),
        "UnshardHandle.wait": works(SWITCH),
    },
    "torch.distributed.fsdp.wrap": {
        "CustomPolicy": works(f"{WRAP}::test_custom_policy_carries_overrides"),
        "ModuleWrapPolicy": works(BLOCKS),
        "always_wrap_policy": works(
            f"{WRAP}::test_always_wrap_policy_makes_a_unit_of_each_module_with_parameters"
        ),
        "enable_wrap": works(MANUAL),
        "lambda_auto_wrap_policy": works(BLOCKS),
        "size_based_auto_wrap_policy": works(
            f"{WRAP}::test_size_based_policy_chooses_what_fsdp1_does"
        ),
        "transformer_auto_wrap_policy": works(BLOCKS),
        "wrap": works(MANUAL),
    },
    "torch.distributed.fsdp.sharded_grad_scaler": {
        "ShardedGradScaler": works(f"{FSDP1}::test_sharded_grad_scaler"),
    },
    "FullyShardedDataParallel: arguments": {
        "module": works(f"{API}::test_the_model_stays_itself"),
        "process_group": works(
            f"{FSDP1}::test_experts_of_each_rank_in_a_model_of_all", "also of inner units"
        ),
        "sharding_strategy": works(_STRATEGY),
        "cpu_offload": works(OBJECTS),
        "auto_wrap_policy": works(BLOCKS, 'the default is "auto", not None'),
        "backward_prefetch": works(GATHERS),
        "mixed_precision": works(DTYPES),
        "ignored_modules": works(f"{API}::test_what_is_ignored_is_left_alone"),
        "param_init_fn": works(
            "wrap/test_meta.py::test_a_param_init_fn_that_asks_what_is_on_the_meta_device"
        ),
        "device_id": works(f"{API}::test_the_cpu_by_name"),
        "sync_module_states": works(
            "wrap/test_meta.py::test_only_rank_0_has_values", "the default is True, not False"
        ),
        "forward_prefetch": works(GATHERS),
        "limit_all_gathers": works("units/test_collectives.py::test_what_goes_ahead_is_limited"),
        "use_orig_params": error(
            "must be True, the default, which works: the original parameters are always kept"
        ),
        "ignored_states": works(f"{API}::test_what_is_ignored_is_left_alone"),
        "device_mesh": works(f"{FULLY}::test_a_mesh_of_two_dimensions_is_hybrid"),
    },
    "FullyShardedDataParallel: methods": {
        "__getitem__": works(f"{API}::test_the_model_stays_itself", "the module's own"),
        "apply": works("model/test_summon.py::test_apply_initialises_as_in_a_plain_model"),
        "check_is_root": works(OWN),
        "clip_grad_norm_": works("optim/test_clip.py::test_the_norm_is_that_of_the_whole_model"),
        "flatten_sharded_optim_state_dict": error(
            "load with zshard.load(), or call FSDP.optim_state_dict_to_load()"
        ),
        "forward": works(f"{API}::test_the_model_stays_itself", "the module's own"),
        "fsdp_modules": works(f"{API}::test_fsdp_modules"),
        "full_optim_state_dict": works(OLDER),
        "get_state_dict_type": works(TYPES),
        "module": works(f"{API}::test_module_is_the_model_itself"),
        "named_buffers": works(f"{API}::test_the_model_stays_itself", "without prefixes"),
        "named_parameters": works(f"{API}::test_the_model_stays_itself", "without prefixes"),
        "no_sync": works(NO_SYNC),
        "optim_state_dict": works(NAMED_STATE),
        "optim_state_dict_to_load": works(NAMED_STATE),
        **refused("register_comm_hook"),
        "rekey_optim_state_dict": works(OLDER),
        "scatter_full_optim_state_dict": works(OLDER),
        "set_state_dict_type": works(f"{FSDP1}::test_the_type_that_is_set_is_that_of_the_dicts"),
        "shard_full_optim_state_dict": works(OLDER),
        "sharded_optim_state_dict": error(
            f"{_NO_SHARDED_TENSOR}, or call FSDP.optim_state_dict() for the full state"
        ),
        "state_dict_type": works(TYPES),
        "summon_full_params": works("model/test_summon.py::test_parameters_are_whole_within"),
    },
    "FullyShardedDataParallel: attributes": {
        "backward_prefetch": works(OWN),
        "compute_device": works(OWN),
        "cpu_offload": works(OWN),
        "forward_prefetch": works(OWN),
        "limit_all_gathers": works(OWN),
        "mixed_precision": works(OWN),
        **refused("params"),
        "process_group": works(OWN),
        "rank": works(OWN, "in process_group"),
        "sharding_strategy": works(OWN),
        **refused("training_state"),
        "world_size": works(OWN, "of process_group"),
    },
    "fully_shard: arguments": {
        "module": works(f"{FULLY}::test_a_list_of_modules"),
        "mesh": works(f"{FULLY}::test_a_mesh_of_one_dimension_is_sharded_over"),
        "reshard_after_forward": works(FULLY_TRAINS),
        "shard_placement_fn": error("omit it: zshard shards each unit as one flat buffer"),
        "mp_policy": works(SCRIPT),
        "offload_policy": works(POLICIES),
        "ignored_params": works(
            "compat/test_fully_shard_errors.py::test_ignored_params_are_left_alone"
        ),
        "dp_mesh_dims": error(_NO_DTENSOR),
    },
    "FSDPModule: methods": {
        "reset_iter_state": idle(SWITCH, "a model is ready after any exception that all catch"),
        "reshard": works("units/test_unshard.py"),
        **refused("set_all_reduce_hook"),
        "set_allocate_memory_from_process_group_for_comm": idle(
            CHECKED, "choose by FSDP(transport=zshard.NcclOptions(...))"
        ),
        **refused("set_custom_all_gather", "set_custom_reduce_scatter"),
        "set_force_sum_reduction_for_comms": idle(SWITCH, "ranks always exchange plain gradients"),
        "set_gradient_divide_factor": works(f"{FULLY}::test_gradients_are_divided_by_the_factor"),
        "set_is_last_backward": idle(SWITCH, "every backward completes its reductions"),
        "set_modules_to_backward_prefetch": works(
            "units/test_collectives.py::test_gathers_begin_by_hand"
        ),
        "set_modules_to_forward_prefetch": works(
            "units/test_collectives.py::test_gathers_begin_by_hand"
        ),
        "set_post_optim_event": works(SWITCH, "on GPUs; no effect on CPU ranks"),
        "set_reduce_scatter_divide_factor": works(SWITCH),
        "set_reduce_scatter_max_input_buffers": idle(SWITCH, "memory is planned when wrapping"),
        "set_reduce_scatter_unused_params": idle(SWITCH, "unused parameters always count as zeros"),
        "set_requires_all_reduce": idle(SWITCH, "every backward reduces over all ranks"),
        "set_requires_gradient_sync": works(SWITCH),
        "set_reshard_after_backward": idle(SWITCH, "every backward reshards"),
        "set_reshard_after_forward": works(f"{FULLY}::test_reshard_after_forward_can_be_switched"),
        "set_separate_reduce_scatter_group": idle(SWITCH, "a model has one transport"),
        **refused("set_symm_mem_for_comm"),
        "set_unshard_in_backward": idle(SWITCH, "backward always unshards"),
        "unshard": works("units/test_unshard.py"),
    },
    "DistributedDataParallel: arguments": {
        "module": works(TRAINS),
        "device_ids": works(TRAINS),
        "output_device": error("must be the device of device_ids, or omitted, which works"),
        "dim": error("must be 0, the default, which works: a rank gets a batch of its own"),
        "broadcast_buffers": works(BUFFERS),
        "init_sync": works(f"{DDP}::test_without_init_sync_other_values_are_an_error"),
        "process_group": works(
            "training/test_parity.py::test_each_process_group_shards_for_itself"
        ),
        "bucket_cap_mb": idle(TRAINS, _UNITS),
        "find_unused_parameters": idle(TRAINS, "unused parameters are always found"),
        "check_reduction": idle(TRAINS, "deprecated in torch"),
        "gradient_as_bucket_view": idle(TRAINS, _UNITS),
        "static_graph": idle(TRAINS, "graphs may change or not"),
        "delay_all_reduce_named_params": error(f"omit it: {_AFTER}"),
        "param_to_hook_all_reduce": error(f"omit it: {_AFTER}"),
        "mixed_precision": error("call FSDP(mixed_precision=zshard.MixedPrecision(...))"),
        "device_mesh": works(f"{FULLY}::test_a_mesh_of_one_dimension_is_sharded_over"),
        "skip_all_reduce_unused_params": idle(TRAINS, "an unused unit is never reduced"),
        "bucket_cap_mb_list": idle(TRAINS, _UNITS),
        "batched_grad_copy": idle(TRAINS, _UNITS),
        "forward_sync_buffers": works(BUFFERS),
    },
    "DistributedDataParallel: methods": {
        "broadcast_buffers": works(THEIRS),
        "forward": works(TRAINS, "the module's own"),
        **refused("gather"),
        "join": works("model/test_join.py", "takes the optimizers: model.join(optimizer)"),
        **refused("join_device", "join_hook", "join_process_group"),
        "no_sync": works(NO_SYNC),
        **refused("register_comm_hook", "scatter", "to_kwargs"),
        "train": works(f"{API}::test_train_eval_apply_and_attributes_work"),
        "will_sync_module_buffers": works(BUFFERS),
    },
    "DistributedDataParallel: attributes": {
        **refused("batched_grad_copy", "broadcast_bucket_size", "bucket_bytes_cap"),
        **refused("bucket_bytes_cap_default", "bucket_bytes_cap_list"),
        "device": works(THEIRS),
        "device_ids": works(THEIRS),
        "device_type": works(THEIRS),
        "dim": works(THEIRS),
        "find_unused_parameters": works(THEIRS, "True"),
        "forward_sync_buffers": works(BUFFERS),
        "gradient_as_bucket_view": works(THEIRS, "False"),
        "is_multi_device_module": works(THEIRS, "False"),
        **refused("logger"),
        "mixed_precision": works(OWN),
        "module": works(f"{API}::test_module_is_the_model_itself"),
        **refused("modules_buffers", "named_module_buffers"),
        "output_device": works(THEIRS),
        **refused("parameters_to_ignore"),
        "process_group": works(OWN),
        **refused("reducer"),
        "require_backward_grad_sync": works(THEIRS),
        **refused("require_forward_param_sync", "skip_all_reduce_unused_params"),
        "static_graph": works(THEIRS, "False"),
        **refused("use_side_stream_for_tensor_copies"),
    },
    "Names with an underscore that scripts use": {
        "_flat_param": error(REFUSED["_flat_param"]),
        "_handle": error(REFUSED["_handle"]),
        "_fsdp_wrapped_module": works(OWN),
        "_is_root": works(OWN),
        "_use_orig_params": works(OWN),
        "_set_unshard_async_op": idle(CHECKED, "gathers are ordered by the schedule"),
        "_set_static_graph": idle(THEIRS, "graphs may change or not"),
        "_set_params_and_buffers_to_ignore_for_model": works(
            f"{DDP}::test_parameters_are_ignored_by_name", "parameters only"
        ),
        **refused("_get_fsdp_state", "_register_builtin_comm_hook"),
        **refused("_register_buffer_comm_hook", "_register_fused_optim", "_get_ddp_logging_data"),
    },
}
