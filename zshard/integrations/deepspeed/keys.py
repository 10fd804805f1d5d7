"""The keys of a DeepSpeed config: supported, refused, or ignored.

Supported and refused ones are in two tables, under their full names with dots. Any other key has no
effect; one warning names them all, so none is silently dropped. The values of supported keys are
checked as soon as the config is read, whether or not they have an effect.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zshard.api import did_you_mean

AUTO = "auto"
Check = Callable[[str, object], None]  # raises for an invalid value of the key
TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}

# --- checks of values -----------------------------------------------------------------------------


def must_be(name: str, what: str, value: object) -> str:
    """Return the message for an invalid value."""
    return f"'{name}' in the DeepSpeed config must be {what}, got {value!r}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value == int(value)


def _check(
    has_type: Callable[[Any], bool],
    kind: str,
    is_valid: Callable[[Any], object] = lambda value: True,
    valid: str = "",
) -> Check:
    def check(name: str, value: object) -> None:
        if not has_type(value):
            raise TypeError(must_be(name, kind, value))
        if not is_valid(value):
            raise ValueError(must_be(name, valid, value))

    return check


def at_least(least: int) -> Check:
    return _check(_is_integer, "an integer", lambda value: value >= least, f"at least {least}")


def _dtype_of(text: str) -> torch.dtype | None:
    return _DTYPES.get(text.lower().removeprefix("torch."))


_any = _check(lambda value: True, "")  # check_params() checks it
_flag = _check(lambda value: isinstance(value, bool), "true or false")
_text = _check(lambda value: isinstance(value, str), "a string")
_dtype = _check(
    lambda value: isinstance(value, str), "a string", _dtype_of, "'fp32', 'fp16' or 'bf16'"
)
_number = _check(_is_number, "a number", lambda n: 0 <= n < math.inf, "finite and at least 0")


# --- the keys -------------------------------------------------------------------------------------

_OFFLOAD = {"device": _text, "nvme_path": _text, "ratio": _number}


def _section(name: str, keys: Mapping[str, Check]) -> dict[str, Any]:
    return {f"{name}.{key}": check for key, check in keys.items()}


WORKS: dict[str, Check] = {
    **dict.fromkeys((TRAIN, MICRO, STEPS), at_least(1)),
    "gradient_clipping": _number,
    "steps_per_print": _check(
        lambda n: n == math.inf or _is_integer(n), "an integer", lambda n: n >= 1, "at least 1"
    ),
    "communication_data_type": _dtype,
    "dataloader_drop_last": _flag,
    "managed_gradient_accumulation": _flag,
    "gradient_allreduce_op": _text,
    **_section("optimizer", {"type": _text, "params": _any}),
    **_section("scheduler", {"type": _text, "params": _any}),
    **_section("torch_autocast", {"enabled": _flag, "dtype": _dtype}),
    **_section("data_types", {"grad_accum_dtype": _dtype, "buffer_dtype": _dtype}),
    **_section("fp16", {"enabled": _flag, "auto_cast": _flag, "consecutive_hysteresis": _flag}),
    **_section("fp16", {"loss_scale": _number, "min_loss_scale": _number}),
    **_section("fp16", {"initial_scale_power": at_least(0), "hysteresis": at_least(1)}),
    "fp16.loss_scale_window": at_least(1),
    **_section("bf16", {"enabled": _flag, "check_grad_overflow": _flag}),
    **_section("zero_optimization", {"stage": at_least(0), "compute_grad_norm": _flag}),
    **{f"zero_optimization.cpu_offload{part}": _flag for part in ("", "_param", "_params")},
    **_section("checkpoint", {"use_node_local_storage": _flag}),
    **_section("zero_optimization.offload_param", _OFFLOAD),
    **_section("zero_optimization.offload_optimizer", _OFFLOAD),
}
"""The keys that have their effect, with the checks of their values."""

_ZERO = (
    *("zenflow", "zeropp_loco_param", "zero_quantized_weights", "zero_quantized_gradients"),
    *("zero_quantized_nontrainable_weights", "mics_shard_size", "mics_hierarchical_params_gather"),
)
REFUSED = frozenset(
    (
        *("amp", "sparse_attention", "curriculum_learning", "data_efficiency", "random_ltd"),
        *("progressive_layer_drop", "compression_training", "quantize_training", "eigenvalue"),
        *("weight_quantization", "elasticity", "pipeline", "tensor_parallel", "expert_parallel"),
        *("sequence_parallel_size", "data_parallel_size", "hybrid_engine"),
        *("data_types.param_dtype", "torch_autocast.lower_precision_safe_modules"),
        *("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"),
        "bf16.bf16_optimizer_states",
        *(f"zero_optimization.{key}" for key in _ZERO),
    )
)
"""The keys that would change numbers and are not supported: docs/deepspeed.md says what to use."""

SECTIONS = frozenset(name[:i] for name in WORKS for i in (name.find("."), name.rfind(".")) if i > 0)
FREE = ("optimizer.params", "scheduler.params")  # each type has its own: see check_params()
_OLD_NAMES = {"bfloat16": "bf16"}
_OFF: tuple[object, ...] = (None, False, 0, 1, {}, [], AUTO, "none", "")
_PLACES = [name.rpartition(".") for name in (*WORKS, *sorted(SECTIONS))]
_CLOSE = 0.75  # difflib's ratio of a name and the one that was meant


def checked(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of the config under current names, without nulls and comments, and what it
    ignores: keys that have no effect, with the key that was meant if one has nearly that name.

    A null value counts as absent, and a key that does not begin with a letter is a comment
    ("_comment", "//"). Raises TypeError for a section that is not a dict, NotImplementedError for a
    key that would change numbers and is not supported.
    """
    current = {_OLD_NAMES.get(key, key): value for key, value in config.items()}
    if isinstance(current.get("zero_optimization"), bool):  # DeepSpeed 0.1
        current["zero_optimization"] = {"stage": int(current["zero_optimization"])}
    ignored: list[str] = []
    return _checked(current, "", ignored), ignored


