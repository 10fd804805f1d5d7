"""Builds a sharded model from a plain one: checks, facts, values, engine, units and plan.

Ranks agree on names, shapes and dtypes before anything changes. Values then come one unit at a
time, from the model itself, from an initialization, or from rank 0. Engines and units are real, or
dry: these have no memory. The engine plans a step from the order of the units and the calls of a
forward. Before the first forward, the order of registration is the best guess.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zshard import _core
from zshard.guard.words import refused_grad_dtype
from zshard.precision import Precision, name_of
from zshard.ranks.agreement import Fact, checksum, take_from, tensor_facts
from zshard.ranks.devices import move
from zshard.ranks.transports import Comms
from zshard.units.extensions import EXTENSIONS
from zshard.units.units import Options, without_memory
from zshard.wrap.tree import UnitSpec

Call = tuple[_core.Unit, int]

_ENTER, _EXIT = -1, -2  # csrc/engine/plan.h has the same
_MOST_VISITS = 2  # further visits of a shared module add no information

# --- checks and facts -----------------------------------------------------------------------------


def dtypes_of(spec: UnitSpec) -> tuple[str | None, str | None, set[int]]:
    """Return compute dtype, reduce dtype, and the indices of parameters that keep theirs."""
    precision = spec.options.precision
    if precision == Precision():
        return None, None, set()
    keep = {
        i
        for i, ref in enumerate(spec.params)
        if all(precision.keeps(owner) for owner, _ in ref.owners)
        or precision.keeps_param(ref.param)
        or any(each.keeps_dtype(ref) for each in EXTENSIONS)
    }
    wire = precision.wire_for(ref.param for ref in spec.params)
    return name_of(precision.compute), name_of(wire), keep


def facts_of(module: nn.Module, specs: list[UnitSpec], values: bool) -> list[Fact]:
    """Return what ranks must agree on about a model; with `values`, also the parameters' values."""
    facts: list[Fact] = [("torch", torch.__version__)]
    for spec in specs:
        facts.append((f"unit '{spec.name or '(root)'}'", f"a {type(spec.module).__name__}"))
        for name, ref in zip(spec.param_names, spec.params, strict=True):
            with_values = values and not ref.param.is_meta
            facts.extend(tensor_facts("parameter", name, ref.param, with_values))
            facts.extend(f for each in EXTENSIONS for f in each.facts(name, ref.param, values))
    for name, buffer in module.named_buffers():
        facts.extend(tensor_facts("buffer", name, buffer))
    if specs[-1].options.precision.override is not None:
        kept = ((spec.name, dtypes_of(spec)[2]) for spec in specs)
        facts += [(f"what keeps its dtype in unit '{name}'", str(sorted(at))) for name, at in kept]
    return facts


def check_unit(spec: UnitSpec) -> None:
    """Raise what creating the unit would raise, without changing anything; for a parameter without
    dense memory of its own TypeError, ValueError or NotImplementedError. Parameters on the meta
    device count as real ones."""
    real = []
    for name, ref in zip(spec.param_names, spec.params, strict=True):
        param, kind = ref.param, type(ref.param)
        if param.layout != torch.strided or param.is_nested or param.is_neg() or param.is_conj():
            raise ValueError(
                f"parameter '{name}' is not a dense tensor; pass its module in ignored_modules"
            )
        if getattr(param, "grad_dtype", param.dtype) != param.dtype:
            raise NotImplementedError(refused_grad_dtype(name, param.grad_dtype))
        if kind.__module__.startswith("torch.distributed.tensor"):
            raise NotImplementedError(
                f"parameter '{name}' is a {kind.__name__}, but zshard has no tensor parallelism: "
                "omit parallelize_module() and distribute_tensor()"
            )
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise TypeError(
                f"parameter '{name}' is of class {kind.__name__}, which has no memory of its own: "
                "pass it in ignored_states=, or convert the model after training"
            )
        for each in EXTENSIONS:
            each.check(name, ref)
        real.append(without_memory(param, param.shape, "cpu") if param.is_meta else param)
    _core.Unit.check(spec.name, spec.param_names, real)


# --- values ---------------------------------------------------------------------------------------


class InitialValues:
    """The source of a model's values: present, or initialized here; with `from_rank_0`, rank 0's.

    comm: of all ranks. device: where they go. Collective.
    """

    def __init__(self, root: nn.Module, comm: _core.Comm, device: str, from_rank_0: bool) -> None:
        self._root, self._comm, self._device = root, comm, device
        # Ranks that have the same values need not send them: comparing checksums is faster.
        self._compares = self._shares = from_rank_0 and comm.world > 1
        self.is_shared = not self._shares  # each rank has the parameters' values

    def compare(self, specs: Sequence[UnitSpec]) -> None:
        """Compare the parameters, which are materialized: one exchange, not one for each unit."""
        if not self.is_shared:
            tensors = [each for spec in specs for each in _tensors_of(spec)]
            self.is_shared = self._compares = self._are_same(_dense(tensors))

    def give(self, spec: UnitSpec) -> None:
        """Share and move the parameters of a unit, which are materialized."""
        params = [ref.param for ref in spec.params]
        if not self.is_shared:
            self._share(_tensors_of(spec))
        move(params, self._device)
        for each in EXTENSIONS:
            for param in params:
                each.move(param)

    def give_buffers(self, ignored: set[nn.Module]) -> None:
        """Do the same for the buffers, except those of `ignored` modules."""
        left_alone = {id(b) for m in ignored for b in m.buffers()}
        buffers = [b for b in self._root.buffers() if id(b) not in left_alone]
        self._share([b.detach() for b in buffers])
        move(buffers, self._device)

    def _share(self, tensors: Sequence[Tensor]) -> None:
        """Take rank 0's values, unless all ranks have the same; compares until they differ."""
        dense = _dense(tensors)
        self._compares = self._compares and self._are_same(dense)
        if self._shares and not self._compares:
            for tensor in dense:
                take_from(0, self._comm, tensor)

    def _are_same(self, tensors: Sequence[Tensor]) -> bool:
        digest = hashlib.sha256(repr([checksum(each) for each in tensors]).encode()).digest()
        return not tensors or len(set(self._comm.exchange(digest))) == 1


