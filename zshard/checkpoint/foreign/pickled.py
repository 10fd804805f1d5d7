"""Read pickles as data: nothing that a pickle names is imported, created or called.

A pickle is a small program. A pass over its opcodes rewrites it with those alone that
plain data needs, and checks what its numbers ask for. Python's own unpickler then runs the result,
and gets an inert PickledObject for each class or function by name. So a malicious pickle is only
an error.
"""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
import struct
from collections.abc import Callable, Collection, Iterable
from typing import Any

_LIMIT = 10_000_000  # opcodes
_BITS = 10_000  # of an integer: Python cannot print more than 4300 digits
_NAME = 1000  # characters
_DEPTH = 400  # levels; Python's own functions recurse to less than 1000
_SHARED = 1_000_000  # values beyond those that the bytes have room for
_KEY = 100  # values of a tuple that is a key of a dict, and keys with one hash


class NotPlainError(ValueError):
    """The pickle is right, but describes no tree of a size that fits its length."""


class PickledObject:
    """A class or function that a pickle names, or the result that calling it would have."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any = None) -> None:
        self.name = name  # dotted
        self.args = args  # None: not called
        self.state: Any = None  # what __setstate__() would have received

    def __repr__(self) -> str:
        return self.name if self.args is None else f"{self.name}(...)"

    def field(self, name: str) -> Any:
        """Return an attribute from its state. Raise KeyError if it lacks that."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]

    # --- what the unpickler calls -----------------------------------------------------------------

    def __setstate__(self, state: Any) -> None:
        if self.args is None:
            raise ValueError("it sets the state of an object that has none")
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item."""

    def extend(self, values: Any) -> None:
        """Ignore items."""

    append = extend


class _PickledCallable(PickledObject):
    """A PickledObject that the pickle may call, which only makes a record or plain data."""

    __slots__ = ("_allowance",)

    def __init__(self, name: str, allowance: _CopyAllowance) -> None:
        super().__init__(name)
        self._allowance = allowance

    def __call__(self, *args: Any) -> Any:
        maker = _PLAIN.get(self.name)
        made = None if maker is None else maker(args, self._allowance)
        return PickledObject(self.name, args) if made is None else made


class _Dict(dict[Any, Any]):
    """A dict that looks at a key before it hashes it: the hash of a tuple takes time and stack for
    all that the tuple contains, and keys that share a hash are compared one by one."""

    __slots__ = ("_hashes",)

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(key) in _GUESSABLE:
            self._check(key)
        super().__setitem__(key, value)

    def _check(self, key: Any) -> None:
        if type(key) is tuple and not _is_tree(key, _KEY):
            raise ValueError(f"it has a dict key of more than {_KEY} values")
        if key not in self:
            if not hasattr(self, "_hashes"):
                self._hashes: dict[int, int] = {}
            hashes = self._hashes
            same = hashes[hash(key)] = hashes.get(hash(key), 0) + 1
            if same > _KEY:
                raise ValueError(f"it has a dict with more than {_KEY} keys of one hash")

    def __setstate__(self, state: Any) -> None:
        """Ignore attributes, which an OrderedDict may have."""


_GUESSABLE = frozenset((int, float, tuple))  # Python does not salt their hashes


class _CopyAllowance:
    """How many bytes calls may still copy. Without this, a call of a few bytes could copy a long
    text, again and again."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise ValueError("it copies more than it contains")


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: bytes, size: int) -> None:
        super().__init__(io.BufferedReader(io.BytesIO(program), 1 << 16))  # which can peek: faster
        self._allowance = _CopyAllowance(size)

    def find_class(self, module: str, name: str) -> PickledObject:
        if len(module) + len(name) > _NAME:
            raise ValueError(f"it has a class name of more than {_NAME} characters")
        return _PickledCallable(f"{module}.{name}", self._allowance)

    def persistent_load(self, key: Any) -> Any:
        return _Dict() if key is None else PickledObject("persistent", (key,))


# What Python's unpickler, and a maker below, raise for a damaged pickle.
_WRONG = (pickle.PickleError, EOFError, LookupError, TypeError, AttributeError)
_ALSO_WRONG = (ArithmeticError, RecursionError, struct.error)


def parse(data: bytes) -> Any:
    """Return the content of a pickle: None, bool, int, float, str, bytes, tuples, lists, dicts,
    sets (as lists), and PickledObjects. Raise ValueError if it is damaged or needs anything else.

    torch.Size becomes a tuple; OrderedDict, defaultdict and Counter become dicts; a deque becomes a
    list; NumPy numbers become Python numbers. Raises NotPlainError if a value contains itself, or
    if the result is far larger than `data` because it repeats values.
    """
    try:
        value = _Unpickler(_rewritten(data), len(data)).load()
    except (*_WRONG, *_ALSO_WRONG) as error:
        raise ValueError(f"it is damaged: {error!r:.200}") from None
    if not _is_tree(value, _SHARED + 4 * len(data)):
        raise NotPlainError("it contains itself, is nested too deeply, or repeats itself too often")
    return value


