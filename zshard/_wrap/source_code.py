"""Which modules are used without being called.

The one idea: a unit's parameters are there only while its module is being called, so a module that
somebody reaches through (`F.linear(x, self.embed.weight)`, `for layer in self.stack: x = layer(x)`)
must not be a unit. Python says who does that: the source of `forward`, and of the methods that it
calls, is parsed, and each attribute path that starts at `self` is followed through the live
modules, also by way of local names, loops, properties and getters (`self.get_embeddings()(ids)`).
This is a help for automatic choices, not a proof: what it cannot see (no source, a module handed to
a function) counts as well behaved, and is met by the error for a parameter that is used while it is
sharded.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType, MethodType

from torch import nn

AttributePath = tuple[str, ...]

# Steps that are no attribute names: any element of a container ("[0]", "['key']" is a known
# one), a slice of it, and the mark after the name of a method of which the path is the result.
_ANY, _SLICE, _RESULT = "[*]", "[:]", "()"
# Any parameter of a module and its descendants: an element of `parameters()`.
_PARAM = "**"
# A name with so many paths gets no more: each `w = w.t()` on a weight would double them.
_MANY = 64

# What may be asked of a sharded parameter: its storage is not touched, nor its sizes.
_HARMLESS = frozenset(
    ("device", "dim", "dtype", "is_cuda", "is_floating_point", "is_meta", "ndim", "requires_grad")
)


@dataclass(frozen=True)
class _Use:
    """A path from `self` and whether its end is called; () is `self`."""

    path: AttributePath
    called: bool


@dataclass
class _Uses:
    """What one function does with `self`: the paths it uses, the methods that it calls on super(),
    and the paths that it may return. (Dicts, as ordered sets.)"""

    paths: dict[_Use, None] = field(default_factory=dict)
    supers: dict[str, None] = field(default_factory=dict)
    returns: dict[AttributePath, None] = field(default_factory=dict)


_cache: weakref.WeakKeyDictionary[FunctionType, _Uses] = weakref.WeakKeyDictionary()


def bypassed_modules(modules: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return the modules that one of `modules` reaches through without calling them: the id of
    each, with the module that does so."""
    found: dict[int, nn.Module] = {}
    for module in modules:
        if module._modules:
            follower = _UseFollower()
            follower.start(module)
            found.update((name, module) for name in follower.found if name not in found)
    return found


class _UseFollower:
    """Follows the uses of one module's forward through its children."""

    def __init__(self) -> None:
        self.found: set[int] = set()  # the ids of the modules that are reached through
        self._seen: set[tuple[object, ...]] = set()

    def start(self, module: nn.Module) -> None:
        own = _patches(module, module.__dict__.get("forward"))
        for function in own or _methods(module, "forward")[:1]:
            self._enter(module, function, ())

    def _enter(self, module: nn.Module, function: FunctionType, passed: tuple[int, ...]) -> None:
        """Follows what `function`, a method of `module`, does; `passed` are the ids of the modules
        on the way here from the caller, `module` included, that nobody called."""
        if _is_torchs(function) or not self._is_new(id(module), function, passed):
            return
        uses = _uses_of(function)
        for use in uses.paths:
            self._follow(module, use.path, use.called, passed)
        for name in uses.supers:
            for inherited in _methods(module, name):
                self._enter(module, inherited, passed)

    def _follow(
        self, module: nn.Module, path: AttributePath, called: bool, passed: tuple[int, ...]
    ) -> None:
        if not path:
            if called:  # the last module is called, those on the way to it are not
                self.found.update(passed[:-1])
            return
        step, rest = path[0], path[1:]
        if step == _SLICE:  # a slice is another object: calling it does not call the container
            self._follow(module, rest, called, (*passed, id(module)))
        elif step == _PARAM:
            if not (rest and rest[0] in _HARMLESS):
                below = (id(each) for each in module.modules() if each is not module)
                self.found.update((*passed, *below))
        elif step.startswith("["):
            for element in _elements(module, step):
                self._follow(element, rest, called, (*passed, id(element)))
            if any(param is not None for param in module._parameters.values()):
                self.found.update(passed)
        elif (child := module._modules.get(step)) is not None:
            self._follow(child, rest, called, (*passed, id(child)))
        elif step in module._parameters:
            if not (rest and rest[0] in _HARMLESS):
                self.found.update(passed)
        else:
            self._follow_class_attribute(module, path, called, passed)

    def _follow_class_attribute(
        self, module: nn.Module, path: AttributePath, called: bool, passed: tuple[int, ...]
    ) -> None:
        """Follows a method that is called, or the result of a getter or property."""
        step, rest = path[0], path[1:]
        is_property = isinstance(getattr(type(module), step, None), property)
        is_result = is_property or step.endswith(_RESULT)
        if not is_result and (rest or not called):
            return
        if step == "forward":  # called by its name, which runs no hook
            self.found.update(passed)
        for method in _methods(module, step.removesuffix(_RESULT))[:1]:
            self._enter(module, method, passed)
            if is_result:
                self._follow_result(module, method, rest, called, passed)

    def _follow_result(
        self,
        module: nn.Module,
        method: FunctionType,
        rest: AttributePath,
        called: bool,
        passed: tuple[int, ...],
    ) -> None:
        if _is_torchs(method) or not self._is_new(id(module), method, rest, called, passed):
            return
        for returned in _uses_of(method).returns:
            self._follow(module, returned + rest, called, passed)

    def _is_new(self, *visit: object) -> bool:
        """Whether this visit is the first of its kind: methods may call each other in circles."""
        if visit in self._seen:
            return False
        self._seen.add(visit)
        return True


