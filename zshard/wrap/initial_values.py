"""The model before it is sharded: checks, facts that ranks must agree on, sources of values.

Ranks agree on names, shapes and dtypes before anything changes. Values then come one unit at a
time, from the model itself, from an initialization, or from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from zshard import _core
from zshard.guard.words import refused_grad_dtype
from zshard.precision import name_of
from zshard.ranks.agreement import Fact, checksum, take_from, tensor_facts
from zshard.ranks.devices import CPU, move
from zshard.units.extensions import EXTENSIONS
from zshard.units.units import Options, without_memory
from zshard.wrap.meta import Materializer
from zshard.wrap.tree import UnitSpec


def check_module(module: object) -> None:
    """Raise TypeError or ValueError for what FSDP() cannot wrap."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP expects an nn.Module, got {type(module).__name__}")
    devices: dict[torch.device, str] = {}
    for name, param in module.named_parameters():
        if not param.is_meta:  # it is materialized later
            devices.setdefault(param.device, name)
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(
            f"all parameters must be on one device, got {places}: move the model to one, or "
            "pass device_id="
        )


def check_values(init: object, sync_buffers: object) -> None:
    """Raise TypeError or ValueError for invalid values of FSDP()'s param_init_fn and
    forward_sync_buffers."""
    if init is not None and not callable(init):
        raise TypeError(f"param_init_fn must be a callable that takes a module, got {init!r}")
    if sync_buffers not in (False, True, "training"):
        raise ValueError(
            f"forward_sync_buffers must be True, False or 'training', got {sync_buffers!r}"
        )


