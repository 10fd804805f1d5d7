"""Misuse of deterministic="any-world" is an error with a remedy, or has no effect on the
numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from any_world_training import OPTIMIZERS, digest_of, loss_of, make, train_step
from nursery import fork_ranks
from rows import all_refused, all_rows
from spawn import RankPool, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision
from zshard.units.units import state_of

ANY: dict[str, Any] = {"deterministic": "any-world", "micro_batches": 4, "timeout": 20}
ONES = torch.ones(2, 4)


def small(net: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return FSDP(nn.Linear(4, 4) if net is None else net, **{**ANY, **options})


def run(model: Any, step: int = 0, x: torch.Tensor = ONES) -> None:
    for _ in model.micro_batches(step):
        model(x).sum().backward()


def stepper(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- arguments ------------------------------------------------------------------------------------

TWO = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"micro_batches": None}, "belong together: pass both"),
    ({"deterministic": None}, "belong together: pass both"),
    ({"deterministic": True}, "must be 'any-world' or None, got True"),
    ({"micro_batches": 0}, "at least 1, got 0"),
    ({"micro_batches": 10**6}, "micro_batches=1000000"),
    ({"wire": "bf16"}, "does not allow wire="),
    ({"mixed_precision": MixedPrecision(torch.bfloat16, torch.bfloat16)}, "omit reduce_dtype"),
    ({"net": nn.Linear(2, 2).bfloat16()}, "'weight' has torch.bfloat16: "),
    ({"net": TWO, "ignored_modules": [TWO[1]]}, "parameter '1.weight' is ignored, but trains"),
]


def test_arguments() -> None:
    rows: dict[str, Any] = {
        words: (lambda options=options: small(**options), ValueError, words)
        for options, words in ARGUMENTS
    }
    inner, plain = nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2)), FSDP(nn.Linear(2, 2))
    few = "100 samples are fewer than a step of 4 micro-batches of 26"
    named = "needs FSDP(model, deterministic='any-world'"
    all_refused(
        {
            **rows,
            "a float": (lambda: small(micro_batches=2.0), TypeError, "must be an int"),
            "inner units": (lambda: small(inner), ValueError, "same micro_batches to all FSDP"),
            "no model": (lambda: zshard.MicroBatchSampler(TWO, 9, 2), TypeError, "needs FSDP"),
            "few samples": (lambda: zshard.MicroBatchSampler(small(), 100, 26), ValueError, few),
            "another model": (lambda: next(plain.micro_batches(0)), RuntimeError, named),
            "a part": (lambda: next(make(2).blocks[0].micro_batches(0)), ValueError, "not the mod"),
        }
    )
    small(TWO, ignored_modules=[TWO[1].requires_grad_(False)])


@on_ranks(2, fresh=True)
def test_ranks_must_agree() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with pytest.raises(zshard.DivergenceError, match="micro_batches"):
        small(micro_batches=4 + rank)
    torch.set_num_threads(1 + rank)
    with pytest.raises(zshard.DivergenceError, match="OMP_NUM_THREADS"):
        small()
    torch.set_num_threads(1)
    with pytest.raises(ValueError, match="at least one for each of the 2 ranks"):
        small(micro_batches=1)
    os.environ["ZSHARD_HOST"] = f"host {rank}"
    with pytest.raises(NotImplementedError, match="pass transport='c10d'"):
        small(transport="hosts")


# --- a step ---------------------------------------------------------------------------------------


def test_a_step_needs_all_micro_batches() -> None:
    model = small()
    optimizer = stepper(model)
    before = digest_of(model)
    for index in model.micro_batches(0):
        model(ONES).sum().backward()
        if index == 2:
            break
    with pytest.raises(RuntimeError, match="after 3 of the 4 micro-batches"):
        optimizer.step()
    assert digest_of(model) == before
    assert all(param.grad is None for param in model.parameters())


def test_a_micro_batch_has_one_backward_and_a_step_new_gradients() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="a backward after that of the micro-batch"):
        for _ in model.micro_batches(0):
            model(ONES).sum().backward()
            model(ONES).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="micro-batch 0 of step 3 had no backward"):
        for _ in model.micro_batches(3):
            pass
    with pytest.raises(RuntimeError, match="outside of a micro-batch"):
        model(ONES).sum().backward()
    model.zero_grad()
    run(model)
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' has a .grad .* call zero_grad\(\)"):
        run(model, 1)


def unfrozen(within: bool) -> str:
    """Unfreeze a layer before the second step, or within it; return the weights' digest."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    model = small(net, auto_wrap_policy={nn.Linear})
    optimizer = stepper(model)
    for step in range(3):
        for index in model.micro_batches(step):
            if step == 1 and index % 2 == within:
                net[0].requires_grad_(True)
            model(torch.full((1, 4), float(index))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest_of(model)


def test_layers_are_unfrozen_between_steps(pool2: RankPool) -> None:
    assert pool2.run(unfrozen, False) == [unfrozen(within=False)] * 2
    for result in fork_ranks(unfrozen, 2, True):
        assert result.returncode and "were unfrozen within a step" in result.stderr


def test_buffers_must_not_change() -> None:
    model = small(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(RuntimeError, match=r"buffer '1\.running_mean' .* eval\(\) mode"):
        run(model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="was changed in a training forward"):
        model(ONES)  # the ranks would calibrate on other samples
    model[1].eval()
    run(model)
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        model(ONES)


class Writes(nn.Module):
    """Keeps an average of its inputs in a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        WRITES[self.way](self, 0.9 * self.ema + x.detach().mean(0))
        y: torch.Tensor = self.layer(x)
        return y


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "assigned": lambda model, ema: setattr(model, "ema", ema),
    "data": lambda model, ema: model.ema.data.copy_(ema),
    "data assigned": lambda model, ema: setattr(model.ema, "data", ema),
    "registered": lambda model, ema: model.register_buffer("late", ema),
    "deleted": lambda model, ema: model._buffers.pop("ema"),
    "same": lambda model, ema: setattr(model, "ema", model.ema.clone()),
}


@on_ranks(1, 2)
def test_all_ways_to_change_a_buffer_are_refused() -> None:
    """Afterwards the ranks train on, and shard another model."""
    with all_rows() as row:
        for way in WRITES:
            with row(way):
                model = small(Writes(way))
                if way == "same":
                    run(model)
                else:
                    name = "late" if way == "registered" else "ema"
                    words = f"buffer '{name}' was changed in a training forward"
                    with pytest.raises(RuntimeError, match=words):
                        run(model)
                model.way = "same"
                model.register_buffer("ema", torch.zeros(4))
                for each in (model, small()):
                    each.zero_grad()
                    run(each)
                    stepper(each).step()


def adversaries(together: bool) -> str:
    """Train a generator and a critic, with the micro-batches of both in the generator's step."""
    generator, critic = small(), small()
    for step in range(2):
        for _ in critic.micro_batches(step):
            with torch.no_grad():
                made = generator(torch.rand(2, 4))
            (critic(made).mean() - critic(torch.rand(2, 4)).mean()).backward()
        stepper(critic).step()
        critic.zero_grad()
        critic.requires_grad_(step == 0)
        loops = [generator.micro_batches(step), critic.micro_batches(step)]
        for _ in zip(*(loops if together else loops[:1]), strict=True):
            critic(generator(torch.rand(2, 4)).square()).mean().backward()
        critic.requires_grad_(True)
        stepper(generator).step()
        generator.zero_grad()
        critic.zero_grad()
    return digest_of(generator, digest_of(critic))


def test_two_models_in_one_backward_need_the_micro_batches_of_both(
    pool2: RankPool, pool3: RankPool
) -> None:
    digests = [*pool2.run(adversaries, True), *pool3.run(adversaries, True)]
    assert digests == [adversaries(True)] * 5
    for rank in fork_ranks(adversaries, 2, False):
        assert rank.returncode != 0 and "zip() the micro_batches(step) of all" in rank.stderr


def norms() -> dict[str, float]:
    model = make(6)
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    with pytest.raises(NotImplementedError, match="needs norm_type=2 or inf"):
        zshard.named_norms(model, 3.0)
    return {**zshard.named_norms(model, grads=True), **zshard.named_norms(model, float("inf"))}


def test_norms_by_name_do_not_depend_on_ranks(pool2: RankPool, pool3: RankPool) -> None:
    assert [*pool2.run(norms), *pool3.run(norms)] == [norms()] * 5


def test_what_is_not_supported() -> None:
    model = small()
    with pytest.raises(NotImplementedError, match=r"optimizer\.step"):
        model.optimizer_in_backward(zshard.AdamW(model.parameters()))
    run(model, x=torch.ones(1, 4))
    with pytest.raises(NotImplementedError, match="norm_type=2 or inf"):
        model.clip_grad_norm_(1.0, norm_type=1)
    assert float(model.clip_grad_norm_(1.0, norm_type=float("inf"))) == 1.0


# --- what happens in the middle -------------------------------------------------------------------


def disturbed(what: str, only_on: int | None = None) -> str:
    """Train four steps, with something in the middle of the third; return the weights' digest."""
    model = make(4)
    optimizer = OPTIMIZERS["adamw"](model)
    for step in range(4):
        if step == 2 and (only_on is None or dist.get_rank() == only_on):
            DISTURBANCES[what](model, step)
        train_step(model, optimizer, step)
    return digest_of(model)


def half_a_step(model: Any, step: int) -> None:
    for index in model.micro_batches(step):
        loss_of(model, step, index).backward()
        break


def raise_in_backward(model: Any, step: int) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[1].register_forward_hook(
        lambda *each: each[-1].register_hook(fails) and None
    )
    with pytest.raises(ValueError, match="on purpose"):
        for index in model.micro_batches(step):
            loss_of(model, step, index).backward()
    handle.remove()


def raise_in_the_loop(model: Any, step: int) -> None:
    with pytest.raises(KeyError):
        for index in model.micro_batches(step):
            loss_of(model, step, index).backward()
            raise KeyError(index)


def catch_and_continue(model: Any, step: int) -> None:
    with pytest.raises(RuntimeError, match="had no backward, or a failed one"):
        for index in model.micro_batches(step):
            loss_of(model, step, index)  # and what follows it raises


def evaluate(model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, step, 0)
    model.train()


DISTURBANCES: dict[str, Callable[[Any, int], None]] = {
    "nothing": lambda model, step: None,
    "half a step": half_a_step,
    "a backward raises": raise_in_backward,
    "the loop raises": raise_in_the_loop,
    "caught": catch_and_continue,
    "evaluation": evaluate,
}


def test_a_step_begins_anew(pool2: RankPool) -> None:
    expected = disturbed("nothing")
    digests = {what: pool2.run(disturbed, what) for what in DISTURBANCES}
    assert digests == {what: [expected] * 2 for what in DISTURBANCES}


@pytest.mark.parametrize("what", ["a backward raises", "the loop raises"])
@on_ranks(2, fresh=True)
def test_on_one_rank_alone_it_is_an_error(what: str) -> None:
    with pytest.raises((zshard.DivergenceError, zshard.PeerError)):
        disturbed(what, only_on=1)


# --- misuse without effect ------------------------------------------------------------------------


def in_some_way(way: str) -> str:
    model = make(4)
    optimizer = OPTIMIZERS["adamw"](model)
    for block in model.blocks if way.startswith("checkpoint") else ():
        recompute(block, reentrant="reentrant" in way)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**10, enabled=way == "scaler")
    for step in range(3):
        for index in model.micro_batches(step):
            if way == "no_sync":
                with model.no_sync():
                    loss_of(model, step, index).backward()
            else:
                scaler.scale(loss_of(model, step, index)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return digest_of(model)


def recompute(block: nn.Module, reentrant: bool) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)  # type: ignore[method-assign]


def test_ways_that_give_the_same_numbers(pool2: RankPool) -> None:
    ways = ("plain", "no_sync", "scaler", "checkpoint", "checkpoint, reentrant")
    digests = {way: [in_some_way(way), *pool2.run(in_some_way, way)] for way in ways}
    assert digests == {way: [digests["plain"][0]] * 3 for way in ways}


# --- checkpoints and data -------------------------------------------------------------------------


def test_a_checkpoint_fits_runs_of_its_kind_only(tmp_path: Path) -> None:
    zshard.save(tmp_path / "a", small())
    with pytest.raises(ValueError, match=r"saved with micro_batches=4, .* micro_batches=2"):
        zshard.load(tmp_path / "a", small(micro_batches=2))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ValueError, match=f"saved with OMP_NUM_THREADS={threads}"):
            zshard.load(tmp_path / "a", small())
    finally:
        torch.set_num_threads(threads)
    zshard.load(tmp_path / "a", small())
    zshard.load(tmp_path / "a", FSDP(nn.Linear(4, 4)))


