"""A registry of what other libraries, and extras, need of sharded models.

The core knows only torch. An integration (integrations/peft.py, say) or an extra derives a class
from Extension and registers an instance; the core asks each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard.ranks.agreement import Fact
from zshard.units.units import Options, State


@dataclass(eq=False, frozen=True)
class ParamRef:
    """One parameter of a unit: its name in the model's `named_parameters()`, and the (module,
    attribute) pairs that hold it."""

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]


class Extension:
    """The hooks of an integration or an extra on sharded models; by default they do nothing."""

    # --- before a model is sharded ----------------------------------------------------------------

    def check_model(
        self,
        module: nn.Module,
        options: Sequence[Options],
        inner: Iterable[Options],
        held: Collection[int],
        device: str,
    ) -> None:
        """Raise NotImplementedError or ValueError for a model that cannot be sharded so. options:
        of its units; inner: of units of earlier calls; held: ids of the parameters of both."""

    def check_transport(self, options: Options, comm: _core.Comm, asked: object) -> None:
        """Raise NotImplementedError for a transport. asked: what the script passed."""

    def methods(self, original: type[nn.Module]) -> dict[str, Any]:
        """Return replacements for attributes of `original` on a unit's class, by name."""
        return {}

    def check(self, name: str, ref: ParamRef) -> None:
        """Raise TypeError or ValueError for a parameter that cannot be sharded."""

    def facts(self, name: str, param: Tensor, values: bool) -> Iterable[Fact]:
        """Return what ranks must agree on about a parameter; with `values`, also its values."""
        return ()

    def prepare(self, ref: ParamRef) -> None:
        """Do to a parameter and its modules now what they would do in a forward."""

    def restore(self, model: nn.Module) -> None:
        """Undo that in a plain copy of a sharded model."""

    def keeps_dtype(self, ref: ParamRef) -> bool:
        """Return whether mixed precision must not cast a parameter."""
        return False

    def tensors(self, param: Tensor) -> Iterable[Tensor]:
        """Return tensors that belong to a parameter and are not sharded with it."""
        return ()

    def move(self, param: Tensor) -> None:
        """Move these tensors to the device of the parameter."""

    # --- a sharded model --------------------------------------------------------------------------

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        """Finish once a model is sharded. of: the sharded model that it is a copy of."""

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Return what model.metrics() has of it, by name."""
        return {}

    # --- steps ------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, models: list[State], in_closure: bool) -> None:
        """An optimizer is about to write to sharded models. models: a unit's state of each.
        in_closure: in its closure."""

    def after_step(self, optimizer: Optimizer, models: list[State]) -> None:
        """Its step has ended or raised."""

    def check_in_backward(self, state: State) -> None:
        """Raise NotImplementedError for a unit that cannot be stepped in backward."""

    def check_write(
        self, units: Sequence[_core.Unit], what: str, stepper: Optimizer | None
    ) -> None:
        """Raise RuntimeError if the units' models may not be written now, by `what`: a step of the
        optimizer `stepper`, or another write."""

    # --- norms ------------------------------------------------------------------------------------

    def exact_norms(self) -> bool:
        """Return whether norms, from now on, must not depend on the number of ranks."""
        return False

    def check_norm(self, norm_type: float) -> None:
        """Raise NotImplementedError for norms of an order."""

    # --- checkpoints ------------------------------------------------------------------------------

    def recorded(self, model: nn.Module) -> dict[str, Any]:
        """Return what a checkpoint of a model records, by a name of the extension's."""
        return {}

    def check_recorded(self, model: nn.Module, recorded: Mapping[str, Any], path: str) -> None:
        """Raise ValueError for a model that cannot continue from what a checkpoint has recorded."""


EXTENSIONS: list[Extension] = []


def refuse_writes(units: Iterable[_core.Unit], what: str, stepper: Optimizer | None = None) -> None:
    """See Extension.check_write()."""
    units = list(units)
    for each in EXTENSIONS:
        each.check_write(units, what, stepper)
