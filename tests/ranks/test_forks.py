"""Ranks that fork: DataLoader workers and other children do not affect training."""

import copy
import gc
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from compare import differences
from groups import hosts_of
from misdeeds import STEPS, Misdeed, batch, check_survivors, make_model, step_once, train, wrap
from models import TRANSPORTS
from nursery import fork_ranks
from spawn import on_ranks

import zshard
from zshard import FSDP


def harmless():
    """Return the model of misdeeds.py on a rank that does nothing wrong."""
    return make_model(Misdeed("", "", ""))


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return batch(index)[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_forked_dataloader_workers_are_harmless(transport):
    """Two epochs with two forked workers each are those of a plain model without any."""
    model, plain = wrap(harmless(), transport), harmless()
    for net, workers in ((model, 2), (plain, 0)):
        optimizer = zshard.SGD(net.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=3, num_workers=workers)
        for _ in range(2):
            for x in loader:
                net(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert differences(model.state_dict(), plain.state_dict()) == []


def kill_beside_workers(folder):
    """As `train`, but the last rank has forked workers, which outlive it for a while."""
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    workers = iter(loader)
    next(workers)
    return train("kill", "forward", folder, "shm")


def test_rank_killed_with_workers_is_named(tmp_path):
    results = fork_ranks(kill_beside_workers, 2, tmp_path)
    assert results[-1].returncode == -signal.SIGKILL
    check_survivors(results, ("PeerError",), "rank 1")


def in_child(function):
    """Return the result of `function` in a forked child that exits without cleaning up."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, function().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def refusal(call):
    """Return the text of the RuntimeError that a call raises, or that there was none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def free(model):
    """Free all that a child has inherited."""
    for module in list(model.modules()):
        module.__dict__.clear()
    zshard.ranks.transports._connections.clear()
    gc.collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_forked_child_is_refused_and_frees_nothing(transport):
    """It tries to use the model, frees all it inherited, and exits; then training continues."""
    model, plain = wrap(harmless(), transport), harmless()
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]

    def use_and_free():
        text = refusal(lambda: model(batch(0)))
        free(model)
        return text

    for step in range(STEPS):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            step_once(net, optimizer, plain[2].misdeed, step)
        if step == 1:
            text = in_child(use_and_free)
    assert f"forked from rank {dist.get_rank()} cannot use its process group" in text
    assert differences(model.state_dict(), plain.state_dict()) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_dying_child_does_not_report_for_its_parent(transport):
    """A child dies between forward and backward; then the ranks wait for each other so long that
    they check the store for messages."""
    model = wrap(harmless(), transport, 30.0)
    loss = model(batch(0)).square().sum()

    def die():
        """Exit as after an uncaught exception: an exit hook runs, and objects are freed."""
        text = refusal(loss.backward)
        sys.excepthook(ValueError, ValueError("the child dies"), None)
        zshard.ranks.transports._leave()
        free(model)
        return text

    text = in_child(die)
    for rank in (0, 1):
        if dist.get_rank() == rank:
            time.sleep(2.5)
        loss.backward()
        loss = model(batch(0)).square().sum()
    assert f"forked from rank {dist.get_rank()} cannot use its process group" in text


@on_ranks(4)
def test_fork_while_a_parents_thread_works():
    """Each layer's backward forks a child that frees the model, while a thread of the parent sums
    the earlier layers' gradients."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    plain, ends = torch.nn.Sequential(*copy.deepcopy(layers)), []

    def free_soon():
        signal.alarm(20)
        free(model)
        return "freed"

    with hosts_of(2, 2) as group:
        options = {"auto_wrap_policy": {torch.nn.Linear}, "process_group": group}
        model = FSDP(torch.nn.Sequential(*layers), transport="hosts", **options)
        optimizers = [zshard.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for _ in range(3):
            x = torch.ones(2, 1024)
            plain(x).sum().backward()
            for layer in model:
                x = layer(x)
                x.register_hook(lambda _: ends.append(in_child(free_soon)))
            x.sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        assert ends == ["freed"] * 12
        assert differences(model.state_dict(), plain.state_dict()) == []
