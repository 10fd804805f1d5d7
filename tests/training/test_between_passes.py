"""Scripts that unfreeze, keep gradients, step with a closure or summon parameters between passes.

Each function does the same to a sharded model and to a plain one that gets the mean of the ranks'
gradients by hand, and compares them.
"""

import contextlib
import copy
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import own_group, passing_groups
from models import COMBINATIONS, Parts, make, wrapped
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


# --- unfreezing -----------------------------------------------------------------------------------


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
    """Rank 0 fails in the middle of its backward, and then nothing that its peer could wait for."""
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
    """A copy of a model whose layers were unfrozen, and one frozen, since it was wrapped."""
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


# --- gradients that are kept ----------------------------------------------------------------------


HOW = {
    "tensors": lambda grad: grad,
    "views": lambda grad: zshard.to_local(grad).view(-1),
    "arrays": lambda grad: zshard.to_local(grad).numpy(),
}


class KeptGrads:
    """Gradients of some parameters that a script keeps, and their values."""

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
    """Unreduced gradients of no_sync(), kept beyond zero_grad(); one parameter's grows."""
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


# --- closures, summoned parameters, hooks ---------------------------------------------------------


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
                optimizer.step(lambda model=model, step=step: backward(model, step + 10) or 1.0)
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
    """A norm of a reduced gradient is refused in post-accumulate hooks, unless it is not sharded.
    A hook's exception is raised, though there are hooks of other units; none runs after it."""
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


# --- forwards that read parameters by iterators; notes --------------------------------------------


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


# --- the memory of gradients: its earlier contents, and none being left ---------------------------

SIZES = {"a": 40, "b": 40, "c": 1000}  # no multiples of the layout's alignment


def three():
    """Parameters that are used as a call says."""
    params = {name: nn.Parameter(torch.ones(size)) for name, size in SIZES.items()}
    return Parts(lambda m, names: sum((getattr(m, name) * 2).sum() for name in names), **params)


def dirty_heap(value):
    """Leave `value` in freed memory of the sizes that gradients take."""
    for size in (64, 128, 256, 512, 576, 640, 1024, 1040, 2048):
        _ = [torch.full((size,), value) for _ in range(200)]


@pytest.mark.parametrize("value", [1e10, math.nan])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_norms_do_not_see_what_memory_held_before(transport, value):
    model = FSDP(three(), transport=transport)

    def renew():
        model.zero_grad()
        dirty_heap(value)

    def check_norm(used):
        """Each gradient is 2 as often as its parameter was used."""
        squares = sum((2 * used.count(name)) ** 2 * size for name, size in SIZES.items())
        norm = float(model.clip_grad_norm_(math.inf))
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)

    model("abc").backward()
    check_norm("abc")  # from now on, sums take squares
    renew()
    used = ""
    for names in ("a", "b", "ab", "abc", "c"):  # each adds to the results of earlier ones
        model(names).backward()
        used += names
        check_norm(used)
    renew()
    model("abc").backward()
    held = [param.grad for param in model.parameters()]
    dirty_heap(value)
    model("abc").backward()  # into new memory, as the script keeps the old
    check_norm("abcabc")
    del held
    renew()
    model("abc").backward()
    saved = [param.grad.clone() for param in model.parameters()]
    renew()
    for param, grad in zip(model.parameters(), saved, strict=True):
        param.grad = grad
    model("abc").backward()
    check_norm("abcabc")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_a_grad_kept_from_a_step_in_backward_is_no_trap(transport):
    model, kept = FSDP(nn.Linear(100, 100), transport=transport), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    handle = model.optimizer_in_backward(zshard.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, 100)).sum().backward()
    handle.remove()
    model(torch.ones(2, 100)).sum().backward()
    assert len(kept) == 4
    for param in model.parameters():
        assert (zshard.full_tensor(param.grad) == 2.0).all()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_negated_views_are_read_as_torch_reads_them(transport):
    """A gradient and parameters whose bytes torch negates when it reads them."""
    model = FSDP(nn.Linear(3, 3, bias=False), transport=transport)
    model.load_state_dict({"weight": torch.ones(3, 3)})
    optimizer = zshard.SGD(model.parameters(), lr=0.5)
    weight, twos = model.weight, torch.full((3, 3), 2.0)
    weight.register_hook(torch._neg_view)
    model(torch.ones(2, 3)).sum().backward()  # 2 in each element, and -2 with the hook
    assert torch.equal(zshard.full_tensor(weight.grad), -twos)
    optimizer.step()
    assert torch.equal(model.state_dict()["weight"], twos)
    with torch.no_grad():
        weight.data = torch._neg_view(zshard.to_local(weight).detach().clone())
        assert torch.equal(model(torch.eye(3)).T.contiguous(), -twos)


@pytest.mark.parametrize("cls", [zshard.SGD, zshard.AdamW])
def test_optimizers_of_plain_models_read_negated_gradients(cls):
    ours, theirs = (nn.Parameter(torch.ones(40)) for _ in range(2))
    for param, kind in ((ours, cls), (theirs, getattr(torch.optim, cls.__name__))):
        param.grad = torch._neg_view(torch.full((40,), 2.0))
        kind([param], lr=0.5).step()
    torch.testing.assert_close(ours, theirs)


class LimitsMemory(torch.autograd.Function):
    """Its first backward leaves the process 4 MiB of address space."""

    on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if LimitsMemory.on:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
        return grad


@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "rank 1"])
@pytest.mark.parametrize(
    ("transport", "strategy"),
    [("shm", "full_shard"), ("c10d", "full_shard"), ("shm", "no_shard")],
)
@on_ranks(2, fresh=True)
def test_training_continues_after_a_sum_without_memory(transport, strategy, everywhere):
    """Under no_shard, all ranks lack a sum that one cannot make."""
    dist.init_process_group("gloo")
    LimitsMemory.on = everywhere or dist.get_rank() == 1
    lacks = LimitsMemory.on or strategy == "no_shard"
    run = lambda model, x: model.linear(LimitsMemory.apply(x)).sum()  # noqa: E731
    wide = Parts(run, linear=nn.Linear(4096, 2048, bias=False))
    model = FSDP(wide, transport=transport, strategy=strategy, timeout=30)
    for step in range(3):
        with pytest.raises(MemoryError) if lacks and step == 0 else contextlib.nullcontext():
            model(torch.ones(1, 4096, requires_grad=True)).backward()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        LimitsMemory.on = False
        model.zero_grad()
