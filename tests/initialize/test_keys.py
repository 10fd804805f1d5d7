"""A DeepSpeed config is read as DeepSpeed reads it: every key works, is refused, or is named in a
warning.

No rank and no model; `settings_of` alone, for two ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import LR, config
from rows import all_rows

from zshard.integrations.deepspeed import keys
from zshard.integrations.deepspeed.ds_config import (
    BatchSizes,
    Settings,
    complete,
    read,
    settings_of,
)
from zshard.integrations.deepspeed.optimizers import optimizer_of
from zshard.integrations.deepspeed.schedules import schedule_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deepspeed_keys.md").read_text()


def settings(changes: dict[str, Any], args: Any = None) -> Settings:
    return settings_of(config(**changes), args, world=2, rank=0)


def with_zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **options}}


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return a config with one key, by its full name."""
    section, _, key = name.rpartition(".")
    return nested(section, {key: value}) if section else {key: value}


# --- keys -----------------------------------------------------------------------------------------


def all_refused(call: Any, rows: list[tuple[Any, Any, str]]) -> None:
    """Fail unless `call` raises each row's error, with its text, of the row's argument."""
    with all_rows() as row:
        for argument, error, text in rows:
            with row(argument), pytest.raises(error, match=re.escape(text)):
                call(argument)


