"""What scripts for DDP do on rank 0 alone: evaluate, save the model and the optimizer, read values.

Over shm none of it needs the other ranks, wherever their scripts are: in torch's own barrier,
asleep, or training. Each step is compared with a plain model that has seen the same batches.
"""

import copy
import re
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import own_group, passing_groups
from models import COMBINATIONS, Counting, loss_of, make
from nursery import fork_ranks
from optim_states import flat
from scenarios import Wide, floats, learn, message_of, whole
from torch import nn

import zshard
from zshard import FSDP

OVER_SHM = [c for c in COMBINATIONS if c[0] != "no_shard" and c[1] == "shm"]
STEPS = 3
OPTIMIZERS = {
    "torch": torch.optim.AdamW,
    "zshard": zshard.AdamW,
    "foreach": torch.optim.Adam,
    "state under other keys": Counting,
}


def built(combination, **options):
    strategy, transport = combination
    options = {"process_group": own_group(), "transport": transport, "timeout": 20, **options}
    return FSDP(make(Wide), strategy=strategy, **options)


class Plain:
    """A plain model, trained on all ranks' batches."""

    def __init__(self, kind):
        self.model = make(Wide)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters(), lr=0.01)

    def step(self, i):
        world = dist.get_world_size()
        self.optimizer.zero_grad()
        sum(loss_of(self.model(floats(rank, i))) for rank in range(world)).div(world).backward()
        self.optimizer.step()


def evaluated(model):
    model.eval()
    with torch.no_grad():
        found = model(floats(9)).clone()
    model.train()
    return found


def near(ours, theirs):
    return ours.shape == theirs.shape and bool(torch.allclose(ours, theirs, atol=1e-5))


def assert_near(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def looks(model, optimizer, plain):
    """Return what rank 0 reads from the model that differs from the plain one."""
    wrong = [] if near(evaluated(model), evaluated(plain.model)) else ["evaluation"]
    values = plain.model.state_dict()
    for name, ours in (("state_dict", model.state_dict()), ("module", model.module.state_dict())):
        wrong += [name for key in values if not near(ours[key], values[key])]
    wrong += [key for key, v in zshard.whole_named_parameters(model) if not near(v, values[key])]
    first = next(iter(model.parameters()))
    wrong += [] if near(zshard.full_tensor(first), next(iter(values.values()))) else ["full_tensor"]
    ours, theirs = (
        flat(optimizer.state_dict()["state"]),
        flat(plain.optimizer.state_dict()["state"]),
    )
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if torch.is_tensor(value):
            wrong += [] if near(ours[path].float(), value.float()) else [path]
        else:
            wrong += [] if ours[path] == value else [path]
    return wrong


ELSEWHERE = {
    "in a barrier": dist.barrier,
    "asleep": lambda: time.sleep(0.3),
    "training on": lambda: None,
}


@passing_groups()
def rank_0_looks(combination, kind, place):
    model = built(combination)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.01)
    plain, wrong = Plain(kind), []
    for i in range(STEPS):
        learn(model, optimizer, i)
        plain.step(i)
        if dist.get_rank() == 0:
            wrong += looks(model, optimizer, plain)
        if dist.get_rank() != 0 or place == "in a barrier":
            ELSEWHERE[place]()
    return wrong


