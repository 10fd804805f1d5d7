"""Readers and writers of a model's values, by name: functions of a Case, whose results are compared
with those of a plain model. Each is a script's code for the sharded model, and for the plain one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools

import torch
import torch.distributed as dist
from models import make, wrapped
from safetensors.torch import load_file
from scenarios import Stack, floats
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_

import zshard
from zshard import FSDP

# --- the model ----------------------------------------------------------------------------------------


class Case:
    """A model after a step of training, with its optimizer and averages, and gradients of the next
    step.

    combination: None for a plain model. later: what after_more_steps() has returned.
    """

    def __init__(self, combination, folder="", later=None, averages=None):
        self.is_plain, self.reader = combination is None, None
        self.model = make(Stack) if combination is None else wrapped(Stack, combination)
        params = list(self.model.parameters())
        groups = [{"params": params[:9]}, {"params": params[9:]}]
        self.optimizer = torch.optim.Adam(groups, 0.01)
        self.ema = None if combination is None else zshard.EMA(self.model, 0.5)
        self.folder, self.later, self.averages = folder, copy.deepcopy(later), averages
        self.learn()
        if self.ema is not None:
            self.ema.update()
            self.averages = self.ema.state_dict()
        self.model(floats(1)).sum().backward()

    def learn(self):
        self.model(floats(1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def unless_plain(self, context):
        return contextlib.nullcontext() if self.is_plain else context

    def parameters(self):
        return self.model.parameters()

    def named(self, value_of):
        """Return a value of each parameter, where it has one, by name."""
        values = {name: value_of(param) for name, param in self.model.named_parameters()}
        return {name: value for name, value in values.items() if value is not None}

    def set(self, values):
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), values, strict=True):
                param.copy_(value)

    @contextlib.contextmanager
    def hook(self, module, act, register="register_forward_hook"):
        handle = getattr(module, register)(lambda *_: act())
        yield
        handle.remove()

    def new_path(self):
        """Return a path that no reader has used yet, the same on all ranks."""
        return f"{self.folder}/new-{next(self._numbers)}"

    _numbers = itertools.count()


@functools.cache
def blank():
    """Return a plain model to load into."""
    with torch.enable_grad(), torch.inference_mode(False):
        return Case(None)


def after_more_steps(combination, folder):
    """Save a checkpoint of a model that has trained on; return its state dicts."""
    case = Case(combination, folder)
    case.learn()
    case.ema.update()
    zshard.save(f"{folder}/later", case.model, case.optimizer, ema=case.ema)
    return {
        "model": case.model.state_dict(),
        "optimizer": case.optimizer.state_dict(),
        "named": zshard.optim_state_dict(case.model, case.optimizer),
        "ema": case.ema.state_dict(),
    }


# --- readers and writers -------------------------------------------------------------------------------


def either(plain, sharded):
    """Return a function of a case that does the one or the other."""
    return lambda case: (plain if case.is_plain else sharded)(case)


def state_dict(case):
    return case.model.state_dict()


def typed_state_dict(case):
    with case.unless_plain(FSDP.state_dict_type(case.model, "FULL_STATE_DICT")):
        return case.model.state_dict()


def torch_save(case):
    file = io.BytesIO()
    torch.save(case.model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def export(case):
    return {name: t for bucket in zshard.export(case.model) for name, t in bucket.items()}


def export_to_folder(case):
    path = case.new_path()
    zshard.export(case.model).save(path)
    return load_file(f"{path}/model.safetensors") if dist.get_rank() == 0 else None


@torch.no_grad()
def full_tensor(case):
    return case.named(zshard.full_tensor)


@torch.no_grad()
def named_values(case):
    return dict(zshard.whole_named_parameters(case.model))


def named_gradients(case):
    named = zshard.whole_named_parameters(case.model, grads=True)
    return {n: grad for n, grad in named if grad is not None}


def summon(case):
    with case.unless_plain(FSDP.summon_full_params(case.model)):
        return case.named(lambda param: param.detach().clone())


def summon_with_gradients(case):
    full = FSDP.summon_full_params(case.model, writeback=False, with_grads=True)
    with case.unless_plain(full):
        return case.named(lambda param: None if param.grad is None else param.grad.clone())


def save(case):
    path = case.new_path()
    zshard.save(path, case.model)
    return load_file(f"{path}/model.safetensors")


def save_all(case):
    if case.is_plain:
        return {**case.model.state_dict(), **optimizer_state(case), "0": case.averages["head.bias"]}
    path, plain = case.new_path(), blank()
    zshard.save(path, case.model, case.optimizer, ema=case.ema)
    zshard.load(path, plain.model, plain.optimizer)
    averages = load_file(f"{path}/average-0.5.safetensors")
    return {**plain.model.state_dict(), **optimizer_state(plain), "0": averages["head.bias"]}


def norms(case, **options):
    norms = zshard.named_norms(case.model, **options)
    return {n: torch.tensor(norm, dtype=torch.float64) for n, norm in norms.items()}


@torch.no_grad()
def forward(case):
    return {"out": case.model(floats(1))}


def gradients(case):
    return case.named(lambda p: None if p.grad is None else zshard.full_tensor(p.grad))


def flat(state):
    """Return the tensors of an optimizer's state, by the number of the parameter and key."""
    return {f"{n}.{k}": t for n, own in enumerate(state.values()) for k, t in own.items()}


