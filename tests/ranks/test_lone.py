"""Scripts for DDP act on rank 0 alone: they evaluate, save the model and the optimizer, read
values.

Over shm none of it needs the other ranks, in any state of their scripts: in torch's own barrier,
asleep, or training. Each step is compared with a plain model that has seen the same batches.
"""

import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import COMBINATIONS, Counting, loss_of, make
from nursery import fork_ranks
from optim_states import flat
from rows import all_refused
from scenarios import Wide, built, floats, learn, message_of, whole
from spawn import on_ranks
from test_alone import OVER_SHM, STEPS, Plain, evaluate
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import zshard
from zshard import FSDP

SHM = ("full_shard", "shm")
LR = 0.01


class Replacing(torch.optim.Optimizer):
    """A user's: makes a new tensor at each step, holds one elsewhere, and has more state later."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.held = []

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state |= {name: torch.zeros_like(param) for name in ("mean", "sum")}
                self.held.append((state["sum"], param))
            elif "late" not in state:
                state["late"] = torch.ones_like(param)
            state["mean"] = state["mean"] * 0.9 + param.grad
            param.sub_(state["mean"] * 0.01)
        for total, param in self.held:
            total.add_(param.grad)


OPTIMIZERS = {
    "torch": torch.optim.AdamW,
    "zshard": zshard.AdamW,
    "foreach": torch.optim.Adam,
    "state under other keys": Counting,
    "state that is replaced": Replacing,
}


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def same_values(ours, theirs):
    """Fail unless states are the same but for rounding, which may be kept in low precision."""
    ours, theirs = flat(ours), flat(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if torch.is_tensor(value):
            assert_near(ours[path].float(), value.float())
        else:
            assert ours[path] == value, path


def check_all_reads(model, optimizer, plain):
    """Fail unless all that rank 0 reads alone is as in the plain model."""
    assert_near(evaluate(model), evaluate(plain.model))
    values = plain.model.state_dict()
    for ours in (model.state_dict(), model.module.state_dict()):
        assert_near({key: ours[key] for key in values}, dict(values))
    assert_near(dict(zshard.whole_named_parameters(model)), dict(values))
    assert_near(zshard.full_tensor(next(iter(model.parameters()))), next(iter(values.values())))
    same_values(optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"])


ELSEWHERE = {
    "in a barrier": dist.barrier,
    "asleep": lambda: time.sleep(0.3),
    "training on": lambda: None,
}


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("combination", OVER_SHM)
@on_ranks(2)
def test_rank_0_calls_alone(combination, kind, place):
    model, plain = built(combination), Plain(OPTIMIZERS[kind], LR)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=LR)
    if dist.get_rank() == 0:  # nanoGPT evaluates before it trains
        check_all_reads(model, optimizer, plain)
    for i in range(STEPS):
        learn(model, optimizer, i)
        plain.step(i)
        if dist.get_rank() == 0:
            check_all_reads(model, optimizer, plain)
        if dist.get_rank() != 0 or place == "in a barrier":
            ELSEWHERE[place]()


@pytest.mark.parametrize("read", [FSDP.state_dict, evaluate], ids=["state_dict", "forward"])
@on_ranks(2)
def test_between_backward_and_step(read):
    """Rank 1 has stepped when rank 0 reads; the remedy is to read after the step."""
    model = built(SHM)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    stepped = dist.new_group(backend="gloo")
    model(floats(dist.get_rank(), 0)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.step()
    dist.barrier(stepped, async_op=True).wait()
    if dist.get_rank() == 0:
        text = message_of(lambda: read(model), zshard.DivergenceError)
        assert "after optimizer.step(), not between backward and step" in text
        optimizer.step()
        read(model)
    model(floats(dist.get_rank(), 1)).sum().backward()


def scale(model, factor):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)
    return model


@on_ranks(2)
def test_leading_rank_waits_before_writing():
    """All ranks evaluate and then write; rank 1 is late with its evaluations."""
    model, plain = built(SHM), make(Wide)
    for factor in (1.0, 0.5, 0.25):
        for _ in range(2):
            time.sleep(0.1 * dist.get_rank())
            assert_near(evaluate(model), evaluate(plain))
        scale(model, factor)
        scale(plain, factor)


def scale_data(model, factor):
    for param in model.parameters():
        param.data = param.data * factor


@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(torch.bfloat16)])
@pytest.mark.parametrize("write", [scale, scale_data])
@on_ranks(2)
def test_rank_0_evaluates_averages(write, precision):
    """All ranks swap in other weights directly, or by `p.data = t`, and back; rank 0 evaluates in
    between."""
    model = built(SHM, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(model, optimizer, 0)
    plain = make(Wide)
    plain.load_state_dict(whole(model))
    limits = {"atol": 1e-6, "rtol": 1e-5} if precision is None else {"atol": 0.05, "rtol": 0.05}
    for factor in (0.5, 2.0, 0.25, 4.0):  # exact
        write(model, factor)
        scale(plain, factor)
        dist.barrier()
        if dist.get_rank() == 0:
            torch.testing.assert_close(evaluate(model).float(), evaluate(plain), **limits)
        dist.barrier()
    if write is scale:
        learn(model, optimizer, 0)


@on_ranks(2)
def test_model_lives_until_all_ranks_have_read():
    """The last evaluations of a function: each rank frees its model when that rank is done."""
    plain = make(Wide)

    def rounds():
        model = built(SHM)
        if dist.get_rank() == 0:
            assert_near(evaluate(model), evaluate(plain))
        for _ in range(4):
            time.sleep(0.1 * dist.get_rank())
            assert_near(evaluate(model), evaluate(plain))

    rounds()
    rounds()


# --- after the others have exited -----------------------------------------------------------------


KEPT = []  # like a script's global variables


def saves_late(path, how):
    """Rank 0 alone evaluates and saves at the end, while the others' functions and scripts end."""

    def train():
        model, plain = FSDP(make(Wide), timeout=60), Plain(torch.optim.AdamW, LR)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        for i in range(STEPS):
            learn(model, optimizer, i)
            plain.step(i)
        if dist.get_rank() == 0:
            time.sleep(1.0)
            check_all_reads(model, optimizer, plain)
            torch.save(optimizer.state_dict(), path)
        if how == "at the end":
            KEPT.extend((model, optimizer))

    train()
    if how == "after an exception" and dist.get_rank() != 0:
        raise ValueError("rank 1 has a problem")
    if how == "without the group":
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "how", ["at the end", "after a function", "without the group", "after an exception"]
)
def test_rank_0_saves_after_the_others_have_exited(tmp_path, how):
    path = tmp_path / "optimizer.pt"
    first, second = fork_ranks(saves_late, 2, path, how)
    assert first.returncode == 0, first.stderr
    assert second.returncode == (how == "after an exception"), second.stderr
    assert ("rank 1 has a problem" in second.stderr) == (how == "after an exception")
    state = torch.load(path, weights_only=True)["state"]
    assert len(state) == len(list(make(Wide).parameters()))