def _rewritten(data: bytes) -> bytes:
    """Return the pickle with only the opcodes in `_KEPT`. Raise ValueError if it has opcodes that
    data does not need, if its numbers do not fit its size, or if it does not end."""
    parts: list[bytes] = []
    begin = 0
    opcodes: Iterable[tuple[pickletools.OpcodeInfo, Any, Any]] = pickletools.genops(data)
    for count, (op, arg, at) in enumerate(opcodes):
        name = op.name
        if name in _KEPT:
            continue
        if name in _REPLACED:
            length, new = _REPLACED[name]
            parts += data[begin:at], new
            begin = at + length
        elif name == "STOP":
            return b"".join((*parts, data[begin : at + 1]))
        elif name in _MEMO:
            if arg > count:  # it would ask for room for all below
                raise ValueError(f"it numbers a value {arg}, but has only {count} before it")
        elif name not in _INTEGERS:
            raise ValueError(f"it has opcode {name}, which plain data does not need")
        elif arg.bit_length() > _BITS:
            raise ValueError(f"it has an integer of more than {_BITS} bits")
        if count >= _LIMIT:
            raise ValueError(f"it has more than {_LIMIT} opcodes")
    raise ValueError("it has no STOP opcode")


def _is_tree(value: Any, most: int) -> bool:
    """Return whether it has at most `most` values, where those that it repeats count each time, on
    at most _DEPTH levels. So whoever walks, prints or hashes it takes no longer than that."""
    level = [value]
    for _ in range(_DEPTH):
        inner: list[Collection[Any]] = []
        for each in level:
            if isinstance(each, PickledObject):
                inner.append((each.args, each.state))
            elif isinstance(each, dict):
                inner += each.keys(), each.values()
            elif isinstance(each, list | tuple):
                inner.append(each)
        most -= sum(map(len, inner))
        if most < 0 or not inner:
            return most >= 0
        level = [each for each in itertools.chain(*inner) if isinstance(each, _CONTAINERS)]
    return False


_CONTAINERS = (PickledObject, dict, list, tuple)


# --- opcodes --------------------------------------------------------------------------------------

_KEPT = frozenset(
    (
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        *("MARK", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("MEMOIZE", "BINGET", "LONG_BINGET"),
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
    )
)
_MEMO = frozenset(("BINPUT", "LONG_BINPUT"))
_INTEGERS = frozenset(("LONG1", "LONG4"))
# (length, what does the same to data)
_REPLACED = {
    "PROTO": (2, b""),
    "FRAME": (9, b""),
    "EMPTY_DICT": (1, pickle.NONE + pickle.BINPERSID),  # the reader makes a _Dict
    "EMPTY_SET": (1, pickle.EMPTY_LIST),
    "ADDITEMS": (1, pickle.APPENDS),
    "FROZENSET": (1, pickle.LIST),
    "NEWOBJ": (1, pickle.REDUCE),
}

# --- plain data that pickles write as calls -------------------------------------------------------

# NumPy dtype name: struct format.
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"}
_NUMBERS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _number(args: tuple[Any, ...], _: _CopyAllowance) -> Any:
    dtype, data = args
    kind, order = dtype.args[0], dtype.state[1]
    if dtype.name != "numpy.dtype" or not isinstance(kind, str) or order not in ("<", "|"):
        return None
    return struct.unpack(f"<{_NUMBERS[kind]}", data)[0] if kind in _NUMBERS else None


def _list(args: tuple[Any, ...], allowance: _CopyAllowance) -> Any:
    if not args:
        return []
    if not isinstance(args[0], tuple):
        return args[0] if isinstance(args[0], list) else None
    allowance.take(len(args[0]))
    return list(args[0])


def _dict(args: tuple[Any, ...], _: _CopyAllowance) -> Any:
    return args[0] if args and isinstance(args[0], dict) else _Dict()


def _bytes(args: tuple[Any, ...], allowance: _CopyAllowance) -> Any:
    text, encoding = args
    allowance.take(len(text))
    return text.encode("latin-1") if encoding in ("latin1", "latin-1") else None


def _size(args: tuple[Any, ...], _: _CopyAllowance) -> Any:
    return args[0] if isinstance(args[0], tuple) else None


# Functions that make values from arguments; if they return None, the call stays a PickledObject.
_PLAIN: dict[str, Callable[[tuple[Any, ...], _CopyAllowance], Any]] = {
    "torch.Size": _size,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _dict,
    "collections.Counter": _dict,
    "collections.deque": _list,
    "builtins.set": _list,
    "__builtin__.set": _list,
    "builtins.frozenset": _list,
    "__builtin__.frozenset": _list,
    "_codecs.encode": _bytes,  # how protocol 2 writes bytes
    "numpy._core.multiarray.scalar": _number,
    "numpy.core.multiarray.scalar": _number,
}
