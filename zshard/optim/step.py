"""The step of zshard's optimizers: one C call per param group.

The subclasses keep everything of torch.optim (arguments, param groups, schedulers,
state_dict) and replace step(). A plan in C (`_core.OptimPlan`) walks the group's parameters,
reads their `.grad`, and updates all of them at once on torch's threads; no Python runs per
parameter and step. Python runs only when a parameter gets its state, or for one that the C loop
does not support (not contiguous, sparse gradient, other devices, complex): torch's own function
updates it, on the same state.

State tensors are adjacent (optim/sharded_state.py), so that adjacent parameters of a shard are
updated as one run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zshard import _core
from zshard.guard.whole_values import full_numel
from zshard.optim.sharded_state import SizeOf, one_tensor, problem_with_codes, zeros_side_by_side
from zshard.units.shards import part_of


@dataclass
class Prepared:
    """Steps that the optimizer has prepared instead of taking them, within Keep.commit()."""

    plans: list[_core.OptimPlan] = field(default_factory=list)
    is_writing: bool = False  # the models wait for the end of the write


class InOneCall(torch.optim.Optimizer):
    """Base class of zshard's optimizers: step() in C, and the options that zshard adds.

    A subclass declares its rule and its state. All rules are elementwise, so the step is correct on
    shards.
    """

    _rule: str  # the rule in C (csrc/update/update_rules.h) that the plan applies
    _state: ClassVar[Mapping[str, str | None]]
    """State tensors of the parameter's shape, in C's order; for each, the option of
    a param group that asks for it, if it is not always there."""
    _counts_steps = False  # whether its state has a "step" per parameter
    _begins_as_grad: str | None = None  # the state tensor whose first value is the gradient
    multiplies_gradients = True  # by what is pending for them (csrc/device/pending.h), in its step
    _group_size = 1  # elements that share state; numbers of parameters begin at multiples of it

    _plans: dict[Any, _core.OptimPlan]  # by group index; for a part, also its unit
    prepared: Prepared | None = None  # not None: step() only prepares
    state_changes = 0  # how often tensors of its state were made or replaced

    def prepare_only(self) -> Prepared:
        """Make step() only prepare, until `prepared` is None again; return what it prepares."""
        self.prepared = Prepared()
        return self.prepared

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: called first, with gradients enabled; reevaluates the model and returns the
                loss.

        Returns what `closure` returned, or None. Raises TypeError for a tensor subclass that wraps
        other tensors (DTensor), RuntimeError for a parameter that is currently unsharded.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_groups()
        return loss

    def step_groups(self) -> None:
        """Do the work of step(), without torch's hooks."""
        for index, group in enumerate(self.param_groups):
            self._step_params(index, group, self.state)
            _count_rounding(group)

    def _step_part(self, index: int, unit: int, params: list[Tensor]) -> None:
        """Step some parameters of group `index`, those of one unit; for optimizer_in_backward.

        Does not count as a step of stochastic rounding: `_end_parts` does, once for all parts.
        """
        group = {**self.param_groups[index], "params": params}
        state = {param: self.state[param] for param in params if param in self.state}
        self._step_params((index, unit), group, state)

    def _end_parts(self, groups: Iterable[int]) -> None:
        """Note that all parts of these groups have been stepped."""
        self._opt_called = True  # torch's schedulers check it, to warn of a missing step()
        for index in groups:
            if "rounding_step" in self.param_groups[index]:
                self.param_groups[index]["rounding_step"] += 1

    def _step_params(self, key: object, group: dict[str, Any], state: dict[Any, Any]) -> None:
        """Step a group by its plan, which is cached under `key`. state: at least that of its
        parameters."""
        if not group["params"]:
            return
        if (
            group.get("stochastic_rounding")
            and not {"rounding_seed", "rounding_step"} <= group.keys()
        ):
            raise ValueError(
                "stochastic_rounding=True was set on a param group without rounding_seed and "
                "rounding_step: pass it to the constructor or add_param_group(), or set all three"
            )
        plan = self._plans.get(key)
        foreign = None if plan is None else self._step_by(plan, group, state)
        if foreign is None:
            foreign = self._step_with_new_plan(key, group, state)
        if foreign and self.prepared is not None:
            shape = tuple(group["params"][foreign[0]].shape)
            raise NotImplementedError(
                f"a kept run steps contiguous parameters with dense gradients, but one of shape "
                f"{shape} does not qualify: leave it out of the optimizer, or do not keep this run"
            )
        if foreign:
            self._step_by_torch(group, [group["params"][i] for i in foreign])

    def _step_by(
        self, plan: _core.OptimPlan, group: dict[str, Any], state: dict[Any, Any]
    ) -> tuple[int, ...] | None:
        """Step a group by its plan, or only prepare it; return what OptimPlan.step() does."""
        prepared = self.prepared
        if prepared is None:
            return plan.step(group, state, self._live(group))
        if plan in prepared.plans:
            raise RuntimeError("step() was called twice in one commit(): call it once in each")
        foreign = plan.prepare(group, state)
        if foreign is not None:
            prepared.plans.append(plan)
        return foreign

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch.optim.

        Args:
            param_group: "params" and options; `stochastic_rounding` and `rounding_seed` may differ
                between groups.

        Raises NotImplementedError for options that the constructor rejects.
        """
        super().add_param_group(param_group)
        try:
            self._take_group(self.param_groups[-1])
        except BaseException:
            del self.param_groups[-1]  # or later steps would step it
            raise
        self._plans = {}
        self._set_scaler_flag()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "param_groups" in vars(self):  # a load, not a copy
            wrong = problem_with_codes(self, state["state"])
            if wrong is not None:
                raise ValueError(f"cannot load the state dict: {wrong}")
            for group, own in zip(state["param_groups"], self.param_groups, strict=True):
                keep_options(group, own)
                self._take_group(group)
            check_state(self, state, self._problem)
        super().__setstate__(state)
        self._plans = {}
        self.state_changes += 1
        self._set_scaler_flag()

    def _problem(
        self, param: Tensor, own: Mapping[str, Any], group: Mapping[str, Any]
    ) -> str | None:
        """Return what is wrong with a parameter's loaded state, if anything is."""
        always = [name for name, option in self._state.items() if option is None]
        wanted = [*(always or self._state_names(group)), *["step"] * self._counts_steps]
        return state_problem(param, own, wanted, self._state)

    def _set_scaler_flag(self) -> None:
        """Whether torch's GradScaler may leave checking `found_inf` to the step, on the GPU.

        It then sets `grad_scale` and `found_inf` while it calls step().
        """
        self._step_supports_amp_scaling = all(g.get("capturable") for g in self.param_groups)

    def _live(self, group: dict[str, Any]) -> tuple[Tensor | None, ...] | None:
        """(Capturable) Return what a step reads on the GPU: new tensors, so that each graph has its
        own."""
        if not group.get("capturable"):
            return None
        device = group["params"][0].device
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        lr = group["lr"]
        return (
            torch.empty(16 * len(group["params"]), dtype=torch.float64, device=device),
            lr.double() if isinstance(lr, Tensor) and lr.device == device else None,
            None if scale is None else scale.double().reciprocal().float(),
            None if found is None else found.float(),
        )

    def _set_rounding(self, stochastic: bool, seed: int) -> None:
        """Finish the constructor: set defaults for its groups and for later ones."""
        if stochastic:
            self.defaults.update(stochastic_rounding=True, rounding_seed=operator.index(seed))
            for group in self.param_groups:
                self._take_group(group)
        elif seed != 0:
            raise ValueError(
                "rounding_seed requires stochastic_rounding=True: pass both to the optimizer, or "
                "set both on a param group"
            )
        self._set_scaler_flag()  # with fused, torch has set it already

    def _take_group(self, group: dict[str, Any]) -> None:
        """Check a group's options, and complete those of stochastic rounding if it is enabled.

        Otherwise a group has no such options: its state dict is torch's.
        """
        for option in ("capturable", "stochastic_rounding"):
            if option in self.defaults:
                group.setdefault(option, self.defaults[option])
        wrong = _unsupported(type(self).__name__, group)
        if wrong:
            raise NotImplementedError(f"zshard.{type(self).__name__}: {wrong}")
        if group.get("stochastic_rounding"):
            group.setdefault("rounding_seed", self.defaults.get("rounding_seed", 0))
            group.setdefault("rounding_step", 0)

    def _numbers(self, params: Sequence[Tensor]) -> list[int]:
        """Return, for each parameter, the number of its first element on this rank, counting all
        elements of all groups' full parameters one after another."""
        begins: dict[Tensor, int] = {}
        start = 0
        for group in self.param_groups:
            for param in group["params"]:
                info = _core.shard_info(param)
                begins[param] = start + (info["begin"] if info else 0)
                start += -(-full_numel(param) // self._group_size) * self._group_size
        return [begins[param] for param in params]

    def _step_with_new_plan(
        self, key: object, group: dict[str, Any], state: dict[Any, Any]
    ) -> tuple[int, ...]:
        """Give state to the parameters that lack it, and step; return the indices that C did not
        take."""
        params: list[Tensor] = group["params"]
        if _core.capturing(params):
            raise RuntimeError(
                "cannot capture an optimizer's first step in a CUDA graph, as it creates the "
                "optimizer's state: run a warm-up step before the capture"
            )
        fresh = self._make_state(group, [p for p in params if p.grad is not None])
        numbers = self._numbers(params) if "rounding_step" in group else None
        if state is not self.state:
            state = {param: self.state[param] for param in params if param in self.state}
        steps = _read_steps(params, state) if group.get("capturable") else None
        plan = _core.OptimPlan(self._rule, params, state, fresh, numbers, steps)
        self._plans[key] = plan
        self.state_changes += 1
        foreign = self._step_by(plan, group, state)
        if foreign is None:
            raise RuntimeError(
                "the optimizer's state changed during step(): do not modify it from another thread"
            )
        for i in foreign if self._begins_as_grad else ():
            if params[i] in fresh:
                self.state[params[i]][self._begins_as_grad] = None  # torch creates its own
        return foreign

    def _make_state(self, group: dict[str, Any], params: Sequence[Tensor]) -> set[Tensor]:
        """Create the missing state of `params`; return those whose state starts as a gradient."""
        for param in params:
            if is_traceable_wrapper_subclass(param):
                raise TypeError(
                    f"zshard.{type(self).__name__} does not support {type(param).__name__} "
                    f"parameters: use torch.optim.{type(self).__name__} for them"
                )
        if self._counts_steps:
            new = [param for param in params if "step" not in self.state[param]]
            for param, step in zip(new, _counters(len(new), group), strict=True):
                self.state[param]["step"] = step
        fresh: set[Tensor] = set()
        for name in self._state_names(group):
            missing = [p for p in params if self.state[p].get(name) is None]
            for param, zeros in zip(missing, self._zeros(group, name, missing), strict=True):
                self.state[param][name] = zeros
            if name == self._begins_as_grad:
                fresh.update(missing)
        return fresh

    def _zeros(self, group: Mapping[str, Any], name: str, params: Sequence[Tensor]) -> list[Tensor]:
        """Return new state tensors of one name."""
        return zeros_side_by_side(params)

    def _state_names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that the group's rule keeps for each parameter."""
        return [name for name, option in self._state.items() if option is None or group[option]]

    def state_layout(self, group: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Return None if all state of a param group is like its parameters; otherwise it has dtypes
        of its own, and these tensors, by name, have one element for so many of a parameter's."""
        return None

    def state_bytes(self, group: Mapping[str, Any]) -> SizeOf | None:
        """Return the function for the bytes of state that a step creates for parameters of this
        group; None if it creates none."""
        count = len(self._state_names(group))
        return (lambda param, numel: count * one_tensor(param, numel)) if count > 0 else None

    def _step_by_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Update parameters that the C loop does not support, with torch's own function."""
        raise NotImplementedError


# --- loading --------------------------------------------------------------------------------------


def keep_options(group: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Give a param group that is being loaded the options that its state dict lacks, such as
    zshard's in torch's: those of the optimizer's own group. Random bits begin anew."""
    for option in own.keys() - group.keys() - {"rounding_step"}:
        group[option] = own[option]


def check_state(
    optimizer: torch.optim.Optimizer,
    given: Mapping[str, Any],
    problem: Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], str | None],
) -> None:
    """Raise ValueError for loaded state that the step would not find or could not use.

    problem: returns what is wrong with a parameter's state; it gets that and the param group.
    """
    for group in given["param_groups"]:
        for number, param in enumerate(group["params"]):
            own = given["state"].get(param)
            wrong = problem(param, own, group) if own else None
            if wrong:
                part = part_of(param)
                name = f"'{part.name}'" if part is not None else f"{number} of its param group"
                raise ValueError(
                    f"cannot load the state dict into {type(optimizer).__name__}: in the state of "
                    f"parameter {name}, {wrong}; load state of the same parameters that an "
                    "optimizer of this kind has saved"
                )


def state_problem(
    param: Tensor, own: Mapping[str, Any], wanted: Iterable[str], names: Iterable[str]
) -> str | None:
    """Return what is wrong with a parameter's loaded state, if anything is.

    wanted: what must be there, except where a script has put only numbers. names: of all tensors of
        the parameter's shape.
    """
    if "step" in wanted or any(isinstance(value, Tensor) for value in own.values()):
        for name in wanted:
            if own.get(name) is None:
                return f"'{name}' is missing"
    part = part_of(param)
    full = tuple(param.shape) if part is None else part.shape
    for name in names:
        value = own.get(name)
        if value is not None and tuple(value.shape) not in (tuple(param.shape), full):
            return f"'{name}' has shape {tuple(value.shape)}, expected {full}"
    return None


# --- options --------------------------------------------------------------------------------------


def _unsupported(name: str, group: dict[str, Any]) -> str:
    """Return the options of a group that the step in C does not support; "" if there are none."""
    params = group["params"]
    if group.get("differentiable"):
        return f"differentiable=True is not supported: use torch.optim.{name}"
    if group.get("capturable") and params and not _core.on_gpu(params):
        where = ", ".join(sorted({str(param.device) for param in params}))
        return (
            "capturable=True requires contiguous parameters on one GPU, got parameters on "
            f"{where}: move the model before constructing the optimizer, or omit capturable"
        )
    if not group.get("stochastic_rounding"):
        return ""
    if group.get("capturable"):
        return (
            "stochastic_rounding=True does not support capturable=True, as a captured step would "
            "repeat its random bits: omit one of them"
        )
    halves = [tuple(param.shape) for param in params if param.dtype == torch.float16]
    if halves:
        return (
            f"stochastic_rounding=True supports bfloat16, but a parameter of shape {halves[0]} is "
            "float16: keep it in float32, or put it in a param group with stochastic_rounding=False"
        )
    return ""


def _counters(n: int, group: dict[str, Any]) -> Sequence[Tensor]:
    """Return new step counters: on the CPU, where C reads them; if capturable, on the GPU."""
    if not group.get("capturable"):
        return [torch.zeros((), dtype=torch.float32) for _ in range(n)]
    return torch.zeros(n, dtype=torch.float32, device=group["params"][0].device).unbind()


def _read_steps(params: Iterable[Tensor], state: dict[Any, Any]) -> list[float]:
    """Return the values of the step counters on the GPU, 0 for a parameter without one.
    Synchronizes with the GPU once."""
    counters = [state.get(param, {}).get("step") for param in params]
    held = [step.reshape(()).double() for step in counters if isinstance(step, Tensor)]
    said = iter(torch.stack(held).tolist() if held else [])
    return [next(said) if isinstance(step, Tensor) else 0.0 for step in counters]


def _count_rounding(group: dict[str, Any]) -> None:
    """Count a step, so that the next one uses other random bits; not if there are no gradients."""
    if "rounding_step" in group and any(p.grad is not None for p in group["params"]):
        group["rounding_step"] += 1
