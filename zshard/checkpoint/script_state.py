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
from collections.abc import Callable, Mapping
from typing import Any

import torch

from zshard.checkpoint.safetensors import CODES
from zshard.ranks.agreement import bytes_of

_BITS = 8192  # of an int; Python refuses to parse somewhat larger ones
LIMIT = 2**24  # bytes of one tensor; larger ones belong in a module's buffers

_PLAIN = (str, bool, type(None))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*CODES, torch.complex128)}


def encode(value: object, where: str = "extra") -> Any:
    """Return `value` as JSON values. Supported are numbers, strings, None, lists, tuples, dicts,
    sets, bytes, torch dtypes, and tensors and NumPy arrays of at most 16 MiB. For anything else,
    raise TypeError or ValueError, which names the entry as `where['key'][0]`."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, int):
        if value.bit_length() > _BITS:
            raise ValueError(
                f"{where} is an integer of {value.bit_length()} bits; the limit is {_BITS}"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]}
    if isinstance(
        value, set | frozenset
    ):  # in a fixed order, so that equal sets agree between ranks
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


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    """Encode a dict as an object if its keys allow that; otherwise as a list of pairs."""
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
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return encode(value.item(), where)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        data = _text(numpy.ascontiguousarray(value).tobytes(), where)
        return {"$array": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}
    kind = f" of {value.dtype}" if hasattr(value, "dtype") else ""
    raise TypeError(
        f"cannot save {where}: unsupported type {type(value).__name__}{kind}; pass numbers, "
        "strings, None, lists, tuples, dicts, sets, bytes, or tensors or arrays of numbers"
    )


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