def draw(first: int, shuffle: bool) -> list[dict[int, list[int]]]:
    """Return, for nine steps from `first` on, this rank's batches by their numbers."""
    model = small()
    sampler = zshard.MicroBatchSampler(model, 50, 3, shuffle=shuffle, seed=7)
    sampler.step = first
    batches = iter(sampler)
    own = state_of(model).unit.engine.leaves()
    return [{i: next(batches) for i in own} for _ in range(9)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_do_not_depend_on_ranks(pool2: RankPool, pool3: RankPool, shuffle: bool) -> None:
    def merged(results: list[Any]) -> list[dict[int, list[int]]]:
        steps: list[dict[int, list[int]]] = [{} for _ in results[0]]
        for result in results:
            for step, mine in zip(steps, result, strict=True):
                assert all(step.get(i, batch) == batch for i, batch in mine.items())
                step |= mine
        return steps

    whole = draw(0, shuffle)
    for pool in (pool2, pool3):
        assert merged(pool.run(draw, 0, shuffle)) == whole
    assert merged(pool3.run(draw, 4, shuffle))[:5] == whole[4:9]
    for epoch in (whole[:4], whole[4:8]):
        seen = [i for step in epoch for batch in step.values() for i in batch]
        assert len(seen) == len(set(seen)) == 48
    assert (whole[:4] == whole[4:8]) is not shuffle


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_random_numbers_do_not_depend_on_the_class_of_the_step(kind: Any) -> None:
    def drawn(step: Any) -> list[Any]:
        next(iter(small().micro_batches(step)))
        return [*torch.rand(2).tolist(), random.random(), np.random.random()]

    assert drawn(3) == drawn(kind(3)) != drawn(4)
