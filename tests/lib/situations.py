"""Code that was written for full parameters on one process, for test_situations.py.

Each situation is a function of a model, sharded or not, after a backward. It is correct if its
result and its effect on the model equal the plain model's; otherwise it must raise. RIGHT and
REFUSED list which applies on shards.
"""

import copy
import io

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


def state_of(tensors):
    return [tensor.clone() for tensor in tensors]


# --- supported ----------------------------------------------------------------------------------------


@torch.no_grad()
def decay_by_hand(model):
    for p in params(model):
        p.mul_(0.99)


@torch.no_grad()
def step_by_hand(model):
    for p in params(model):
        p -= 0.1 * p.grad


def step_by_data(model):
    for p in params(model):
        p.data.add_(p.grad, alpha=-0.1)


def moving_average(model):
    average = {n: p.detach().clone() for n, p in model.named_parameters()}
    decay_by_hand(model)
    for n, p in model.named_parameters():
        average[n].mul_(0.9).add_(p.detach(), alpha=0.1)
    return average["0.weight"]


def moving_average_lerp(model):
    average = [torch.zeros_like(p) for p in params(model)]
    torch._foreach_lerp_(average, params(model), 0.5)
    return average[0]


def averaged_model(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    decay_by_hand(model)
    average.update_parameters(model)
    return average.module.state_dict()["0.weight"]


def clip_by_value(model):
    nn.utils.clip_grad_value_(params(model), 0.01)
    return weight(model).grad


def clip_values_by_hand(model):
    for p in params(model):
        p.grad.clamp_(-0.01, 0.01)
    return weight(model).grad


def sign_momentum(model):
    for p in params(model):
        momentum = torch.zeros_like(p)
        momentum.lerp_(p.grad, 0.1)
        p.data.add_(momentum.sign(), alpha=-0.1)


def adam_by_hand(model):
    for p in params(model):
        first, second = p.grad * 0.1, p.grad.square() * 0.01
        p.data.addcdiv_(first, second.sqrt().add_(1e-8), value=-0.01)


def mask_gradients(model):
    for p in params(model):
        p.grad.masked_fill_(p.grad.abs() < 0.01, 0.0)
    return weight(model).grad


def where_by_sign(model):
    p = weight(model)
    return torch.where(p.detach() > 0, p.detach(), torch.zeros_like(p))


def copy_of_a_parameter(model):
    return copy.deepcopy(weight(model)).detach()


def gradient_noise(model):
    torch.manual_seed(5)
    for p in params(model):
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
    return weight(model).grad


def uniform_like(model):
    torch.manual_seed(5)
    return torch.rand_like(weight(model))


def zeros_and_ones(model):
    nn.init.zeros_(weight(model))
    nn.init.constant_(params(model)[1], 0.5)


def xavier(model):
    torch.manual_seed(5)
    nn.init.xavier_uniform_(weight(model))


def kaiming(model):
    torch.manual_seed(5)
    nn.init.kaiming_normal_(weight(model))


def trunc_normal(model):
    torch.manual_seed(5)
    nn.init.trunc_normal_(weight(model))


def normal_in_place(model):
    torch.manual_seed(5)
    weight(model).data.normal_(0, 0.02)


def reset_parameters(model):
    torch.manual_seed(5)
    model[0].reset_parameters()


def first_row(model):
    return weight(model).detach()[0]


def set_first_row(model):
    with torch.no_grad():
        weight(model)[0] = 0.0


def assigned_rows(model):
    weight(model).data[2:4].zero_()


def print_it(model):
    return str(weight(model))[:3] != "" and len(f"{weight(model)}") > 10


def saved_and_read(model):
    file = io.BytesIO()
    torch.save(zshard.to_local(weight(model)), file)
    file.seek(0)
    return tuple(torch.load(file, weights_only=True).shape) == tuple(weight(model).shape)


def norm_by_the_model(model):
    clip = getattr(model, "clip_grad_norm_", None)
    clip = clip or (lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
    return clip(1e9)


def norm_by_torch(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def norms_by_name(model):
    return torch.tensor(zshard.named_norms(model)["0.weight"])


def whole_values(model):
    return dict(zshard.whole_named_parameters(model))["0.weight"]


def histogram_of_whole_values(model):
    return zshard.full_tensor(weight(model)).histc(10)


def whole_gradient(model):
    return zshard.full_tensor(weight(model).grad)


def unfreeze_later(model):
    weight(model).requires_grad_(False)
    weight(model).requires_grad_(True)


def compare_in_place(model):
    return (weight(model).detach() > 0).float()


def own_optimizer(model):
    class Lion(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((momentum * 0.9 + p.grad * 0.1).sign(), alpha=-0.1)
                momentum.lerp_(p.grad, 0.01)

    Lion(model.parameters(), {}).step()


def torchs_rprop(model):
    torch.optim.Rprop(model.parameters(), lr=0.01).step()


def to_double(model):
    return weight(model).double().float()


def is_anything_nan(model):
    """Elementwise until the last operation."""
    return torch.isnan(weight(model).detach())


RIGHT = [
    *(decay_by_hand, step_by_hand, step_by_data, moving_average, moving_average_lerp),
    *(averaged_model, clip_by_value, clip_values_by_hand, sign_momentum, adam_by_hand),
    *(mask_gradients, where_by_sign, copy_of_a_parameter, gradient_noise, uniform_like),
    *(zeros_and_ones, print_it, saved_and_read, norm_by_the_model, norm_by_torch, norms_by_name),
    *(whole_values, histogram_of_whole_values, whole_gradient, unfreeze_later, compare_in_place),
    *(own_optimizer, torchs_rprop, to_double, is_anything_nan, first_row, set_first_row),
    *(xavier, kaiming, trunc_normal, normal_in_place, reset_parameters, assigned_rows),
]


# --- refused --------------------------------------------------------------------------------------------


def orthogonal(model):
    torch.manual_seed(5)
    nn.init.orthogonal_(weight(model))


def uniform_by_shape(model):
    p = weight(model)
    bound = p.size(1) ** -0.5
    p.data.uniform_(-bound, bound)


def rows_of_length_one(model):
    """SwAV's prototypes."""
    with torch.no_grad():
        p = weight(model)
        p.copy_(F.normalize(p.data.clone(), dim=1, p=2))


def renorm(model):
    weight(model).data.renorm_(2, 0, 1.0)


def row_norms(model):
    return weight(model).norm(dim=1)


def norm_of_a_parameter(model):
    return weight(model).detach().norm()


def norms_of_gradients_by_hand(model):
    total = sum(float(p.grad.norm()) ** 2 for p in params(model)) ** 0.5
    for p in params(model):
        p.grad.mul_(1.0 / total)
    return weight(model).grad


def linalg_norm(model):
    return torch.linalg.norm(weight(model).detach())


def foreach_norm(model):
    return torch.stack(torch._foreach_norm([p.grad for p in params(model)]))


def mean(model):
    return weight(model).detach().mean()


def sum_of_squares(model):
    return weight(model).detach().square().sum()


def largest(model):
    return weight(model).grad.abs().max()


def nan_check(model):
    return torch.tensor(float(torch.isfinite(weight(model).grad).all()))


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters())


def vector_back(model):
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in params(model))), params(model))


