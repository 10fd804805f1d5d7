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

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zshard import _core
from zshard._logger import log
from zshard.guard.whole_values import full_numel
from zshard.optim.sharded_state import SCALES, zeros_side_by_side


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
    scale_group = 1  # elements that share a scale; numbers of parameters begin at multiples of it

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
            # The next step uses other random bits, but not if there are no gradients.
            if "rounding_step" in group and any(p.grad is not None for p in group["params"]):
                group["rounding_step"] += 1

    def _step_unit(self, index: int, unit: int, params: list[Tensor]) -> None:
        """Step one unit's parameters of group `index`, for optimizer_in_backward. Stochastic
        rounding counts the step in `_end_units`, once for all parts."""
        group = {**self.param_groups[index], "params": params}
        state = {param: self.state[param] for param in params if param in self.state}
        self._step_params((index, unit), group, state)

    def _end_units(self, groups: Iterable[int]) -> None:
        """Note that all parts of these groups have been stepped."""
        self._opt_called = True  # torch's schedulers check it, to warn of a missing step()
        for index in groups:
            if "rounding_step" in self.param_groups[index]:
                self.param_groups[index]["rounding_step"] += 1

    def _step_params(self, key: object, group: dict[str, Any], state: dict[Any, Any]) -> None:
        """Step a group by its plan, cached under `key`. state: at least that of its parameters."""
        if not group["params"]:
            return
        rounds = group.get("stochastic_rounding")
        if rounds and not {"rounding_seed", "rounding_step"} <= group.keys():
            raise ValueError(
                "stochastic_rounding=True was set on a param group without rounding_seed and "
                "rounding_step: set all three, or pass it to add_param_group()"
            )
        plan = self._plans.get(key)
        foreign = None if plan is None else self._step_by(plan, group, state)
        if foreign is None:
            foreign = self._step_with_new_plan(key, group, state)
        if foreign and self.prepared is not None:
            shape = tuple(group["params"][foreign[0]].shape)
            raise NotImplementedError(
                f"a kept run steps contiguous parameters with dense gradients, unlike one of shape "
                f"{shape}: leave it out of the optimizer, or do not keep this run"
            )
        if foreign:
            self._step_by_torch({**group, "params": [group["params"][i] for i in foreign]})

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
            for group, before in zip(state["param_groups"], self.param_groups, strict=True):
                keep_options(group, before)
                self._take_group(group)
        super().__setstate__(state)
        self._plans = {}
        self.state_changes += 1
        self._set_scaler_flag()

    def _set_scaler_flag(self) -> None:
        """Note whether a GradScaler may leave checking `found_inf` to the step, on the GPU."""
        self._step_supports_amp_scaling = all(g.get("capturable") for g in self.param_groups)

    def _live(self, group: dict[str, Any]) -> tuple[Tensor | None, ...] | None:
        """(Capturable) Return what a step reads on the GPU: new tensors for each graph."""
        if not group.get("capturable"):
            return None
        device = group["params"][0].device
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        lr = group["lr"]
        return (
            torch.empty(16 * len(group["params"]), dtype=torch.float64, device=device),
            lr.double() if isinstance(lr, Tensor) and lr.device == device else None,
            None if scale is None else scale.double().reciprocal().float(),
            None if found_inf is None else found_inf.float(),
        )

    def _set_rounding(self, stochastic: bool, seed: int) -> None:
        """Finish the constructor: set defaults for its groups and for later ones."""
        if stochastic:
            self.defaults.update(stochastic_rounding=True, rounding_seed=operator.index(seed))
            for group in self.param_groups:
                self._take_group(group)
        elif seed != 0:
            raise ValueError("rounding_seed requires stochastic_rounding=True: pass both")
        self._set_scaler_flag()  # with fused, torch has set it already

    def _take_group(self, group: dict[str, Any]) -> None:
        """Check a group's options, and complete those of stochastic rounding if it is enabled: else
        a group has none, and its state dict is torch's."""
        for option in ("capturable", "stochastic_rounding"):
            if option in self.defaults:
                group.setdefault(option, self.defaults[option])
        if problem := _unsupported(type(self).__name__, group):
            raise NotImplementedError(f"zshard.{type(self).__name__}: {problem}")
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
                start += -(-full_numel(param) // self.scale_group) * self.scale_group
        return [begins[param] for param in params]

    def _step_with_new_plan(
        self, key: object, group: dict[str, Any], state: dict[Any, Any]
    ) -> tuple[int, ...]:
        """Make missing state, and step; return the indices that C did not take."""
        params: list[Tensor] = group["params"]
        if _core.capturing(params):
            raise RuntimeError(
                "cannot capture an optimizer's first step, which makes its state, in a CUDA graph: "
                "run a warm-up step before the capture"
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
            raise RuntimeError("the optimizer's state changed during step(): use one thread")
        for i in foreign if self._begins_as_grad else ():
            if params[i] in fresh:
                self.state[params[i]][self._begins_as_grad] = None  # torch creates its own
        if foreign:
            text = "%s steps %d of %d parameters by torch: not contiguous, sparse or complex"
            log.info(text, type(self).__name__, len(foreign), len(params))
        return foreign

    def _make_state(self, group: dict[str, Any], params: Sequence[Tensor]) -> set[Tensor]:
        """Create the missing state of `params`; return those whose state starts as a gradient."""
        for param in params:
            if is_traceable_wrapper_subclass(param):
                raise TypeError(
                    f"zshard.{type(self).__name__} does not support {type(param).__name__} "
                    "parameters: use the optimizer of torch.optim for them"
                )
        fresh: set[Tensor] = set()
        layouts = [(param, self.state_layout(group, param)) for param in params]
        for name in dict.fromkeys(name for _, layout in layouts for name in layout):
            having = [(param, layout[name]) for param, layout in layouts if name in layout]
            missing = [(p, dtype) for p, dtype in having if self.state[p].get(name) is None]
            for dtype in dict.fromkeys(dtype for _, dtype in missing):
                same = [param for param, wanted in missing if wanted == dtype]
                values: Sequence[Tensor]
                if name != "step":
                    values = zeros_side_by_side(same, dtype, SCALES.get(name, 1))
                elif group.get("capturable"):
                    n, device = len(same), params[0].device
                    values = torch.zeros(n, dtype=torch.float32, device=device).unbind()
                else:  # on the CPU, where C reads them
                    values = [torch.zeros((), dtype=torch.float32) for _ in same]
                for param, value in zip(same, values, strict=True):
                    self.state[param][name] = value
            if name == self._begins_as_grad:
                fresh.update(param for param, _ in missing)
        return fresh

    def _state_names(self, group: Mapping[str, Any]) -> list[str]:
        return [name for name, option in self._state.items() if option is None or group[option]]

    def state_layout(
        self, group: Mapping[str, Any], param: Tensor
    ) -> Mapping[str, torch.dtype | None]:
        """Declare the state of a parameter in a group with these options: each name with its dtype;
        None: the parameter's. SCALARS and SCALES (sharded_state.py) name what has another shape
        than the parameter. What makes, saves, loads and sizes state asks here."""
        return dict.fromkeys([*["step"] * self._counts_steps, *self._state_names(group)])

    @torch.no_grad()
    def _step_by_torch(self, group: dict[str, Any]) -> None:
        """Update parameters that the C loop does not support, by the step of torch's class."""
        torchs = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("torch."))
        names = ("param_groups", "grad_scale", "found_inf")  # the latter a GradScaler's
        before = {name: vars(self)[name] for name in names if name in vars(self)}
        self.param_groups = [{**group, "foreach": False, "fused": False}]
        self.grad_scale = self.found_inf = None  # the plan has read them
        try:
            inspect.unwrap(torchs.step)(self)  # type: ignore[attr-defined] # without hooks
        finally:
            del self.grad_scale, self.found_inf
            vars(self).update(before)


def keep_options(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give a param group that is being loaded the options that its state dict lacks, such as
    zshard's in torch's: those of the optimizer's own group. Random bits begin anew."""
    for option in before.keys() - group.keys() - {"rounding_step"}:
        group[option] = before[option]


def _unsupported(name: str, group: dict[str, Any]) -> str:
    """Return the options of a group that the step in C does not support; "" if there are none."""
    params = group["params"]
    if group.get("differentiable"):
        return f"differentiable=True is not supported: use torch.optim.{name}"
    if group.get("capturable") and params and not _core.on_gpu(params):
        devices = ", ".join(sorted({str(param.device) for param in params}))
        return f"capturable=True requires contiguous parameters on one GPU, not {devices}: omit it"
    if not group.get("stochastic_rounding"):
        return ""
    if group.get("capturable"):
        return "stochastic_rounding=True does not support capturable=True: omit one of them"
    half = next((param for param in params if param.dtype == torch.float16), None)
    if half is not None:
        return (
            f"stochastic_rounding=True does not support a parameter of shape {tuple(half.shape)}, "
            "which is float16: use float32, or a group with stochastic_rounding=False"
        )
    return ""


def _read_steps(params: Iterable[Tensor], state: dict[Any, Any]) -> list[float]:
    """Return the values of the step counters on the GPU, 0 for a parameter without one.
    Synchronizes with the GPU once."""
    counters = [state.get(param, {}).get("step") for param in params]
    there = [step.reshape(()).double() for step in counters if isinstance(step, Tensor)]
    values = iter(torch.stack(there).tolist() if there else [])
    return [next(values) if isinstance(step, Tensor) else 0.0 for step in counters]