def optimizer_state(case):
    return flat(case.optimizer.state_dict()["state"])


def load(case):
    case.model.load_state_dict(case.later["model"])


def load_part(case):
    head = {n[5:]: t for n, t in case.later["model"].items() if n.startswith("head.")}
    case.model.head.load_state_dict(head)


def load_from_rank_0(case):
    own = case.later["model"] if dist.get_rank() == 0 else None
    zshard.load_state_dict(case.model, own, from_rank0=True)


def load_optimizer(case):
    case.optimizer.load_state_dict(case.later["optimizer"])


def load_all(case):
    if case.is_plain:
        load(case)
        load_optimizer(case)
        return case.later["ema"]
    zshard.load(f"{case.folder}/later", case.model, case.optimizer, ema=case.ema)
    return case.ema.state_dict()


def double(tensors):
    for tensor in tensors:
        tensor.mul_(2)


def clip(case):
    clip_grad_norm_(case.parameters(), 0.1)
    return gradients(case)


def unscale(case):
    scaler = zshard.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(case.optimizer)
    return gradients(case)


in_place = torch.no_grad()(double)

READERS = {
    "state_dict": state_dict,
    "unit_state_dict": lambda case: case.model.blocks[0].state_dict(),
    "part_state_dict": lambda case: {
        **case.model.blocks.state_dict(),
        **case.model.blocks[1].up.state_dict(),
    },
    "typed_state_dict": typed_state_dict,
    "dcp_state_dict": lambda case: get_model_state_dict(case.model),
    "torch_save": torch_save,
    "export": either(state_dict, export),
    "export_to_folder": either(state_dict, export_to_folder),
    "full_tensor": full_tensor,
    "summon": summon,
    "summon_with_gradients": summon_with_gradients,
    "deepcopy": lambda case: copy.deepcopy(case.model).state_dict(),
    "deepcopy_unit": lambda case: copy.deepcopy(case.model.blocks[1]).state_dict(),
    "deepcopy_part": lambda case: copy.deepcopy(case.model.head).state_dict(),
    "save": either(state_dict, save),
    "save_all": save_all,
    "averages": either(lambda case: case.averages, lambda case: case.ema.state_dict()),
    "update_averages": either(lambda case: None, lambda case: case.ema.update()),
    "forward": forward,
    "gradients": gradients,
    "norms": norms,
    "norms_of_gradients": lambda case: norms(case, grads=True),
    "named_values": named_values,
    "named_gradients": named_gradients,
    "data": lambda case: case.named(lambda param: zshard.full_tensor(param.data)),
    "detached": lambda case: case.named(lambda param: zshard.full_tensor(param.detach())),
    "memory": either(lambda case: None, lambda case: case.model.memory()["total"]),
    "optimizer_state": optimizer_state,
    "optimizer_state_by_name": either(
        optimizer_state,
        lambda case: flat(zshard.optim_state_dict(case.model, case.optimizer)["state"]),
    ),
    "optimizer_state_by_torch": lambda case: flat(
        get_optimizer_state_dict(case.model, case.optimizer)["state"]
    ),
}
WRITERS = {
    "load": load,
    "load_part": load_part,
    "load_from_rank_0": either(load, load_from_rank_0),
    "dcp_load": lambda case: set_model_state_dict(case.model, case.later["model"]),
    "load_optimizer": load_optimizer,
    "load_optimizer_by_name": either(
        load_optimizer,
        lambda case: zshard.load_optim_state_dict(case.model, case.optimizer, case.later["named"]),
    ),
    "load_optimizer_by_torch": lambda case: set_optimizer_state_dict(
        case.model, case.optimizer, case.later["named"]
    ),
    "load_checkpoint": either(load, lambda case: zshard.load(f"{case.folder}/later", case.model)),
    "load_all": load_all,
    "apply": lambda case: case.model.apply(lambda part: in_place(part._parameters.values())),
    "write_in_place": lambda case: in_place(case.parameters()),
    "write_data": lambda case: double(param.data for param in case.parameters()),
    "write_detached": lambda case: double(param.detach() for param in case.parameters()),
    "clip": clip,
    "unscale": unscale,
    "step": lambda case: case.optimizer.step(),
}
