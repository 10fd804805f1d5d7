"""model.join(): uneven numbers of batches give DDP's parameters and Adam state, and misuse an error.

The one idea: each loop is written once and run by a sharded model and by DDP, each within its own
join(). The ranks that had data last have what counts under DDP, so their state is compared.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import COMBINATIONS, ddp, differences, loss_of, make
from scenarios import WIDTH, Stack, floats, message_of
from spawn import ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zshard
from zshard import FSDP
from zshard.wrap import CustomPolicy

FEW = [("full_shard", "shm"), ("full_shard", "c10d"), ("no_shard", "shm"), ("no_shard", "c10d")]
POLICY = CustomPolicy(lambda module: isinstance(module, nn.Linear | nn.LayerNorm))


def built(combination, build=Stack, **options):
    strategy, transport = combination
    return FSDP(
        make(build),
        process_group=options.pop("process_group", None) or own_group(),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=POLICY,
        timeout=60,
        **options,
    )


def joining(model, *others, **options):
    """join() of either library."""
    return model.join(*others, **options) if isinstance(model, FSDP) else model.join(**options)


def batch(step):
    return floats(dist.get_rank(), step)


def adamw(params, lr=1e-2):
    return torch.optim.AdamW(params, lr=lr)


# --- loops ----------------------------------------------------------------------------------------


def plain_loop(model, n, **options):
    optimizer = adamw(model.parameters())
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            optimizer.step()
    return [optimizer]


def two_optimizers(model, n, **options):
    params = list(model.parameters())
    first, second = adamw(params[:5]), torch.optim.SGD(params[5:], lr=1e-2, momentum=0.9)
    with joining(model, first, second, **options):
        for step in range(n):
            model.zero_grad()
            loss_of(model(batch(step))).backward()
            first.step()
            if step % 2:
                second.step()
    return [first, second]


def one_cycle(model, n, **options):
    optimizer = adamw(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            optimizer.step()
            schedule.step()
    return [optimizer]


def accumulating(model, n, **options):
    """Ranks may end within what they accumulate; their gradients of it count as none."""
    optimizer = adamw(model.parameters())
    with joining(model, optimizer, **options):
        for step in range(n):
            syncs = step % 3 == 2
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss_of(model(batch(step))).backward()
            if syncs:
                optimizer.step()
                optimizer.zero_grad()
    return [optimizer]


def evaluating(model, n, **options):
    optimizer = adamw(model.parameters())
    with joining(model, optimizer, **options):
        for step in range(n):
            model.train()
            loss_of(model(batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            inner = model if isinstance(model, FSDP) else model.module
            with torch.no_grad():
                inner(batch(9))
    return [optimizer]


def zeroing_in_place(model, n, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(batch(step))).backward()
            optimizer.step()
    return [optimizer]


def with_a_closure(model, n, **options):
    optimizer = adamw(model.parameters())

    def closure(step):
        optimizer.zero_grad()
        loss = loss_of(model(batch(step)))
        loss.backward()
        return loss

    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.step(lambda step=step: closure(step))
    return [optimizer]


def clipping(model, n, **options):
    """Both ways, and by the largest element, whose norm has the bits of DDP's."""
    optimizer = adamw(model.parameters())
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            if step % 2 and isinstance(model, FSDP):
                model.clip_grad_norm_(1e-3, norm_type=float("inf"))
            else:
                clip_grad_norm_(model.parameters(), 1e-3, norm_type=float("inf"))
            optimizer.step()
    return [optimizer]


