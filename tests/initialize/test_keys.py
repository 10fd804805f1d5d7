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

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md").read_text()


def settings(changes: dict[str, Any], args: Any = None) -> Settings:
    return settings_of(config(**changes), args, world=2, rank=0)


def with_zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **options}}


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return a config with one key, by its full name."""
    section, _, key = name.rpartition(".")
    return nested(section, {key: value}) if section else {key: value}


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"fp16": True}, TypeError, "'fp16' in the DeepSpeed config must be a dict, got True"),
        ({"fp16": {"enabled": "yes"}}, TypeError, "'fp16.enabled' in the DeepSpeed config must be true or false, got 'yes'"),
        ({"gradient_clipping": "1.0"}, TypeError, "must be a number, got '1.0'"),
        ({"gradient_clipping": -1}, ValueError, "finite and at least 0, got -1"),
        ({"steps_per_print": 0}, ValueError, "at least 1"),
        ({"communication_data_type": "int8"}, ValueError, "'fp32', 'fp16' or 'bf16', got 'int8'"),
        (with_zero(stage=4), ValueError, "'zero_optimization.stage' in the DeepSpeed config must be 0, 1, 2 or 3, got 4"),
        (with_zero(stage="3"), TypeError, "must be an integer, got '3'"),
        (with_zero(offload_param={"device": "gpu"}), ValueError, "'none', 'cpu' or 'nvme', got 'gpu'"),
        (with_zero(offload_param={"device": "nvme"}), ValueError, "'zero_optimization.offload_param.nvme_path' in the DeepSpeed config must be set"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ValueError, "enables fp16 and bf16: enable one of them"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, NotImplementedError, "enable 'fp16'"),
        ({"gradient_allreduce_op": "sum"}, NotImplementedError, "'gradient_allreduce_op' in the DeepSpeed config must be 'mean', got 'sum'"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, NotImplementedError, "must be 'fp32' with 'bf16' or 'fp16'"),
    ],
)  # fmt: skip
def test_invalid_keys_and_values_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        settings(changes)


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
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "_why": "tuned"}, "eps": 1e-8}
    changes = {
        "xyzzy": 1,
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": True, "output_path": "runs"},
        "//": 1,
        "stage": 3,
        "optimizer": optimizer,
        **with_zero(cpu_offload_use_pin_memory=True, prefetch_bucket_size="auto", _read_the_docs=1),
    }
    zero = ("cpu_offload_use_pin_memory", "prefetch_bucket_size", "_read_the_docs")
    assert sorted(ignored(changes)) == sorted(
        [
            *("xyzzy", "wall_clock_breakdown", "tensorboard", "//", "stage"),
            *("optimizer.params._why", "optimizer.eps"),
            *(f"zero_optimization.{name}" for name in zero),
        ]
    )
    with pytest.warns(UserWarning):
        assert settings(changes).values["optimizer"]["params"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("changes", "name", "meant"),
    [
        ({"train_micro_batch_size": 4}, "train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        ({"gradient_cliping": 0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "zero_optimization"),
        ({"lr_scheduler": {"type": "WarmupLR"}}, "lr_scheduler", "scheduler"),
        ({"fp16": {"enable": True}}, "fp16.enable", "enabled"),
        (
            with_zero(offload_params={"device": "cpu"}),
            "zero_optimization.offload_params",
            "offload_param",
        ),
        (
            with_zero(offload_param={"devise": "cpu"}),
            "zero_optimization.offload_param.devise",
            "device",
        ),
        ({"bfp16": {"enabled": True}}, "bfp16", "bf16"),
    ],
)
def test_warning_says_which_key_was_meant(changes: dict[str, Any], name: str, meant: str) -> None:
    assert ignored(changes) == [f"{name} (did you mean '{meant}'?)"]


def test_no_key_is_in_two_tables() -> None:
    assert not keys.WORKS.keys() & keys.REFUSED


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


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((16, 4, 2), (16, 4, 2)),
        ((16, 4, None), (16, 4, 2)),
        ((16, None, 2), (16, 4, 2)),
        ((None, 4, 2), (16, 4, 2)),
        ((16, None, None), (16, 8, 1)),
        ((None, 4, None), (8, 4, 1)),
    ],
)
def test_two_batch_sizes_give_the_third(given: Any, sizes: Any) -> None:
    assert complete(*given, 2) == BatchSizes(*sizes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None, 2), "has no 'train_batch_size' and no 'train_micro_batch_size_per_gpu': add one of them"),
        ((16, 4, 3), "train_batch_size=16 is not train_micro_batch_size_per_gpu=4 * gradient_accumulation_steps=3 * 2 rank(s): change one"),
        ((9, 4, None), "train_batch_size=9 is not a multiple of train_micro_batch_size_per_gpu=4 * 2 rank(s): change one"),
        ((3, None, None), "train_batch_size=3 is not a multiple of gradient_accumulation_steps=1 * 2 rank(s)"),
        ((4, 4, None), "train_batch_size=4 is not a multiple of"),
    ],
)  # fmt: skip
def test_contradictory_batch_sizes_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        complete(*given, 2)


def test_auto_takes_the_trainers_arguments_or_their_defaults() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "weight_decay"), "auto")},
        "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_max_lr", "warmup_num_steps"), "auto")},
    }  # fmt: skip
    plain = settings(auto)
    assert plain.sizes == (16, 8, 1) and plain.clipping == 1.0 and plain.dtype is None
    assert plain.values["optimizer"]["params"] == {
        "lr": 5e-5,
        "betas": [0.9, 0.999],
        "weight_decay": 0.0,
    }
    assert plain.values["scheduler"]["params"] == {"warmup_max_lr": 5e-5, "warmup_num_steps": 0}
    args = argparse.Namespace(
        **{
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
        },
        **{
            "bf16": True,
            "learning_rate": LR,
            "adam_beta1": 0.8,
            "adam_beta2": 0.9,
            "warmup_steps": 7,
        },
    )
    told = settings(auto, args)
    assert told.sizes == (12, 3, 2) and told.clipping == 0.5 and told.dtype is torch.bfloat16
    assert told.values["optimizer"]["params"]["betas"] == [0.8, 0.9]
    assert told.values["scheduler"]["params"] == {"warmup_max_lr": LR, "warmup_num_steps": 7}
    auto["scheduler"]["params"]["total_num_steps"] = "auto"
    with pytest.raises(
        ValueError, match='total_num_steps\' in the DeepSpeed config is "auto": set it'
    ):
        settings(auto)
    for changes in (
        {"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}},
        {"fp16": {"enabled": True, "loss_scale": "auto"}},
        {"zero_optimization": {"stage": "auto"}},
    ):
        with pytest.raises(ValueError, match='in the DeepSpeed config is "auto": set its value'):
            settings(changes)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{,}", "is not valid JSON"),
        ('"a": 1', "Extra data: line 1 column 4"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ("[]", "must be a JSON object"),
    ],
)
def test_invalid_config_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
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


def test_mistake_behind_a_comment_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{ /* two\nlines */ "a": 1\n"b": 2}')
    with pytest.raises(ValueError, match="line 3 column 1"):
        read(path)


# --- values ---------------------------------------------------------------------------------------


CHECKED = sorted(keys.WORKS.keys() - {"optimizer.params", "scheduler.params"})
SECTIONS = sorted(keys.SECTIONS | set(keys.FREE))


def with_null(name: str) -> dict[str, Any]:
    """Return a config in which one key, or section, is null."""
    section = name.partition(".")[0]
    own = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}.get(section, {})
    given = {"train_micro_batch_size_per_gpu": 2}
    given |= nested(name, None) if name == section else {section: own | nested(name, None)[section]}
    if name == "train_micro_batch_size_per_gpu":
        given["train_batch_size"] = 4
    return given


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
    with pytest.raises(
        TypeError, match="'gradient_accumulation_steps' in the DeepSpeed config must"
    ):
        settings({"gradient_accumulation_steps": float("inf")})


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("AdamW", {"lr": float("nan")}, "lr"),
        ("AdamW", {"lr": None}, "lr"),
        ("AdamW", {"lr": "1e-3"}, "lr"),
        ("AdamW", {"betas": [0.9, float("inf")]}, "betas"),
        ("Adam", {"weight_decay": "0.1"}, "weight_decay"),
        ("RMSprop", {"alpha": True}, "alpha"),
    ],
)
def test_optimizers_values_are_checked_by_key(kind: str, params: Any, key: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"'optimizer.params.{key}' in the DeepSpeed"):
        made(kind, **params)


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("WarmupLR", {"warmup_num_steps": float("inf")}, "warmup_num_steps"),
        ("WarmupDecayLR", {"total_num_steps": 5, "warmup_min_lr": "0"}, "warmup_min_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": float("nan")}, "cycle_max_lr"),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_lr_rate": None},
            "decay_lr_rate",
        ),
    ],
)
def test_schedules_values_are_checked_by_key(kind: str, params: Any, key: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"'scheduler.params.{key}' in the DeepSpeed"):
        schedule_of({"type": kind, "params": params}, made("AdamW"))


def test_schedules_null_means_its_default() -> None:
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_second_step_size": None}
    schedule_of({"type": "OneCycle", "params": params}, made("AdamW"))


def test_config_is_not_changed() -> None:
    given = config(gradient_clipping="auto", bfloat16={"enabled": True})
    before = json.dumps(given)
    settings_of(read(given), None, 1, 0)
    assert json.dumps(given) == before
    with pytest.raises(
        TypeError, match="config must be a dict or the path of a JSON file, got int"
    ):
        read(3)


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


@pytest.mark.parametrize(
    ("kind", "params", "error", "message"),
    [
        *[(kind, {}, ValueError, f"'optimizer.type' '{kind}' in the DeepSpeed config is not one of") for kind in ("Lamb", "OneBitAdam", "Muon", "Lion", "AdamX")],
        ("Lion", {}, ValueError, "is not one of Adam, AdamW, SGD"),
        ("Muon", {}, ValueError, "pass another one as optimizer="),
        ("Adam", {"learning_rate": 1}, TypeError, "'optimizer.params' in the DeepSpeed config: "),
        ("Adam", {"max_grad_norm": 1.0}, ValueError, "set 'gradient_clipping' instead"),
        ("Adam", {"bias_correction": False}, NotImplementedError, "'optimizer.params.bias_correction'"),
    ],
)  # fmt: skip
def test_unsupported_optimizer_error_lists_alternatives(
    kind: str, params: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        made(kind, **params)
