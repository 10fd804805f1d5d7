"""Muon over shards: torch.optim.Muon for matrices, zshard's AdamW for everything else.

Muon's momentum is elementwise, so each rank keeps that of its shard. The update of a matrix is not:
a Newton-Schulz iteration makes the momentum's singular values about equal. One rank computes it for
each matrix (owners.py), with torch's operations on the whole matrix in bfloat16, so that the
result is bitwise that of torch.optim.Muon on any number of ranks.

torch.optim.Muon's documentation prints another momentum than its code has; this is the code's,
B = mu * B + (1 - mu) * gradient.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from zshard.api import AdamW, keep_options, load_state_of_optimizer, part_of, zeros_side_by_side
from zshard.extras.optimizers.eight_bit import AdamW8bit
from zshard.extras.optimizers.matrices import groups_of
from zshard.extras.optimizers.newton_schulz import cost_of, orthogonalized
from zshard.extras.optimizers.whole_steps import Stepping, WholeSteps, full_shape, refuse_copy

__all__ = ["Muon"]

_BATCH = 16 << 20
"""Bytes of a rank's own matrices in a batch: enough to keep it busy while the next ones travel."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for sharded and unsharded models, with AdamW for what Muon is not for.

    Each matrix is orthogonalized on one rank; the momentum is sharded like the parameter. With
    parameters in float32, bit-identical to torch.optim.Muon after DDP with as many threads.

    Args:
        params: a model, or parameters or param groups. Of a model, Muon updates the weights of
            nn.Linear, nn.MultiheadAttention and transformers' Conv1D, and AdamW the rest:
            embeddings and what is tied to them, the output head (the last nn.Linear), biases,
            norms. Rank 0 prints the choice. Otherwise Muon updates all parameters, which must be
            matrices, but for param groups with use_muon=False, which AdamW updates.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            torch.optim.Muon.
        split: for a matrix that consists of several, such as a fused QKV projection or the heads of
            one: into how many equal blocks of rows, the rows of each block, or ("columns", n) for n
            equal blocks of columns. Each is updated as a matrix of its own. With a model, a dict of
            these by patterns of parameter names, {"*.qkv.weight": 3}; for transformers' Conv1D,
            which has its outputs in columns, 3 means ("columns", 3).
        ns_dtype: what the matrices are computed and sent in, "bfloat16" as in torch.optim.Muon, or
            "float32", which is much faster on CPUs without instructions for bfloat16, and more
            exact.
        symmetric: compute only half of each symmetric product, in blocks: faster for matrices of
            at least 256 rows and columns. The update then differs from torch's by at most 1e-5 of
            its norm in float32, and by 1% in bfloat16.
        adamw: options of zshard.AdamW for its param groups; with "bits": 8, those of
            zshard.AdamW8bit. None: its defaults, also for lr.

    Param groups may set all of these, and those of AdamW, by themselves. step() is collective.

    Raises ValueError for hyperparameters out of range, and for parameters of Muon that are not
    matrices; NotImplementedError for options of AdamW that zshard does not support.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: Any = None,
        ns_dtype: str = "bfloat16",
        symmetric: bool = False,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        by_model = isinstance(params, nn.Module)
        self._of_muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": None if by_model else split,
            "ns_dtype": ns_dtype,
            "symmetric": symmetric,
            "use_muon": True,
        }
        _check_options(self._of_muon)
        self._adamw = _adamw_of({} if adamw is None else adamw)
        self.scale_group = self._adamw.scale_group
        self._of_adamw = {**self._adamw.defaults, "use_muon": False}
        self._whole = WholeSteps("Muon", 1, _BATCH)
        if isinstance(params, nn.Module):
            if split is not None and not isinstance(split, Mapping):
                raise ValueError(f'split={split!r}: pass a dict, such as {{"*.qkv.weight": 3}}')
            params, text = groups_of(params, split or {})
            _announce(text)
        self.options = {**self._of_adamw, **self._of_muon}  # which ranks compare
        # Each group keeps those of its kind. Torch's schedulers would cycle all groups' betas.
        super().__init__(params, {k: v for k, v in self.options.items() if k != "betas"})

    def state_layout(
        self, group: Mapping[str, Any], param: Tensor
    ) -> Mapping[str, torch.dtype | None]:
        """Declare the state of a parameter, as zshard.AdamW does."""
        if group["use_muon"]:
            return {"momentum_buffer": None}
        return self._adamw.state_layout({**self._of_adamw, **group}, param)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in torch.optim.

        Args:
            param_group: "params" and options; with use_muon=False those of AdamW.

        Raises what the constructor does.
        """
        defaults = self._of_muon if param_group.get("use_muon", True) else self._of_adamw
        if "bits" in param_group and "bits" not in defaults:
            bits = f"bits={param_group['bits']!r}"
            raise ValueError(
                f'{bits} of a param group needs use_muon=False and adamw={{"bits": 8}}'
            )
        for name, default in defaults.items():
            param_group.setdefault(name, default)
        names = {*param_group}
        super().add_param_group(param_group)
        for name in self.defaults.keys() - names:
            del param_group[name]
        try:
            self._take_group(param_group)
        except BaseException:
            del self.param_groups[-1]  # or later steps would step it
            raise

    def _take_group(self, group: dict[str, Any]) -> None:
        if group["use_muon"]:
            _check_options(group)
            for param in group["params"]:
                if len(full_shape(param)) != 2:
                    raise ValueError(
                        f"Muon is for matrices, not for {_name_of(param)}: put it in a param group "
                        "with use_muon=False, or pass the model, zshard.Muon(model)"
                    )
                _blocks(param, group["split"])
            return
        if group.get("capturable"):
            raise NotImplementedError("zshard.Muon: capturable=True is not supported: omit it")
        self._adamw._take_group(group)

    load_state_dict = load_state_of_optimizer  # type: ignore[assignment]
    __getstate__ = refuse_copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        for saved, group in zip(state["param_groups"], self.param_groups, strict=True):
            if saved.get("use_muon", "ns_steps" in saved) != group["use_muon"]:
                raise ValueError(
                    f"cannot load the state dict into Muon: a group has use_muon="
                    f"{group['use_muon']}, the saved one has not; load that of the same groups"
                )
            keep_options(saved, group)
            self._take_group(saved)
        self._adamw.param_groups = _of_adamw(self.param_groups)
        self._adamw.__setstate__({**state, "param_groups": _of_adamw(state["param_groups"])})
        super().__setstate__({**state, "state": self._adamw.state})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective.

        Args:
            closure: called first, with gradients enabled; reevaluates the model and returns the
                loss.

        Returns what `closure` returned, or None. Raises DivergenceError if other parameters have
        gradients on another rank; what another rank raises; RuntimeError for sparse gradients, and
        for a parameter that is currently unsharded.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._adamw.state = self.state  # both keep one dict
        self._adamw.param_groups = _of_adamw(self.param_groups)
        stepped = [(_stepping(param, group), group) for param, group in self._matrices()]
        self._whole.agree([each for each, _ in stepped])
        self._adamw.step_groups()
        self._whole.run(
            [each for each, _ in stepped], lambda active: self._job([stepped[i] for i in active])
        )
        return loss

    def wait_for_ranks(self) -> None:
        """Wait for the ranks of the next step, before anything is written. Collective."""
        self._whole.wait_for_ranks(param for param, _ in self._matrices())

    def _matrices(self) -> list[tuple[Tensor, dict[str, Any]]]:
        groups = [each for each in self.param_groups if each["use_muon"]]
        return [(param, each) for each in groups for param in each["params"]]

    def _job(self, active: Sequence[tuple[Stepping, dict[str, Any]]]) -> _MuonJob:
        params = [each.param for each, _ in active]
        for param in params:
            grad = param.grad
            if torch.is_complex(param) or (grad is not None and grad.layout != torch.strided):
                kind = "complex parameters" if torch.is_complex(param) else "sparse gradients"
                raise RuntimeError(f"zshard.Muon does not support {kind}: use AdamW for them")
        missing = [param for param in params if "momentum_buffer" not in self.state[param]]
        for param, zeros in zip(missing, zeros_side_by_side(missing), strict=True):
            self.state[param]["momentum_buffer"] = zeros
        momenta = (self.state[param]["momentum_buffer"] for param in params)
        groups, blocks = [g for _, g in active], [_blocks(e.param, g["split"]) for e, g in active]
        return _MuonJob(list(map(_Step, params, momenta, groups, blocks)))


# --- options --------------------------------------------------------------------------------------


def _adamw_of(options: Mapping[str, Any]) -> AdamW | AdamW8bit:
    """Return the optimizer that steps Muon's other param groups, which it gets later."""
    if not isinstance(options, Mapping):
        raise TypeError(f"adamw must be a dict of options of zshard.AdamW, got {options!r}")
    if "bits" in options:
        others = {name: value for name, value in options.items() if name != "bits"}
        optimizer = AdamW8bit([{"params": [], "bits": options["bits"]}], **others)
        optimizer.defaults["bits"] = options["bits"]
        return optimizer
    for name in ("master", "min_8bit_size"):
        if name in options:
            raise ValueError(f'adamw has {name}={options[name]!r} but no bits: add "bits": 8')
    return AdamW([{"params": []}], **options)