def clipping_by_two(model, n, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    return [optimizer]


def scaling(model, n, **options):
    """The second batch's gradients are infinite: all ranks skip that step, and scale less."""
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with joining(model, optimizer, **options):
        for step in range(n):
            optimizer.zero_grad()
            loss = loss_of(model(batch(step))) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            if step % 2 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    model.scale = scaler.get_scale()
    return [optimizer]


LOOPS = (
    *(plain_loop, two_optimizers, one_cycle, accumulating, evaluating, zeroing_in_place),
    *(with_a_closure, clipping, scaling),
)


# --- comparing with DDP ---------------------------------------------------------------------------


def whole_state(optimizer):
    """Its whole state, by parameter and name."""
    found = {}
    for i, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            found[f"{i} {key}"] = value
    return found


def from_rank(value, rank):
    box = [value]
    dist.broadcast_object_list(box, rank)
    return box[0]


@passing_groups()
def compared(loop, combination, counts, close=False, by_all=True):
    """What differs between a loop's results and those of DDP, and between ranks."""
    rank = dist.get_rank()
    last = counts.index(max(counts))
    options = {"divide_by_initial_world_size": by_all}
    reference = ddp(make(Stack), process_group=own_group())
    theirs = loop(reference, counts[rank], **options)
    expected = from_rank([whole_state(each) for each in theirs], last)
    model = built(combination)
    ours = loop(model, counts[rank], **options)
    pairs = [(model.state_dict(), reference.module.state_dict())]
    pairs += [(whole_state(o), e) for o, e in zip(ours, expected, strict=True)]
    groups = [[{**g, "params": 0} for g in o.param_groups] for o in ours]
    said = [f"rank {rank}'s options"] if groups != from_rank(groups, last) else []
    if not close:
        return said + [each for pair in pairs for each in differences(*pair)]
    for mine, other in pairs:
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-5, atol=1e-7)
    return said


COUNTS = {2: [(5, 2), (0, 4)], 3: [(2, 5, 3), (4, 0, 0)]}


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_bits_are_those_of_ddps_join(pool2, loop, combination):
    for counts in COUNTS[2]:
        assert pool2.run(compared, loop, combination, counts) == [[]] * 2, counts


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@pytest.mark.parametrize("loop", [plain_loop, accumulating, clipping])
def test_three_ranks(pool3, loop, combination):
    for counts in COUNTS[3]:  # gloo adds three ranks' gradients in another order
        assert pool3.run(compared, loop, combination, counts, True) == [[]] * 3, counts


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_dividing_by_the_ranks_that_have_data(pool2, combination):
    for loop, counts in itertools.product((plain_loop, accumulating), COUNTS[2]):
        found = pool2.run(compared, loop, combination, counts, False, False)
        assert found == [[]] * 2, (loop, counts)


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_clipping_by_the_norm_of_order_two(pool2, combination):
    assert pool2.run(compared, clipping_by_two, combination, (1, 4), True) == [[]] * 2


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_even_and_no_data(pool2, combination):
    for counts in ((2, 2), (0, 0)):
        assert pool2.run(compared, plain_loop, combination, counts) == [[]] * 2, counts


@passing_groups()
def hybrid(transport, counts):
    rank = dist.get_rank()
    reference = ddp(make(Stack), process_group=own_group())
    plain_loop(reference, counts[rank])
    found = []
    for strategy in ("hybrid_shard", "hybrid_shard_zero2", "hybrid_full"):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = FSDP(
            make(Stack),
            strategy=strategy,
            transport=transport,
            device_mesh=mesh,
            auto_wrap_policy=POLICY,
            timeout=60,
        )
        plain_loop(model, counts[rank])
        for name, value in model.state_dict().items():
            expected = reference.module.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-7)
        found.append(strategy)
    return found


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@ranks(4)
def test_hybrid_strategies(pool, transport):
    strategies = ["hybrid_shard", "hybrid_shard_zero2", "hybrid_full"]
    assert pool.run(hybrid, transport, (3, 1, 0, 2)) == [strategies] * 4


# --- between joins --------------------------------------------------------------------------------


