"""Ranks that step, set or write different things: an error that names both, or correct.

One rank does something alone after a step that all have made; the next round, a checkpoint or the
end of the process reports it on all ranks. test_out_of_step.py has loads and failed steps,
test_allowed_differences.py allowed differences.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from groups import own_group
from models import COMBINATIONS, loss_of
from nursery import fork_ranks
from scenarios import built, floats, learn, message_of, whole
from spawn import on_ranks

import zshard

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
FEW = [("full_shard", "shm"), ("no_shard", "shm"), ("zero1", "c10d")]
"""For checks that do not depend on the combination, as the tests of one change show."""
STEPS = 3


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def check_divergence(action, words):
    """Fail unless the action reports on each rank that ranks diverged, in these words."""
    text = message_of(action, zshard.DivergenceError)
    assert re.search(words, text), text


def check_equal(state, tolerance=0.0):
    """Fail unless all ranks have this state."""
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    for name, value in states[0].items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=tolerance, equal_nan=True)


# --- one rank alone -------------------------------------------------------------------------------

# Rank 1's changes to (the optimizer, its settings, the parameters).
SETTINGS = {
    "lr": lambda _, group, params: group.update(lr=5e-4),
    "lr, a little": lambda _, group, params: group.update(lr=group["lr"] * (1 + 3e-6)),
    "state": lambda optimizer, *_: [each["step"].add_(5) for each in optimizer.state.values()],
    "one step more": lambda optimizer, *_: optimizer.step(),
}
WRITES = {
    "mul_": lambda _, group, params: params[0].mul_(0.5),
    "data": lambda _, group, params: params[-1].data.clamp_(-0.01, 0.01),
    "data assigned": lambda _, group, params: setattr(params[0], "data", params[0].data * 0.5),
    "where": lambda _, group, params: params[0].data.__setitem__(params[0].data > 0, 0.0),
    "gradient": lambda _, group, params: params[0].grad.mul_(2),
    "zero in place": lambda optimizer, *_: optimizer.zero_grad(set_to_none=False),
}
WORDS = {
    "lr": r"AdamW lr is 0\.001 on rank 0 and 0\.0005 on rank 1",
    "lr, a little": r"AdamW lr is 0\.001 on rank 0 and 0\.001000003 on rank 1",
    "state": "optimizer's state counts 2 steps on rank 0 and 7 on rank 1",
    "one step more": "rank 0 has made 1 optimizer steps, but rank 1 has made 2",
    "mul_": r"\(rank 0 made none; rank 1's last was mul_\(\) on 'first\.weight'\)",
    "data": r"rank 1's last was clamp_\(\) on 'second\.bias'",
    "data assigned": r"rank 1's last was an assignment to \.data on 'first\.weight'",
    "where": r"rank 1's last was __setitem__\(\) on 'first\.weight'",
    "gradient": r"rank 1's last was mul_\(\) on the gradient of 'first\.weight'\)",
    "zero in place": r"rank 1's last was zero_\(\) on the gradient of '",
}


@torch.no_grad()
def change_on_rank_1(optimizer, what):
    """Let rank 1 change something; return the words of the error."""
    if dist.get_rank() == 1:
        group = optimizer.param_groups[0]
        {**SETTINGS, **WRITES}[what](optimizer, group, group["params"])
    return WORDS[what]


def cases(changes, combinations, everywhere):
    """Return (combination, change): `everywhere` in all combinations, the others in a few."""
    few = [c for c in FEW if c in combinations]
    return [(c, what) for what in changes for c in (combinations if what in everywhere else few)]


def check_rank_1_alone(combination, what):
    """A round detects rank 1's change; then all load, and continue."""
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    saved = whole(model)
    words = change_on_rank_1(optimizer, what)

    def train_more():
        for step in range(1, STEPS):
            learn(model, optimizer, step)

    check_divergence(train_more, f"out of step.*{words}")
    optimizer = adamw(model)
    model.load_state_dict(saved)
    train_more()
    check_equal(whole(model))


@pytest.mark.parametrize(
    ("combination", "what"), cases(SETTINGS, COMBINATIONS, ("lr", "one step more"))
)
@on_ranks(2)
def test_step_on_one_rank_only_is_an_error(combination, what):
    check_rank_1_alone(combination, what)


