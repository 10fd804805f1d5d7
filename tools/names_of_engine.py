"""What each public name of DeepSpeed's engine is in zshard: the entries of docs/names.md for it.

The one idea: the names are data, `deepspeed_engine.json`, written from DeepSpeed's source: the
methods of DeepSpeedEngine and what it assigns to self. DeepSpeed itself need not be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from names_table import Entry, error, idle, works

from zshard._deepspeed.engine_names import REFUSED

_FOUND: dict[str, Any] = json.loads((Path(__file__).parent / "deepspeed_engine.json").read_text())
VERSION: str = _FOUND["deepspeed"]
METHODS, ATTRIBUTES = "DeepSpeedEngine: methods", "DeepSpeedEngine: attributes"
THEIRS: dict[str, set[str]] = {
    METHODS: {*_FOUND["methods"]},
    ATTRIBUTES: {*_FOUND["attributes"]},
}

_NAMES = "initialize/test_engine_names.py"
_SCRIPT = "initialize/test_names.py::test_a_script_with_arguments_groups_and_a_scheduler_trains"
_MISUSE = "initialize/test_misuse.py"
_SAVED = "initialize/test_checkpoints.py"

TESTS = {
    f"{_NAMES}::test_answers": """
        bfloat16_enabled dataloader_drop_last dynamic_loss_scale fp16_enabled get_batch_info
        get_data_parallel_rank get_data_types gradient_accumulation_steps gradient_clipping
        is_iterable_style_dataset is_map_style_dataset loss_scale optimizer_name optimizer_params
        scheduler_name scheduler_params steps_per_print torch_autocast_dtype
        torch_autocast_enabled train_batch_size train_micro_batch_size_per_gpu
        zero_optimization zero_optimization_partition_gradients
        zero_optimization_partition_weights dp_world_size lr_scheduler""",
    _SCRIPT: """
        backward deepspeed_io forward get_lr get_mom step zero_optimization_stage config device
        global_rank global_steps local_rank optimizer training_dataloader world_size""",
    f"{_NAMES}::test_compile_compiles_the_model": "compile eval is_compiled micro_steps train",
    f"{_NAMES}::test_destroy_ends_the_engine_and_not_the_model": "destroy",
    f"{_NAMES}::test_state_dicts_go_through_older_names": """
        load_module_state_dict module_state_dict save_fp16_model""",
    f"{_SAVED}::test_weights_are_saved_in_16_bits": "save_16bit_model",
    f"{_SAVED}::test_a_run_resumes_with_the_same_losses": """
        load_checkpoint save_checkpoint global_samples""",
    "initialize/test_names.py::test_a_loop_may_set_the_boundary": """
        is_gradient_accumulation_boundary set_gradient_accumulation_boundary""",
    f"{_MISUSE}::test_no_sync_refuses_to_step": "no_sync",
    f"{_MISUSE}::test_the_batch_size_changes_between_steps_only": """
        set_train_batch_size set_train_micro_batch_size""",
    f"{_MISUSE}::test_an_overflow_on_one_rank_skips_the_step_on_all": """
        skipped_steps was_step_applied""",
    f"{_MISUSE}::test_a_step_needs_a_backward": "get_global_grad_norm zero_grad",
}
IDLE = {"wall_clock_breakdown": (f"{_NAMES}::test_answers", "False: the engine has no timers")}
NOTES = {
    "compile": "an error with accumulation at stages 2 and 3, and with `schedule`",
    "destroy": "`engine.module` can evaluate and save afterwards",
    "load_module_state_dict": "`custom_load_fn` is an error",
    "load_checkpoint": "zshard's folders; `custom_load_fn` is an error",
    "save_checkpoint": "zshard's folders; `exclude_frozen_parameters` is an error",
    "loss_scale": "as in the config: `cur_scale` is the current one",
    "no_sync": "at all stages",
}
BY_NAME = {name: test for test, names in TESTS.items() for name in names.split()}


def names() -> dict[str, set[str]]:
    """What this table has, by section; names that DeepSpeed does not have are among the methods."""
    ours = {*BY_NAME, *IDLE, *REFUSED}
    return {METHODS: ours - THEIRS[ATTRIBUTES], ATTRIBUTES: ours & THEIRS[ATTRIBUTES]}


def rows() -> dict[str, dict[str, Entry]]:
    """The entries, by section."""
    return {section: {n: _entry(n) for n in sorted(ours)} for section, ours in names().items()}


def _entry(name: str) -> Entry:
    if name in REFUSED:
        return error(REFUSED[name])
    if name in IDLE:
        return idle(*IDLE[name])
    return works(BY_NAME[name], NOTES.get(name, ""))