def flattened(model):
    return weight(model).detach().flatten()


def reshaped(model):
    return weight(model).detach().reshape(-1, 4)


def transposed(model):
    return weight(model).detach().t().contiguous()


def first_column(model):
    return weight(model).detach()[:, 0]


def set_row(model):
    with torch.no_grad():
        weight(model)[0] = torch.ones(model[0].in_features)


def as_matrix(model):
    return torch.ones(2, weight(model).shape[-1]) @ weight(model).detach()


def linear_outside(model):
    return F.linear(torch.ones(2, weight(model).shape[-1]), weight(model))


def gram(model):
    return weight(model).detach() @ weight(model).detach().T


def singular_values(model):
    return torch.linalg.svdvals(weight(model).detach())


def softmax(model):
    return weight(model).detach().softmax(dim=1)


def concatenated(model):
    return torch.cat([p.detach() for p in params(model) if p.ndim == 2])


def stacked(model):
    return torch.stack([p.grad for p in params(model) if p.ndim == 2])


def numpy(model):
    return torch.from_numpy(weight(model).detach().numpy().copy())


def numbers(model):
    return torch.tensor(weight(model).detach().tolist())


def one_number(model):
    return torch.tensor(params(model)[1].detach()[0].item())


def same_everywhere(model):
    return torch.tensor(float(torch.equal(weight(model).detach(), weight(model).detach() * 1)))


def histogram(model):
    return torch.histc(weight(model).detach(), 10)


def quantile(model):
    return weight(model).detach().quantile(0.5)


def top_k(model):
    return weight(model).grad.topk(3).values


def add_row_numbers(model):
    p = weight(model)
    p.data.mul_(torch.arange(float(model[0].out_features)).unsqueeze(1))


def copy_whole_values(model):
    weight(model).data.copy_(torch.ones(model[0].out_features, model[0].in_features))


def broadcast_parameters(model):
    for p in params(model):
        dist.broadcast(p.data, 0)


def reduce_gradients(model):
    for p in params(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return weight(model).grad


def gather_parameters(model):
    there = [torch.empty_like(weight(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(there, weight(model).data)


def dropped_out(model):
    return F.dropout(weight(model).detach(), 0.5)


def adafactor(model):
    torch.optim.Adafactor(model.parameters(), lr=0.1).step()


def trust_ratio(model):
    with torch.no_grad():
        for p in params(model):
            p.sub_(p.grad * (p.norm() / p.grad.norm()))


def penalty(model):
    return sum(p.square().sum() for p in model.parameters()).detach()


def gradient_of_a_view(model):
    weight(model).square().backward(torch.ones_like(weight(model)))


REFUSED = [
    *(orthogonal, uniform_by_shape, rows_of_length_one, renorm, row_norms, norm_of_a_parameter),
    *(norms_of_gradients_by_hand, linalg_norm, foreach_norm, mean, sum_of_squares, largest),
    *(nan_check, vector, vector_back, flattened, reshaped, transposed, first_column, set_row),
    *(as_matrix, linear_outside, gram, singular_values, softmax, concatenated),
    *(stacked, numpy, numbers, one_number, same_everywhere, histogram, quantile, top_k),
    *(add_row_numbers, copy_whole_values, broadcast_parameters, reduce_gradients),
    *(gather_parameters, dropped_out, adafactor, trust_ratio, penalty, gradient_of_a_view),
]