def _tensors_of(spec: UnitSpec) -> list[Tensor]:
    """Return the parameters of a unit, and the tensors that extensions add to them."""
    params = [ref.param for ref in spec.params]
    beside = [t for each in EXTENSIONS for param in params for t in each.tensors(param)]
    return [*(param.detach() for param in params), *beside]


def _dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those with values to share: a unit's error names what cannot be sharded."""
    return [each for each in tensors if not each.is_meta and each.layout == torch.strided]


# --- engine and units -----------------------------------------------------------------------------


def make_engine(
    module: nn.Module, comms: Comms, options: Options, dry: bool = False
) -> _core.Engine:
    """Make an engine with the options that apply to the model. Collective for an offload directory;
    raises OSError on all ranks if a file cannot be created."""
    engine = _core.Engine(type(module).__name__, *comms)
    engine.set_prefetch(*options.prefetch)
    engine.keep_gathered(options.gathered or 0)
    engine.set_codes(*options.wire.codes)
    if options.micro_batches:
        engine.add_leaves(options.micro_batches)
    offload = options.offload
    if offload is not None:
        directory = None if dry else os.fspath(offload.directory or "")
        engine.set_offload(directory, *offload.what)
        if offload.to_disk and not dry:
            _core.set_pager_limit(offload.cache)
    return engine


def make_unit(
    engine: _core.Engine, spec: UnitSpec, dry: Sequence[nn.Parameter] | None = None
) -> _core.Unit:
    """Make a unit, which no module refers to yet. dry: full parameters for one without memory."""
    params, places = dry, []
    if params is None:
        params = [ref.param for ref in spec.params]
        places = [
            (i, owner._parameters, attribute)
            for i, ref in enumerate(spec.params)
            for owner, attribute in ref.owners
        ]
    kind = spec.options.strategy.in_group.value
    facts = engine, spec.name, kind, spec.param_names, list(params), places
    return _core.Unit(*facts, *dtypes_of(spec), dry is not None)


def plan_forward(
    engine: _core.Engine,
    model: nn.Module,
    made: Sequence[tuple[UnitSpec, _core.Unit]],
    inner: Sequence[tuple[nn.Module, _core.Unit, _core.Unit]],
) -> list[_core.Unit]:
    """Give the engine the order of its units, and the calls of a forward.

    made: new units. inner: modules of earlier calls, each with its unit and the one that stands for
    it here. Neither includes units over other ranks. Returns the units in order, parents first.
    """
    at = {id(module): unit for module, _, unit in inner}
    at |= {id(spec.module): unit for spec, unit in made}
    modules = list(model.modules())
    order = [at[id(module)] for module in modules if id(module) in at]
    stands_for = {id(earlier): unit for _, earlier, unit in inner}
    hooked: dict[int, _core.Unit] = {}  # by the ids of the modules whose hooks unshard them
    used: dict[int, Call] = {}  # by the ids of parameters
    for module in modules if inner else ():
        for hook in module._forward_pre_hooks.values():
            unit = stands_for.get(id(getattr(hook, "__self__", None)))
            if unit is not None:
                hooked[id(module)] = unit
    for _, earlier, unit in inner:
        used.update({id(param): (unit, i) for i, param in enumerate(earlier.params)})
    for spec, unit in made:
        used.update({id(ref.param): (unit, i) for i, ref in enumerate(spec.params)})
        if unit.is_hooked:
            parts = () if unit.replicated else spec.parts
            hooked.update({id(part): unit for part in (spec.module, *parts)})
    engine.set_order(order)
    engine.set_calls(list(_calls(model, hooked, used, {})))
    return order


def _calls(
    module: nn.Module, hooked: dict[int, _core.Unit], used: dict[int, Call], visits: dict[int, int]
) -> Iterator[Call]:
    """Yield the calls of a forward of `module`, for Engine.set_calls. Takes parameters out of
    `used`: their first use counts."""
    key, unit = id(module), hooked.get(id(module))
    before = visits.get(key, 0)
    if before == _MOST_VISITS:
        return
    visits[key] = _MOST_VISITS  # within a visit there is no other
    if unit is not None:
        yield unit, _ENTER
    for param in module._parameters.values():
        if id(param) in used:
            yield used.pop(id(param))
    for child in module._modules.values():
        if child is not None:
            yield from _calls(child, hooked, used, visits)
    if unit is not None:
        yield unit, _EXIT
    visits[key] = before + 1
