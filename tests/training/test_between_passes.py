"""Scripts that unfreeze, keep gradients, step with a closure or summon parameters between passes.

Each function does the same to a sharded model and to a plain one that gets the mean of the ranks'
gradients by hand, and compares them.
"""

import contextlib
import copy
import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import COMBINATIONS, make, wrapped
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

WIDTH = 40
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
NOTHING = contextlib.nullcontext()


def plain_model(frozen=()):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def sharded_model(combination, frozen=(), policy=frozenset({nn.Linear}), **options):
    strategy, transport = combination
    options |= {"strategy": strategy, "transport": transport, "auto_wrap_policy": policy}
    return FSDP(plain_model(frozen), **options)


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def backward(model, step):
    """One of DDP, which averages by hand where nothing else does."""
    model(batch(step)).square().mean().backward()
    for param in () if isinstance(model, FSDP) else model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def unreduced_backward(model, step):
    with model.no_sync() if isinstance(model, FSDP) else contextlib.nullcontext():
        model(batch(step)).square().mean().backward()


def assert_close(models):
    ours, theirs = (model.state_dict() for model in models)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


# --- unfreezing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{nn.Linear}, None], ids=["units", "one unit"])
@on_ranks(2)
def test_gradual_unfreezing(policy):
    """Frozen layers join one after the other, as in ULMFiT; torch's AdamW has all parameters."""
    for combination in COMBINATIONS:
        models = [sharded_model(combination, (0, 1), policy), plain_model((0, 1))]
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(6):
                if step in (2, 4):
                    model[step // 2 - 1].requires_grad_(True)
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        assert_close(models)
        assert models[0].memory("peak")["grads"] > 0


@pytest.mark.parametrize(("layer", "trains"), [(0, True), (2, False)], ids=["unfreeze", "freeze"])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@on_ranks(2)
@passing_groups()
def test_a_change_on_one_rank_raises_on_all(combination, layer, trains):
    """Rank 0 fails in the middle of its backward, and then does nothing that its peer could wait for."""
    model = sharded_model(combination, (0,), process_group=own_group(), timeout=10)
    backward(model, 0)
    model.zero_grad()
    if dist.get_rank() == 0:
        model[layer].requires_grad_(trains)
    said = message_of(lambda: [backward(model, step) for step in (1, 2)], zshard.DivergenceError)
    dist.barrier()
    assert "diverged" in said or "out of step" in said


@on_ranks(2)
def test_unfreezing_over_unreduced_gradients_is_refused():
    model = sharded_model(("full_shard", "shm"), (0,), None)
    unreduced_backward(model, 0)
    model[0].requires_grad_(True)
    said = message_of(lambda: backward(model, 1), RuntimeError)
    assert "outside of no_sync() before requires_grad_(True)" in said


@on_ranks(2)
def test_deepcopy_after_unfreezing():
    """A copy of a model of which some layers were unfrozen, and one frozen, since it was wrapped."""
    for combination in COMBINATIONS:
        copies = []
        for model in (sharded_model(combination, (0, 1), None), plain_model((0, 1))):
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
            backward(model, 0)
            copied = copy.deepcopy(model)
            copied.zero_grad()
            params = [p for p in copied.parameters() if p.requires_grad]
            backward(copied, 1)
            torch.optim.SGD(params, lr=0.1).step()
            copies.append(copied)
        assert_close(copies)
        ours, theirs = ([p.requires_grad for p in model.parameters()] for model in copies)
        assert ours == theirs


# --- gradients that are kept ----------------------------------------------------------------------------


HOW = {
    "tensors": lambda grad: grad,
    "views": lambda grad: zshard.to_local(grad).view(-1),
    "arrays": lambda grad: zshard.to_local(grad).numpy(),
}


class KeptGrads:
    """Gradients of some parameters that a script keeps, and what they were."""

    def __init__(self, params, how):
        self.grads = [HOW[how](param.grad) for param in params]
        self.copies = [HOW["arrays"](param.grad).copy() for param in params]

    def check(self):
        for grad, copied in zip(self.grads, self.copies, strict=True):
            np.testing.assert_array_equal(np.ravel(zshard.to_local(grad)), np.ravel(copied))


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_kept_gradients_do_not_change(how):
    for combination in COMBINATIONS:
        models = [sharded_model(combination), plain_model()]
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = []
            for step in range(4):
                optimizer.zero_grad()
                backward(model, step)
                kept.append(KeptGrads(list(model.parameters()), how))
                optimizer.step()
            for each in kept:
                each.check()
        assert_close(models)


@pytest.mark.parametrize("how", HOW)
@on_ranks(2)
def test_kept_unreduced_gradients_do_not_change(how):
    """Gradients that no_sync() has left unreduced, kept beyond zero_grad(); one parameter's goes on."""
    for combination in COMBINATIONS:
        grads = []
        for model in (sharded_model(combination), plain_model()):
            kept, rest = [], list(model.parameters())[1:]
            for step in range(3):
                unreduced_backward(model, step)
                if step < 2:
                    kept.append(KeptGrads(rest, how))
                    for param in rest:
                        param.grad = None
            backward(model, 3)
            for each in kept:
                each.check()
            grads.append([zshard.full_tensor(param.grad) for param in model.parameters()])
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


@on_ranks(2)
def test_gradient_in_a_loop_variable_costs_one_unit():
    """And no page faults in later steps."""
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    model = FSDP(layers, transport="shm", auto_wrap_policy={nn.Linear})
    grads, faults = model.memory("predicted")["grads"], []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad()
        model(torch.ones(2, 256)).sum().backward()
        for param in model.parameters():
            grad = param.grad  # which the loop leaves behind
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del grad
    assert 0 < model.memory()["grads"] - grads <= grads // 8
    assert min(faults[-4:]) < 16


# --- closures, summoned parameters, hooks -------------------------------------------------------------------


@on_ranks(2)
def test_step_with_a_closure_after_no_sync():
    for combination in COMBINATIONS:
        models = [sharded_model(combination), plain_model()]
        for model in models:
            library = zshard if isinstance(model, FSDP) else torch.optim
            optimizer = library.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                optimizer.zero_grad()
                unreduced_backward(model, step)

                def closure(model=model, step=step):
                    backward(model, step + 10)
                    return 1.0

                optimizer.step(closure)
        assert_close(models)


@on_ranks(2)
def test_summon_without_writeback_between_forward_and_backward():
    """Unsharded parameters are changed and discarded between a forward and its backward."""
    for combination in COMBINATIONS:
        grads = []
        for summons in (True, False):
            model = sharded_model(combination)
            loss = model(batch(0)).square().mean()
            if summons:
                with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
                    for param in model.parameters():
                        param.mul_(2.0)
            loss.backward()
            grads.append([zshard.to_local(param.grad) for param in model.parameters()])
        assert_same(*grads, f"{combination}: the gradients")


@on_ranks(2)
def test_hooks_on_reduced_gradients_are_guarded():
    """A norm of a reduced gradient is refused in post-accumulate hooks, unless it is not sharded. What
    a hook raises is raised, though there are hooks of other units; none runs after it."""
    for combination in COMBINATIONS:
        model, ran = sharded_model(combination), []

        def hook(param, combination=combination, ran=ran):
            ran.append(param)
            with pytest.raises(zshard.ShardError) if combination in SHARDED else NOTHING:
                param.grad.norm()
            if len(ran) == 1:
                raise ArithmeticError("in a hook")

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        with pytest.raises(ArithmeticError, match="in a hook"):
            backward(model, 0)
        assert len(ran) == 1
        model.zero_grad()
        backward(model, 1)
        assert len(ran) == 1 + len(list(model.parameters()))


# --- forwards that read parameters by iterators; notes --------------------------------------------------------


class OverParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for name, param in self.named_parameters():
            x = x @ param.t() if name.endswith("weight") else x + param
        return x


class OverChildren(OverParameters):
    def forward(self, x):
        for child in self.layers.children():
            x = x @ child.weight.t() + child.bias
        return x


@pytest.mark.filterwarnings("ignore:auto_wrap_policy")
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("kind", [OverParameters, OverChildren])
@on_ranks(2)
def test_auto_wrap_skips_modules_read_by_iterators(kind, transport):
    model = wrapped(kind, ("full_shard", transport))
    torch.testing.assert_close(model(batch(0)), make(kind)(batch(0)), rtol=1e-5, atol=1e-8)


@on_ranks(2)
def test_shape_error_names_unit_and_parameters():
    model = sharded_model(("full_shard", "shm"))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH + 1))
    (note,) = caught.value.__notes__
    assert "unit '0', with parameters 0.weight (40, 40), 0.bias (40,)" in note