@pytest.mark.parametrize("place", ELSEWHERE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("combination", OVER_SHM)
def test_rank_0_calls_alone(pool2, combination, kind, place):
    assert pool2.run(rank_0_looks, combination, kind, place) == [[], []]


@passing_groups()
def rank_0_looks_in_low_precision(place):
    """Others read copies in bf16, which each rank makes separately; return what differs, by
    step."""
    model = built(("full_shard", "shm"), mixed_precision=zshard.MixedPrecision(torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for i in range(STEPS):
        learn(model, optimizer, i)
        alone = evaluated(model) if dist.get_rank() == 0 else None
        ELSEWHERE[place]()
        together = evaluated(model)
        found.append([] if alone is None else differences(alone, together))
    return found


@pytest.mark.parametrize("place", ["in a barrier", "asleep"])
def test_rank_0_calls_alone_in_low_precision(pool2, place):
    assert pool2.run(rank_0_looks_in_low_precision, place) == [[[]] * STEPS] * 2


@passing_groups()
def between_backward_and_step(read):
    """Rank 1 has stepped when rank 0 reads; the remedy is to read after the step."""
    model = FSDP(make(Wide), process_group=own_group(), transport="shm", timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    stepped = dist.new_group(backend="gloo")
    model(floats(dist.get_rank(), 0)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.step()
    dist.barrier(stepped, async_op=True).wait()
    text = ""
    if dist.get_rank() == 0:
        text = message_of(lambda: read(model), zshard.DivergenceError)
        optimizer.step()
        read(model)
    model(floats(dist.get_rank(), 1)).sum().backward()
    return text


@pytest.mark.parametrize("read", [zshard.FSDP.state_dict, evaluated], ids=["state_dict", "forward"])
def test_between_backward_and_step(pool2, read):
    first, second = pool2.run(between_backward_and_step, read)
    assert "after optimizer.step(), not between backward and step" in first and not second


@passing_groups()
def before_the_first_step(place):
    """nanoGPT evaluates before it trains, and its optimizer is older than its sharded model."""
    model = make(Wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = FSDP(model, process_group=own_group(), transport="shm", timeout=20)
    if dist.get_rank() == 0:
        assert_near(evaluated(model), evaluated(make(Wide)))
        assert optimizer.state_dict()["state"] == {}
    ELSEWHERE[place]()


@pytest.mark.parametrize("place", ["in a barrier", "asleep"])
def test_before_the_first_step(pool2, place):
    pool2.run(before_the_first_step, place)


@passing_groups()
def one_is_ahead():
    """All ranks evaluate and then write; rank 1 is late with its evaluations."""
    model = built(("full_shard", "shm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = make(Wide)
    for factor in (1.0, 0.5, 0.25):
        for _ in range(2):
            time.sleep(0.1 * dist.get_rank())
            assert_near(evaluated(model), evaluated(plain))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
            for param in plain.parameters():
                param.mul_(factor)
    del optimizer


def test_leading_rank_waits_before_writing(pool2):
    pool2.run(one_is_ahead)


@passing_groups()
def rank_0_evaluates_replaced_data():
    """All ranks swap in averages by `p.data = t`, and back; rank 0 evaluates in between."""
    model, plain = built(("full_shard", "shm")), make(Wide)
    for factor in (0.5, 0.25):
        halved = copy.deepcopy(plain)
        with torch.no_grad():
            for param in halved.parameters():
                param.mul_(factor)
        backup = [param.data.clone() for param in model.parameters()]
        for param in model.parameters():
            param.data = param.data * factor
        dist.barrier()
        if dist.get_rank() == 0:
            assert_near(evaluated(model), evaluated(halved))
        dist.barrier()
        for param, value in zip(model.parameters(), backup, strict=True):
            param.data = value
        dist.barrier()
        if dist.get_rank() == 0:
            assert_near(evaluated(model), evaluated(plain))
        dist.barrier()


def test_rank_0_evaluates_replaced_data(pool2):
    pool2.run(rank_0_evaluates_replaced_data)


@passing_groups()
def rank_0_evaluates_averages(precision, twice):
    """All ranks swap in other weights directly, and back; rank 0 evaluates in between."""
    options = {} if precision is None else {"mixed_precision": precision}
    model = built(("full_shard", "shm"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learn(model, optimizer, 0)
    plain = make(Wide)
    plain.load_state_dict(whole(model))
    for factor in (0.5, 0.25) if twice else (0.5,):
        swapped = copy.deepcopy(plain)
        with torch.no_grad():
            for param in swapped.parameters():
                param.mul_(factor)
            for param in model.parameters():
                param.mul_(factor)
        alone = evaluated(model) if dist.get_rank() == 0 else None
        dist.barrier()
        exact = {"atol": 1e-8, "rtol": 1e-5}
        limits = exact if precision is None else {"atol": 0.05, "rtol": 0.05}
        theirs = evaluated(swapped)
        if alone is not None:
            torch.testing.assert_close(alone.float(), theirs, **limits)
        with torch.no_grad():
            for param in model.parameters():
                param.div_(factor)
        dist.barrier()
    learn(model, optimizer, 0)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("precision", [None, zshard.MixedPrecision(torch.bfloat16)])
def test_rank_0_evaluates_averages(pool2, precision, twice):
    pool2.run(rank_0_evaluates_averages, precision, twice)


@passing_groups()
def one_frees_its_model_early():
    """The last evaluations of a function: each rank frees its model when that rank is done."""
    plain = make(Wide)

    def rounds():
        model = built(("full_shard", "shm"))
        if dist.get_rank() == 0:
            assert_near(evaluated(model), evaluated(plain))
        for _ in range(4):
            time.sleep(0.1 * dist.get_rank())
            assert_near(evaluated(model), evaluated(plain))

    rounds()
    rounds()


def test_model_lives_until_all_ranks_have_read(pool2):
    pool2.run(one_frees_its_model_early)


# --- after the others have exited -----------------------------------------------------------------


KEPT = []  # like a script's global variables


def saves_late(path, how):
    """Rank 0 alone evaluates and saves at the end, while the others' functions and scripts end."""

    def train():
        model = FSDP(make(Wide), timeout=60)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plain = Plain("torch")
        for i in range(STEPS):
            learn(model, optimizer, i)
            plain.step(i)
        if dist.get_rank() == 0:
            time.sleep(1.0)
            assert looks(model, optimizer, plain) == []
            torch.save(optimizer.state_dict(), path)
        if how == "at the end":
            KEPT.extend((model, optimizer))

    train()
    if how == "after an exception" and dist.get_rank() != 0:
        raise ValueError("rank 1 has a problem")
    if how == "without the group":
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["at the end", "after a function", "without the group"])
def test_rank_0_saves_after_the_others_have_exited(tmp_path, how):
    path = tmp_path / "optimizer.pt"
    for result in fork_ranks(saves_late, 2, path, how):
        assert result.returncode == 0, result.stderr
    state = torch.load(path, weights_only=True)["state"]
    assert len(state) == len(list(make(Wide).parameters()))


def ends_with_an_optimizer():
    """Its state is freed while Python shuts down, on whatever threads there are."""
    model = FSDP(make(Wide), timeout=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer, 0)
    KEPT.extend((model, optimizer))
    print("threads:", *(thread.name for thread in threading.enumerate()), flush=True)


def test_no_thread_is_there_for_optimizers_and_none_complains_at_exit():
    for result in fork_ranks(ends_with_an_optimizer, 2):
        assert result.returncode == 0, result.stderr
        names = re.search("threads: (.*)", result.stdout)[1].split()
        assert [name for name in names if name.startswith("zshard-")] == ["zshard-stalls"]
        assert "Exception ignored" not in result.stderr


def test_rank_0_saves_after_another_has_failed(tmp_path):
    path = tmp_path / "optimizer.pt"
    saved, failed = fork_ranks(saves_late, 2, path, "after an exception")
    assert failed.returncode == 1 and "rank 1 has a problem" in failed.stderr
    assert saved.returncode == 0, saved.stderr
    assert len(torch.load(path, weights_only=True)["state"]) == len(list(make(Wide).parameters()))


def ends_while_rank_0_is_in_a_barrier(code):
    """As a script that catches its exception, and calls sys.exit(1); or one that has finished."""
    model = FSDP(make(Wide), timeout=60)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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


@passing_groups()
def frees_when_all_have_dropped(first):
    """Return whether an optimizer's state is still there: after one rank has dropped it; after the
    other has; and once another model has been made."""
    model = built(("full_shard", "shm"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer, 0)
    state = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    found = []
    for rank in (first, 1 - first):
        if dist.get_rank() == rank:
            del optimizer
        dist.barrier()
        found.append(state() is not None)
    built(("full_shard", "shm"))
    return [*found, state() is not None]


@pytest.mark.parametrize("first", [0, 1])
def test_state_is_freed_when_all_ranks_have_dropped_it(pool2, first):
    found = pool2.run(frees_when_all_have_dropped, first)
    assert found[first] == [True, True, False]  # it learns of the other when it next makes a model
    assert found[1 - first] == [True, False, False]


@passing_groups()
def reads_what_another_rank_has_dropped(again):
    """Rank 1 drops its optimizer, and perhaps starts with another one, before rank 0 saves."""
    model, plain = built(("full_shard", "shm")), Plain("torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    learn(model, optimizer, 0)
    plain.step(0)
    if dist.get_rank() == 1:
        del optimizer
        if again:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    dist.barrier()
    wrong = looks(model, optimizer, plain) if dist.get_rank() == 0 else []
    dist.barrier()
    return wrong


@pytest.mark.parametrize("again", [False, True])
def test_rank_0_reads_what_another_rank_has_dropped(pool2, again):
    assert pool2.run(reads_what_another_rank_has_dropped, again) == [[], []]


@passing_groups()
def reads_replaced_state():
    """State that scripts replace, grow or hold is read as it is: a user's optimizer, too."""
    model, plain = built(("full_shard", "shm")), make(Wide)
    optimizers = [Replacing(each.parameters()) for each in (model, plain)]
    wrong = []
    for i in range(4):
        learn(model, optimizers[0], i)
        optimizers[1].zero_grad()
        world = dist.get_world_size()
        sum(loss_of(plain(floats(rank, i))) for rank in range(world)).div(world).backward()
        optimizers[1].step()
        if dist.get_rank() == 0:
            ours, theirs = (each.state_dict()["state"] for each in optimizers)
            for number, entries in theirs.items():
                wrong += [k for k, v in entries.items() if not near(ours[number][k].float(), v)]
                wrong += [k for k in ours[number] if k not in entries]
        dist.barrier()
    return wrong


class Replacing(torch.optim.Optimizer):
    """Makes a new tensor at each step, holds one elsewhere, and has more state from step 2 on."""

    def __init__(self, params):
        super().__init__(params, {})
        self.held = []

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["mean"] = torch.zeros_like(param)
                state["sum"] = torch.zeros_like(param)
                self.held.append(state["sum"])
            elif "late" not in state:
                state["late"] = torch.ones_like(param)
            state["mean"] = state["mean"] * 0.9 + param.grad
            param.sub_(state["mean"] * 0.01)
        for total, param in zip(self.held, self.param_groups[0]["params"], strict=True):
            total.add_(param.grad)


def test_rank_0_reads_replaced_state(pool2):
    assert pool2.run(reads_replaced_state) == [[], []]


class Failing(torch.optim.SGD):
    """Raises in its step, after it has written."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise RuntimeError("step")


def raises(*_):
    raise RuntimeError("a hook or a closure")


def failed_step(optimizer, where):
    """Call a step that raises. All ranks do."""
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


@passing_groups()
def reads_after_a_failed_step(combination, where):
    """Rank 0 reads alone after each rank's step has raised; then all train on."""
    model = built(combination)
    optimizer = Failing(model.parameters(), lr=0.1, momentum=0.9)
    learn(model, optimizer, 0)
    loss_of(model(floats(dist.get_rank(), 1))).backward()
    failed_step(optimizer, where)
    alone = [model.state_dict(), optimizer.state_dict()] if dist.get_rank() == 0 else None
    dist.barrier()
    together = [model.state_dict(), optimizer.state_dict()]
    learn(model, optimizer, 2)
    return [] if alone is None else differences(flat(alone), flat(together))


@pytest.mark.parametrize("where", ["step", "closure", "hook before", "hook after"])
@pytest.mark.parametrize("combination", OVER_SHM)
def test_rank_0_reads_after_a_step_that_raised(pool2, combination, where):
    assert pool2.run(reads_after_a_failed_step, combination, where, timeout=15) == [[], []]


# --- idioms of DDP scripts ------------------------------------------------------------------------


@passing_groups()
def accumulates_as_under_ddp(combination):
    """`require_backward_grad_sync`, which nanoGPT sets in place of no_sync()."""
    model, plain = built(combination), make(Wide)
    world = dist.get_world_size()
    for i in range(3):
        model.require_backward_grad_sync = i == 2
        loss_of(model(floats(dist.get_rank(), i))).backward()
        sum(loss_of(plain(floats(rank, i))) for rank in range(world)).div(world).backward()
    assert model.require_backward_grad_sync is True
    grads = [zshard.full_tensor(param.grad) for param in model.parameters()]
    assert_near(grads, [param.grad for param in plain.parameters()])


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_require_backward_grad_sync(pool2, combination):
    pool2.run(accumulates_as_under_ddp, combination)


@passing_groups()
def wrapped_by_torch(combination):
    model = built(combination)
    before = whole(model)
    texts = [message_of(lambda: nn.parallel.DistributedDataParallel(model), TypeError)]
    wrong = differences(whole(model), before)
    if not model.summary().count("no_shard"):  # otherwise the rank has all of it
        outer = nn.parallel.DistributedDataParallel(nn.Sequential(model), init_sync=False)
        texts.append(message_of(lambda: outer(floats(0)), TypeError))
    return texts, wrong


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_ddp_around_a_wrapped_model(pool2, combination):
    for texts, wrong in pool2.run(wrapped_by_torch, combination):
        assert wrong == []
        for text in texts:
            assert "DistributedDataParallel cannot wrap" in text and "remove it" in text


@passing_groups()
def zero_over_shards(early):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make_optimizer(model):
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    plain = make(Wide)
    optimizer = make_optimizer(plain) if early else None
    model = FSDP(plain, process_group=own_group(), transport="shm", timeout=20)
    optimizer = optimizer or make_optimizer(model)
    loss_of(model(floats(dist.get_rank()))).backward()
    return message_of(optimizer.step, TypeError)


@pytest.mark.parametrize("early", [False, True])
def test_zero_redundancy_optimizer_over_shards(pool2, early):
    for text in pool2.run(zero_over_shards, early):
        assert "ZeroRedundancyOptimizer cannot step" in text and "AdamW" in text


def test_device_ids_is_one_device():
    both = message_of(lambda: FSDP(nn.Linear(2, 2), device_id=0, device_ids=[0]), ValueError)
    assert "not both" in both
    two = message_of(lambda: FSDP(nn.Linear(2, 2), device_ids=[0, 1]), ValueError)
    assert "a list of one GPU" in two
    assert isinstance(FSDP(nn.Linear(2, 2), device_ids=None), FSDP)