def split_ignored(
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that FSDP()'s ignored_modules and ignored_states
    exclude."""
    ignored_modules, ignored_params = set(modules or ()), set()
    for item in states or ():
        if isinstance(item, nn.Module):
            ignored_modules.add(item)
        elif isinstance(item, nn.Parameter):
            ignored_params.add(item)
        else:
            raise TypeError(f"ignored_states must contain modules or parameters, got {item!r}")
    for module in ignored_modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ignored_modules must contain modules, got {module!r}")
    return ignored_modules, ignored_params


def names_of(spec: UnitSpec) -> list[str]:
    """Return the dotted names of a unit's parameters, relative to the root."""
    prefix = f"{spec.name}." if spec.name else ""
    return [prefix + ref.names[0] for ref in spec.params]


def dtypes_of(spec: UnitSpec, options: Options) -> tuple[str | None, str | None, set[int]]:
    """Return the last arguments of _core.Unit: compute dtype, reduce dtype, and the indices of
    parameters that keep their dtype."""
    precision = options.precision
    keep = {
        i
        for i, ref in enumerate(spec.params)
        if all(precision.keeps(owner) for owner, _ in ref.owners)
        or precision.keeps_param(ref.param)
        or any(each.keeps_dtype(ref) for each in EXTENSIONS)
    }
    wire = precision.wire_for(ref.param for ref in spec.params)
    return name_of(precision.compute), name_of(wire), keep


def facts_of(
    module: nn.Module, specs: list[UnitSpec], options: Options, values: bool
) -> list[Fact]:
    """Return what ranks must agree on about a model; with `values`, also the parameters' values."""
    facts: list[Fact] = [("torch", torch.__version__)]
    for spec in specs:
        facts.append((f"unit '{spec.name or '(root)'}'", f"a {type(spec.module).__name__}"))
        for name, ref in zip(names_of(spec), spec.params, strict=True):
            with_values = values and not ref.param.is_meta
            facts.extend(tensor_facts("parameter", name, ref.param, with_values))
            facts.extend(f for each in EXTENSIONS for f in each.facts(name, ref.param, values))
    for name, buffer in module.named_buffers():
        facts.extend(tensor_facts("buffer", name, buffer))
    if options.precision.override is not None:
        kept = ((spec.name, dtypes_of(spec, options)[2]) for spec in specs)
        facts += [(f"what keeps its dtype in unit '{name}'", str(sorted(at))) for name, at in kept]
    return facts


def check_unit(spec: UnitSpec) -> None:
    """Raise what creating the unit would raise, without changing anything; TypeError or ValueError
    for a parameter without dense memory of its own. Parameters on the meta device count as real
    ones."""
    for name, ref in zip(names_of(spec), spec.params, strict=True):
        _check_plain(name, ref.param)
        for each in EXTENSIONS:
            each.check(name, ref)
    params = [ref.param for ref in spec.params]
    real = [
        without_memory(param, param.shape, "cpu") if param.is_meta else param for param in params
    ]
    _core.Unit.check(spec.name, names_of(spec), real)


def _check_plain(name: str, param: nn.Parameter) -> None:
    """Raise for a parameter without dense memory of its own."""
    if param.layout != torch.strided or param.is_nested or param.is_neg() or param.is_conj():
        raise ValueError(
            f"parameter '{name}' is not a dense tensor; pass its module in ignored_modules"
        )
    if getattr(param, "grad_dtype", param.dtype) != param.dtype:
        raise NotImplementedError(refused_grad_dtype(name, param.grad_dtype))
    kind = type(param)
    if kind.__module__.startswith("torch.distributed.tensor"):
        raise NotImplementedError(
            f"parameter '{name}' is a {kind.__name__}, as parallelize_module() and "
            "distribute_tensor() make them: zshard has no tensor parallelism. Omit them, or train "
            "this model with torch's fully_shard"
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"parameter '{name}' is of class {kind.__name__}, which has no memory of its own; "
            "zshard shards plain tensors only: pass the parameter in ignored_states=, so that each "
            "rank keeps all of it, or convert the model after training"
        )


class InitialValues:
    """The source of values: present, or initialized here; with `source`, broadcast from rank 0."""

    def __init__(
        self,
        root: nn.Module,
        materializer: Materializer,
        source: _core.Comm | None,
        device: str = CPU,
    ) -> None:
        self._root = root
        self._materializer = materializer
        self._source = source
        self._device = device
        # Ranks that drew the same numbers need not send them: comparing a checksum is faster.
        self._alike = True  # so far

    def make(self, spec: UnitSpec) -> None:
        """Materialize the parameters of a unit; runs the user's initialization."""
        self._materializer.up_to(spec.module)

    def give(self, spec: UnitSpec) -> None:
        """Share and move the parameters of a unit, which are materialized. Collective."""
        params = [ref.param for ref in spec.params]
        values = [param.detach() for param in params]
        drawn = self._materializer.has_made(params)
        if self._source is not None and not self._same(self._source, values, drawn):
            self._share(values)
            self._share(t for each in EXTENSIONS for param in params for t in each.tensors(param))
        move(params, self._device)
        for each in EXTENSIONS:
            for param in params:
                each.move(param)

    def _same(self, comm: _core.Comm, values: list[torch.Tensor], drawn: bool) -> bool:
        """Return whether all ranks drew the same values. Collective until they differ for the first
        time."""
        if not self._alike:
            return False
        facts = (drawn, [checksum(value) for value in values] if drawn else [])
        mine = hashlib.sha256(repr(facts).encode()).digest()
        self._alike = len(set(comm.exchange(mine))) == 1
        return self._alike and drawn

    def give_buffers(self, ignored: set[nn.Module]) -> None:
        """Do the same for the buffers, except those of `ignored` modules."""
        left_alone = {id(b) for m in ignored for b in m.buffers()}
        buffers = [b for b in self._root.buffers() if id(b) not in left_alone]
        self._share(b.detach() for b in buffers)
        move(buffers, self._device)

    def _share(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._source is None:
            return
        for tensor in tensors:
            if tensor.is_meta or tensor.layout != torch.strided:
                continue  # the unit's error names what cannot be sharded
            take_from(0, self._source, tensor)
