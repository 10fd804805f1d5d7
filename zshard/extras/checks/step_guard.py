"""Checks that all ranks make before an optimizer's step, and the skipping of a step.

The hook around a step (optim/hooks.py) calls before_step() before anything is updated. Whether the
gradients are finite is known from their sums over the ranks (csrc/reduce/squares.h), so a step with
finite gradients costs one exchange of a number. Only if a rank has found others do ranks exchange
names.

A step is skipped by taking the gradients away until it is over: every optimizer leaves parameters
without a gradient as they are.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zshard import api
from zshard.api import (
    EXTENSIONS,
    Extension,
    PublicCall,
    State,
    gather,
    grads_of,
    params_of,
    plain,
    state_of,
    units_of,
    warn,
    warn_on_rank_0,
)
from zshard.extras.checks import NonFiniteError
from zshard.extras.checks.replicas import ReplicaCheck

__all__ = ["StepGuard", "parse"]


_NAME = "checks"  # under which a model's context keeps its StepGuard


class StepChecks(NamedTuple):
    """The checks that FSDP() was asked for. every: steps between checks of replicas; 0: none."""

    nonfinite: Literal["raise", "skip"] | None
    every: int

    @property
    def name(self) -> str:
        return "nonfinite=" if self.nonfinite else "check_replicas="


def parse(nonfinite: object, check_replicas: object) -> dict[str, Any]:
    """Parse FSDP()'s arguments. Raises ValueError for an invalid one."""
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}")
    is_number = isinstance(check_replicas, int) and not isinstance(check_replicas, bool)
    if not is_number or check_replicas < 0:  # type: ignore[operator]
        raise ValueError(f"check_replicas must be a number of steps or 0, got {check_replicas!r}")
    return {"nonfinite": nonfinite, "check_replicas": check_replicas}


class Culprit(NamedTuple):
    """A parameter with a nonfinite gradient. order: in the model. ranks: a bitmap of those whose
    own gradient is nonfinite; -1: not known."""

    order: int
    name: str
    ranks: int


class StepGuard:
    """Checks a model's steps. The model's context keeps it."""

    def __init__(self, module: nn.Module, checks: StepChecks) -> None:
        self.checks = checks
        self.skipped = 0  # steps
        self.withheld: dict[int, _Withheld] = {}  # by the id() of an optimizer that skips a step
        self._module = weakref.ref(module)
        self._units = [state.unit for _, state in units_of(module)]
        api.expect_norms(self._units)  # so that the first backward takes them as well
        self._replicas = ReplicaCheck(module, checks.every) if checks.every else None
        state_of(module).model.attached[_NAME] = self

    def skips(self, optimizer: torch.optim.Optimizer, in_closure: bool) -> bool:
        """Return whether all ranks skip this step, after raising what the checks find. Collective.

        Raises NonFiniteError, DivergenceError on all ranks.
        """
        module = self._module()
        if module is None:
            return False
        with PublicCall("optimizer.step()"):
            if self._replicas is not None:
                self._replicas.count_step(module)
            has_inf = getattr(optimizer, "found_inf", None)  # set by a GradScaler
            if self.checks.nonfinite is None or (has_inf is not None and float(has_inf) != 0):
                return False
            return self._skips_nonfinite(module, optimizer, in_closure)

    def _skips_nonfinite(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, in_closure: bool
    ) -> bool:
        api.expect_norms(self._units)
        finite = _are_finite(grads_of(params_of(optimizer)))
        if state_of(module).unit.engine.max_over_ranks([float(not finite)])[0] == 0:
            return False
        culprit = _first_of_all(module, optimizer, finite)
        if culprit is None:  # squares of float64 numbers may overflow
            return False
        if self.checks.nonfinite == "raise":
            after = " after a reload" if in_closure else ""  # the closure may have moved parameters
            raise NonFiniteError(
                f"all ranks refuse this step: {culprit}; call zero_grad() and continue{after} with "
                'other data on all ranks, or pass nonfinite="skip" to FSDP()'
            )
        self.skipped += 1
        if self.skipped == 1:
            where = 'model.metrics()["steps/skipped"] counts later ones'
            warn(f"all ranks skip this step: {culprit}; {where}")
        return True


