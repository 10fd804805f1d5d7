"""The steps of an optimizer that needs whole matrices: what its ranks agree on, and its plans.

Before anything moves, the ranks compare which parameters have gradients, since the plan follows
from that. Plans are kept from step to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zshard import api
from zshard.api import Fact, Part, PublicCall, check_agreement, gather, part_of, plain
from zshard.extras.optimizers.owners import Matrix, StepPlan, assigned
from zshard.extras.optimizers.transfers import Job, Mail, carry_out, mail_for

__all__ = ["Stepping", "WholeSteps", "comm_of", "full_shape", "refuse_copy"]


def full_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the full parameter."""
    part = part_of(param)
    return tuple(param.shape) if part is None else part.shape


def comm_of(param: Tensor) -> api.Comm | None:
    """Return the transport of the ranks that step a parameter together; None: this rank alone."""
    part = part_of(param)
    return None if part is None or part.comm.world == 1 else part.comm


def refuse_copy(optimizer: Any) -> NoReturn:
    """Raise TypeError: the `__getstate__` of optimizers whose steps ranks share."""
    name = type(optimizer).__name__
    remedy = "pass its state_dict() to another one's load_state_dict()"
    raise TypeError(f"zshard.{name} cannot be copied or pickled: {remedy}")


class Stepping(NamedTuple):
    """A parameter that an optimizer may step."""

    param: Tensor
    cost: int  # see owners.Matrix
    options: str = ""  # on which its ranks must agree
    dtype: torch.dtype | None = None  # of what travels; None: the parameter's
    turn: int = 0  # see owners.assigned()


_KEPT = 8
"""Plans of each model, of the latest sets of parameters with gradients: a mixture of experts has
another set in each step."""


class _Members(NamedTuple):
    """The parameters that an optimizer has of one model, and what follows from them."""

    params: list[weakref.ref[Tensor]]
    ranges: list[tuple[tuple[int, int], ...]]  # what each rank holds of each
    plans: dict[object, StepPlan]


class WholeSteps:
    """Runs an optimizer's job on the ranks of each model.

    name: the optimizer's, for messages. n_inputs, limit: see owners.py.
    """

    def __init__(self, name: str, n_inputs: int, limit: int) -> None:
        self._name, self._n_inputs, self._limit = name, n_inputs, limit
        self._members: dict[api.Comm | None, _Members] = {}
        self._mails: dict[api.Comm, Mail] = {}  # shared memory, which is kept

    def is_owner(self, stepped: Sequence[Stepping]) -> list[bool]:
        """Return for each parameter whether this rank is its owner. Not collective."""
        owned = [False] * len(stepped)
        for comm, members in _by_comm(stepped).items():
            for i, owner in _owners(comm, stepped, members).items():
                owned[i] = comm is None or owner == comm.rank
        return owned

    def agree(self, stepped: Sequence[Stepping]) -> None:
        """Raise DivergenceError if other parameters have gradients on another rank, or other
        options. Call it before run(), and before anything is updated. Collective."""
        for comm, members in _by_comm(stepped).items():
            if comm is not None:
                with PublicCall(f"{self._name}.step()"), torch.inference_mode(False), plain():
                    facts = [fact for i in members for fact in _facts(stepped[i])]
                    check_agreement(comm, facts, "optimizers")

    def wait_for_ranks(self, params: Iterable[Tensor]) -> None:
        """Wait until all ranks that step these parameters together have come. Collective."""
        for comm in dict.fromkeys(map(comm_of, params)):
            if comm is not None:
                with PublicCall(f"{self._name}.step()"):
                    comm.exchange(b"")

    def run(self, stepped: Sequence[Stepping], job_of: Callable[[list[int]], Job]) -> None:
        """Step the parameters that have a gradient, on which all ranks agree. Collective.

        job_of: returns the job for these parameters, which it numbers as in the list it gets.
        """
        for comm, members in _by_comm(stepped).items():
            params = [stepped[i].param for i in members]
            active = [i for i, p in zip(members, params, strict=True) if p.grad is not None]
            active = [i for i in active if 0 not in full_shape(stepped[i].param)]
            if not active:
                continue
            with PublicCall(f"{self._name}.step()"), torch.inference_mode(False), plain():
                job, plan, mail = job_of(active), self._plan(comm, stepped, members, active), None
                if comm is not None and plan.most_sent > 0:
                    device = stepped[active[0]].param.device
                    mail = mail_for(plan, comm, device, self._mails.get(comm))
                    if comm.transport == "shm":
                        self._mails[comm] = mail
                carry_out(plan, job, comm, mail)

    def _plan(
        self,
        comm: api.Comm | None,
        stepped: Sequence[Stepping],
        members: list[int],
        active: list[int],
    ) -> StepPlan:
        params, kept = [stepped[i].param for i in members], self._members.get(comm)
        if kept is None or [id(ref()) for ref in kept.params] != list(map(id, params)):
            here = [_range(part_of(param), param) for param in params]
            of_all = [here] if comm is None else [list(map(tuple, r)) for r in gather(comm, here)]
            ranges = list(zip(*of_all, strict=True))
            kept = self._members[comm] = _Members(list(map(weakref.ref, params)), ranges, {})
        _, ranges, plans = kept
        costs = tuple(stepped[i].cost for i in active)
        key = (tuple(members), tuple(active), costs, tuple(stepped[i].dtype for i in active))
        plan = plans.pop(key, None)
        if plan is None:
            held, matrices = dict(zip(members, ranges, strict=True)), []
            for i in active:
                param, cost, _, dtype, _ = stepped[i]
                numel = torch.Size(full_shape(param)).numel()
                dtype = param.dtype if dtype is None else dtype
                matrices.append(Matrix(numel, dtype, self._n_inputs, cost, held[i]))
            owners = _owners(comm, stepped, members)
            world = 1 if comm is None else comm.world
            plan = StepPlan(matrices, [owners[i] for i in active], world, self._limit)
        plans[key] = plan  # the latest is the last
        if len(plans) > _KEPT:
            del plans[next(iter(plans))]
        return plan


def _range(part: Part | None, param: Tensor) -> tuple[int, int]:
    if part is None or not part.is_cut:
        return 0, torch.Size(full_shape(param)).numel()
    return part.begin, part.numel


def _by_comm(stepped: Sequence[Stepping]) -> dict[api.Comm | None, list[int]]:
    """Return the parameters of each model's ranks; None: of this rank alone."""
    members: dict[api.Comm | None, list[int]] = {}
    for i, each in enumerate(stepped):
        members.setdefault(comm_of(each.param), []).append(i)
    return members


def _owners(
    comm: api.Comm | None, stepped: Sequence[Stepping], members: list[int]
) -> dict[int, int]:
    """Return the owner of each member, whether it has a gradient or not: owners keep state."""
    costs, turns = [stepped[i].cost for i in members], [stepped[i].turn for i in members]
    owners = assigned(costs, 1 if comm is None else comm.world, turns)
    return dict(zip(members, owners, strict=True))


def _facts(each: Stepping) -> list[Fact]:
    part = part_of(each.param)
    name = "" if part is None else part.name
    value = "None" if each.param.grad is None else "set"
    facts = [(f"the gradient of '{name}'", value)]
    return [*facts, (f"the options of '{name}'", each.options)] if each.options else facts