@passing_groups()
def epochs(combination, transport_counts):
    """Three epochs, with a scheduler and a scaler that are passed: all ranks go on as one."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    scaler = zshard.GradScaler(init_scale=8.0, growth_interval=2)
    for counts in transport_counts:
        with model.join(optimizer, schedule, scaler):
            for step in range(counts[rank]):
                optimizer.zero_grad()
                scaler.scale(loss_of(model(batch(step)))).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
    optimizer.zero_grad()
    loss_of(model(batch(0))).backward()  # and outside of it
    optimizer.step()
    return schedule.last_epoch, scaler.get_scale(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_schedulers_and_scalers_go_on_alike(pool2, combination):
    first, second = pool2.run(epochs, combination, [(1, 3), (4, 4), (2, 0)])
    assert first == second and first[0] == 3 + 4 + 2


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@passing_groups()
def buffers(combination, syncs, counts):
    rank = dist.get_rank()
    reference = ddp(make(Normed), syncs, process_group=own_group())
    plain_loop(reference, counts[rank])
    model = built(combination, Normed, forward_sync_buffers=syncs)
    plain_loop(model, counts[rank])
    theirs = reference.module.state_dict()
    return differences(model.state_dict(), theirs)


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@pytest.mark.parametrize("syncs", [True, False])
def test_buffers_are_those_of_ddp(pool2, combination, syncs):
    for counts in COUNTS[2]:
        found = pool2.run(buffers, combination, syncs, counts)
        assert found == [[]] * 2, counts


# --- errors ---------------------------------------------------------------------------------------


def train(model, optimizer, n, at=None, error=None):
    """At step `at`, something else than training."""
    for step in range(n):
        if step == at:
            error(model, optimizer)
        optimizer.zero_grad()
        loss_of(model(batch(step))).backward()
        optimizer.step()


def raises(model, optimizer):
    raise ValueError("boom")


def interrupts(model, optimizer):
    raise KeyboardInterrupt


class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


def raises_in_backward(model, optimizer):
    optimizer.zero_grad()
    hidden = model.blocks[0].register_forward_hook(lambda m, a, out: Bad.apply(out))
    try:
        loss_of(model(batch(0))).backward()
    finally:
        hidden.remove()


def raises_in_forward(model, optimizer):
    def fail(*args):
        raise ValueError("boom")

    hook = model.blocks[1].register_forward_pre_hook(fail)
    try:
        model(batch(0))
    finally:
        hook.remove()


@passing_groups()
def failing(combination, what, counts, raising, at):
    """What ranks raise if rank `raising` fails at a step."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model.parameters())
    try:
        with model.join(optimizer):
            train(model, optimizer, counts[rank], at if rank == raising else None, what)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("combination", FEW, ids="-".join)
@pytest.mark.parametrize("what", [raises, raises_in_forward, raises_in_backward, interrupts])
def test_an_exception_ends_join_on_all_ranks(pool3, combination, what):
    own = "KeyboardInterrupt" if what is interrupts else "ValueError: boom"
    for raising, at in ((0, 1), (0, 3), (2, 0)):
        found = pool3.run(failing, combination, what, (5, 2, 4), raising, at)
        for rank, said in enumerate(found):
            if rank == raising:
                assert own in said, found
            else:
                assert said.startswith("DivergenceError") and f"rank {raising} " in said, found


@passing_groups()
def terminating(combination, counts):
    model = built(combination)
    optimizer = adamw(model.parameters())

    def run():
        with model.join(optimizer, throw_on_early_termination=True):
            train(model, optimizer, counts[dist.get_rank()])

    first = message_of(run, RuntimeError)
    with model.join(optimizer, throw_on_early_termination=True):
        train(model, optimizer, 2)
    return first


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_throw_on_early_termination(pool2, combination):
    for said in pool2.run(terminating, combination, (3, 1)):
        assert "rank 1 has no more data" in said


