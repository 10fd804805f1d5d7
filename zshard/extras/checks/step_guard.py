"""What ranks check together before an optimizer's step, and how they skip one.

The hook around a step (optim/hooks.py) calls before_step() before anything is updated. Whether the
gradients are finite is known from their sums over the ranks (csrc/reduce/squares.h), so a step with
finite gradients costs one exchange of a number. Only if a rank has found others do ranks exchange
names.

A step is skipped by taking the gradients away until it is over: every optimizer leaves parameters
without a gradient as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from zshard import api
from zshard.api import (
    EXTENSIONS,
    Extension,
    PublicCall,
    gather,
    grads_of,
    params_of,
    plain,
    state_of,
    units_of,
    units_stepped_by,
    warn,
    warn_on_rank_0,
)
from zshard.extras.checks import NonFiniteError
from zshard.extras.checks.replicas import ReplicaCheck

__all__ = ["StepGuard", "parse"]


class StepChecks(NamedTuple):
    """What FSDP() was asked to check. every: steps between two looks at replicas; 0: none."""

    nonfinite: Literal["raise", "skip"] | None
    every: int


def parse(nonfinite: object, check_replicas: object) -> dict[str, Any]:
    """Parse FSDP()'s arguments. Raises ValueError for an invalid one."""
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}")
    is_number = isinstance(check_replicas, int) and not isinstance(check_replicas, bool)
    if not is_number or check_replicas < 0:  # type: ignore[operator]
        raise ValueError(
            f"check_replicas must be a number of steps, or 0 for no checks, got {check_replicas!r}"
        )
    return {"nonfinite": nonfinite, "check_replicas": check_replicas}


class Culprit(NamedTuple):
    """A parameter with a nonfinite gradient. order: in the model. ranks: a bitmap of those whose
    own gradient is nonfinite; -1: not known."""

    order: int
    name: str
    ranks: int


_guards: weakref.WeakValueDictionary[int, StepGuard] = weakref.WeakValueDictionary()
"""By the model's engine."""

_withheld: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Withheld] = weakref.WeakKeyDictionary()
"""What has been taken from optimizers that are skipping a step."""


class StepGuard:
    """Checks a model's steps. The root's State keeps it."""

    def __init__(self, module: nn.Module, checks: StepChecks) -> None:
        self.checks = checks
        self.skipped = 0  # steps
        self._module = weakref.ref(module)
        self._units = [state.unit for _, state in units_of(module)]
        api.expect_norms(self._units)  # so that the first backward takes them, too
        self._replicas = ReplicaCheck(module, checks.every) if checks.every else None
        _guards[state_of(module).unit.engine_id] = self

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
            if self.checks.nonfinite is None or _scaler_skips(optimizer):
                return False
            return self._skips_nonfinite(module, optimizer, in_closure)

    def _skips_nonfinite(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, in_closure: bool
    ) -> bool:
        api.expect_norms(self._units)
        finite = _are_finite(grads_of(params_of(optimizer)))
        if state_of(module).unit.engine.max_over_ranks([float(not finite)])[0] == 0:
            return False
        found = _first_of_all(module, optimizer, finite)
        if found is None:  # squares of float64 numbers may overflow
            return False
        if self.checks.nonfinite == "raise":
            done = "Nothing has been updated"
            if in_closure:
                done += " since the closure; reload if the optimizer moved parameters before it"
            raise NonFiniteError(
                f"all ranks refuse this step: {found}. {done}: call zero_grad() and continue with "
                'other data on all ranks, or pass nonfinite="skip" to FSDP()'
            )
        self.skipped += 1
        if self.skipped == 1:
            warn(
                f"all ranks skip this step: {found}. Later ones are counted in "
                'model.metrics()["steps/skipped"], without a warning'
            )
        return True


def _guard_steps(module: nn.Module, checks: StepChecks) -> StepGuard:
    """Check the steps of a model. Raises NotImplementedError for models whose steps cannot be
    checked."""
    asked = "nonfinite=" if checks.nonfinite else "check_replicas="
    states = [state for _, state in units_of(module)]
    if any(param.device.type != "cpu" for param in module.parameters()):
        raise NotImplementedError(
            f"{asked} checks parameters in host memory, but this model is on a GPU: omit it; there "
            "GradScaler skips steps, and clip_grad_norm_(..., error_if_nonfinite=True) raises"
        )
    if checks.every and any(state.options.offload for state in states):
        raise NotImplementedError(
            "check_replicas= does not support offload: parameters would be read from the disk; "
            "omit one of them"
        )
    if checks.every and not any(each.has_replicas for each in states):
        warn_on_rank_0(
            state_of(module).comms.all,
            f"check_replicas={checks.every} compares only buffers: each rank has other parameters "
            "under this strategy, so there are no replicas of them; omit it, or use hybrid_shard",
        )
    return StepGuard(module, checks)


def _guard_of(unit: api.Unit) -> StepGuard | None:
    """Return what checks the steps of the unit's model, if anything does."""
    return _guards.get(unit.engine_id) if _guards else None


# --- around a step --------------------------------------------------------------------------------


