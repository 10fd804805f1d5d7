"""What a model is before it is sharded: do ranks hold the same, and where do values come from?

The one idea: ranks agree on names, shapes and dtypes before anything changes; values then come a
unit at a time, from the model itself, from an initialisation, or from rank 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from zshard import _core
from zshard._agree import Fact, checksum, tensor_fact, value_fact
from zshard._device import CPU, move
from zshard._meta import Materializer
from zshard._plan import UnitSpec
from zshard._units import Options, outline
from zshard.precision import name_of


def names_of(spec: UnitSpec) -> list[str]:
    """The dotted names of a unit's parameters, from the root on."""
    prefix = f"{spec.name}." if spec.name else ""
    return [prefix + ref.names[0] for ref in spec.params]


def dtypes_of(spec: UnitSpec, options: Options) -> tuple[str | None, str | None, set[int]]:
    """The last arguments of _core.Unit: dtypes to compute and to send in, and the parameters that
    keep their own."""
    precision = options.precision
    keep = {
        i
        for i, ref in enumerate(spec.params)
        if all(precision.keeps(owner) for owner, _ in ref.owners)
    }
    return name_of(precision.compute), name_of(precision.wire), keep


def facts_of(
    module: nn.Module, specs: list[UnitSpec], options: Options, values: bool
) -> list[Fact]:
    """All that the ranks have to agree on; `values`: of the parameters' values, too."""
    facts: list[Fact] = [("the strategy", options.strategy.value), ("torch", torch.__version__)]
    for spec in specs:
        facts.append((f"unit '{spec.name}'", type(spec.module).__name__))
        for name, ref in zip(names_of(spec), spec.params, strict=True):
            facts.append(tensor_fact("parameter", name, ref.param))
            if values and not ref.param.is_meta:
                facts.append(value_fact(name, ref.param))
    facts.extend(tensor_fact("buffer", name, b) for name, b in module.named_buffers())
    facts.append(("mixed precision", repr(options.precision)))
    if options.offload is not None:  # directories may differ: a disk of each host's own
        facts.append(("offload", repr(replace(options.offload, directory=None))))
    return facts


def check_unit(spec: UnitSpec) -> None:
    """Raises as making the unit would, and changes nothing. What is on the meta device is taken for
    what it will be."""
    params = [ref.param for ref in spec.params]
    real = [outline(param, param.shape, "cpu") if param.is_meta else param for param in params]
    _core.Unit.check(spec.name, names_of(spec), real)


class Values:
    """Where values come from: they are there, or made here; with `source`, taken from rank 0."""

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
        # Ranks that draw the same numbers need not send them: a checksum says so in less time.
        self._alike = True  # so far

    def give(self, spec: UnitSpec) -> None:
        """Sees to the parameters of a unit that is about to be made."""
        self._materializer.up_to(spec.module)
        values = [ref.param.detach() for ref in spec.params]
        drawn = self._materializer.has_made(ref.param for ref in spec.params)
        if self._source is not None and not self._same(self._source, values, drawn):
            self._share(values)
        move((ref.param for ref in spec.params), self._device)

    def _same(self, comm: _core.Comm, values: list[torch.Tensor], drawn: bool) -> bool:
        """Have all ranks drawn the same values? Collective, and asked no more once they had not."""
        if not self._alike:
            return False
        facts = (drawn, [checksum(value) for value in values] if drawn else [])
        mine = hashlib.sha256(repr(facts).encode()).digest()
        self._alike = len(set(comm.exchange(mine))) == 1
        return self._alike and drawn

    def give_buffers(self, ignored: set[nn.Module]) -> None:
        """The same for the buffers, but for those of `ignored` modules."""
        left_alone = {id(b) for m in ignored for b in m.buffers()}
        buffers = [b for b in self._root.buffers() if id(b) not in left_alone]
        self._share(b.detach() for b in buffers)
        move(buffers, self._device)

    def _share(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._source is None:
            return
        for tensor in tensors:
            if tensor.is_meta or tensor.layout != torch.strided:
                continue  # the unit names what cannot be sharded
            take_from_rank_0(self._source, tensor)


def take_from_rank_0(comm: _core.Comm, tensor: torch.Tensor) -> None:
    """Gives a dense tensor the values that rank 0 has; in place, on all ranks."""
    if tensor.numel() == 0:
        return
    plain = tensor.contiguous().cpu()
    comm.broadcast(plain, 0)
    if plain is not tensor:
        tensor.copy_(plain)
