"""Code that was written for full parameters on one process, for test_situations.py.

Each situation is a function of a model, sharded or not, after a backward. It is correct if its
result and its effect on the model equal the plain model's; otherwise it must raise. RIGHT and
REFUSED list which applies on shards, by name.
"""

import copy
import io
import operator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zshard


def params(model):
    return list(model.parameters())


def weight(model):
    return next(p for p in model.parameters() if p.ndim == 2)


def values(model):
    return weight(model).detach()


def grad(model):
    return weight(model).grad


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def each(change, result=lambda model: None):
    """A situation that changes each parameter without autograd, and returns result(model)."""

    def situation(model):
        with torch.no_grad():
            for p in model.parameters():
                change(p)
        return result(model)

    return situation


def draws(draw):
    """A situation that draws numbers for the first weight, by initializers as the first FSDP(...)
    leaves them."""

    def situation(model):
        torch.manual_seed(5)
        return draw(weight(model))

    return situation


# --- supported ------------------------------------------------------------------------------------

decay = each(lambda p: p.mul_(0.99))


def averaged_model(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    decay(model)
    average.update_parameters(model)
    return average.module.state_dict()["0.weight"]


def clip_by_value(model):
    nn.utils.clip_grad_value_(params(model), 0.01)
    return grad(model)


def saved_and_read(model):
    file = io.BytesIO()
    torch.save(zshard.to_local(weight(model)), file)
    file.seek(0)
    return tuple(torch.load(file, weights_only=True).shape) == tuple(weight(model).shape)


def own_optimizer(model):
    class Lion(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((momentum * 0.9 + p.grad * 0.1).sign(), alpha=-0.1)
                momentum.lerp_(p.grad, 0.01)

    Lion(model.parameters(), {}).step()


def unfreeze_later(model):
    weight(model).requires_grad_(False)
    weight(model).requires_grad_(True)


RIGHT = {
    "decay_by_hand": decay,
    "step_by_hand": each(lambda p: operator.isub(p, 0.1 * p.grad)),
    "step_by_data": each(lambda p: p.data.add_(p.grad, alpha=-0.1)),
    "averaged_model": averaged_model,
    "clip_by_value": clip_by_value,
    "mask_gradients": each(lambda p: p.grad.masked_fill_(p.grad.abs() < 0.01, 0.0), grad),
    "copy_of_a_parameter": lambda m: copy.deepcopy(weight(m)).detach(),
    "first_row": lambda m: values(m)[0],
    "print_it": lambda m: str(weight(m))[:3] != "" and len(f"{weight(m)}") > 10,
    "saved_and_read": saved_and_read,
    "norms_by_name": lambda m: torch.tensor(zshard.named_norms(m)["0.weight"]),
    "whole_values": lambda m: dict(zshard.whole_named_parameters(m))["0.weight"],
    "histogram_of_whole_values": lambda m: zshard.full_tensor(weight(m)).histc(10),
    "whole_gradient": lambda m: zshard.full_tensor(grad(m)),
    "unfreeze_later": unfreeze_later,
    "own_optimizer": own_optimizer,
    "is_anything_nan": lambda m: torch.isnan(values(m)),  # elementwise until the last operation
}


# --- refused --------------------------------------------------------------------------------------


@torch.no_grad()
def rows_of_length_one(model):
    """SwAV's prototypes."""
    weight(model).copy_(F.normalize(weight(model).data.clone(), dim=1, p=2))


def copy_whole_values(model):
    weight(model).data.copy_(torch.ones(model[0].out_features, model[0].in_features))


@torch.no_grad()
def set_row(model):
    weight(model)[0] = torch.ones(model[0].in_features)


def gather_parameters(model):
    there = [torch.empty_like(weight(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(there, weight(model).data)


def vector_back(model):
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in params(model))), params(model))


REFUSED = {
    "orthogonal": draws(lambda p: nn.init.orthogonal_(p)),
    "rows_of_length_one": rows_of_length_one,
    "renorm": lambda m: weight(m).data.renorm_(2, 0, 1.0),
    "row_norms": lambda m: weight(m).norm(dim=1),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "vector_back": vector_back,
    "reshaped": lambda m: values(m).reshape(-1, 4),
    "set_row": set_row,
    "gram": lambda m: values(m) @ values(m).T,
    "concatenated": lambda m: torch.cat([p.detach() for p in matrices(m)]),
    "numpy": lambda m: torch.from_numpy(values(m).numpy().copy()),
    "one_number": lambda m: torch.tensor(params(m)[1].detach()[0].item()),
    "same_everywhere": lambda m: torch.tensor(float(torch.equal(values(m), values(m) * 1))),
    "histogram": lambda m: torch.histc(values(m), 10),
    "copy_whole_values": copy_whole_values,
    "broadcast_parameters": each(lambda p: dist.broadcast(p.data, 0)),
    "reduce_gradients": each(lambda p: dist.all_reduce(p.grad)),
    "gather_parameters": gather_parameters,
    "dropped_out": lambda m: F.dropout(values(m), 0.5),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1).step(),
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()).detach(),
    "gradient_of_a_view": lambda m: weight(m).square().backward(torch.ones_like(weight(m))),
}
