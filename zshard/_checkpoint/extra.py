"""What a script keeps beside tensors (step, scheduler, random numbers), as JSON and back.

The one idea: JSON has fewer kinds of values than the state that schedulers and generators give, so
each other kind is an object with one key, which begins with "$". Reading makes values of these
kinds and of no other: nothing in a file says what is to be called, as it would in a pickle.
"""

from __future__ import annotations

import base64
import importlib
import math
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zshard._agree import bytes_of
from zshard._checkpoint.safetensors import CODES

_BITS = 8192  # of an int; Python refuses texts of somewhat larger ones
LIMIT = 2**24  # bytes of one tensor; larger ones belong into a module's buffers

_PLAIN = (str, bool, type(None))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}


def encode(value: Any, where: str = "extra") -> Any:
    """`value` as JSON values. Raises TypeError or ValueError that names the entry, as
    `where['key'][0]`, for what cannot be kept: only numbers, strings, None, lists, tuples, dicts,
    sets, bytes, dtypes of torch, and tensors and NumPy arrays of at most 16 MiB can."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        if value.bit_length() > _BITS:
            raise ValueError(
                f"{where} is a number of {value.bit_length()} bits, the limit is {_BITS}"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if isinstance(value, set | frozenset):  # in one order, so that ranks which have the same agree
        kind = "$set" if isinstance(value, set) else "$frozenset"
        return {kind: [encode(each, f"an element of {where}") for each in sorted(value, key=repr)]}
    if isinstance(value, Mapping):
        return _encode_dict(value, where)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": _text(bytes(value), where)}
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in _DTYPES:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value, where)}
    return _encode_numpy(value, where)


def decode(value: Any) -> Any:
    """What encode() was given. Raises ValueError for JSON that it cannot have made."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(each) for key, each in value.items()}
    maker = _MAKERS.get(kind)
    if maker is None or len(value) != 1:
        raise ValueError(f"{str(value)[:80]} is no value that this version of zshard writes")
    try:
        return maker(value[kind])
    except (TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{str(value)[:80]} is no value of the kind {kind}: {error}") from None


def rng_state() -> dict[str, Any]:
    """The state of this process's random number generators, for `extra` of zshard.save: those of
    torch (and of this rank's GPU, where it has one in use), of Python's random, and of NumPy if it
    is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Gives the generators what rng_state() took; those that it does not have stay as they are.
    ValueError for a dict with other keys."""
    strange = sorted(set(state) - {"torch", "random", "cuda", "numpy"})
    if strange:
        raise ValueError(f"{strange[0]!r} is no key of what rng_state() gives")
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "random" in state:
        random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        _numpy().random.set_state(state["numpy"])


# --- one kind each --------------------------------------------------------------------------------


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    """As an object if its keys allow that; else as a list of pairs."""
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
    pairs = [
        [encode(key, f"a key of {where}"), encode(each, f"{where}[{key!r}]")]
        for key, each in value.items()
    ]
    return {"$dict": pairs}


def _text(data: bytes, where: str) -> str:
    if len(data) > LIMIT:
        raise ValueError(
            f"{where} has {len(data)} bytes, the limit is {LIMIT}: what is that large belongs into "
            "a buffer of the model"
        )
    return base64.b64encode(data).decode()


def _encode_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_meta or name not in _DTYPES:
        raise TypeError(
            f"{where} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which is "
            "none of those that can be kept"
        )
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytes(bytes_of(plain))
    return {"dtype": name, "shape": list(value.shape), "data": _text(data, where)}


def _encode_numpy(value: Any, where: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return encode(value.item(), where)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        data = _text(numpy.ascontiguousarray(value).tobytes(), where)
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}
    kind = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise TypeError(
        f"{where} is a {type(value).__name__}{kind}, which a checkpoint cannot keep: numbers, "
        "strings, None, lists, tuples, dicts, sets, bytes, tensors and arrays of numbers it can"
    )


def _numpy() -> Any:
    """NumPy, which whoever has saved things of its has; zshard does without."""
    return importlib.import_module("numpy")


def _make_tensor(told: Any) -> torch.Tensor:
    dtype, data = _DTYPES[told["dtype"]], bytearray(base64.b64decode(told["data"], validate=True))
    if not data:
        return torch.empty(told["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(told["shape"])


def _make_array(told: Any) -> Any:
    numpy = _numpy()
    dtype = numpy.dtype(told["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"an array of {dtype} is not among what is written")
    data = base64.b64decode(told["data"], validate=True)
    return numpy.frombuffer(data, dtype).reshape(told["shape"]).copy()


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda values: tuple(decode(list(values))),
    "$set": lambda values: set(decode(list(values))),
    "$frozenset": lambda values: frozenset(decode(list(values))),
    "$dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": lambda name: _DTYPES[name],
    "$tensor": _make_tensor,
    "$array": _make_array,
}
