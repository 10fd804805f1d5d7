"""Ranks that step, set or write different things: an error that names both, or correct.

One rank does something alone after a step that all have made; the next round, a checkpoint or the
end of the process reports it on all ranks. Differences that are allowed cause no error.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import COMBINATIONS, loss_of, make
from nursery import fork_ranks
from scenarios import Wide, floats, learn, whole

import zshard
from zshard import FSDP

SHARDED = [c for c in COMBINATIONS if c[0] != "no_shard"]
FEW = [("full_shard", "shm"), ("no_shard", "shm"), ("zero1", "c10d")]
"""Where what is compared does not hang on the combination, which the tests of one change show."""
STEPS = 3


def built(combination, group=None, **options):
    strategy, transport = combination
    return FSDP(
        make(Wide),
        process_group=group or own_group(),
        strategy=strategy,
        transport=transport,
        timeout=20,
        **options,
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


# --- one rank alone -------------------------------------------------------------------------------


def lr(model, optimizer):
    optimizer.param_groups[0]["lr"] = 5e-4


def a_little(model, optimizer):
    optimizer.param_groups[0]["lr"] *= 1 + 3e-6


def betas(model, optimizer):
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def scheduler(model, optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1).step()


def step_state(model, optimizer):
    for state in optimizer.state.values():
        state["step"] += 5


def one_step_more(model, optimizer):
    optimizer.step()


def write(model, optimizer):
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def write_data(model, optimizer):
    list(model.parameters())[-1].data.clamp_(-0.01, 0.01)


def assign_data(model, optimizer):
    param = next(model.parameters())
    param.data = param.data * 0.5


def write_lists(model, optimizer):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def write_out(model, optimizer):
    param = next(model.parameters())
    with torch.no_grad():
        torch.mul(param, 0.5, out=param.data)


def write_where(model, optimizer):
    param = next(model.parameters()).data
    param[param > 0] = 0.0


def write_gradient(model, optimizer):
    next(model.parameters()).grad.mul_(2)


def zero_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


SETTINGS = {
    lr: r"AdamW lr is 0\.001 on rank 0 and 0\.0005 on rank 1",
    a_little: r"AdamW lr is 0\.001 on rank 0 and 0\.001000003 on rank 1",
    betas: r"AdamW betas is \(0\.9, 0\.999\) on rank 0 and \(0\.5, 0\.999\) on rank 1",
    scheduler: r"AdamW lr is 0\.001 on rank 0 and 0\.0001 on rank 1",
    step_state: "optimizer's state counts 2 steps on rank 0 and 7 on rank 1",
}
COUNTS = {one_step_more: "rank 0 has made 1 optimizer steps, but rank 1 has made 2"}
WRITES = {
    write: r"\(rank 0 made none; rank 1's last was mul_\(\) on 'first\.weight'\)",
    write_data: r"rank 1's last was clamp_\(\) on 'second\.bias'",
    assign_data: r"rank 1's last was an assignment to \.data on 'first\.weight'",
    write_lists: r"rank 1's last was _foreach_mul_\(\) on 'second\.bias'",
    write_out: r"rank 1's last was mul\(\) on 'first\.weight'",
    write_where: r"rank 1's last was __setitem__\(\) on 'first\.weight'",
    write_gradient: r"rank 1's last was mul_\(\) on the gradient of 'first\.weight'\)",
    zero_in_place: r"rank 1's last was zero_\(\) on the gradient of '",
}


@passing_groups()
def rank_1_alone(combination, what):
    """Return whether a round detects what rank 1 has done, and the message; then all load, and
    continue."""
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    saved = whole(model)
    if dist.get_rank() == 1:
        what(model, optimizer)
    with pytest.raises(zshard.DivergenceError) as caught:
        for step in range(1, STEPS):
            learn(model, optimizer, step)
    optimizer = adamw(model)
    model.load_state_dict(saved)
    for step in range(1, STEPS):
        learn(model, optimizer, step)
    return str(caught.value), whole(model)


def all_equal(states, tolerance=0.0):
    first, *others = states
    return all(
        torch.allclose(first[name], other[name], rtol=0, atol=tolerance)
        for other in others
        for name in first
    )


def check(pool, combination, what, words):
    results = pool.run(rank_1_alone, combination, what)
    for said, _ in results:
        assert "out of step" in said and re.search(words, said), said
    assert all_equal([state for _, state in results])


def cases(changes, combinations, everywhere):
    """Return (combination, change): `everywhere` in all combinations, the others in a few."""
    few = [c for c in FEW if c in combinations]
    return [(c, what) for what in changes for c in (combinations if what in everywhere else few)]


@pytest.mark.parametrize(
    ("combination", "what"), cases([*SETTINGS, *COUNTS], COMBINATIONS, (lr, one_step_more))
)
def test_step_on_one_rank_only_is_an_error(pool2, combination, what):
    check(pool2, combination, what, {**SETTINGS, **COUNTS}[what])


@pytest.mark.parametrize(
    ("combination", "what"), cases(WRITES, SHARDED, (write_data, write_gradient))
)
def test_in_place_write_on_one_rank_only_is_an_error(pool2, combination, what):
    check(pool2, combination, what, WRITES[what])


@passing_groups()
def steps_in_backward(combination):
    model = built(combination)
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    model.optimizer_in_backward(optimizer)
    loss_of(model(floats(dist.get_rank(), 0))).backward()
    if dist.get_rank() == 1:
        lr(model, optimizer)
    with pytest.raises(zshard.DivergenceError) as caught:
        for step in range(1, STEPS):
            loss_of(model(floats(dist.get_rank(), step))).backward()
    return str(caught.value)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_settings_are_compared_in_optimizer_in_backward(pool2, combination):
    for said in pool2.run(steps_in_backward, combination):
        assert re.search(SETTINGS[lr], said), said


@passing_groups()
def skipped_before_no_sync(combination):
    """Rank 1 skips a step; the next backward does not communicate. A load repairs that."""
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    saved = whole(model)
    learn(model, optimizer, 1, stepping=dist.get_rank() == 0)
    with pytest.raises(zshard.DivergenceError) as caught:
        with model.no_sync():
            loss_of(model(floats(0))).backward()
        learn(model, optimizer, 2)
    model.load_state_dict(saved)
    optimizer = adamw(model)
    learn(model, optimizer, 3)
    learn(model, optimizer, 4)
    return str(caught.value), whole(model)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_backward_without_exchange_compares_nothing(pool2, combination):
    results = pool2.run(skipped_before_no_sync, combination)
    for said, _ in results:
        assert "rank 0 has made 2 optimizer steps" in said
    assert all_equal([state for _, state in results])


@passing_groups()
def two_models(combination):
    """A generator and a discriminator with an optimizer each, on one transport; one steps more
    often."""
    group = own_group()
    models = [built(combination, group), built(combination, group)]
    optimizers = [adamw(model) for model in models]
    for step in range(STEPS):
        for i in (0, 1, 1):
            optimizers[i].zero_grad()
            loss_of(models[i](floats(dist.get_rank(), step))).backward()
            optimizers[i].step()
    if dist.get_rank() == 1:
        lr(models[1], optimizers[1])
    learn(models[1], optimizers[1], 0)
    learn(models[0], optimizers[0], 0)
    with pytest.raises(zshard.DivergenceError) as caught:
        learn(models[1], optimizers[1], 1)
    return str(caught.value)


@pytest.mark.parametrize("combination", [c for c in COMBINATIONS if c[1] == "shm"])
def test_two_models_on_one_transport(pool2, combination):
    for said in pool2.run(two_models, combination):
        assert "AdamW #2 lr is 0.001 on rank 0 and 0.0005 on rank 1" in said, said


# --- after the last round -------------------------------------------------------------------------


@passing_groups()
def saved_after(combination, what, folder):
    model = built(combination)
    optimizer = adamw(model)
    learn(model, optimizer, 0)
    if dist.get_rank() == 1:
        what(model, optimizer)
    if what is not one_step_more:
        optimizer.step()
    with pytest.raises(zshard.DivergenceError) as caught:
        zshard.save(f"{folder}/saved", model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize("what", [one_step_more, lr], ids=lambda f: f.__name__)
@pytest.mark.parametrize("combination", FEW)
def test_save_compares(pool2, combination, what, tmp_path):
    for said in pool2.run(saved_after, combination, what, str(tmp_path)):
        assert re.search({**SETTINGS, **COUNTS}[what], said), said
    assert not list(tmp_path.iterdir())


END = """
import sys, torch, zshard
from zshard import FSDP
import torch.distributed as dist

