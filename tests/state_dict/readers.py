"""Readers and writers of a model's values: functions of a Case, whose results are compared with those
of a plain model. Each is what a script writes for the sharded model, and for the plain one.
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


# --- readers and writers: functions of a case, whose result is compared -------------------------------


def state_dict(case):
    return case.model.state_dict()


def unit_state_dict(case):
    return case.model.blocks[0].state_dict()


def part_state_dict(case):
    return {**case.model.blocks.state_dict(), **case.model.blocks[1].up.state_dict()}


def typed_state_dict(case):
    if case.is_plain:
        return case.model.state_dict()
    with FSDP.state_dict_type(case.model, "FULL_STATE_DICT"):
        return case.model.state_dict()


def dcp_state_dict(case):
    return get_model_state_dict(case.model)


def torch_save(case):
    file = io.BytesIO()
    torch.save(case.model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()))


def export(case):
    if case.is_plain:
        return case.model.state_dict()
    return {name: t for bucket in zshard.export(case.model) for name, t in bucket.items()}


def full_tensor(case):
    with torch.no_grad():
        return {n: zshard.full_tensor(p) for n, p in case.model.named_parameters()}


def summon(case):
    with contextlib.nullcontext() if case.is_plain else FSDP.summon_full_params(case.model):
        return {n: p.detach().clone() for n, p in case.model.named_parameters()}


def deepcopy(case):
    return copy.deepcopy(case.model).state_dict()


def deepcopy_unit(case):
    return copy.deepcopy(case.model.blocks[1]).state_dict()


def deepcopy_part(case):
    return copy.deepcopy(case.model.head).state_dict()


def save(case):
    if case.is_plain:
        return case.model.state_dict()
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


def export_to_folder(case):
    if case.is_plain:
        return case.model.state_dict()
    path = case.new_path()
    zshard.export(case.model).save(path)
    return load_file(f"{path}/model.safetensors") if dist.get_rank() == 0 else None


def norms(case):
    found = zshard.named_norms(case.model)
    return {n: torch.tensor(norm, dtype=torch.float64) for n, norm in found.items()}


def norms_of_gradients(case):
    found = zshard.named_norms(case.model, grads=True)
    return {n: torch.tensor(norm, dtype=torch.float64) for n, norm in found.items()}


def named_values(case):
    with torch.no_grad():
        return dict(zshard.whole_named_parameters(case.model))


def named_gradients(case):
    found = zshard.whole_named_parameters(case.model, grads=True)
    return {n: grad for n, grad in found if grad is not None}


def summon_with_gradients(case):
    full = FSDP.summon_full_params(case.model, writeback=False, with_grads=True)
    with contextlib.nullcontext() if case.is_plain else full:
        return {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}


def data(case):
    return {n: zshard.full_tensor(p.data) for n, p in case.model.named_parameters()}


def detached(case):
    return {n: zshard.full_tensor(p.detach()) for n, p in case.model.named_parameters()}


def memory(case):
    if not case.is_plain:
        assert case.model.memory()["total"] > 0
    return {}


def averages(case):
    if case.is_plain:
        return case.averages
    return case.ema.state_dict()


def update_averages(case):
    if not case.is_plain:
        case.ema.update()
    return {}


def forward(case):
    with torch.no_grad():
        return {"out": case.model(floats(1))}


def gradients(case):
    grads = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    return grads if case.is_plain else {n: zshard.full_tensor(g) for n, g in grads.items()}


def optimizer_state(case):
    state = case.optimizer.state_dict()["state"]
    return {f"{n}.{key}": t for n, entries in state.items() for key, t in entries.items()}


def optimizer_state_by_name(case):
    if case.is_plain:
        return optimizer_state(case)
    state = zshard.optim_state_dict(case.model, case.optimizer)["state"]
    return {f"{n}.{k}": t for n, own in enumerate(state.values()) for k, t in own.items()}


def optimizer_state_by_torch(case):
    state = get_optimizer_state_dict(case.model, case.optimizer)["state"]
    return {f"{n}.{key}": t for n, entries in state.items() for key, t in entries.items()}


def load(case):
    case.model.load_state_dict(case.later["model"])
    return {}


def load_part(case):
    head = {n[5:]: t for n, t in case.later["model"].items() if n.startswith("head.")}
    case.model.head.load_state_dict(head)
    return {}


def load_from_rank_0(case):
    if case.is_plain:
        return load(case)
    zshard.load_state_dict(
        case.model, case.later["model"] if dist.get_rank() == 0 else None, from_rank0=True
    )
    return {}


def dcp_load(case):
    set_model_state_dict(case.model, case.later["model"])
    return {}


def load_optimizer(case):
    case.optimizer.load_state_dict(case.later["optimizer"])
    return {}


def load_optimizer_by_name(case):
    if case.is_plain:
        return load_optimizer(case)
    zshard.load_optim_state_dict(case.model, case.optimizer, case.later["named"])
    return {}


def load_optimizer_by_torch(case):
    set_optimizer_state_dict(case.model, case.optimizer, case.later["named"])
    return {}


def load_checkpoint(case):
    if case.is_plain:
        return load(case)
    zshard.load(f"{case.folder}/later", case.model)
    return {}


def load_all(case):
    if case.is_plain:
        load(case)
        load_optimizer(case)
        return case.later["ema"]
    zshard.load(f"{case.folder}/later", case.model, case.optimizer, ema=case.ema)
    return case.ema.state_dict()


def apply(case):
    def double(module):
        with torch.no_grad():
            for param in module._parameters.values():
                param.mul_(2)

    case.model.apply(double)
    return {}


def write_in_place(case):
    with torch.no_grad():
        for param in case.model.parameters():
            param.mul_(2)
    return {}


def write_data(case):
    for param in case.model.parameters():
        param.data.mul_(2)
    return {}


def write_detached(case):
    for param in case.model.parameters():
        param.detach().mul_(2)
    return {}


def clip(case):
    clip_grad_norm_(case.model.parameters(), 0.1)
    return gradients(case)


def unscale(case):
    scaler = zshard.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(case.optimizer)
    return gradients(case)


def step(case):
    case.optimizer.step()
    return {}


READERS = [
    *(state_dict, unit_state_dict, part_state_dict, typed_state_dict, dcp_state_dict, torch_save),
    *(export, export_to_folder, full_tensor, summon, summon_with_gradients, deepcopy),
    *(deepcopy_unit, deepcopy_part, save, save_all, averages, update_averages, forward, gradients),
    *(norms, norms_of_gradients, named_values, named_gradients, data, detached, memory),
    *(optimizer_state, optimizer_state_by_name, optimizer_state_by_torch),
]
WRITERS = [
    *(load, load_part, load_from_rank_0, dcp_load, load_optimizer, load_optimizer_by_name),
    *(load_optimizer_by_torch, load_checkpoint, load_all, apply, write_in_place, write_data),
    *(write_detached, clip, unscale, step),
]
