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
"""Factories that a defaultdict may call for a missing key."""


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
        raise TypeError(f"cannot save {where}: it is a parameter's shard; pass full_tensor() of it")
    numpy = sys.modules.get("numpy")
    dtype: Any = getattr(value, "dtype", None)
    if numpy is not None and isinstance(value, numpy.generic) and dtype.kind in "biufc":
        return {"$number": _encode_array(numpy, value, where)}
    if numpy is not None and kind is numpy.ndarray and dtype.kind in "biufc":
        return {"$array": _encode_array(numpy, value, where)}
    of = f" of {dtype}" if dtype is not None else ""
    text = f"cannot save {where}: unsupported type {kind.__name__}{of}"
    raise TypeError(f"{text}; pass plain values, tensors or arrays of numbers")


def decode(value: object) -> Any:
    """Return the value that encode() was given. Raise ValueError for any other JSON."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(item) for key, item in value.items()}
    decoder = _DECODERS.get(kind)
    if decoder is None or len(value) != 1:
        raise ValueError(f"{str(value)[:80]} is not a value that this version of zshard writes")
    try:
        return decoder(value[kind])
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
    if strange := sorted(set(state) - {"torch", "random", "cuda", "numpy"}):
        raise ValueError(f"unexpected key {strange[0]!r}: pass the dict that rng_state() returned")
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "random" in state:
        random.setstate(state["random"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        importlib.import_module("numpy").random.set_state(state["numpy"])


# --- one function per type ------------------------------------------------------------------------


def _encode_int(value: int, where: str) -> Any:
    if (bits := value.bit_length()) > _BITS:
        raise ValueError(f"{where} is an integer of {bits} bits; the limit is {_BITS}")
    return value


def _encode_items(values: Iterable[Any], where: str) -> list[Any]:
    return [encode(item, f"{where}[{i}]") for i, item in enumerate(values)]


def _encode_pairs(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [
        [encode(key, f"a key of {where}"), encode(each, f"{where}[{key!r}]")]
        for key, each in value.items()
    ]


def _encode_defaultdict(value: defaultdict[Any, Any], where: str) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise TypeError(f"cannot save {where}: a defaultdict of {factory!r}; pass dict() of it")
    return {"$defaultdict": {"factory": name, "pairs": _encode_pairs(value, where)}}


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    """Encode a dict as an object if its keys allow that; otherwise as a list of pairs."""
    if all(type(key) is str for key in value) and not any(key.startswith("$") for key in value):
        return {key: encode(each, f"{where}[{key!r}]") for key, each in value.items()}
    return {"$dict": _encode_pairs(value, where)}


def _text(data: bytes, where: str) -> str:
    if len(data) > LIMIT:
        size = f"{where} has {len(data)} bytes; the limit is {LIMIT}"
        raise ValueError(f"{size}: store larger data in a buffer of the model")
    return base64.b64encode(data).decode()


def _encode_tensor(value: torch.Tensor, where: str) -> dict[str, Any]:
    name = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided or value.is_meta or name not in _DTYPES:
        kind = f"unsupported tensor ({value.dtype}, {value.layout}, {value.device})"
        raise TypeError(f"cannot save {where}: {kind}; pass strided values of a safetensors dtype")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = _text(bytes(bytes_of(plain)), where)
    return {"dtype": name, "shape": list(value.shape), "data": data}


def _encode_array(numpy: Any, value: Any, where: str) -> dict[str, Any]:
    data = _text(numpy.ascontiguousarray(value).tobytes(), where)
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}


def _decode_tensor(row: dict[str, Any]) -> torch.Tensor:
    dtype, data = _DTYPES[row["dtype"]], bytearray(base64.b64decode(row["data"], validate=True))
    if not data:
        return torch.empty(row["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(row["shape"])


def _decode_array(row: dict[str, Any]) -> Any:
    numpy: Any = importlib.import_module("numpy")  # which a script that saves NumPy values has
    dtype = numpy.dtype(row["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"unsupported array dtype {dtype}")
    data = base64.b64decode(row["data"], validate=True)
    return numpy.frombuffer(data, dtype).reshape(row["shape"]).copy()


def _decode_pairs(pairs: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(value) for key, value in pairs}


_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    int: _encode_int,
    float: lambda value, where: value if math.isfinite(value) else {"$float": repr(value)},
    list: _encode_items,
    tuple: lambda value, where: {"$tuple": _encode_items(value, where)},
    torch.Size: lambda value, where: {"$size": list(value)},
    # Sets are in a fixed order, so that equal ones agree between ranks.
    set: lambda value, where: {"$set": _encode_items(sorted(value, key=repr), where)},
    frozenset: lambda value, where: {"$frozenset": _encode_items(sorted(value, key=repr), where)},
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

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": lambda values: tuple(decode(list(values))),
    "$size": lambda values: torch.Size(list(values)),
    "$set": lambda values: set(decode(list(values))),
    "$frozenset": lambda values: frozenset(decode(list(values))),
    "$deque": lambda row: deque(decode(list(row["items"])), row["maxlen"]),
    "$dict": _decode_pairs,
    "$ordered": lambda pairs: OrderedDict(_decode_pairs(pairs)),
    "$counter": lambda pairs: Counter(_decode_pairs(pairs)),
    "$defaultdict": lambda row: defaultdict(
        _FACTORIES[row["factory"]], _decode_pairs(row["pairs"])
    ),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "$dtype": lambda name: _DTYPES[name],
    "$tensor": _decode_tensor,
    "$parameter": lambda row: torch.nn.Parameter(_decode_tensor(row), bool(row["requires_grad"])),
    "$array": _decode_array,
    "$number": lambda row: _decode_array({**row, "shape": []})[()],
}
