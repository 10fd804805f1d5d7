"""What scripts do wrong with deterministic="any-world": each is an error that names the remedy, or
has no effect on the numbers.
"""

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
from spawn import RankPool, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP
from zshard.units.units import state_of


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    given = {"deterministic": "any-world", "micro_batches": 4, "timeout": 20} | options
    return FSDP(nn.Linear(4, 4), **given)


def stepper(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"micro_batches": None}, ValueError, "belong together: pass both"),
        ({"deterministic": None}, ValueError, "belong together: pass both"),
        ({"deterministic": True}, ValueError, "must be 'any-world' or None, got True"),
        ({"micro_batches": 0}, ValueError, "at least 1, got 0"),
        ({"micro_batches": 2.0}, TypeError, "must be an int"),
        ({"micro_batches": 10**6}, ValueError, "micro_batches=1000000"),
        ({"wire": "bf16"}, ValueError, "does not allow wire="),
        (
            {"mixed_precision": zshard.MixedPrecision(torch.bfloat16, torch.bfloat16)},
            ValueError,
            "omit reduce_dtype",
        ),
    ],
)
def test_arguments(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small(**given)


def test_low_precision_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'weight' has torch\.bfloat16: .*MixedPrecision"):
        FSDP(nn.Linear(2, 2).bfloat16(), deterministic="any-world", micro_batches=1)


def test_inner_units_need_the_same_option() -> None:
    model = nn.Sequential(FSDP(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="same micro_batches to all FSDP"):
        FSDP(model, deterministic="any-world", micro_batches=1)


def refuse_differences() -> None:
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


def test_ranks_must_agree() -> None:
    fork_ranks(in_a_group, 2, refuse_differences, check=True)


def in_a_group(function: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    function()


# --- a step ---------------------------------------------------------------------------------------


def test_a_step_needs_all_micro_batches() -> None:
    model = small()
    optimizer = stepper(model)
    before = digest_of(model)
    for index in model.micro_batches(0):
        model(torch.ones(1, 4)).sum().backward()
        if index == 2:
            break
    with pytest.raises(RuntimeError, match="after 3 of the 4 micro-batches"):
        optimizer.step()
    assert digest_of(model) == before
    assert all(param.grad is None for param in model.parameters())


def test_a_micro_batch_has_one_backward() -> None:
    model = small()
    with pytest.raises(RuntimeError, match="a backward after that of the micro-batch"):
        for _ in model.micro_batches(0):
            model(torch.ones(1, 4)).sum().backward()
            model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="micro-batch 0 of step 3 had no backward"):
        for _ in model.micro_batches(3):
            pass
    with pytest.raises(RuntimeError, match="outside of a micro-batch"):
        model(torch.ones(1, 4)).sum().backward()


def unfrozen(within: bool) -> str:
    """Unfreeze a layer before the second step, or within it; return the weights' digest."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    model: Any = FSDP(net, auto_wrap_policy={nn.Linear}, deterministic="any-world", micro_batches=4)
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
    expected = unfrozen(within=False)
    assert pool2.run(unfrozen, False) == [expected] * 2
    for result in fork_ranks(unfrozen, 2, True):
        assert result.returncode and "were unfrozen within a step" in result.stderr


def test_gradients_must_be_cleared() -> None:
    model = small()
    for _ in model.micro_batches(0):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'(weight|bias)' has a .grad .* call zero_grad\(\)"):
        for _ in model.micro_batches(1):
            model(torch.ones(1, 4)).sum().backward()


def test_other_models_have_no_micro_batches() -> None:
    with pytest.raises(RuntimeError, match=r"needs FSDP\(model, deterministic='any-world'"):
        next(FSDP(nn.Linear(2, 2)).micro_batches(0))
    with pytest.raises(ValueError, match="not the model"):
        next(make(2).blocks[0].micro_batches(0))


def test_buffers_must_not_change() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model: Any = FSDP(net, deterministic="any-world", micro_batches=2)
    with pytest.raises(RuntimeError, match=r"buffer '1\.running_mean' .* eval\(\) mode"):
        for _ in model.micro_batches(0):
            model(torch.rand(3, 4)).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="was changed in a training forward"):
        model(torch.rand(3, 4))  # the ranks would calibrate on other samples
    model[1].eval()
    for _ in model.micro_batches(0):
        model(torch.rand(3, 4)).sum().backward()
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.rand(3, 4))


class Writes(nn.Module):
    """Keeps an average of its inputs in a buffer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ema = 0.9 * self.ema + x.detach().mean(0)
        if self.way == "assigned":
            self.ema = ema
        elif self.way == "data":
            self.ema.data.copy_(ema)
        elif self.way == "data assigned":
            self.ema.data = ema
        elif self.way == "registered":
            self.register_buffer("late", ema)
        elif self.way == "deleted":
            self._buffers.pop("ema")
        elif self.way == "same":
            self.ema = self.ema.clone()
        y: torch.Tensor = self.layer(x)
        return y


def writes(way: str) -> bool:
    """Return whether the forward is refused; then the ranks train on, and shard another model."""
    torch.manual_seed(0)
    model: Any = FSDP(Writes(way), deterministic="any-world", micro_batches=4, timeout=20)
    refused = False
    try:
        for index in model.micro_batches(0):
            model(torch.full((2, 4), 1.0 + index)).sum().backward()
    except RuntimeError as error:
        name = "late" if way == "registered" else "ema"
        assert f"buffer '{name}' was changed in a training forward" in str(error)
        refused = True
    model.way = "same"
    model.register_buffer("ema", torch.zeros(4))
    for each in (model, small()):
        each.zero_grad()
        for _ in each.micro_batches(0):
            each(torch.ones(2, 4)).sum().backward()
        stepper(each).step()
    return refused


@on_ranks(1, 2)
def test_all_ways_to_change_a_buffer_are_refused() -> None:
    for way in ("assigned", "data", "data assigned", "registered", "deleted", "same"):
        assert writes(way) == (way != "same"), way


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
    assert (
        len({adversaries(True), *pool2.run(adversaries, True), *pool3.run(adversaries, True)}) == 1
    )
    for rank in fork_ranks(adversaries, 2, False):
        assert rank.returncode != 0 and "zip() the micro_batches(step) of all" in rank.stderr


def test_ignored_parameters_must_not_train() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options: Any = {"deterministic": "any-world", "micro_batches": 4, "ignored_modules": [net[1]]}
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is ignored, but trains"):
        FSDP(net, **options)
    net[1].requires_grad_(False)
    FSDP(net, **options)


def norms() -> dict[str, float]:
    model = make(6)
    for index in model.micro_batches(0):
        loss_of(model, 0, index).backward()
    with pytest.raises(NotImplementedError, match="needs norm_type=2 or inf"):
        zshard.named_norms(model, 3.0)
    return {**zshard.named_norms(model, grads=True), **zshard.named_norms(model, float("inf"))}


def test_norms_by_name_do_not_depend_on_ranks() -> None:
    (alone,) = (each.value for each in fork_ranks(norms, 1, check=True))
    for world in (2, 3):
        found = fork_ranks(norms, world, check=True)
        assert [each.value for each in found] == [alone] * world


def test_what_is_not_supported() -> None:
    model = small()
    with pytest.raises(NotImplementedError, match=r"optimizer\.step"):
        model.optimizer_in_backward(zshard.AdamW(model.parameters()))
    for _ in model.micro_batches(0):
        model(torch.ones(1, 4)).sum().backward()
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
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ValueError("on purpose")

    handle = model.blocks[1].register_forward_hook(lambda *args: Fails.apply(args[-1]))
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
            try:
                loss_of(model, step, index)
                raise KeyError(index)
            except KeyError:
                continue


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
    found = {what: pool2.run(disturbed, what) for what in DISTURBANCES}
    assert found == {what: [expected] * 2 for what in DISTURBANCES}


@pytest.mark.parametrize("what", ["a backward raises", "the loop raises"])
def test_on_one_rank_alone_it_is_an_error(what: str) -> None:
    for result in fork_ranks(diverge, 2, what, timeout=60, check=True):
        assert result.value in ("DivergenceError", "PeerError", "PeerTimeoutError")


def diverge(what: str) -> str:
    try:
        disturbed(what, only_on=1)
    except (zshard.DivergenceError, zshard.PeerError, zshard.PeerTimeoutError) as error:
        return type(error).__name__
    return "nothing"


# --- what has no effect ---------------------------------------------------------------------------


def in_some_way(way: str) -> str:
    model = make(4)
    optimizer = OPTIMIZERS["adamw"](model)
    if way.startswith("checkpoint"):
        for block in model.blocks:
            recompute(block, reentrant="reentrant" in way)
    scaler = zshard.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        for index in model.micro_batches(step):
            if way == "no_sync":
                with model.no_sync():
                    loss_of(model, step, index).backward()
            elif way == "scaler":
                scaler.scale(loss_of(model, step, index)).backward()
            else:
                loss_of(model, step, index).backward()
        if way == "scaler":
            scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        if way == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return digest_of(model)


def recompute(block: nn.Module, reentrant: bool) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=reentrant)  # type: ignore[method-assign]


def test_ways_that_give_the_same_numbers(pool2: RankPool) -> None:
    ways = ("plain", "no_sync", "scaler", "checkpoint", "checkpoint, reentrant")
    found = {way: [in_some_way(way), *pool2.run(in_some_way, way)] for way in ways}
    assert found == {way: [found["plain"][0]] * 3 for way in ways}


# --- checkpoints and data -------------------------------------------------------------------------


def test_a_checkpoint_fits_runs_of_its_kind_only(tmp_path: Path) -> None:
    model = small()
    zshard.save(tmp_path / "a", model)
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


def test_sampler_arguments() -> None:
    with pytest.raises(TypeError, match="needs FSDP"):
        zshard.MicroBatchSampler(nn.Linear(2, 2), 100, 2)
    with pytest.raises(
        ValueError, match="100 samples are fewer than a step of 4 micro-batches of 26"
    ):
        zshard.MicroBatchSampler(small(), 100, 26)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_do_not_depend_on_ranks(
    pools: dict[int, RankPool], pool2: RankPool, pool3: RankPool, shuffle: bool
) -> None:
    def by_number(world: int, first: int) -> list[dict[int, list[int]]]:
        alone = [draw(first, shuffle)] if world == 1 else None
        results = alone or pools[world].run(draw, first, shuffle)
        steps: list[dict[int, list[int]]] = [{} for _ in results[0]]
        for result in results:
            for step, mine in zip(steps, result, strict=True):
                assert all(step.get(i, batch) == batch for i, batch in mine.items())
                step |= mine
        return steps

    whole = by_number(1, 0)
    assert by_number(2, 0) == by_number(3, 0) == whole
    assert by_number(3, 4)[:5] == whole[4:9]
    for epoch in (whole[:4], whole[4:8]):
        seen = [i for step in epoch for batch in step.values() for i in batch]
        assert len(seen) == len(set(seen)) == 48
    assert (whole[:4] == whole[4:8]) is not shuffle


def draw(first: int, shuffle: bool) -> list[dict[int, list[int]]]:
    model = small()
    sampler = zshard.MicroBatchSampler(model, 50, 3, shuffle=shuffle, seed=7)
    sampler.step = first
    batches = iter(sampler)
    run = state_of(model).unit.engine.leaves()
    return [{i: next(batches) for i in run} for _ in range(9)]


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor])
def test_random_numbers_do_not_depend_on_the_class_of_the_step(kind: Any) -> None:
    def drawn(step: Any) -> list[Any]:
        next(iter(small().micro_batches(step)))
        return [*torch.rand(2).tolist(), random.random(), np.random.random()]

    assert drawn(3) == drawn(kind(3)) != drawn(4)
