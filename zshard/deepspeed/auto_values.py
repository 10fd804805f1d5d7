"""What "auto" in a DeepSpeed config means: what the Trainer of transformers would fill in.

`args` of initialize() may be the Trainer's TrainingArguments, or a script's own with
the same names; what it lacks has TrainingArguments' default. docs/deepspeed.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zshard.deepspeed.keys import FREE, WORKS

AUTO = "auto"


class _ArgumentSource(NamedTuple):
    attributes: tuple[str, ...]  # of `args`; several make a list
    default: Any


_SOURCES = {
    "train_micro_batch_size_per_gpu": _ArgumentSource(("per_device_train_batch_size",), 8),
    "gradient_accumulation_steps": _ArgumentSource(("gradient_accumulation_steps",), 1),
    "gradient_clipping": _ArgumentSource(("max_grad_norm",), 1.0),
    "fp16.enabled": _ArgumentSource(("fp16",), False),
    "bf16.enabled": _ArgumentSource(("bf16",), False),
    "optimizer.params.lr": _ArgumentSource(("learning_rate",), 5e-5),
    "optimizer.params.betas": _ArgumentSource(("adam_beta1", "adam_beta2"), [0.9, 0.999]),
    "optimizer.params.eps": _ArgumentSource(("adam_epsilon",), 1e-8),
    "optimizer.params.weight_decay": _ArgumentSource(("weight_decay",), 0.0),
    "scheduler.params.warmup_min_lr": _ArgumentSource((), 0.0),
    "scheduler.params.warmup_num_steps": _ArgumentSource(("warmup_steps",), 0),
}
_TRAIN, _MICRO, _STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def fill(section: Mapping[str, Any], args: Any, path: str = "") -> dict[str, Any]:
    """Return a copy of a config, or of the section at `path`, with values in the place of "auto".

    Keys that have no effect keep it. Raises ValueError for an "auto" that nothing tells.
    """
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            found[key] = fill(value, args, name)
        elif value != AUTO or not isinstance(value, str):
            found[key] = value
        elif name == "scheduler.params.total_num_steps":
            found[key] = _total_steps(args)
        elif name == "scheduler.params.warmup_max_lr":
            found[key] = AUTO  # once the optimizer's learning rate is known: settled()
        elif name in _SOURCES:
            if not _follows(name, section, args):
                found[key] = _from(args, *_SOURCES[name])
        elif name != _TRAIN and (name in WORKS or path in FREE):
            raise ValueError(f"'{name}' in the DeepSpeed config is \"auto\": set its value")
        elif name != _TRAIN:
            found[key] = value
    return _settled(found) if not path else found


def assumed_values(given: Mapping[str, Any], filled: Mapping[str, Any], args: Any) -> str:
    """Return in words what "auto" has become where `args` does not tell: "optimizer.params.lr is
    5e-05, ..."; "" if there is none."""
    found = []
    for name, source in _SOURCES.items():
        value: Any = given
        result: Any = filled
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
            result = result.get(key) if isinstance(result, Mapping) else None
        told = source.attributes and all(
            _given(args, each) is not None for each in source.attributes
        )
        if isinstance(value, str) and value == AUTO and result is not None and not told:
            found.append(f"{name} is {result}")
    return ", ".join(found)


def _follows(name: str, config: Mapping[str, Any], args: Any) -> bool:
    """Whether a batch size is not told by `args`, but follows from others in the config."""
    if name not in (_MICRO, _STEPS) or config.get(_TRAIN, AUTO) == AUTO:
        return False
    told = {each: _given(args, _SOURCES[each].attributes[0]) for each in (_MICRO, _STEPS)}
    knows_micro = config.get(_MICRO, AUTO) != AUTO or told[_MICRO] is not None
    return told[name] is None and (name == _MICRO or knows_micro)


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """Replace the last "auto", which is another value of the config: None, if there is none."""
    params = config.get("scheduler", {}).get("params")
    if isinstance(params, dict) and params.get("warmup_max_lr") == AUTO:
        optimizer = config.get("optimizer", {}).get("params") or {}
        params["warmup_max_lr"] = optimizer.get("lr")
    return config


def _from(args: Any, attributes: tuple[str, ...], default: Any) -> Any:
    values = [_given(args, name) for name in attributes]
    if not values or None in values:
        return default
    return values if len(values) > 1 else values[0]


def _given(args: Any, name: str) -> Any:
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _total_steps(args: Any) -> int:
    steps = _given(args, "max_steps")
    if not isinstance(steps, int) or steps <= 0:
        raise ValueError(
            "'scheduler.params.total_num_steps' in the DeepSpeed config is \"auto\": set it, or "
            "pass args= with max_steps, the number of optimizer steps"
        )
    return steps