@pytest.mark.parametrize(("combination", "what"), cases(WRITES, SHARDED, ("data", "gradient")))
@on_ranks(2)
def test_in_place_write_on_one_rank_only_is_an_error(combination, what):
    check_rank_1_alone(combination, what)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_settings_are_compared_in_optimizer_in_backward(combination):
    model = built(combination)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank(), 0))).backward()
    words = change_on_rank_1(optimizer, "lr")
    backward = lambda: loss_of(model(floats(dist.get_rank(), 1))).backward()  # noqa: E731
    check_divergence(lambda: [backward() for _ in range(1, STEPS)], words)


@pytest.mark.parametrize("combination", COMBINATIONS)
@on_ranks(2)
def test_backward_without_exchange_compares_nothing(combination):
    """Rank 1 skips a step; the next backward does not communicate. A load repairs that."""
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    saved = whole(model)
    learn(model, optimizer, 1, stepping=dist.get_rank() == 0)

    def train_more():
        with model.no_sync():
            loss_of(model(floats(0))).backward()
        learn(model, optimizer, 2)

    check_divergence(train_more, "rank 0 has made 2 optimizer steps")
    model.load_state_dict(saved)
    optimizer = adamw(model)
    learn(model, optimizer, 3)
    learn(model, optimizer, 4)
    check_equal(whole(model))


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"])
@on_ranks(2)
def test_two_models_on_one_transport(combination):
    """A generator and a discriminator with an optimizer each; one steps more often."""
    group = own_group()
    models = [built(combination, process_group=group) for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    for step in range(STEPS):
        for i in (0, 1, 1):
            learn(models[i], optimizers[i], step)
    change_on_rank_1(optimizers[1], "lr")
    learn(models[1], optimizers[1], 0)
    learn(models[0], optimizers[0], 0)
    words = "AdamW #2 lr is 0.001 on rank 0 and 0.0005 on rank 1"
    check_divergence(lambda: learn(models[1], optimizers[1], 1), words)


# --- after the last round -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["one step more", "lr"])
@pytest.mark.parametrize("combination", FEW)
@on_ranks(2)
def test_save_compares(combination, what, tmp_path):
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    words = change_on_rank_1(optimizer, what)
    if what == "lr":
        optimizer.step()
    check_divergence(lambda: zshard.save(tmp_path / "saved", model, optimizer), words)
    assert not list(tmp_path.iterdir())


HELD = []  # like a script's global variables


def trains_to_the_end(combination, what):
    """Train; in the last step rank 1 does something else. Then the process ends."""
    dist.init_process_group("gloo")
    model = built(combination)
    optimizer = adamw(model)
    HELD.extend((model, optimizer))
    for step in range(2):
        last = step == 1 and dist.get_rank() == 1
        if step == 1 and what == "lr":
            change_on_rank_1(optimizer, what)
        learn(model, optimizer, step, stepping=not (last and what == "skip"))
    if what == "best":  # all load, and rank 0 evaluates
        model.load_state_dict(model.state_dict())
        if dist.get_rank() == 0:
            model(floats(0))
    if what == "told":
        if dist.get_rank() == 1:
            optimizer.step()
        check_divergence(lambda: loss_of(model(floats(0))).backward(), "optimizer steps")
    print("trained", flush=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "combination", [("full_shard", "shm"), ("no_shard", "shm"), ("full_shard", "c10d")]
)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lr", WORDS["lr"]),
        ("skip", "rank 0 has made 2 optimizer steps, but rank 1 has made 1"),
    ],
)
def test_last_step_is_compared_at_exit(combination, what, words):
    ended = fork_ranks(trains_to_the_end, 2, combination, what)
    assert [rank.stdout.count("trained") for rank in ended] == [1, 1]
    assert any(rank.returncode != 0 for rank in ended)
    text = "".join(rank.stderr for rank in ended)
    assert re.search(f"zshard: DivergenceError at the end of rank [01]: .*{words}", text)


QUIET = [
    (("full_shard", "shm"), ""),
    (("full_shard", "shm"), "told"),
    (("no_shard", "c10d"), "best"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("combination", "what"), QUIET)
def test_normal_exit_is_silent(combination, what):
    """Everything succeeded, or the script has caught the error already."""
    for rank in fork_ranks(trains_to_the_end, 2, combination, what, check=True):
        assert "zshard:" not in rank.stderr
