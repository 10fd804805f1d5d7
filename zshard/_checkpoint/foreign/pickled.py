"""Read pickles as data: nothing that a pickle names is imported, created or called.

The one idea: a pickle is a small program for a stack machine, and Python's unpickler runs any such
program. This one supports only the opcodes that plain data needs. Where the program names a class
or a function, it records the name and the arguments. So a malicious pickle is only an error here.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import Any

_LIMIT = 10_000_000  # opcodes


class Thing:
    """A class or function that a pickle names, or the result that calling it would have."""

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


class _Mark:
    """Where a list of values begins, on the stack."""


def parse(data: bytes) -> Any:
    """Return the content of a pickle: None, bool, int, float, str, bytes, tuples, lists, dicts,
    sets (as lists), and Things. Raise ValueError if it is damaged or needs anything else.

    torch.Size becomes a tuple; OrderedDict, defaultdict and Counter become dicts; a deque becomes a
    list; NumPy numbers become Python numbers.
    """
    machine = _Machine()
    try:
        for count, (op, arg, _) in enumerate(pickletools.genops(data)):
            if op.name == "STOP":
                return machine.only()
            if count >= _LIMIT:
                raise ValueError(f"it has more than {_LIMIT} opcodes")
            machine.do(op.name, arg)
    except (LookupError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"it is damaged: {error!r}") from None
    raise ValueError("it has no STOP opcode")


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def only(self) -> Any:
        """Return the only value on the stack."""
        if len(self._stack) != 1:
            raise ValueError("it does not contain exactly one value")
        return self._stack[0]

    def do(self, name: str, arg: Any) -> None:
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _VALUES:
            self._stack.append(arg)
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, arg)
        else:
            raise ValueError(f"it has opcode {name}, which plain data does not need")

    # --- opcodes ----------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        self._stack.append(_Mark)

    def tuple_of(self, count: int | None) -> None:
        values = self._since_mark() if count is None else self._last(count)
        self._stack.append(tuple(values))

    def append(self, _: Any) -> None:
        self._extend(self._last(1))

    def appends(self, _: Any) -> None:
        self._extend(self._since_mark())

    def set_item(self, _: Any) -> None:
        self._update(self._last(2))

    def set_items(self, _: Any) -> None:
        self._update(self._since_mark())

    def set_of(self, _: Any) -> None:
        self._stack.append(self._since_mark())

    def put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def name(self, arg: str | None) -> None:
        module, name = self._last(2) if arg is None else arg.split(" ", 1)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it has a class name that is not a string")
        self._stack.append(Thing(f"{module}.{name}"))

    def call(self, _: Any) -> None:
        what, args = self._last(2)
        if not isinstance(what, Thing) or what.args is not None or not isinstance(args, tuple):
            raise ValueError("it calls an object that is not a function")
        maker = _PLAIN.get(what.name)
        made = None if maker is None else maker(args)
        self._stack.append(Thing(what.name, args) if made is None else made)

    def build(self, _: Any) -> None:
        thing, state = self._last(2)
        if isinstance(thing, Thing) and thing.args is not None:
            thing.state = state
        elif not isinstance(thing, dict):  # attributes of an OrderedDict are ignored
            raise ValueError("it sets the state of an object that has none")
        self._stack.append(thing)

    def persistent(self, _: Any) -> None:
        self._stack.append(Thing("persistent", (self._last(1)[0],)))

    # --- the stack --------------------------------------------------------------------------------

    def _last(self, count: int) -> list[Any]:
        """Pop `count` values."""
        if len(self._stack) < count or _Mark in self._stack[len(self._stack) - count :]:
            raise ValueError("it pops from an empty stack")
        values = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return values

    def _since_mark(self) -> list[Any]:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i] is _Mark:
                values = self._stack[i + 1 :]
                del self._stack[i:]
                return values
        raise ValueError("it has no MARK opcode")

    def _extend(self, values: list[Any]) -> None:
        if isinstance(self._stack[-1], Thing):
            return  # its items are ignored
        if not isinstance(self._stack[-1], list):
            raise ValueError("it appends to an object that is not a list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if isinstance(self._stack[-1], Thing):
            return
        if not isinstance(self._stack[-1], dict) or len(values) % 2 != 0:
            raise ValueError("it sets items of an object that is not a dict")
        self._stack[-1].update(zip(values[::2], values[1::2], strict=True))


# --- plain data that pickles write as calls -------------------------------------------------------

# NumPy dtype name: struct format.
_NUMBERS = {"f2": "e", "f4": "f", "f8": "d", "b1": "?"}
_NUMBERS |= {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q"}


def _number(args: tuple[Any, ...]) -> Any:
    dtype, data = args
    code = _NUMBERS.get(dtype.args[0])
    order = dtype.state[1]
    if dtype.name != "numpy.dtype" or code is None or order not in ("<", "|"):
        return None
    return struct.unpack(f"<{code}", data)[0]


def _list(args: tuple[Any, ...]) -> Any:
    return list(args[0]) if args and isinstance(args[0], list | tuple) else None


def _dict(args: tuple[Any, ...]) -> Any:
    return dict(args[0]) if args and isinstance(args[0], dict) else {}


def _bytes(args: tuple[Any, ...]) -> Any:
    text, encoding = args
    return text.encode("latin-1") if encoding in ("latin1", "latin-1") else None


# Functions that make values from arguments; if they return None, the call stays a Thing.
_PLAIN: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "torch.Size": lambda args: tuple(args[0]) if isinstance(args[0], tuple) else None,
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

_IGNORED = frozenset(("PROTO", "FRAME"))
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_DICT": dict,
}
_VALUES = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    )
)
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_of,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "ADDITEMS": _Machine.appends,
    "FROZENSET": _Machine.set_of,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
