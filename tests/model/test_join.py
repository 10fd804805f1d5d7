"""model.join(): uneven numbers of batches give DDP's parameters and Adam state; misuse is an error.

Each loop is written once and run by a sharded model and by DDP, each within its own join(). Under
DDP, the ranks that had data last are authoritative, so their state is compared.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import COMBINATIONS, ddp, differences, loss_of, make
from scenarios import WIDTH, Stack, floats
from spawn import ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

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
    """Ranks may run out of data while they accumulate; those gradients count as zero."""
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
    """Both ways, and by the largest element, whose norm is bit-identical to DDP's."""
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
    """The second batch's gradients are infinite: all ranks skip that step, and reduce the scale."""
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with joining(model, optimizer, scaler, **options):
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
    """Return its full state, by parameter and name."""
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
    """Return what differs between a loop's results and those of DDP, and between ranks."""
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


@pytest.mark.sampled(len(LOOPS))
@pytest.mark.parametrize("counts", COUNTS[2])
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("loop", LOOPS)
def test_join_is_bit_identical_to_ddp(pool2, loop, combination, counts):
    assert pool2.run(compared, loop, combination, counts) == [[]] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("counts", COUNTS[3])
@pytest.mark.parametrize("combination", FEW, ids="-".join)
@pytest.mark.parametrize("loop", [plain_loop, accumulating, clipping])
def test_three_ranks(pool3, loop, combination, counts):
    """gloo adds three ranks' gradients in another order."""
    assert pool3.run(compared, loop, combination, counts, True) == [[]] * 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("counts", COUNTS[2])
@pytest.mark.parametrize("loop", [plain_loop, accumulating])
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_division_by_ranks_with_data(pool2, combination, loop, counts):
    assert pool2.run(compared, loop, combination, counts, False, False) == [[]] * 2


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_clipping_by_the_norm_of_order_two(pool2, combination):
    assert pool2.run(compared, clipping_by_two, combination, (1, 4), True) == [[]] * 2


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_equal_batches_and_no_data(pool2, combination):
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
    """Three epochs, with a scheduler and a scaler that are passed: all ranks stay in the same
    state."""
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
def test_schedulers_and_scalers_stay_in_step(pool2, combination):
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
def test_buffers_match_ddp(pool2, combination, syncs):
    for counts in COUNTS[2]:
        found = pool2.run(buffers, combination, syncs, counts)
        assert found == [[]] * 2, counts


# --- models ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.how = forward
        self.a, self.b = nn.Linear(WIDTH, 64), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x, rank=None):
        rank = dist.get_rank() if rank is None else rank
        return self.d(torch.tanh(self.how(self, torch.tanh(self.a(x)), rank)))


def in_order(net, x, rank):
    return net.c(torch.tanh(net.b(x)))


def one_expert(net, x, rank):
    """Each rank uses another submodule."""
    return (net.b if rank % 2 else net.c)(x)


def checkpointed(net, x, rank):
    """A unit is recomputed, and used, twice in a backward."""
    for layer in (net.b, net.b, net.c):
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def expected_of(how, counts, freeze=False):
    """Return what one process computes from all ranks' batches."""
    net = make(lambda: Net(how))
    net.b.requires_grad_(not freeze)
    optimizer = adamw(net.parameters())
    for step in range(max(counts)):
        sums: list = [None for _ in net.parameters()]
        for rank in (r for r, n in enumerate(counts) if step < n):
            optimizer.zero_grad()
            loss_of(net(floats(rank, step), rank)).backward()
            for i, param in enumerate(net.parameters()):
                if param.grad is not None:
                    mean = param.grad / len(counts)
                    sums[i] = mean if sums[i] is None else sums[i] + mean
        for total, param in zip(sums, net.parameters(), strict=True):
            param.grad = total  # None: no rank has used it
        optimizer.step()
    return net.state_dict()


@passing_groups()
def uneven_net(how, combination, counts, frozen=False, thaws=False):
    strategy, transport = combination
    net = make(lambda: Net(how))
    net.b.requires_grad_(not (frozen or thaws))
    model = FSDP(
        net,
        process_group=own_group(),
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=POLICY,
        timeout=60,
    )
    model.b.requires_grad_(not frozen)
    plain_loop(model, counts[dist.get_rank()])
    expected = expected_of(how, counts, frozen)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    plain_loop(model, 2)  # evenly: all ranks gather in one order again


@pytest.mark.parametrize("combination", FEW, ids="-".join)
def test_models_with_unusual_gathers_and_reductions(pool3, combination):
    counts = (3, 0, 2)
    pool3.run(uneven_net, checkpointed, combination, counts)
    pool3.run(uneven_net, in_order, combination, counts, True)
    pool3.run(uneven_net, in_order, combination, counts, False, True)
    if combination != ("full_shard", "c10d"):  # it requires all units in one order
        pool3.run(uneven_net, one_expert, combination, (4, 2, 1))