def _checked(section: Mapping[str, Any], path: str, ignored: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        if not str(key)[:1].isalpha():
            ignored.append(name)
            continue
        if value is None and path not in FREE:
            continue
        values[key] = value
        if name in SECTIONS or name in FREE:
            if not isinstance(value, Mapping):
                raise TypeError(must_be(name, "a dict", value))
            values[key] = _checked(value, name, ignored)
        elif name in REFUSED and not _is_off(value):
            raise NotImplementedError(
                f"'{name}' in the DeepSpeed config is not supported: remove it (docs/deepspeed.md)"
            )
        elif path not in FREE and name not in WORKS and name not in REFUSED:
            siblings = [last for parent, _, last in _PLACES if parent == path]
            near = did_you_mean(str(key), siblings, _CLOSE)
            ignored.append(f"{name} ({near[2:]})" if near else name)
    return values


def _is_off(value: object) -> bool:
    """Return whether a value requests nothing: false, a section that is not enabled, size 1."""
    if isinstance(value, Mapping):
        inner = value.get("enabled", value.get("autotp_size"))
        return not value or (inner is not None and _is_off(inner))
    return value is not True and value in _OFF


# --- values ---------------------------------------------------------------------------------------


class ConfigValues:
    """The values of a config by their full names. Raises TypeError or ValueError for an invalid
    one."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        for name, check in WORKS.items():
            value = self.get(name)
            if value is not None:
                check(name, value)

    def get(self, name: str, default: object = None) -> Any:
        """Return the value of a key, or `default` where it is absent or "auto"."""
        value: object = self.config
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype that a key names."""
        value = self.get(name)
        return None if value is None else _dtype_of(value)


def check_params(path: str, kind: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Check the values in `path`, the arguments of a class or function: numbers must be finite, and
    an argument whose default is a number must be a number, or several.

    Raises TypeError or ValueError, which names the key.
    """
    parameters = inspect.signature(kind).parameters
    for key, value in params.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        default = parameters[key].default if key in parameters else None
        first = default[0] if isinstance(default, tuple) and default else default
        if _is_number(first) and any(n is None or isinstance(n, str | bool) for n in numbers):
            raise TypeError(must_be(f"{path}.{key}", "a number", value))
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers):
            raise ValueError(must_be(f"{path}.{key}", "finite", value))


# --- "auto" ---------------------------------------------------------------------------------------


SOURCES: dict[str, tuple[Sequence[str], object]] = {
    MICRO: (("per_device_train_batch_size",), 8),
    STEPS: (("gradient_accumulation_steps",), 1),
    "gradient_clipping": (("max_grad_norm",), 1.0),
    "fp16.enabled": (("fp16",), False),
    "bf16.enabled": (("bf16",), False),
    "optimizer.params.lr": (("learning_rate",), 5e-5),
    "optimizer.params.betas": (("adam_beta1", "adam_beta2"), [0.9, 0.999]),
    "optimizer.params.eps": (("adam_epsilon",), 1e-8),
    "optimizer.params.weight_decay": (("weight_decay",), 0.0),
    "scheduler.params.warmup_min_lr": ((), 0.0),
    "scheduler.params.warmup_num_steps": (("warmup_steps",), 0),
}
"""Values of "auto" under the Trainer of transformers: the names in its TrainingArguments (several
make a list), and the default."""


def fill(config: Mapping[str, Any], args: object) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of a config with values in place of "auto", and a description of those that
    `args` does not give: "optimizer.params.lr is 5e-05".

    args: the Trainer's TrainingArguments, or a script's own with the same names. What it lacks has
    TrainingArguments' default. Keys that have no effect keep "auto". Raises ValueError for an
    "auto" without a value.
    """
    assumed: list[str] = []
    values = _filled(config, "", args, assumed)
    params = values.get("scheduler", {}).get("params")
    if isinstance(params, dict) and params.get("warmup_max_lr") == AUTO:
        params["warmup_max_lr"] = (values.get("optimizer", {}).get("params") or {}).get("lr")
    return values, assumed


def _filled(
    section: Mapping[str, Any], path: str, args: object, assumed: list[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            values[key] = _filled(value, name, args, assumed)
        elif (
            not isinstance(value, str) or value != AUTO or name == "scheduler.params.warmup_max_lr"
        ):
            values[key] = value
        elif name in SOURCES:
            attributes, default = SOURCES[name]
            arguments = [_argument(args, attribute) for attribute in attributes]
            if arguments and None not in arguments:
                values[key] = arguments if len(arguments) > 1 else arguments[0]
            elif not _follows(name, section, args):
                values[key] = default
                assumed.append(f"{name} is {default}")
        elif name != TRAIN and (name in WORKS or path in FREE):
            is_total = name == "scheduler.params.total_num_steps"
            values[key] = steps = _argument(args, "max_steps") if is_total else None
            if not isinstance(steps, int) or steps <= 0:
                remedy = "set it, or pass args= with max_steps" if is_total else "set its value"
                raise ValueError(f"'{name}' in the DeepSpeed config is \"auto\": {remedy}")
        elif name != TRAIN:
            values[key] = value
    return values


def _follows(name: str, config: Mapping[str, Any], args: object) -> bool:
    """Return whether a batch size that `args` does not give follows from others in the config."""
    if name not in (MICRO, STEPS) or config.get(TRAIN, AUTO) == AUTO:
        return False
    micro = config.get(MICRO, AUTO)
    return name == MICRO or micro != AUTO or _argument(args, SOURCES[MICRO][0][0]) is not None


def _argument(args: object, name: str) -> Any:
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