dist.init_process_group("gloo")
strategy, transport, what = sys.argv[1:]
model = FSDP(torch.nn.Linear(64, 64), strategy=strategy, transport=transport, timeout=20)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, 64)).sum().backward()
    last = step == 1 and dist.get_rank() == 1
    if last and what == "lr":
        optimizer.param_groups[0]["lr"] = 5e-4
    if not (last and what == "skip"):
        optimizer.step()
if what == "best":  # all load, and rank 0 evaluates
    model.load_state_dict(model.state_dict())
    if dist.get_rank() == 0:
        model(torch.ones(4, 64))
if what == "told":
    if dist.get_rank() == 1:
        optimizer.step()
    try:
        model(torch.ones(4, 64)).sum().backward()
    except zshard.DivergenceError:
        print("caught")
print("trained", flush=True)
"""


def run_to_the_end(folder: Path, combination: tuple[str, str], what: str):
    script = folder / "train.py"
    script.write_text(END)
    return fork_ranks(script, 2, *combination, what, timeout=120)


ENDS = [("full_shard", "shm"), ("no_shard", "shm"), ("full_shard", "c10d")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("combination", ENDS)
@pytest.mark.parametrize(
    ("what", "words"),
    [("lr", SETTINGS[lr]), ("skip", "rank 0 has made 2 optimizer steps, but rank 1 has made 1")],
)
def test_last_step_is_compared_at_exit(tmp_path, combination, what, words):
    ended = run_to_the_end(tmp_path, combination, what)
    assert [rank.stdout.count("trained") for rank in ended] == [1, 1]
    assert any(rank.returncode != 0 for rank in ended)
    said = "".join(rank.stderr for rank in ended)
    assert re.search(f"zshard: DivergenceError at the end of rank [01]: .*{words}", said)


QUIET = [
    (("full_shard", "shm"), ""),
    (("full_shard", "shm"), "told"),
    (("no_shard", "c10d"), "best"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("combination", "what"), QUIET)
def test_normal_exit_is_silent(tmp_path, combination, what):
    """Everything succeeded, or the script has caught the error already."""
    for rank in run_to_the_end(tmp_path, combination, what):
        assert rank.returncode == 0 and "zshard:" not in rank.stderr
        assert rank.stdout.count("caught") == (1 if what == "told" else 0)