def ends_while_rank_0_is_in_a_barrier(code):
    """As a script that catches its exception, and calls sys.exit(1); or one that has finished."""
    model = FSDP(make(Wide), timeout=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    learn(model, optimizer, 0)
    KEPT.extend((model, optimizer))
    if dist.get_rank() == 0:
        dist.barrier()
    sys.exit(code)


@pytest.mark.parametrize("code", [0, 1])
def test_exiting_rank_does_not_wait_for_a_waiting_one(code):
    start = time.monotonic()
    waiting, ended = fork_ranks(ends_while_rank_0_is_in_a_barrier, 2, code)
    assert time.monotonic() - start < 50
    assert ended.returncode == code
    assert waiting.returncode == 1 and "by peer" in waiting.stderr  # gloo: closed, or reset


# --- an optimizer's state -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2)
def test_state_is_freed_when_all_ranks_have_dropped_it(first):
    """The rank that drops it first learns of the other when it next makes a model."""
    model = built(SHM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    learn(model, optimizer, 0)
    state = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    exists = []
    for rank in (first, 1 - first):
        if dist.get_rank() == rank:
            del optimizer
        dist.barrier()
        exists.append(state() is not None)
    built(SHM)
    assert exists == [True, dist.get_rank() == first] and state() is None


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_rank_0_reads_what_another_rank_has_dropped(again):
    """Rank 1 drops its optimizer, and perhaps starts with another one, before rank 0 saves."""
    model, plain = built(SHM), Plain(torch.optim.AdamW, LR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    learn(model, optimizer, 0)
    plain.step(0)
    if dist.get_rank() == 1:
        del optimizer
        if again:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        check_all_reads(model, optimizer, plain)
    dist.barrier()


class Failing(torch.optim.SGD):
    """Raises in its step, after it has written."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("step")


def raises(*_):
    raise RuntimeError("a hook or a closure")


@pytest.mark.parametrize("where", ["step", "closure", "hook before", "hook after"])
@pytest.mark.parametrize("combination", OVER_SHM)
@on_ranks(2)
def test_rank_0_reads_after_a_step_that_raised(combination, where):
    """Each rank's step has raised; then rank 0 reads alone, and all train on."""
    model = built(combination, timeout=10)
    optimizer = Failing(model.parameters(), lr=0.1, momentum=0.9)
    learn(model, optimizer, 0)
    loss_of(model(floats(dist.get_rank(), 1))).backward()
    hooks = {
        "hook before": optimizer.register_step_pre_hook,
        "hook after": optimizer.register_step_post_hook,
    }
    handle = hooks[where](raises) if where in hooks else None
    optimizer.fails = where == "step"
    with pytest.raises(RuntimeError):
        optimizer.step(raises if where == "closure" else None)
    optimizer.fails = False
    if handle is not None:
        handle.remove()
    alone = [model.state_dict(), optimizer.state_dict()] if dist.get_rank() == 0 else None
    dist.barrier()
    together = [model.state_dict(), optimizer.state_dict()]
    learn(model, optimizer, 2)
    if alone is not None:
        assert_same(flat(alone), flat(together), "what rank 0 read alone")


# --- idioms of DDP scripts ------------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_require_backward_grad_sync(combination):
    """nanoGPT sets this in place of no_sync()."""
    model, plain = built(combination), Plain()
    for i in range(3):
        model.require_backward_grad_sync = i == 2
        loss_of(model(floats(dist.get_rank(), i))).backward()
        plain.backward(i)
    assert model.require_backward_grad_sync is True
    grads = [zshard.full_tensor(param.grad) for param in model.parameters()]
    assert_near(grads, [param.grad for param in plain.model.parameters()])


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_ddp_around_a_wrapped_model(combination):
    model, ddp = built(combination), nn.parallel.DistributedDataParallel
    before = whole(model)
    calls = {"directly": lambda: ddp(model)}
    if combination[0] != "no_shard":  # otherwise the rank has all of it
        outer = ddp(nn.Sequential(model), init_sync=False)
        calls["within"] = lambda: outer(floats(0))
    words = "DistributedDataParallel cannot wrap"
    all_refused({name: (call, TypeError, words) for name, call in calls.items()})
    assert_same(whole(model), before, "the state after it")


@pytest.mark.parametrize("early", [False, True])
@on_ranks(2)
def test_zero_redundancy_optimizer_over_shards(early):
    model = make(Wide)
    optimizers = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)]
    model = FSDP(model, process_group=dist.new_group(), transport="shm", timeout=20)
    if not early:
        optimizers = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)]
    loss_of(model(floats(dist.get_rank()))).backward()
    text = message_of(optimizers[0].step, TypeError)
    assert "ZeroRedundancyOptimizer cannot step" in text and "AdamW" in text


def test_device_ids_is_one_device():
    for options, words in (
        ({"device_id": 0, "device_ids": [0]}, "not both"),
        ({"device_ids": [0, 1]}, "a list of one GPU"),
    ):
        with pytest.raises(ValueError, match=words):
            FSDP(nn.Linear(2, 2), **options)
    assert isinstance(FSDP(nn.Linear(2, 2), device_ids=None), FSDP)