@passing_groups()
def misused(combination):
    rank = dist.get_rank()
    model = built(combination)
    other = built(combination, process_group=own_group())
    optimizer, stranger = adamw(model.parameters()), adamw(other.parameters())
    plain = nn.Linear(2, 2)
    said = [
        message_of(lambda: model.join(stranger).__enter__(), ValueError),
        message_of(lambda: model.join(optimizer, optimizer).__enter__(), ValueError),
        message_of(lambda: model.join(plain).__enter__(), TypeError),
        message_of(lambda: model.join(3).__enter__(), TypeError),
        message_of(lambda: FSDP.join(plain, optimizer).__enter__(), TypeError),
        message_of(lambda: model.blocks[0].up.join().__enter__(), ValueError),
        message_of(
            lambda: model.join(optimizer, divide_by_initial_world_size=rank == 0).__enter__(),
            zshard.DivergenceError,
        ),
        message_of(lambda: model.join(*[optimizer][rank:]).__enter__(), zshard.DivergenceError),
        message_of(lambda: model.join(*[3][rank:]).__enter__(), TypeError),
    ]

    def nested():
        with model.join(optimizer), model.join(optimizer):
            pass

    def without():
        with model.join():
            train(model, optimizer, 1)

    said += [message_of(nested, RuntimeError), message_of(without, RuntimeError)]
    with model.join(optimizer, enable=False):
        train(model, optimizer, 2)
    with model.join(optimizer):
        train(model, optimizer, 2 - rank)
    return said


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_misuse_is_an_error_that_says_what_to_do(pool2, combination):
    expected = [
        "no parameter of this model",
        "the same AdamW twice",
        "got Linear",
        "got int",
        "got Linear: call model = FSDP",
        "call it on the outermost",
        "divide_by_initial_world_size is True on rank 0, but False on rank 1",
        "the list of optimizers is AdamW on rank 0, but none on rank 1",
        "got int",
        "join() is already active",
        "pass all optimizers of the model",
    ]
    for found in pool2.run(misused, combination):
        for said, words in zip(found, expected, strict=True):
            assert words in said


@passing_groups()
def only_one_rank(combination):
    model = built(combination)
    optimizer = adamw(model.parameters())

    def run():
        with model.join(optimizer) if dist.get_rank() == 0 else contextlib.nullcontext():
            train(model, optimizer, 2)

    return message_of(run, (zshard.DivergenceError, zshard.PeerTimeoutError, zshard.PeerError))


@pytest.mark.parametrize(
    "combination", [("full_shard", "shm"), ("full_shard", "c10d")], ids="-".join
)
def test_join_on_one_rank_only(pool2, combination):
    for said in pool2.run(only_one_rank, combination):
        assert "rank" in said


@passing_groups()
def collectives(combination):
    """What all ranks would have to do is refused on those that have data; then they go on."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = adamw(model.parameters())
    said = []
    with model.join(optimizer):
        for step in range(3 if rank == 0 else 1):
            train(model, optimizer, 1)
            if step == 1:
                said.append(message_of(lambda: zshard.named_norms(model, grads=True), RuntimeError))
                said.append(message_of(lambda: optimizer.state_dict(), RuntimeError))
    model.state_dict()
    return said


@pytest.mark.parametrize("combination", [("full_shard", "c10d")], ids="-".join)
def test_collectives_that_nobody_can_follow(pool2, combination):
    first, second = pool2.run(collectives, combination)
    assert all("after join()" in said for said in first) and second == []


@passing_groups()
def writing_by_hand(combination):
    """What ranks without data cannot know of: an error, not another model."""
    rank = dist.get_rank()
    model = built(combination)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def run():
        with model.join(optimizer):
            for step in range(4 if rank == 0 else 1):
                optimizer.zero_grad()
                loss_of(model(batch(step))).backward()
                optimizer.step()
                with torch.no_grad():
                    next(model.parameters()).mul_(0.9)

    return message_of(run, zshard.DivergenceError)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_writes_by_hand_that_nobody_can_follow(pool2, transport):
    for said in pool2.run(writing_by_hand, ("full_shard", transport)):
        assert "mul_()" in said or "rank" in said