@functools.cache  # once
def _announce(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"zshard: {text}", file=sys.stderr, flush=True)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for options that torch.optim.Muon refuses, some of them only in a step."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, got shape {lr.shape}")
    adjustments = (None, "original", "match_rms_adamw")
    for name, kind, is_valid in (
        *((name, "at least 0", options[name] >= 0) for name in ("lr", "momentum", "weight_decay")),
        ("ns_steps", "in 0 ... 99", 0 <= options["ns_steps"] < 100),
        ("ns_coefficients", "three numbers", len(options["ns_coefficients"]) == 3),
        ("ns_dtype", "'bfloat16' or 'float32'", options["ns_dtype"] in _DTYPES),
        ("symmetric", "True or False", isinstance(options["symmetric"], bool)),
        ("adjust_lr_fn", f"one of {adjustments}", options["adjust_lr_fn"] in adjustments),
    ):
        if not is_valid:
            raise ValueError(f"{name} must be {kind}, got {options[name]!r}")


def _name_of(param: Tensor) -> str:
    part = part_of(param)
    named = "" if part is None else f"'{part.name}' "
    return f"parameter {named}of shape {full_shape(param)}"


def _of_adamw(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if not group["use_muon"]]


class _Blocks(NamedTuple):
    """The matrices that a parameter consists of."""

    dim: int  # along which it is split
    sizes: list[int]  # there
    shapes: list[tuple[int, int]]