def test_invalid_keys_and_values_are_named() -> None:
    on, gpu, nvme = {"enabled": True}, {"device": "gpu"}, {"device": "nvme"}
    sums = {"bf16": on, "data_types": {"grad_accum_dtype": "bf16"}}
    half = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    never = {"gradient_accumulation_steps": float("inf")}
    rows: list[Any] = [
        ({"fp16": True}, TypeError, "'fp16' in the DeepSpeed config must be a dict, got True"),
        (
            {"fp16": {"enabled": "yes"}},
            TypeError,
            "'fp16.enabled' in the DeepSpeed config must be true",
        ),
        ({"gradient_clipping": "1.0"}, TypeError, "must be a number, got '1.0'"),
        ({"gradient_clipping": -1}, ValueError, "finite and at least 0, got -1"),
        ({"steps_per_print": 0}, ValueError, "at least 1"),
        (never, TypeError, "'gradient_accumulation_steps' in the DeepSpeed config must"),
        ({"communication_data_type": "int8"}, ValueError, "'fp32', 'fp16' or 'bf16', got 'int8'"),
        (with_zero(stage=4), ValueError, "must be 0, 1, 2 or 3, got 4"),
        (with_zero(stage="3"), TypeError, "must be an integer, got '3'"),
        (with_zero(offload_param=gpu), ValueError, "'none', 'cpu' or 'nvme', got 'gpu'"),
        (
            with_zero(offload_param=nvme),
            ValueError,
            "offload_param.nvme_path' in the DeepSpeed config",
        ),
        ({"fp16": on, "bf16": on}, ValueError, "enables fp16 and bf16: enable one of them"),
        (half, NotImplementedError, "enable 'fp16'"),
        ({"gradient_allreduce_op": "sum"}, NotImplementedError, "must be 'mean', got 'sum'"),
        (sums, NotImplementedError, "must be 'fp32' with 'bf16' or 'fp16'"),
        (with_zero(stage="auto"), ValueError, 'in the DeepSpeed config is "auto": set its value'),
        ({"fp16": {**on, "loss_scale": "auto"}}, ValueError, 'is "auto": set its value'),
        ({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, ValueError, 'is "auto"'),
    ]
    all_refused(settings, rows)
    with pytest.raises(TypeError, match="a dict or the path of a JSON file, got int"):
        read(3)


def test_keys_that_would_change_numbers_are_refused() -> None:
    with all_rows() as row:
        for name in sorted(keys.REFUSED):
            with row(name):
                text = f"'{re.escape(name)}' in the DeepSpeed config is not supported"
                with pytest.raises(NotImplementedError, match=text):
                    settings(nested(name, {"enabled": True}))
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    settings(nested(name, {"enabled": False}))


def ignored(changes: dict[str, Any]) -> list[str]:
    """Return the keys that the warning names, which is one, on rank 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings(changes)
        settings_of(config(**changes), None, world=2, rank=1)
    (message,) = [str(each.message) for each in caught]
    begin, end = "zshard ignores these keys of the DeepSpeed config: ", "; docs/deepspeed.md"
    return message.partition(begin)[2].partition(end)[0].split(", ")


def test_one_warning_names_all_keys_without_effect() -> None:
    """Known to DeepSpeed or not, on or off; and comments."""
    zero = {"cpu_offload_use_pin_memory": True, "prefetch_bucket_size": "auto", "_read_the_docs": 1}
    others = {"xyzzy": 1, "wall_clock_breakdown": False, "tensorboard": {"enabled": True}, "//": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "_why": "tuned"}, "eps": 1e-8}
    changes = {**others, "optimizer": optimizer, **with_zero(**zero)}
    names = [*others, "optimizer.params._why", "optimizer.eps"]
    assert sorted(ignored(changes)) == sorted(
        [*names, *(f"zero_optimization.{key}" for key in zero)]
    )
    with pytest.warns(UserWarning):
        assert settings(changes).values["optimizer"]["params"] == {"lr": 0.1}


def test_warning_says_which_key_was_meant() -> None:
    meant = {
        "train_micro_batch_size": "train_micro_batch_size_per_gpu",
        "gradient_cliping": "gradient_clipping",
        "lr_scheduler": "scheduler",
        "fp16.enable": "enabled",
        "zero_optimization.offload_params": "offload_param",
        "zero_optimization.offload_param.devise": "device",
        "bfp16": "bf16",
    }
    with all_rows() as row:
        for name, other in meant.items():
            with row(name):
                assert ignored(nested(name, 4)) == [f"{name} (did you mean '{other}'?)"]


def test_page_lists_all_keys() -> None:
    known = {name.rpartition(".")[2] for name in (*keys.WORKS, *keys.REFUSED)}
    assert {name for name in known if f"`{name}`" not in PAGE and f'"{name}"' not in PAGE} == set()


def test_page_lists_what_auto_means() -> None:
    for name, (attributes, default) in keys.SOURCES.items():
        rows = PAGE.split('## "auto"')[1].splitlines()
        row = next(line for line in rows if line.startswith(f"| `{name}`"))
        assert all(f"`{attribute}`" in row for attribute in attributes), row
        assert json.dumps(default) in row, row


# --- values ---------------------------------------------------------------------------------------


def test_two_batch_sizes_give_the_third() -> None:
    all_three = (16, 4, 2)
    for sizes in (all_three, (16, 4, None), (16, None, 2), (None, 4, 2)):
        assert complete(*sizes, 2) == all_three
    assert complete(16, None, None, 2) == (16, 8, 1) and complete(None, 4, None, 2) == (8, 4, 1)
    contradiction = (
        "train_batch_size=16 is not train_micro_batch_size_per_gpu=4 * gradient_accumulati"
    )
    multiple = (
        "train_batch_size=9 is not a multiple of train_micro_batch_size_per_gpu=4 * 2 rank(s)"
    )
    rows: list[Any] = [
        (
            (None, None, 2),
            ValueError,
            "has no 'train_batch_size' and no 'train_micro_batch_size_per",
        ),
        ((16, 4, 3), ValueError, contradiction),
        ((9, 4, None), ValueError, multiple),
        (
            (3, None, None),
            ValueError,
            "is not a multiple of gradient_accumulation_steps=1 * 2 rank",
        ),
        ((4, 4, None), ValueError, "train_batch_size=4 is not a multiple of"),
    ]
    all_refused(lambda sizes: complete(*sizes, 2), rows)


def test_auto_takes_the_trainers_arguments_or_their_defaults() -> None:
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    optimizer = dict.fromkeys(("lr", "betas", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")
    auto = {
        **dict.fromkeys((*sizes, "gradient_clipping"), "auto"),
        **{half: {"enabled": "auto"} for half in ("fp16", "bf16")},
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": warmup},
    }
    plain = settings(auto)
    assert plain.sizes == (16, 8, 1) and plain.clipping == 1.0 and plain.dtype is None
    defaults = {"lr": 5e-5, "betas": [0.9, 0.999], "weight_decay": 0.0}
    assert plain.values["optimizer"]["params"] == defaults
    assert plain.values["scheduler"]["params"] == {"warmup_max_lr": 5e-5, "warmup_num_steps": 0}
    args = argparse.Namespace(
        **{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "bf16": True},
        **{"max_grad_norm": 0.5, "learning_rate": LR, "adam_beta1": 0.8, "adam_beta2": 0.9},
        warmup_steps=7,
    )
    ours = settings(auto, args)
    assert ours.sizes == (12, 3, 2) and ours.clipping == 0.5 and ours.dtype is torch.bfloat16
    assert ours.values["optimizer"]["params"]["betas"] == [0.8, 0.9]
    assert ours.values["scheduler"]["params"] == {"warmup_max_lr": LR, "warmup_num_steps": 7}
    warmup["total_num_steps"] = "auto"
    with pytest.raises(
        ValueError, match='total_num_steps\' in the DeepSpeed config is "auto": set'
    ):
        settings(auto)


def test_auto_batch_size_follows_from_the_others() -> None:
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    args = argparse.Namespace(per_device_train_batch_size=3)
    assert settings({**sizes, "train_batch_size": 12}).sizes == (12, 6, 1)
    assert settings({**sizes, "train_batch_size": 12}, args).sizes == (12, 3, 2)
    sizes["train_micro_batch_size_per_gpu"] = 2
    assert settings({**sizes, "train_batch_size": 12}).sizes == (12, 2, 3)


def test_offload_to_the_host_or_one_folder() -> None:
    cpu, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/disk"}

    def places(stage: int = 3, **parts: Any) -> Any:
        found = settings({"zero_optimization": {"stage": stage, **parts}}).offload
        return found and (found.params, found.optimizer, found.directory, found.fraction)

    assert places() is None and places(offload_param={"device": "none"}) is None
    assert places(offload_optimizer=cpu) == (False, True, None, 1.0)
    assert places(offload_param=cpu, offload_optimizer=cpu) == (True, True, None, 1.0)
    assert places(offload_optimizer=disk) == (False, True, "/disk", 1.0)
    assert places(offload_param=cpu, offload_optimizer=disk) == (False, True, "/disk", 1.0)
    assert places(offload_param=disk, offload_optimizer=cpu) == (True, False, "/disk", 1.0)
    assert places(offload_optimizer={**disk, "ratio": 0.5}) == (False, True, "/disk", 0.5)
    assert places(0, offload_optimizer=cpu) is None
    assert places(2, cpu_offload=True) == (False, True, None, 1.0)
    with pytest.raises(NotImplementedError, match=r"\(/disk and /other\): use one folder"):
        places(offload_param=disk, offload_optimizer={**disk, "nvme_path": "/other"})


# --- files ----------------------------------------------------------------------------------------


def test_invalid_config_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    rows = {
        "{,}": "is not valid JSON",
        '"a": 1': "Extra data: line 1 column 4",
        '{"a": 1, "a": 2}': "the key 'a' is there twice",
        "[]": "must be a JSON object",
        '{ /* two\nlines */ "a": 1\n"b": 2}': "line 3 column 1",
    }
    with all_rows() as row:
        for text, message in rows.items():
            path.write_text(text)
            with row(text):
                with pytest.raises((ValueError, TypeError), match=message) as error:
                    read(path)
                assert str(path) in str(error.value)


def test_comments_and_trailing_commas_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // for one node
        "train_batch_size": 8, # over all ranks
        /* a folder,
           with "quotes", and // */
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/a//b#c,}", },
        }, // the end
        }"""
    )
    offload = {"device": "nvme", "nvme_path": "/a//b#c,}"}
    zero = {"stage": 2, "offload_optimizer": offload}
    assert read(path) == {"train_batch_size": 8, "zero_optimization": zero}