def _guard_steps(module: nn.Module, checks: StepChecks) -> None:
    """Check the steps of a model. Raises NotImplementedError for models whose steps cannot be
    checked."""
    states = [state for _, state in units_of(module)]
    if any(param.device.type != "cpu" for param in module.parameters()):
        raise NotImplementedError(f"{checks.name} does not support GPUs: omit it")
    if checks.every and any(state.options.offload for state in states):
        raise NotImplementedError("check_replicas= does not support offload: omit one of them")
    if checks.every and not any(state.has_replicas for state in states):
        text = "compares only buffers under this strategy: omit it, or use hybrid_shard"
        warn_on_rank_0(state_of(module).comms.all, f"check_replicas={checks.every} {text}")
    StepGuard(module, checks)


def _guard_of(state: State) -> StepGuard | None:
    return state.model.attached.get(_NAME)


# --- around a step --------------------------------------------------------------------------------


class _Checks(Extension):
    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        options: dict[str, Any] = dict(state_of(model).options.extras)
        original = _guard_of(state_of(of)) if of is not None else None
        if original is not None:
            StepGuard(model, original.checks)
        elif of is None and "nonfinite" in options:
            checks = StepChecks(options["nonfinite"], options["check_replicas"])
            _guard_steps(model, checks)

    def metrics(self, model: nn.Module) -> dict[str, float]:
        guard = _guard_of(state_of(model))
        if guard is None or guard.checks.nonfinite != "skip":
            return {}
        return {"steps/skipped": float(guard.skipped)}

    def check_in_backward(self, state: State) -> None:
        """A step in backward begins before all gradients are known."""
        guard = _guard_of(state)
        if guard is not None:
            raise NotImplementedError(
                f"optimizer_in_backward() does not support FSDP({guard.checks.name}): omit one"
            )

    def before_step(
        self, optimizer: torch.optim.Optimizer, models: list[State], in_closure: bool
    ) -> None:
        """Collective if the models have checks. If those skip the step, it finds no gradients;
        after_step() puts them back."""
        guards = [guard for guard in map(_guard_of, models) if guard is not None]
        if not guards:
            return
        _take_withheld(optimizer, guards)  # its closure ran again
        _refuse_mixtures(optimizer, len(models), guards)
        if any([guard.skips(optimizer, in_closure) for guard in guards]):
            modules = [module for guard in guards if (module := guard._module()) is not None]
            guards[0].withheld[id(optimizer)] = _Withheld(optimizer, modules)

    def after_step(self, optimizer: torch.optim.Optimizer, models: list[State]) -> None:
        withheld = _take_withheld(optimizer, filter(None, map(_guard_of, models)))
        if withheld is not None:
            withheld.restore(optimizer)


EXTENSIONS.append(_Checks())


def _take_withheld(
    optimizer: torch.optim.Optimizer, guards: Iterable[StepGuard]
) -> _Withheld | None:
    """Return what an optimizer that skips a step lacks during that; None if it skips none."""
    for guard in guards:
        withheld = guard.withheld.pop(id(optimizer), None)
        if withheld is not None:
            withheld.hook.remove()
            return withheld
    return None


class _Withheld:
    """The gradients of the models, and the options of an optimizer, as they were before a step that
    is skipped."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: list[nn.Module]) -> None:
        self._is_over, self._optimizer = False, optimizer  # which keeps its id()
        self._options = [dict(group) for group in optimizer.param_groups]
        # Before users' hooks, which may set the gradients to None.
        self.hook = optimizer.register_step_post_hook(lambda optimizer, *_: self.restore(optimizer))
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(self.hook.id, last=False)
        # Also of what other optimizers step, which this step's hooks may call.
        params = list({*params_of(optimizer), *(p for m in modules for p in m.parameters())})
        self._grads = list(zip(params, grads_of(params), strict=True))
        with plain():
            for param in params:
                param.grad = None

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo it once: at the end of the step, or where that raises."""
        if self._is_over:
            return
        self._is_over = True
        for group, before in zip(optimizer.param_groups, self._options, strict=True):
            group.update(before)  # some optimizers count steps there
        with plain():
            for param, grad in self._grads:
                param.grad = grad
        prepared = getattr(optimizer, "prepared", None)
        if prepared is not None:
            prepared.plans.clear()


