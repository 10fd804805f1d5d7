"""A script's own state (scheduler, data loader, random number generators) as JSON, and back.

JSON has fewer types than the state of schedulers and generators, so each further type
becomes an object with one key, which begins with "$". Decoding creates values of these types and of
no others: unlike a pickle, the file cannot name anything to call.
"""

from __future__ import annotations

import base64
import importlib
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from zshard.checkpoint.safetensors import CODES
from zshard.guard.plain import GuardedTensor
from zshard.ranks.agreement import bytes_of

_BITS = 8192  # of an int; Python refuses to parse somewhat larger ones
LIMIT = 2**24  # bytes of one tensor; larger ones belong in a module's buffers

_PLAIN = (str, bool, type(None))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}
_BUILT_IN = (bool, dict, float, int, list, set, str, tuple)
_FACTORIES: dict[Any, Any] = {None: None, **{kind.__name__: kind for kind in _BUILT_IN}}
"""What a defaultdict may call for a missing key."""


def encode(value: object, where: str = "extra") -> Any:
    """Return `value` as JSON values, from which decode() makes one of the same type. Supported are
    numbers, strings, None, lists, tuples, dicts, sets, bytes, torch dtypes, and tensors and NumPy
    arrays of at most 16 MiB; of subclasses OrderedDict, Counter, deque, torch.Size, nn.Parameter,
    NumPy's numbers, and a defaultdict of a built-in type. For anything else, raise TypeError or
    ValueError, which names the entry as `where['key'][0]`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, where)
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") in _DTYPES:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, GuardedTensor):
        raise TypeError(
            f"cannot save {where}: it is this rank's shard of a parameter; pass full_tensor() of it"
        )
    return _encode_numpy(value, where)


def decode(value: object) -> Any:
    """Return the value that encode() was given. Raise ValueError for any other JSON."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(each) for key, each in value.items()}
    maker = _MAKERS.get(kind)
    if maker is None or len(value) != 1:
        raise ValueError(f"{str(value)[:80]} is not a value that this version of zshard writes")
    try:
        return maker(value[kind])
    except (TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{str(value)[:80]} is not a valid {kind}: {error}") from None


def rng_state() -> dict[str, Any]:
    """Return the state of this process's random number generators, for `extra` of zshard.save():
    torch, this rank's GPU if CUDA is initialized, Python's random, and NumPy if it is imported."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the random number generators from the dict that rng_state() returned. Generators
    that the dict does not list keep their state. Raise ValueError for unexpected keys."""
    strange = sorted(set(state) - {"torch", "random", "cuda", "numpy"})
    if strange:
        raise ValueError(f"unexpected key {strange[0]!r}: pass the dict that rng_state() returned")
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "random" in state:
        random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        _numpy().random.set_state(state["numpy"])


# --- one function per type ------------------------------------------------------------------------


def _encode_int(value: int, where: str) -> Any:
    if value.bit_length() > _BITS:
        raise ValueError(
            f"{where} is an integer of {value.bit_length()} bits; the limit is {_BITS}"
        )
    return value


def _encode_items(values: Iterable[Any], where: str) -> list[Any]:
    return [encode(each, f"{where}[{i}]") for i, each in enumerate(values)]


def _encode_set(values: Iterable[Any], where: str) -> list[Any]:
    """In a fixed order, so that equal sets agree between ranks."""
    return [encode(each, f"an element of {where}") for each in sorted(values, key=repr)]


def _encode_pairs(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [
        [encode(key, f"a key of {where}"), encode(each, f"{where}[{key!r}]")]
        for key, each in value.items()
    ]


def _encode_defaultdict(value: defaultdict[Any, Any], where: str) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise TypeError(
            f"cannot save {where}: a defaultdict of {factory!r}; pass dict() of it, or one of a "
            "built-in type"
        )
    return {"$defaultdict": {"factory": name, "pairs": _encode_pairs(value, where)}}


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    """Encode a dict as an object if its keys allow that; otherwise as a list of pairs."""
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
    return {"$dict": _encode_pairs(value, where)}


def _text(data: bytes, where: str) -> str:
    if len(data) > LIMIT:
        raise ValueError(
            f"{where} has {len(data)} bytes; the limit is {LIMIT}: store larger data in a buffer "
            "of the model"
        )
    return base64.b64encode(data).decode()


def _encode_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_meta or name not in _DTYPES:
        raise TypeError(
            f"cannot save {where}: unsupported tensor ({value.dtype}, {value.layout}, "
            f"{value.device}); pass a strided tensor with values, of a dtype that safetensors has"
        )
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytes(bytes_of(plain))
    return {"dtype": name, "shape": list(value.shape), "data": _text(data, where)}


def _encode_numpy(value: object, where: str) -> Any:
    numpy = sys.modules.get("numpy")
    dtype: Any = getattr(value, "dtype", None)
    if numpy is not None and type(value) is numpy.ndarray and dtype.kind in "biufc":
        return {"$array": _encode_array(numpy, value, where)}
    if numpy is not None and isinstance(value, numpy.generic) and dtype.kind in "biufc":
        return {"$number": _encode_array(numpy, value, where)}
    kind = f" of {dtype}" if dtype is not None else ""
    raise TypeError(
        f"cannot save {where}: unsupported type {type(value).__name__}{kind}; pass numbers, "
        "strings, None, lists, tuples, dicts, sets, bytes, or tensors or arrays of numbers"
    )


def _encode_array(numpy: Any, value: Any, where: str) -> dict[str, Any]:
    data = _text(numpy.ascontiguousarray(value).tobytes(), where)
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def _numpy() -> Any:
    """NumPy, which zshard does not need, but a script that saves NumPy values has."""
    return importlib.import_module("numpy")


def _make_tensor(told: dict[str, Any]) -> torch.Tensor:
    dtype, data = _DTYPES[told["dtype"]], bytearray(base64.b64decode(told["data"], validate=True))
    if not data:
        return torch.empty(told["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(told["shape"])


def _make_array(told: dict[str, Any]) -> Any:
    numpy = _numpy()
    dtype = numpy.dtype(told["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"unsupported array dtype {dtype}")
    data = base64.b64decode(told["data"], validate=True)
    return numpy.frombuffer(data, dtype).reshape(told["shape"]).copy()


def _make_dict(pairs: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(value) for key, value in pairs}


_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    int: _encode_int,
    float: lambda value, where: value if math.isfinite(value) else {"$float": repr(value)},
    list: _encode_items,
    tuple: lambda value, where: {"$tuple": _encode_items(value, where)},
    torch.Size: lambda value, where: {"$size": list(value)},
    set: lambda value, where: {"$set": _encode_set(value, where)},
    frozenset: lambda value, where: {"$frozenset": _encode_set(value, where)},
    deque: lambda value, where: {
        "$deque": {"items": _encode_items(value, where), "maxlen": value.maxlen}
    },
    dict: _encode_dict,
    OrderedDict: lambda value, where: {"$ordered": _encode_pairs(value, where)},
    Counter: lambda value, where: {"$counter": _encode_pairs(value, where)},
    defaultdict: _encode_defaultdict,
    bytes: lambda value, where: {"$bytes": _text(value, where)},
    bytearray: lambda value, where: {"$bytearray": _text(bytes(value), where)},
    torch.Tensor: lambda value, where: {"$tensor": _encode_tensor(value, where)},
    torch.nn.Parameter: lambda value, where: {
        "$parameter": {**_encode_tensor(value, where), "requires_grad": value.requires_grad}
    },
}

_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda values: tuple(decode(list(values))),
    "$size": lambda values: torch.Size(list(values)),
    "$set": lambda values: set(decode(list(values))),
    "$frozenset": lambda values: frozenset(decode(list(values))),
    "$deque": lambda told: deque(decode(list(told["items"])), told["maxlen"]),
    "$dict": _make_dict,
    "$ordered": lambda pairs: OrderedDict(_make_dict(pairs)),
    "$counter": lambda pairs: Counter(_make_dict(pairs)),
    "$defaultdict": lambda told: defaultdict(
        _FACTORIES[told["factory"]], _make_dict(told["pairs"])
    ),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "$dtype": lambda name: _DTYPES[name],
    "$tensor": _make_tensor,
    "$parameter": lambda told: torch.nn.Parameter(_make_tensor(told), bool(told["requires_grad"])),
    "$array": _make_array,
    "$number": lambda told: _make_array({**told, "shape": []})[()],
}