# --- values ---------------------------------------------------------------------------------------


CHECKED = sorted(keys.WORKS.keys() - {"optimizer.params", "scheduler.params"})
SECTIONS = sorted(keys.SECTIONS | set(keys.FREE))


def with_null(name: str) -> dict[str, Any]:
    """Return a config in which one key, or section, is null."""
    section = name.partition(".")[0]
    types = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}.get(section, {})
    null = nested(name, None)
    if name != section:
        null[section] |= types
    size = name == "train_micro_batch_size_per_gpu"
    return {
        "train_batch_size" if size else "train_micro_batch_size_per_gpu": 4 if size else 2
    } | null


def test_null_counts_as_absent() -> None:
    with all_rows() as row:
        for name in [*CHECKED, *SECTIONS]:
            with row(name):
                made = settings_of(read(with_null(name)), None, world=2, rank=0)
                assert made.stage == 0 and made.sizes == BatchSizes(4, 2, 1)


def test_every_value_is_checked_by_its_key() -> None:
    """Also where it has no effect, such as the loss scale's without fp16."""
    errors = (TypeError, ValueError, NotImplementedError)
    values: list[Any] = [float("nan"), float("-inf"), [], {}, "no value"]
    with all_rows() as row:
        for name, value in itertools.product(CHECKED, values):
            if value == "no value" and name.endswith(("nvme_path", ".type")):
                continue
            given = {"train_batch_size": 4} | nested(name, value)
            with row(name, value), pytest.raises(errors, match=re.escape(f"'{name}'")):
                settings_of(read(given), None, world=2, rank=0)


def test_infinitely_many_steps_per_print_mean_never() -> None:
    """Accelerate's default."""
    assert settings({"steps_per_print": float("inf")}).values["steps_per_print"] == float("inf")


