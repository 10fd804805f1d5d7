"""Any optimizer that needs whole matrices, over shards: WholeMatrix.

One rank owns each parameter (optim/owners.py). In a step it gets the full parameter and its
gradient, the optimizer steps them there, and the other ranks get their elements of the result. The
optimizer's state of a parameter is on its owner alone, so its ranks together hold it once.
"""

from __future__ import annotations

import copy
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zshard import api
from zshard.api import (
    PublicCall,
    copied,
    full_tensor,
    gather_bytes,
    ids_of,
    other_state,
    params_of,
    part_of,
    plain,
    run_post_hooks,
)
from zshard.extras.optimizers.whole_steps import (
    Stepping,
    WholeSteps,
    comm_of,
    full_shape,
    refuse_copy,
)

__all__ = ["WholeMatrix"]

StateByNumber = dict[int, dict[Any, Any]]


class WholeMatrix(Optimizer):
    """An optimizer of any class over sharded parameters: one rank steps each in full.

        optimizer = zshard.WholeMatrix(torch.optim.Adafactor, model.parameters(), lr=1e-3)

    For optimizers that use a parameter's shape, or norms of it: Adafactor, Shampoo, SOAP, LAMB. A
    rank holds the state of the parameters that it owns, and in a step these parameters and their
    gradients in full, about 1/W of the model. For Muon, zshard.Muon takes less.

    The optimizer must step each parameter by itself, from its gradient and its own state, and its
    step must not need a closure: an optimizer that computes one number from all parameters, such as
    Prodigy, would see only some of them.

    Args:
        optimizer_class: called as optimizer_class(params, **options).
        params: parameters or param groups, sharded or not.
        options: the optimizer's.

    The constructor, which reads full values one by one, step() and state_dict() are collective.
    state_dict() has the optimizer's state of the unsharded model; load_state_dict() takes it on
    every rank.

    Raises what the optimizer does; TypeError for one whose step requires a closure. The step raises
    NotImplementedError for parameters of models over several process groups.
    """

    takes_full_state = True  # of all parameters that a rank owns, in its shards or not

    def __init__(
        self, optimizer_class: Callable[..., Optimizer], params: ParamsT, **options: Any
    ) -> None:
        super().__init__(params, {})
        self._n_first = len(self.param_groups)  # later ones leave the owners of these
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        self._steps = WholeSteps(f"WholeMatrix({name})", 2, sys.maxsize)
        groups = [self._proxied(group) for group in self.param_groups]
        self._inner = optimizer_class(groups, **options)
        _forget_values(params_of(self._inner))
        closure = inspect.signature(self._inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            name = type(self._inner).__name__
            raise TypeError(f'{name} needs a closure: use FSDP(..., strategy="no_shard")')
        self.defaults = self._inner.defaults
        self._params = [list(group["params"]) for group in self.param_groups]
        _copy_options(self._inner.param_groups, self.param_groups)

    __getstate__ = refuse_copy

    @property
    def optimizer_class(self) -> type[Optimizer]:
        """Return the class of the optimizer that steps full parameters."""
        return type(self._inner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch.optim."""
        super().add_param_group(param_group)
        if "_inner" not in vars(self):
            return
        try:
            self._inner.add_param_group(self._proxied(self.param_groups[-1]))
        except BaseException:
            del self.param_groups[-1]  # or later steps would step it
            raise
        self._params.append(list(self.param_groups[-1]["params"]))
        _forget_values(params_of(self._inner))
        _copy_options(self._inner.param_groups, self.param_groups)

    def wait_for_ranks(self) -> None:
        """Wait for the ranks of the next step, before anything is written. Collective."""
        self._steps.wait_for_ranks(params_of(self))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective.

        Args:
            closure: called first, with gradients enabled; reevaluates the model and returns the
                loss.

        Returns what `closure` returned, or None. Raises what the optimizer does, on any rank;
        DivergenceError if other parameters have gradients on another rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_changes()
        _copy_options(self.param_groups, self._inner.param_groups)
        stepped, proxies = self._stepped(), list(params_of(self._inner))
        for proxy, is_own in zip(proxies, self._steps.is_owner(stepped), strict=True):
            if not is_own:  # from the constructor, or from before the model was sharded
                self._inner.state.pop(proxy, None)
        pairs = list(zip(params_of(self), proxies, strict=True))
        comms = [comm_of(param) for param, _ in pairs]
        others = [i for i, comm in enumerate(comms) if comm is not None]
        if len({comms[i] for i in others}) > 1:
            raise NotImplementedError("WholeMatrix() needs one process group: make several")
        alone = (pair for pair, comm in zip(pairs, comms, strict=True) if comm is None)
        beside = [(param, proxy) for param, proxy in alone if param.grad is not None]
        jobs: list[_WholeJob] = []

        def job_of(active: list[int]) -> _WholeJob:
            jobs.append(_WholeJob(self._inner, [pairs[others[i]] for i in active], beside))
            return jobs[0]

        with torch.no_grad():
            self._steps.agree([stepped[i] for i in others])
            self._steps.run([stepped[i] for i in others], job_of)
            if beside and not jobs:
                with torch.inference_mode(False), plain():
                    _WholeJob(self._inner, [], beside).compute({})
        _copy_options(self._inner.param_groups, self.param_groups)
        return loss

    @PublicCall("optimizer.state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's full state, as the unsharded model's would be. Collective."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        numbers = {id(param): number for number, param in enumerate(params_of(self))}
        groups = [
            {**group, "params": [numbers[id(param)] for param in group["params"]]}
            for group in self.param_groups
        ]
        state = {**self._other_state(), **dict(sorted(self._gathered().items()))}
        packed: dict[str, Any] = {"state": state, "param_groups": groups}
        for hook in self._optimizer_state_dict_post_hooks.values():
            packed = hook(self, packed) or packed
        return packed

    def full_state(self) -> dict[Any, Any]:
        """Return the full state of each parameter, as copies on the CPU, and what the optimizer
        keeps under keys that are no parameters. Collective."""
        numbers = dict(enumerate(params_of(self)))
        states = {numbers[number]: state for number, state in self._gathered().items()}
        return {**self._other_state(), **states}

    def _other_state(self) -> dict[Any, Any]:
        return cast(dict[Any, Any], copied(other_state(self._inner.state)))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of state_dict(), or the state of the same optimizer over the unsharded
        model. Pass all of it on each rank, which keeps what it owns. Raises ValueError for param
        groups that do not match."""
        self._refuse_changes()
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        is_owner = self._steps.is_owner(self._stepped())
        owned = {number for number, is_own in zip(numbers, is_owner, strict=False) if is_own}
        others = set(numbers) - owned
        kept = {key: state for key, state in state_dict["state"].items() if key not in others}
        groups = [_unnamed(group) for group in state_dict["param_groups"]]
        loaded = {**state_dict, "state": copy.deepcopy(kept), "param_groups": groups}
        self._inner.load_state_dict(loaded)
        _copy_options(self._inner.param_groups, self.param_groups)
        run_post_hooks(self)

    def _stepped(self) -> list[Stepping]:
        steps = []
        for number, group in enumerate(self.param_groups):
            turn = max(0, number + 1 - self._n_first)
            for param in group["params"]:
                shape = full_shape(param)
                cost = numel = torch.Size(shape).numel()  # then what matrix products take
                cost *= min(shape[0], numel // max(shape[0], 1)) if shape else 1
                steps.append(Stepping(param, cost, turn=turn))
        return steps

    def _proxied(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a param group with a full parameter for each of the group's: with its values where
        this rank steps it, for optimizers that begin from them, and else zeros without memory.
        Collective."""
        owned = dict(zip(params_of(self), self._steps.is_owner(self._stepped()), strict=True))
        proxies = []
        for param in group["params"]:
            value, part = _nothing(full_shape(param), param), part_of(param)
            # Where shards are in shared memory, the owner reads alone.
            if owned[param] or (part is not None and not api.shares_state(part.shards)):
                full = full_tensor(param.detach())
                value = full if owned[param] else value
            proxies.append(nn.Parameter(value, param.requires_grad))
        return {**_unnamed(group), "params": proxies}

    def _refuse_changes(self) -> None:
        """Raise RuntimeError if a script has removed or replaced parameters: the optimizer has
        state, and each rank its part of the work, for those that it was given."""
        if ids_of(self) != [list(map(id, params)) for params in self._params]:
            raise RuntimeError(
                "the param groups of WholeMatrix() have lost parameters, or have others: make "
                "another WholeMatrix(), and add new ones by add_param_group()"
            )

    def _gathered(self) -> StateByNumber:
        """Return the state by the parameters' numbers, as copies on the CPU."""
        self._refuse_changes()
        states: StateByNumber = self._inner.state_dict()["state"]
        is_owner = self._steps.is_owner(self._stepped())
        gathered: StateByNumber = {}
        comms: dict[api.Comm | None, set[int]] = {}
        for number, param in enumerate(params_of(self)):
            part = part_of(param)
            comms.setdefault(None if part is None else part.comm, set()).add(number)
        for comm, numbers in comms.items():
            owned = {n: state for n, state in states.items() if n in numbers and is_owner[n]}
            if comm is None or comm.world == 1:
                gathered.update(copy.deepcopy(owned))
                continue
            file = io.BytesIO()
            torch.save(owned, file)
            for data in gather_bytes(comm, file.getvalue()):
                gathered |= torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return gathered


def _unnamed(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a param group without names, which full parameters do not have."""
    return {key: value for key, value in group.items() if key != "param_names"}


def _forget_values(proxies: Iterable[Tensor]) -> None:
    for proxy in proxies:
        proxy.data = _nothing(proxy.shape, proxy)


def _nothing(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor without memory."""
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(tuple(shape))


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for options, group in zip(source, target, strict=True):
        group.update({k: v for k, v in options.items() if k not in ("params", "param_names")})


class _WholeJob:
    """WholeMatrix's part of transfers.Job: what travels is a parameter with its gradient.

    beside: parameters that this rank steps alone, which need no transfer. One step of the optimizer
    includes them, as it may count steps in its param groups.
    """

    def __init__(
        self,
        inner: Optimizer,
        pairs: Sequence[tuple[Tensor, Tensor]],
        beside: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._inner, self._pairs, self._beside = inner, pairs, beside

    def device(self, matrix: int) -> torch.device:
        return self._pairs[matrix][0].device

    def put(self, matrix: int, out: Tensor | None) -> None:
        param = self._pairs[matrix][0]
        if out is not None and param.grad is not None:
            out[0].copy_(param.detach().reshape(-1))
            out[1].copy_(param.grad.reshape(-1))

    def compute(self, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        proxies = {i: self._pairs[i][1] for i in inputs}
        try:
            for i, proxy in proxies.items():
                shape = proxy.shape
                proxy.data, proxy.grad = inputs[i][0].view(shape), inputs[i][1].view(shape)
            for param, proxy in self._beside:
                proxy.data, proxy.grad = param.detach(), param.grad
            self._inner.step()  # also without any: some count steps in their param groups
            for param, proxy in self._beside:
                param.detach().copy_(proxy.detach())  # which may have other memory now
            return {i: proxy.detach().reshape(-1) for i, proxy in proxies.items()}
        finally:
            for proxy in (*proxies.values(), *(proxy for _, proxy in self._beside)):
                proxy.data, proxy.grad = _nothing(proxy.shape, proxy), None

    def take(self, matrix: int, result: Tensor) -> None:
        param = self._pairs[matrix][0]
        param.detach().copy_(result.view(param.shape))
