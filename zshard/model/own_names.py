"""One namespace for a model's names and zshard's: the model's own attribute wins.

A unit's class derives from FSDP and then from the model's class, so each name of FSDP would hide a
child, parameter, buffer, method or property of that name. FSDP keeps the names of nn.Module's
protocol (PROTOCOL), and its methods call the model's with super(). Its other public names are
YieldingNames: the model's own attributes hide them, also those that are assigned later. So zshard
calls them as functions, `FSDP.no_sync(model)`, which scripts may do as well.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

from zshard._errors import warn
from zshard.units.units import ATTRIBUTE, State, stray_component
from zshard.wrap.tree import UnitSpec

_Class = TypeVar("_Class", bound=type)

PROTOCOL = frozenset(dir(nn.Module))
"""nn.Module's names: those that FSDP defines are zshard's, such as state_dict and __call__."""

_PRIVATE = "_zshard_"  # begins the names of zshard's own attributes of a module
_BOOLS = ("bool", "bool_")  # Python's class, and NumPy's by both of its names

_without_ours: ContextVar[bool] = ContextVar("zshard_without_ours", default=False)


@contextlib.contextmanager
def _only_the_models_names() -> Iterator[None]:
    """Context manager in which sharded models have no YieldingNames."""
    token = _without_ours.set(True)
    try:
        yield
    finally:
        _without_ours.reset(token)


class YieldingName:
    """A method, static method or property of FSDP, unless the model has an attribute of its name.

    FSDP's own attribute is a function in each case: `FSDP.module(model)`. is_common: many models
    have an attribute of this name, which needs no warning.
    """

    def __init__(self, name: str, ours: Any, is_common: bool = False) -> None:
        self.name, self.ours, self.is_common = name, ours, is_common
        is_property = isinstance(ours, property)
        self.function = ours.fget if is_property else ours.__get__(None, nn.Module)

    def __get__(self, model: nn.Module | None, owner: type[nn.Module]) -> Any:
        if model is None:
            return getattr(super(ModelNamesFirst, owner), self.name, self.function)
        # What the model has in its __dict__, Python finds first.
        own: Any = super(ModelNamesFirst, model)
        if _without_ours.get() or hasattr(super(ModelNamesFirst, owner), self.name):
            return getattr(own, self.name)  # after an AttributeError, Python asks __getattr__
        try:
            with _only_the_models_names():  # the model may ask a part of it, which is sharded too
                return own.__getattr__(self.name)
        except AttributeError:
            return self.ours.__get__(model, owner)


class YieldingSetting(YieldingName):
    """A property of FSDP that scripts set to True or False; other values are the model's own."""

    def __get__(self, model: nn.Module | None, owner: type[nn.Module]) -> Any:
        if model is not None and self.name in vars(model):
            return vars(model)[self.name]
        return super().__get__(model, owner)

    def __set__(self, model: nn.Module, value: object) -> None:
        if type(value).__name__ in _BOOLS and not _has(model, self.name):
            self.ours.__set__(model, value)
        else:
            vars(model)[self.name] = value

    def __delete__(self, model: nn.Module) -> None:
        if self.name not in vars(model):
            raise AttributeError(f"this {type(model).__name__} has no {self.name!r} of its own")
        del vars(model)[self.name]


class ModelNamesFirst(nn.Module):
    """The last of FSDP's classes: those that follow it in a unit's class are the model's."""

    # torch refuses the name of another attribute, and looks at the arguments' names.

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        with _only_the_models_names():
            super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        with _only_the_models_names():  # a model's own method need not know `persistent`
            super().register_buffer(name, tensor, **({} if persistent else {"persistent": False}))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        with _only_the_models_names():
            super().add_module(name, module)


def yields_to_the_model(cls: _Class) -> _Class:
    """Decorator of FSDP and its base classes: the model's own attributes hide its public names."""
    for name, ours in list(vars(cls).items()):
        if not name.startswith("_") and name not in PROTOCOL:
            is_setting = isinstance(ours, property) and ours.fset is not None
            setattr(cls, name, (YieldingSetting if is_setting else YieldingName)(name, ours))
    return cls


def _names_of(base: type[nn.Module]) -> list[YieldingName]:
    """Return the names of FSDP, which is `base`, that yield to the model's."""
    attributes = (each for cls in base.__mro__ for each in vars(cls).values())
    return [each for each in attributes if isinstance(each, YieldingName)]


def properties_in_place(base: type[nn.Module], original: type[nn.Module]) -> dict[str, Any]:
    """Return the properties of the model's class that a unit's class must have itself: Python asks
    the first class that has a name for its setter."""
    names = [each.name for each in _names_of(base)]
    attributes = {name: inspect.getattr_static(original, name, None) for name in names}
    return {name: each for name, each in attributes.items() if inspect.isdatadescriptor(each)}


def _has(module: nn.Module, name: str) -> bool:
    """Return whether the model has an attribute of its own of this name."""
    kind = type(module)
    of_class = super(ModelNamesFirst, kind) if issubclass(kind, ModelNamesFirst) else kind
    return hasattr(of_class, name) or any(name in each for each in _tables(module))


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers, vars(module)


def refuse_names(model: nn.Module) -> None:
    """Raise ValueError for attributes of the model's modules that would take the place of zshard's
    own, and for children that checkpoints would take for those of torch's wrappers."""
    for module in model.modules():
        kind, tables = type(module), (module._modules, module._parameters, module._buffers)
        taken = [name for table in tables for name, _ in table.items() if name.startswith(_PRIVATE)]
        state = vars(module).get(ATTRIBUTE, getattr(kind, ATTRIBUTE, None))
        if not isinstance(state, State | None):
            taken.append(ATTRIBUTE)
        if taken or (stray := stray_component(module)) is not None:
            name, whose = (taken[0], "zshard's") if taken else (stray, "torch's wrappers")
            raise ValueError(
                f"a {kind.__name__} has an attribute {name!r}, a name of {whose}: rename it"
            )


def warn_of_clashes(base: type[nn.Module], units: Sequence[UnitSpec]) -> None:
    """Warn of the attributes of modules that will hide names of FSDP, which is `base`."""
    names = {each.name for each in _names_of(base) if not each.is_common}
    modules = [spec.module for spec in units]
    of_kind = {kind: {n for n in names if hasattr(kind, n)} for kind in {*map(type, modules)}}
    clashes = {
        name: type(module).__name__
        for module in modules
        for name in sorted(of_kind[type(module)].union(*map(names.intersection, _tables(module))))
    }
    if clashes:
        listed = ", ".join(f"{name!r} of {kind}" for name, kind in clashes.items())
        call = f"call zshard's as a function: FSDP.{next(iter(clashes))}(model)"
        warn(f"the model's own attributes hide FSDP's: {listed}; {call}")
