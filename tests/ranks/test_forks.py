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


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return batch(index)[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_forked_dataloader_workers_are_harmless(transport, tmp_path):
    """Two epochs with two forked workers each: return what differs from a plain model without
    any."""
    model = wrap(make_model(Misdeed("", "", tmp_path)), transport)
    plain = make_model(Misdeed("", "", tmp_path))
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


def fork_and_free(folder, transport):
    """A forked child tries to use the model, frees all it inherited, and exits; then training
    continues. Return the child's messages, and what is wrong in the model."""
    plain = make_model(Misdeed("", "", folder))
    model = wrap(make_model(Misdeed("", "", folder)), transport)
    optimizers = [zshard.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    said = ""
    for step in range(STEPS):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            step_once(net, optimizer, plain[2].misdeed, step)
        if step == 1:
            said = in_child(lambda: use_and_free(model))
    return said, differences(model.state_dict(), plain.state_dict())


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
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def use_and_free(model):
    try:
        model(batch(0))
        said = "nothing was raised"
    except RuntimeError as error:
        said = str(error)
    for module in list(model.modules()):
        module.__dict__.clear()
    zshard.ranks.transports._connections.clear()
    gc.collect()
    return said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_forked_child_is_refused_and_frees_nothing(pool2, tmp_path, transport):
    for rank, (said, wrong) in enumerate(pool2.run(fork_and_free, tmp_path, transport)):
        assert f"forked from rank {rank} cannot use its process group" in said
        assert wrong == []


def die(model, loss):
    """Exit as after an uncaught exception: an exit hook runs, and objects are freed."""
    try:
        loss.backward()
        said = "nothing was raised"
    except RuntimeError as error:
        said = str(error)
    sys.excepthook(ValueError, ValueError("the child dies"), None)
    zshard.ranks.transports._leave()
    return said + use_and_free(model)


def child_dies_midway(transport):
    """A child dies between forward and backward; then the ranks wait for each other so long that
    they check the store for messages. Return the child's messages."""
    model = wrap(make_model(Misdeed("", "", "")), transport, 30.0)
    loss = model(batch(0)).square().sum()
    said = in_child(lambda: die(model, loss))
    for rank in (0, 1):
        if dist.get_rank() == rank:
            time.sleep(2.5)
        loss.backward()
        loss = model(batch(0)).square().sum()
    return said


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_dying_child_does_not_report_for_its_parent(pool2, transport):
    for rank, said in enumerate(pool2.run(child_dies_midway, transport)):
        assert f"forked from rank {rank} cannot use its process group" in said


def fork_in_backward(steps):
    """Each layer's backward forks a child that frees the model, while a thread of the parent sums
    the earlier layers' gradients. Return how many children have exited, and what is wrong in the
    model."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    plain, ended = torch.nn.Sequential(*copy.deepcopy(layers)), []
    with hosts_of(2, 2) as group:
        options = {
            "auto_wrap_policy": {torch.nn.Linear},
            "transport": "hosts",
            "process_group": group,
        }
        model = FSDP(torch.nn.Sequential(*layers), **options)
        optimizer = zshard.SGD(model.parameters(), lr=0.1)
        expected = zshard.SGD(plain.parameters(), lr=0.1)
        for _ in range(steps):
            x = torch.ones(2, 1024)
            plain(x).sum().backward()
            for layer in model:
                x = layer(x)
                x.register_hook(lambda _: ended.append(in_child(lambda: free(model))))
            x.sum().backward()
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        return ended.count("freed"), differences(model.state_dict(), plain.state_dict())


def free(model):
    signal.alarm(20)
    use_and_free(model)
    return "freed"


def test_fork_while_a_parents_thread_works(pool4):
    assert pool4.run(fork_in_backward, 3) == [(12, [])] * 4