def test_optimizers_values_are_checked_by_key() -> None:
    wrong, params = (TypeError, ValueError), "'optimizer.params.{}' in the DeepSpeed".format
    types = ("Lamb", "OneBitAdam", "Muon", "Lion", "AdamX")
    unknown = "'optimizer.type' '{}' in the DeepSpeed config is not one of Adam, AdamW, SGD".format
    rows: list[Any] = [
        (("AdamW", {"lr": float("nan")}), wrong, params("lr")),
        (("AdamW", {"lr": None}), wrong, params("lr")),
        (("AdamW", {"lr": "1e-3"}), wrong, params("lr")),
        (("AdamW", {"betas": [0.9, float("inf")]}), wrong, params("betas")),
        (("Adam", {"weight_decay": "0.1"}), wrong, params("weight_decay")),
        (("RMSprop", {"alpha": True}), wrong, params("alpha")),
        *[((kind, {}), ValueError, unknown(kind)) for kind in types],
        (("Muon", {}), ValueError, "pass another one as optimizer="),
        (("Adam", {"learning_rate": 1}), TypeError, "'optimizer.params' in the DeepSpeed config: "),
        (("Adam", {"max_grad_norm": 1.0}), ValueError, "set 'gradient_clipping' instead"),
        (("Adam", {"bias_correction": False}), NotImplementedError, "params.bias_correction'"),
    ]
    all_refused(lambda pair: made(pair[0], **pair[1]), rows)


def test_schedules_values_are_checked_by_key() -> None:
    either, by_key = (TypeError, ValueError), "'scheduler.params.{}' in the DeepSpeed config".format
    others = "OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR: pass another"
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 1}
    warmup: list[Any] = [
        ({"warmup_num_steps": float("inf")}, by_key("warmup_num_steps")),
        ({"warmup_num_steps": 2.5}, "must be an integer, got 2.5"),
        ({"warmup_num_steps": -1}, "at least 0"),
        ({"warmup_steps": 3}, "'scheduler.params' in the DeepSpeed config: "),
        ({"warmup_type": "cubic"}, "'warmup_type' must be 'log' or 'linear'"),
        ({"warmup_max_lr": [1, 2]}, "'warmup_max_lr' has 2 values for 1 param groups"),
    ]
    rows: list[Any] = [
        (("Warmup", {}), either, "'scheduler.type' 'Warmup'"),
        (("LRRangeTest", {}), either, others),
        (("StepLR", {}), either, "pass another one as lr_scheduler="),
        *[(("WarmupLR", params), either, text) for params, text in warmup],
        (("WarmupDecayLR", {}), either, "total_num_steps"),
        (
            ("WarmupDecayLR", {"total_num_steps": 5, "warmup_min_lr": "0"}),
            either,
            by_key("warmup_min_lr"),
        ),
        (("OneCycle", {**cycle, "cycle_max_lr": float("nan")}), either, by_key("cycle_max_lr")),
        (("OneCycle", {**cycle, "decay_lr_rate": None}), either, by_key("decay_lr_rate")),
        (("OneCycle", {**cycle, "first": 2}), either, "unexpected keyword argument 'first'"),
    ]
    all_refused(lambda pair: schedule(*pair), rows)
    schedule("OneCycle", {**cycle, "cycle_second_step_size": None})  # its default


def schedule(kind: str, params: dict[str, Any]) -> Any:
    return schedule_of({"type": kind, "params": params}, made("AdamW"))


def test_config_is_not_changed() -> None:
    changed = config(gradient_clipping="auto", bfloat16={"enabled": True})
    before = json.dumps(changed)
    settings_of(read(changed), None, 1, 0)
    assert json.dumps(changed) == before


# --- optimizers -----------------------------------------------------------------------------------


def made(kind: str, **params: Any) -> Any:
    return optimizer_of({"type": kind, "params": params}, [torch.nn.Parameter(torch.ones(2))])


def test_adam_is_adamw_with_deepspeeds_defaults() -> None:
    assert type(made("Adam")).__name__ == type(made("adamw", adam_w_mode=False)).__name__ == "AdamW"
    assert type(made("Adam", adam_w_mode=False)).__name__ == "Adam"
    assert made("AdamW").defaults["weight_decay"] == 0.0
    assert made("AdamW", torch_adam=True).defaults["weight_decay"] == 0.01
    assert made("AdamW", betas=[0.8, 0.9], max_grad_norm=0.0).defaults["betas"] == (0.8, 0.9)
    for name in ("SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta"):
        assert type(made(name, lr=0.1)).__name__ == name