def _refuse_mixtures(
    optimizer: torch.optim.Optimizer, n_models: int, guards: list[StepGuard]
) -> None:
    kinds = {guard.checks.nonfinite for guard in guards}
    if "skip" in kinds and isinstance(optimizer, torch.optim.LBFGS):
        raise NotImplementedError('nonfinite="skip" does not support LBFGS: pass nonfinite="raise"')
    if n_models > len(guards) and kinds != {None}:
        name = type(optimizer).__name__
        raise NotImplementedError(f"{name} steps models without nonfinite=: pass it to each FSDP()")


# --- what is nonfinite ----------------------------------------------------------------------------


def _are_finite(grads: Iterable[Tensor | None]) -> bool:
    dense: list[Tensor] = []
    others: list[Tensor] = []
    with plain():
        for grad in grads:
            if grad is not None:
                is_dense = grad.layout == torch.strided and grad.is_contiguous()
                (dense if is_dense and grad.is_floating_point() else others).append(grad)
    return api.finite(dense) and all(map(_is_finite, others))


def _is_finite(grad: Tensor) -> bool:
    with plain():
        values = grad.coalesce().values() if grad.is_sparse else grad
        return bool(values.isfinite().all())


def _first_of_all(
    module: nn.Module, optimizer: torch.optim.Optimizer, is_finite: bool
) -> str | None:
    """Describe the first parameter, in model order, with a nonfinite gradient on any rank; None if
    there is none. Collective."""
    comm = state_of(module).comms.all
    culprits = [] if is_finite else _culprits(module, optimizer)
    of_all = [Culprit(*culprit) for of_rank in gather(comm, culprits) for culprit in of_rank]
    of_all = [culprit for culprit in of_all if culprit.ranks >= 0] or of_all
    if not of_all:
        return None
    first = min(of_all)
    bitmaps = [culprit.ranks for culprit in of_all if culprit.order == first.order]
    return f"the gradient of '{first.name}' is not finite{_blame(comm, bitmaps)}"


def _blame(comm: api.Comm, bitmaps: list[int]) -> str:
    if -1 in bitmaps:
        return " (on an unknown rank)"
    bits = functools.reduce(operator.or_, bitmaps)
    if not bits:
        return ": each rank's is, but their sum overflows"
    ranks = [rank for rank in range(min(comm.world, 64)) if bits >> rank & 1]
    if comm.transport == "hosts" and comm.per_host > 1:
        hosts = [f"{rank} to {rank + comm.per_host - 1}" for rank in ranks]
        return f": it comes from a rank of {' and of '.join(hosts)}"
    return f": it comes from rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _culprits(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Culprit]:
    """Return what this rank knows: what the sums over the ranks have shown, which clipping by a
    norm that is NaN spreads to all; else which of its gradients are nonfinite now."""
    params = list(params_of(optimizer))
    grads = dict(zip(map(id, params), grads_of(params), strict=True))
    # The place and name in the model; parameters of other modules come behind.
    names = {id(p): (i, name) for i, (name, p) in enumerate(module.named_parameters())}
    for number, param in enumerate(params):
        names.setdefault(id(param), (len(names), f"parameter {number} of the optimizer"))
    summed = [
        Culprit(*names[id(unit.params[index])], ranks)
        for unit in (state.unit for _, state in units_of(module))
        for index, ranks in unit.nonfinite
        if grads.get(id(unit.params[index])) is not None
    ]
    if summed:
        return summed
    is_bad = {key: grad is not None and not _is_finite(grad) for key, grad in grads.items()}
    return [Culprit(*names[id(param)], -1) for param in params if is_bad[id(param)]]
