"""Scripts that unfreeze, keep gradients, step with a closure or summon parameters between passes.

Each function does the same to a sharded model and to a plain one that gets the mean of the ranks'
gradients by hand, and compares them.
"""

import contextlib
import copy
import itertools
import resource

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import COMBINATIONS
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP

WIDTH = 40
SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]


def plain_model(frozen=()):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    for index in frozen:
        model[index].requires_grad_(False)
    return model


def sharded_model(combination, frozen=(), policy=None, **options):
    strategy, transport = combination
    return FSDP(
        plain_model(frozen),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=policy or {nn.Linear},
        **options,
    )


def batch(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def average(model):
    """Average the gradients over the ranks, as DDP does."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def backward(model, step):
    model(batch(step)).square().mean().backward()
    if not isinstance(model, FSDP):
        average(model)


def differs(ours, theirs):
    """Names of the parameters that differ between a sharded and a plain model."""
    found = ours.state_dict()
    return [n for n, v in theirs.state_dict().items() if not torch.allclose(found[n], v, rtol=1e-5)]


# --- unfreezing ---------------------------------------------------------------------------------------


def unfreeze_gradually(combination, one_unit):
    """Frozen layers join one after the other, as in ULMFiT; torch's AdamW has all parameters."""
    policy = (lambda module: False) if one_unit else None
    models = [sharded_model(combination, (0, 1), policy), plain_model((0, 1))]
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(6):
            if step in (2, 4):
                model[step // 2 - 1].requires_grad_(True)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert differs(*models) == []
    assert models[0].memory("peak")["grads"] > 0


@pytest.mark.parametrize("one_unit", [False, True], ids=["units", "one unit"])
def test_gradual_unfreezing(pool2, one_unit):
    for combination in COMBINATIONS:
        pool2.run(unfreeze_gradually, combination, one_unit)


def unfreeze(model):
    model[0].requires_grad_(True)


def freeze(model):
    model[2].requires_grad_(False)


def step(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@passing_groups()
def change_on_one_rank(combination, change):
    """Rank 0 fails in the middle of its backward, and then does nothing that its peer could wait for."""
    model = sharded_model(combination, (0,), process_group=own_group(), timeout=10)
    backward(model, 0)
    model.zero_grad()
    if dist.get_rank() == 0:
        change(model)
    said = message_of(lambda: [backward(model, step) for step in (1, 2)], zshard.DivergenceError)
    dist.barrier()
    return said


@pytest.mark.parametrize("change", [unfreeze, freeze, step])
@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_a_change_on_one_rank_raises_on_all(pool2, combination, change):
    for said in pool2.run(change_on_one_rank, combination, change):
        assert "diverged" in said or "out of step" in said


@on_ranks(2)
def test_unfreezing_over_unreduced_gradients_is_refused():
    model = sharded_model(("full_shard", "shm"), (0,), lambda module: False)
    with model.no_sync():
        backward(model, 0)
    model[0].requires_grad_(True)
    said = message_of(lambda: backward(model, 1), RuntimeError)
    assert "outside of no_sync() before requires_grad_(True)" in said


def copy_after_unfreezing(combination):
    """A copy of a model of which some layers were unfrozen, and one frozen, since it was wrapped."""
    models = [sharded_model(combination, (0, 1), lambda module: False), plain_model((0, 1))]
    copies = []
    for model in models:
        model[0].requires_grad_(True)
        model[2].requires_grad_(False)
        backward(model, 0)
        copied = copy.deepcopy(model)
        copied.zero_grad()
        optimizer = torch.optim.SGD([p for p in copied.parameters() if p.requires_grad], lr=0.1)
        backward(copied, 1)
        optimizer.step()
        copies.append(copied)
    assert differs(*copies) == []
    ours, theirs = ([p.requires_grad for p in model.parameters()] for model in copies)
    assert ours == theirs


def test_deepcopy_after_unfreezing(pool2):
    for combination in COMBINATIONS:
        pool2.run(copy_after_unfreezing, combination)


# --- gradients that are kept ----------------------------------------------------------------------------


def kept_in(model, how):
    grads = [p.grad for p in model.parameters()]
    if how == "tensors":
        return grads
    if how == "views":
        return [zshard.to_local(grad).view(-1) for grad in grads]
    return [zshard.to_local(grad).numpy() for grad in grads]


def keep(combination, how):
    """Gradients of four backwards, all kept, stay what they were, and training is right."""
    models = [sharded_model(combination), plain_model()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = []
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            kept.append((kept_in(model, how), [np.array(g) for g in kept_in(model, "arrays")]))
            optimizer.step()
        for grads, copies in kept:
            for grad, copied in zip(grads, copies, strict=True):
                np.testing.assert_array_equal(np.ravel(zshard.to_local(grad)), np.ravel(copied))
    assert differs(*models) == []


@pytest.mark.parametrize("how", ["tensors", "views", "arrays"])
def test_kept_gradients_do_not_change(pool2, how):
    for combination in COMBINATIONS:
        pool2.run(keep, combination, how)


def keep_unreduced(combination, how):
    """Gradients that no_sync() has left unreduced, kept beyond zero_grad(); one parameter's goes on."""
    models = [sharded_model(combination), plain_model()]
    found = []
    for model in models:
        kept = []
        for step in range(3):
            with model.no_sync() if isinstance(model, FSDP) else contextlib.nullcontext():
                model(batch(step)).square().mean().backward()
            if step < 2:
                kept.append((kept_in(model, how), [np.array(g) for g in kept_in(model, "arrays")]))
                for param in list(model.parameters())[1:]:
                    param.grad = None
        backward(model, 3)
        for grads, copies in kept:
            for grad, copied in list(zip(grads, copies, strict=True))[1:]:
                np.testing.assert_array_equal(np.ravel(grad), np.ravel(copied))
        found.append([zshard.full_tensor(param.grad) for param in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("how", ["tensors", "views", "arrays"])
def test_kept_unreduced_gradients_do_not_change(pool2, how):
    for combination in COMBINATIONS:
        pool2.run(keep_unreduced, combination, how)


@on_ranks(2)
def test_gradient_in_a_loop_variable_costs_one_unit():
    """(bytes of gradients more than before, page faults of the last steps)."""
    transport = "shm"
    model = FSDP(
        nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]),
        transport=transport,
        auto_wrap_policy={nn.Linear},
    )
    x = torch.randn(2, 256)
    grads = model.memory("predicted")["grads"]
    faults = []
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad()
        model(x).sum().backward()
        for param in model.parameters():
            grad = param.grad  # which the loop leaves behind
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del grad
    more = model.memory()["grads"] - grads
    faults = min(faults[-4:])
    assert 0 < more <= grads // 8
    assert faults < 16


# --- closures, whole parameters, buffers --------------------------------------------------------------------


def step_with_closure(combination, kind):
    models = [sharded_model(combination), plain_model()]
    for model in models:
        optimizer = getattr(zshard if isinstance(model, FSDP) else torch.optim, kind)(
            model.parameters(), lr=0.1
        )
        for step in range(2):
            optimizer.zero_grad()
            if isinstance(model, FSDP):
                with model.no_sync():
                    backward(model, step)
            else:
                model(batch(step)).square().mean().backward()

            def closure(model=model, step=step):
                backward(model, step + 10)
                return 1.0

            optimizer.step(closure)
    assert differs(*models) == []


@pytest.mark.parametrize("kind", ["SGD"])
def test_step_with_a_closure_after_no_sync(pool2, kind):
    for combination in COMBINATIONS:
        pool2.run(step_with_closure, combination, kind)


def summon_between_passes(combination):
    """Unsharded parameters are changed and discarded between a forward and its backward."""
    models = [sharded_model(combination), plain_model()]
    for model in models:
        loss = model(batch(0)).square().mean()
        if isinstance(model, FSDP):
            with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
                for param in model.parameters():
                    param.mul_(2.0)
        loss.backward()
        if not isinstance(model, FSDP):
            average(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert differs(*models) == []


def test_summon_without_writeback_between_forward_and_backward(pool2):
    for combination in COMBINATIONS:
        pool2.run(summon_between_passes, combination)


def summon_within_summon(combination):
    """An inner context that discards does so, also within one that keeps."""
    model = sharded_model(combination)
    inner = FSDP.summon_full_params(model, writeback=False)
    with FSDP.summon_full_params(model), inner, torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert differs(model, plain_model()) == []


def test_summon_without_writeback_within_summon(pool2):
    for combination in COMBINATIONS:
        pool2.run(summon_within_summon, combination)


def norms_in_hooks(combination):
    """A norm of a reduced gradient is refused in post-accumulate hooks, unless it is not sharded."""
    model, said = sharded_model(combination), []

    def hook(param):
        try:
            said.append(float(param.grad.norm()))
        except zshard.ShardError:
            said.append("refused")

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    backward(model, 0)
    if combination[0] == "no_shard":
        assert {type(each) for each in said} == {float}
    else:
        assert set(said) == {"refused"}


def test_hooks_on_reduced_gradients_are_guarded(pool2):
    for combination in COMBINATIONS:
        pool2.run(norms_in_hooks, combination)


def raising_hooks(combination):
    """What a hook raises is raised, though there are hooks of other units; none runs after it."""
    model, ran = sharded_model(combination), []

    def hook(param):
        ran.append(param)
        if len(ran) == 1:
            raise ArithmeticError("in a hook")

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    text = message_of(lambda: backward(model, 0), ArithmeticError)
    count = len(ran)
    model.zero_grad()
    backward(model, 1)
    return text, count, len(ran) - count == len(list(model.parameters()))


def test_what_a_hook_raises_is_not_lost(pool2):
    for combination in COMBINATIONS:
        assert pool2.run(raising_hooks, combination) == [("in a hook", 1, True)] * 2


def save_with_buffers(combination):
    strategy, transport = combination
    model = FSDP(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
        strategy=strategy,
        transport=transport,
        forward_sync_buffers=True,
    )
    model(batch(0)).sum().backward()
    before = [buffer.clone() for buffer in model.buffers()]
    model.state_dict()
    assert_same(model.buffers(), before, "the result")


def test_state_dict_leaves_buffers_unchanged(pool2):
    for combination in COMBINATIONS:
        pool2.run(save_with_buffers, combination)


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


def iterate(kind, combination):
    strategy, transport = combination
    torch.manual_seed(0)
    model = FSDP(kind(), strategy=strategy, transport=transport)
    torch.manual_seed(0)
    torch.testing.assert_close(model(batch(0)), kind()(batch(0)), rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore:auto_wrap_policy")
@pytest.mark.parametrize("kind", [OverParameters, OverChildren])
def test_auto_wrap_skips_modules_read_by_iterators(pool2, kind):
    for combination in itertools.product(["full_shard"], ["shm", "c10d"]):
        pool2.run(iterate, kind, combination)


def raise_by_shape():
    model = sharded_model(("full_shard", "shm"))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, WIDTH + 1))
    return getattr(caught.value, "__notes__", None)


def test_shape_error_names_unit_and_parameters(pool2):
    for notes in pool2.run(raise_by_shape):
        if notes is not None:  # Python 3.11
            assert len(notes) == 1
            assert "unit '0', with parameters 0.weight (40, 40), 0.bias (40,)" in notes[0]