def _elements(module: nn.Module, step: str) -> list[nn.Module]:
    """The children of a container that the path step `step` may stand for."""
    children = {key: child for key, child in module._modules.items() if child is not None}
    if step == _ANY:
        return list(children.values())
    key = ast.literal_eval(step[1:-1])
    if isinstance(key, int) and -len(children) <= key < len(children):
        return [list(children.values())[key]]
    return [children[key]] if key in children else []


def _methods(module: nn.Module, name: str) -> list[FunctionType]:
    """All definitions of the method or property `name` along the module's classes, the effective
    one first."""
    defined = (_function(vars(cls)[name]) for cls in type(module).__mro__ if name in vars(cls))
    return [function for function in defined if function is not None]


def _patches(module: nn.Module, forward: object) -> list[FunctionType]:
    """The functions that run when a script has replaced the forward of `module` itself: each
    wrapper, which need not call what it is named after, and what it keeps to call."""
    found: dict[FunctionType, None] = {}
    waiting = [forward]
    while waiting:
        value = waiting.pop()
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, MethodType) and value.__self__ is module:
            value = value.__func__
        if isinstance(value, FunctionType) and value not in found:
            found[value] = None
            waiting += [getattr(value, "__wrapped__", None), *_kept_by(value)]
    return list(found)


def _kept_by(function: FunctionType) -> list[object]:
    """What the closure of a function holds."""
    found: list[object] = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return found


def _is_torchs(function: FunctionType) -> bool:
    """Whether torch.nn defines it: those modules are known, the ones that bypass are sealed."""
    return (function.__module__ or "").startswith("torch.nn.")


def _function(value: object) -> FunctionType | None:
    """The Python function behind a method, a property, a decorator or a functools.partial."""
    if isinstance(value, property):
        value = value.fget
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
    return value if isinstance(value, FunctionType) else None


def _uses_of(function: FunctionType) -> _Uses:
    known = _cache.get(function)
    if known is None:
        known = _cache[function] = _read(function)
    return known