class _Checks(Extension):
    """The checks of all models that have some."""

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        given: dict[str, Any] = dict(state_of(model).options.extras)
        theirs = _guard_of(state_of(of).unit) if of is not None else None
        if theirs is not None:
            state_of(model).attached.append(StepGuard(model, theirs.checks))
        elif of is None and "nonfinite" in given:
            checks = StepChecks(given["nonfinite"], given["check_replicas"])
            state_of(model).attached.append(_guard_steps(model, checks))

    def metrics(self, model: nn.Module) -> dict[str, float]:
        guard = _guard_of(state_of(model).unit)
        counts = guard is not None and guard.checks.nonfinite == "skip"
        return {"steps/skipped": float(guard.skipped)} if guard is not None and counts else {}

    def meets_before_step(self, units: Sequence[api.Unit]) -> bool:
        return any(map(_guard_of, units))

    def check_in_backward(self, unit: api.Unit) -> None:
        """A step in backward begins before all gradients are known."""
        guard = _guard_of(unit)
        if guard is not None:
            asked = "nonfinite=" if guard.checks.nonfinite else "check_replicas="
            raise NotImplementedError(
                f"optimizer_in_backward() does not support FSDP({asked}...), which acts before a "
                "step, once all gradients are there: omit one of them"
            )

    def before_step(self, optimizer: torch.optim.Optimizer, in_closure: bool) -> None:
        """Collective if the models have checks. If those skip the step, it finds no gradients;
        after_step() puts them back."""
        if not _guards:
            return
        stale = _withheld.pop(optimizer, None)  # its last step has raised, or its closure ran again
        if stale is not None:
            stale.hook.remove()
        units = units_stepped_by(optimizer)
        guards = [guard for guard in map(_guard_of, units) if guard is not None]
        if not guards:
            return
        _refuse_mixtures(optimizer, units, guards)
        if any([guard.skips(optimizer, in_closure) for guard in guards]):
            _withheld[optimizer] = _Withheld(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        hidden = _withheld.pop(optimizer, None) if _withheld else None
        if hidden is not None:
            hidden.hook.remove()
            hidden.restore(optimizer)


EXTENSIONS.append(_Checks())


class _Withheld:
    """The gradients and options of an optimizer, as they were before a step that is skipped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_over = False
        self._options = [dict(group) for group in optimizer.param_groups]
        # Before users' hooks, which may set the gradients to None.
        self.hook = optimizer.register_step_post_hook(lambda optimizer, *_: self.restore(optimizer))
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(self.hook.id, last=False)
        params = list(params_of(optimizer))
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
    optimizer: torch.optim.Optimizer, units: list[api.Unit], guards: list[StepGuard]
) -> None:
    """Raise NotImplementedError where all ranks could not skip one step together."""
    name = type(optimizer).__name__
    skips = any(guard.checks.nonfinite == "skip" for guard in guards)
    if skips and isinstance(optimizer, torch.optim.LBFGS):
        raise NotImplementedError(
            'nonfinite="skip" does not support LBFGS, which has moved the parameters when its '
            'closure finds such a gradient: pass nonfinite="raise" and reload, or another optimizer'
        )
    if len({unit.engine_id for unit in units}) > len(guards) and any(
        guard.checks.nonfinite for guard in guards
    ):
        raise NotImplementedError(
            f"{name} steps several models, and nonfinite= was passed to only some of them: pass it "
            "to each FSDP(), or make an optimizer for each model"
        )


def _scaler_skips(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a GradScaler has found inf for a step that it lets the optimizer skip."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) != 0


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
    mine = [] if is_finite else list(_culprits(module, optimizer))
    known = [Culprit(*each) for rank in gather(comm, mine) for each in rank]
    if not known:
        return None
    known = [each for each in known if each.ranks >= 0] or known
    first = min(known)
    same = [each.ranks for each in known if each.order == first.order]
    return f"the gradient of '{first.name}' is not finite{_blame(comm, same)}"


def _blame(comm: api.Comm, bitmaps: list[int]) -> str:
    if -1 in bitmaps:
        return " (it is not known on which rank it began)"
    bits = 0
    for each in bitmaps:
        bits |= each
    if not bits:
        return ": each rank's is, but their sum overflows"
    ranks = [rank for rank in range(min(comm.world, 64)) if bits >> rank & 1]
    if comm.transport == "hosts" and comm.per_host > 1:
        hosts = [f"{rank} to {rank + comm.per_host - 1}" for rank in ranks]
        return f": it comes from a rank of {' and of '.join(hosts)}"
    return f": it comes from rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _culprits(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Culprit]:
    """Yield what this rank knows: what the sums over the ranks have shown, which clipping by a
    norm that is NaN spreads to all; else which of its gradients are nonfinite now."""
    params = list(params_of(optimizer))
    given = dict(zip(map(id, params), grads_of(params), strict=True))
    names = _names_of(module, params)
    summed = [
        Culprit(*names[id(unit.params[index])], ranks)
        for unit in (state.unit for _, state in units_of(module))
        for index, ranks in unit.nonfinite
        if given.get(id(unit.params[index])) is not None
    ]
    if summed:
        yield from summed
        return
    for param in params:
        grad = given[id(param)]
        if grad is not None and not _is_finite(grad):
            yield Culprit(*names[id(param)], -1)


def _names_of(module: nn.Module, params: Iterable[Tensor]) -> dict[int, tuple[int, str]]:
    """Return each parameter's place and name in the model, and those of others behind them."""
    names = {id(p): (i, name) for i, (name, p) in enumerate(module.named_parameters())}
    for number, param in enumerate(params):
        names.setdefault(id(param), (len(names), f"parameter {number} of the optimizer"))
    return names