def _blocks(param: Tensor, split: Any) -> _Blocks:
    """Return how a parameter is split. Raises ValueError if the blocks do not add up."""
    rows, columns = shape = full_shape(param)
    dim, parts = 0, 1 if split is None else split
    if isinstance(split, tuple | list) and len(split) == 2 and split[0] == "columns":
        dim, parts = 1, split[1]
    sizes: list[Any] = []
    if isinstance(parts, int) and parts > 0 and shape[dim] % parts == 0:
        sizes = [shape[dim] // parts] * parts
    elif isinstance(parts, tuple | list) and dim == 0:
        sizes = [n for n in parts if isinstance(n, int) and n > 0]
        sizes = sizes if len(sizes) == len(parts) else []
    if not sizes or sum(sizes) != shape[dim]:
        raise ValueError(
            f"split={split!r} does not divide {_name_of(param)}: pass a number of equal blocks of "
            'rows, the rows of each block, or ("columns", number of blocks)'
        )
    shapes = [(size, columns) if dim == 0 else (rows, size) for size in sizes]
    return _Blocks(dim, sizes, shapes)


def _stepping(param: Tensor, group: Mapping[str, Any]) -> Stepping:
    split, dtype = group["split"], group["ns_dtype"]
    cost = sum(cost_of(*shape) for shape in _blocks(param, split).shapes)
    options = f"split={split}, ns_dtype={dtype}, symmetric={group['symmetric']}"
    return Stepping(param, cost, options, _DTYPES[dtype])


# --- the step -------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One matrix with what its step needs."""

    param: Tensor
    momentum: Tensor
    options: dict[str, Any]
    blocks: _Blocks

    def segments(self) -> Iterable[tuple[int, int, tuple[int, int]]]:
        """Yield (first element, number, block's shape) of this rank's part of each block. Blocks of
        columns, which are equal, are one segment."""
        part, begin, numel = part_of(self.param), 0, self.param.numel()
        if part is not None and part.is_cut:
            begin, numel = part.begin, part.numel
        dim, _, shapes = self.blocks
        if dim == 1:
            yield 0, numel, shapes[0]
            return
        at = 0
        for rows, columns in shapes:
            end = at + rows * columns
            first, last = max(at, begin), min(end, begin + numel)
            if first < last:
                yield first - begin, last - first, (rows, columns)
            at = end


class _MuonJob:
    """Muon's part of transfers.Job."""

    def __init__(self, steps: Sequence[_Step]) -> None:
        self._steps = steps

    def device(self, matrix: int) -> torch.device:
        return self._steps[matrix].param.device

    def put(self, matrix: int, out: Tensor | None) -> None:
        step = self._steps[matrix]
        grad, momentum = step.param.grad, step.options["momentum"]
        if grad is None or grad.numel() == 0:
            return
        step.momentum.lerp_(grad, 1 - momentum)
        if out is None:
            return
        update = grad.lerp(step.momentum, momentum) if step.options["nesterov"] else step.momentum
        out[0].copy_(update.reshape(-1))

    def compute(self, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        results = {}
        for i, (full,) in inputs.items():
            param, options = self._steps[i].param, self._steps[i].options
            dim, sizes, _ = self._steps[i].blocks
            blocks: Any = full.view(full_shape(param)).split(sizes, dim)
            done = [orthogonalized(block.contiguous(), options) for block in blocks]
            results[i] = (done[0] if len(done) == 1 else torch.cat(done, dim)).reshape(-1)
        return results

    def take(self, matrix: int, result: Tensor) -> None:
        step = self._steps[matrix]
        options, param, lr = step.options, step.param.detach(), step.options["lr"]
        values = param.reshape(-1)  # a copy if the parameter is not contiguous
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        values.mul_(1 - lr * options["weight_decay"])
        for begin, numel, shape in step.segments():
            there, factor = slice(begin, begin + numel), math.sqrt(max(1, shape[0] / shape[1]))
            if options["adjust_lr_fn"] == "match_rms_adamw":
                factor = 0.2 * math.sqrt(max(shape))
            _add(values[there], result[there], -lr * factor, shape)
        if not param.is_contiguous():
            param.copy_(values.view(param.shape))


def _add(values: Tensor, update: Tensor, factor: Any, shape: tuple[int, ...]) -> None:
    """Add factor * update. In bfloat16, where torch rounds the factor, and for tall matrices, whose
    update it has transposed, also the product: here as well, but the same for all elements,
    wherever they lie in memory."""
    if values.dtype != torch.bfloat16:
        values.add_(update, alpha=factor)
        return
    rounded = float(torch.tensor(float(factor), dtype=values.dtype))
    if shape[0] > shape[1] and update.dtype == torch.bfloat16:
        values.add_(update * rounded)
    else:
        values.copy_(values.float().add_(update, alpha=rounded))