def _read(function: FunctionType) -> _Uses:
    try:
        source = inspect.getsource(function.__code__)  # its own, not that of what it wraps
        # A method's source is indented, and its strings may not be: `if` takes it as it is.
        tree = ast.parse(f"if True:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError, ValueError):
        return _Uses()
    definition = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if definition is None or not (definition.args.posonlyargs or definition.args.args):
        return _Uses()
    self_name = (definition.args.posonlyargs + definition.args.args)[0].arg
    reader = _UseReader(_Bindings(definition, self_name))
    for statement in definition.body:
        reader.visit(statement)
    return reader.uses


class _Bindings:
    """Which paths each local name may stand for, whatever the order of the statements."""

    def __init__(self, definition: ast.FunctionDef, self_name: str) -> None:
        self._names: dict[str, set[AttributePath]] = {self_name: {()}}
        for _ in range(2):  # a name may be bound through one that is bound further down
            for node in ast.walk(definition):
                self._bind_statement(node)

    def paths(self, expr: ast.expr) -> set[AttributePath]:
        """Return the paths that `expr` may stand for; none if it does not start at `self`."""
        if isinstance(expr, ast.Name):
            return set(self._names.get(expr.id, ()))
        if isinstance(expr, ast.Attribute):
            return {(*path, expr.attr) for path in self.paths(expr.value)}
        if isinstance(expr, ast.Subscript):
            return {(*path, _index(expr.slice)) for path in self.paths(expr.value)}
        if isinstance(expr, ast.NamedExpr):
            return self.paths(expr.value)
        if isinstance(expr, ast.IfExp):
            return self.paths(expr.body) | self.paths(expr.orelse)
        if isinstance(expr, ast.Call):
            return self._paths_of_call(expr)
        return set()

    def _paths_of_call(self, call: ast.Call) -> set[AttributePath]:
        name = _callee(call)
        if name == "getattr" and len(call.args) >= 2:
            key, step = call.args[1], _ANY
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                step = key.value
            return {(*path, step) for path in self.paths(call.args[0])}
        if name in ("list", "tuple", "iter", "reversed") and len(call.args) == 1:
            return self.paths(call.args[0])
        if not isinstance(call.func, ast.Attribute):
            return set()
        owners = self.paths(call.func.value)
        if name in ("values", "children"):
            return owners
        # Getters take nothing; what comes of a call with arguments is rather a tensor.
        is_getter = not call.args and not call.keywords
        return {(*path, name + _RESULT) for path in owners} if is_getter else set()

    def _bind_statement(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind_elements(node.target, node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, part_value in zip(target.elts, value.elts, strict=False):
                self._bind(part, part_value)
        elif isinstance(target, ast.Name):
            self._add(target, self.paths(value))

    def _bind_elements(self, target: ast.expr, iterable: ast.expr) -> None:
        """Binds the target of a loop over `iterable` to any of its elements."""
        name = _callee(iterable)
        if name in ("parameters", "named_parameters"):
            self._bind_params(target, iterable)
        elif isinstance(target, ast.Tuple) and isinstance(iterable, ast.Call):
            if name == "zip":
                for part, source in zip(target.elts, iterable.args, strict=False):
                    self._bind_elements(part, source)
            elif name == "enumerate" and iterable.args:
                self._bind_elements(target.elts[-1], iterable.args[0])
            elif name in ("items", "named_children") and isinstance(iterable.func, ast.Attribute):
                self._bind_elements(target.elts[-1], iterable.func.value)
        elif isinstance(target, ast.Name):
            self._add(target, {(*path, _ANY) for path in self.paths(iterable)})

    def _bind_params(self, target: ast.expr, iterable: ast.expr) -> None:
        """Binds the target of a loop over a module's parameters, or over their names and them."""
        param = target.elts[-1] if isinstance(target, ast.Tuple) else target
        assert isinstance(iterable, ast.Call)
        if isinstance(param, ast.Name) and isinstance(iterable.func, ast.Attribute):
            self._add(param, {(*path, _PARAM) for path in self.paths(iterable.func.value)})

    def _add(self, target: ast.Name, paths: set[AttributePath]) -> None:
        known = self._names.setdefault(target.id, set())
        if len(known) < _MANY:
            known.update(paths)


class _UseReader(ast.NodeVisitor):
    """Collects the uses: each longest path once, as called or as read."""

    def __init__(self, bindings: _Bindings) -> None:
        self._bindings = bindings
        self.uses = _Uses()

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and _callee(function.value) == "super":
            self.uses.supers[function.attr] = None
        self._use(function, called=True)
        arguments = list(node.args)
        if arguments and "checkpoint" in _callee(node):  # activation checkpointing calls its first
            first = arguments.pop(0)
            if _callee(node) == "checkpoint_sequential":  # or that one's elements
                first = ast.Subscript(first, ast.Name("any"), ast.Load())
            self._use(first, called=True)
        for argument in arguments:
            self._use(argument, called=False)
        for keyword in node.keywords:
            self.visit(keyword.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node, called=False)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._use(node, called=False)

    def visit_Name(self, node: ast.Name) -> None:
        """Other names stand for what was a use where it was bound."""
        for path in sorted(self._bindings.paths(node)):
            if path[-1:] == (_PARAM,):
                self.uses.paths[_Use(path, called=False)] = None

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.uses.returns.update(dict.fromkeys(sorted(self._bindings.paths(node.value))))
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops):
            self.generic_visit(node)  # `self.proj.bias is not None` reads nothing

    def _use(self, expr: ast.expr, called: bool) -> None:
        paths = self._bindings.paths(expr)
        if not paths:
            if isinstance(expr, ast.Attribute | ast.Subscript):
                self.generic_visit(expr)
            else:
                self.visit(expr)
            return
        for path in sorted(paths):
            self.uses.paths[_Use(path, called)] = None
        while isinstance(expr, ast.Attribute | ast.Subscript):  # an index may hold uses of its own
            if isinstance(expr, ast.Subscript):
                self.visit(expr.slice)
            expr = expr.value


def _index(expr: ast.expr) -> str:
    if isinstance(expr, ast.Slice):
        return _SLICE
    try:
        key = ast.literal_eval(expr)
    except (TypeError, ValueError):
        return _ANY
    return f"[{key!r}]" if isinstance(key, int | str) else _ANY


def _callee(expr: ast.expr) -> str:
    """The last name of the function that `expr` calls, '' where it is no call."""
    if not isinstance(expr, ast.Call):
        return ""
    function = expr.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
