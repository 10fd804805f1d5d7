"""keep_gathered: units gathered in forward stay for backward, if there is memory for them.

A saved gather can be counted, and the results are those of full_shard, so each test checks the
number of gathers per step, and that losses are bit-identical.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from meshes import mesh_of
from models import CASES, loss_of, make, train, wrapped
from nursery import fork_ranks
from scenarios import message_of
from spawn import ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, fully_shard
from zshard.memory import spare
from zshard.memory.host_limits import Resident, Room

real_crosses_hosts = spare.crosses_hosts

WIDTH, UNITS = 64, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a unit's full parameters
FORWARD = UNITS
BOTH = 2 * UNITS - 1  # gathers of a step: the last unit stays anyway


@pytest.fixture(autouse=True)
def several_hosts(request: Any) -> Iterator[None]:
    """Make "auto" act as between hosts, on all ranks of a test."""
    names = [name for name in ("pool", "pool2", "pool4") if name in request.fixturenames]
    pools = [request.getfixturevalue(name) for name in names]
    for pool in pools:
        pool.run(pretend, True)
    yield
    for pool in pools:
        pool.run(pretend, False)


def pretend(on: bool) -> None:
    spare.crosses_hosts = (lambda comm: True) if on else real_crosses_hosts


def stack(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)]
    options = {"transport": "c10d", "auto_wrap_policy": {nn.Linear}, **options}
    return FSDP(nn.Sequential(*layers), **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(7 * step + dist.get_rank())
    )


def go(model: Any, optimizer: Any, steps: Any = range(4)) -> tuple[list[int], list[float]]:
    """Return the gathers and the loss of each step."""
    gathers, losses = [], []
    for step in steps:
        with Collectives() as seen:
            loss = loss_of(model(batch(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        gathers.append(seen.gathers)
        losses.append(loss.item())
    return gathers, losses


def counted(options: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    model = stack(**options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)  # its state counts as long as it lives
    gathers, losses = go(model, optimizer)
    parts = {what: model.memory(what) for what in ("now", "predicted")}
    return gathers, losses, {"head": model.summary().splitlines()[0], **parts}


def limits() -> tuple[int, int]:
    """Return what training takes without keeping anything, and with three more units."""
    total = counted({"keep_gathered": False})[2]["now"]["total"]
    return total, total + 3 * UNIT


def with_limit(extra: int, **options: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    return counted({"memory_limit": limits()[0] + extra, **options})


# --- how much is gathered -------------------------------------------------------------------------


def each_setting() -> Any:
    expected = counted({"keep_gathered": False})
    found = [
        counted({"keep_gathered": True}),
        counted({"keep_gathered": 2 * UNIT}),
        counted({"keep_gathered": "auto", "memory_limit": "1GiB"}),
        counted({"memory_limit": None}),
        counted({"transport": "shm", "keep_gathered": True}),
    ]
    return expected, found


def test_settings_determine_gathers_but_not_results(pool2: Any) -> None:
    for (base, losses, usual), found in pool2.run(each_setting):
        assert base == [BOTH + 1, BOTH, BOTH, BOTH]  # the last unit is unknown at first
        gathers = [each[0] for each in found]
        assert gathers[0] == [FORWARD] * 4
        assert gathers[1] == [BOTH - 1, BOTH - 2, BOTH - 2, BOTH - 2]
        assert gathers[2] == [BOTH + 1, BOTH, FORWARD, FORWARD]  # decided in the second backward
        assert gathers[3] == base
        assert gathers[4] == [0] * 4
        assert [each[1] for each in found] == [losses] * len(found)
        for _, _, told in found:
            assert told["now"]["slots"] == told["predicted"]["slots"]
        slots = [told["now"]["slots"] - usual["now"]["slots"] for _, _, told in found[:4]]
        assert slots == [4 * UNIT, 2 * UNIT, 4 * UNIT, 0]  # of six units; two slots existed
        assert "stay gathered from forward to backward" in found[0][2]["head"]
        assert "gather" not in usual["head"] + found[4][2]["head"]


def of_limits() -> Any:
    own = 1 if dist.get_rank() == 0 else 3
    return [with_limit(extra * UNIT)[0] for extra in (-1, 0, 1, 3, own)]


def test_auto_uses_the_least_of_all_ranks(pool2: Any) -> None:
    for none, nothing, one, three, least in pool2.run(of_limits):
        assert none == nothing == [BOTH + 1, BOTH, BOTH, BOTH]
        assert one[2:] == least[2:] == [BOTH - 1] * 2
        assert three[2:] == [BOTH - 3] * 2


def replicas_of_two() -> Any:
    options = {"strategy": "hybrid_shard", "device_mesh": mesh_of(2, 2)}
    expected = counted({"keep_gathered": False, **options})
    extra = 2 if dist.get_rank() == 3 else 5  # the other replica must keep as few
    ours = counted({"memory_limit": expected[2]["now"]["total"] + extra * UNIT, **options})
    return expected[:2], ours[:2]


def test_replicas_keep_the_same_units(pool4: Any) -> None:
    for (base, losses), (gathers, same) in pool4.run(replicas_of_two):
        assert base[1:] == [BOTH] * 3 and gathers[2:] == [BOTH - 2] * 2 and same == losses


# --- predictions and refusals ---------------------------------------------------------------------


def predictions() -> Any:
    found = []
    for keep in (True, 3 * UNIT, False):
        model = stack(keep_gathered=keep)
        plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        told = zshard.predict_memory(
            plain, 2, transport="c10d", auto_wrap_policy={nn.Linear}, keep_gathered=keep
        )
        found.append((model.memory()["slots"], told["slots"]))
    tight = UNITS * UNIT  # for the gathered units, and for no shard
    text = message_of(lambda: stack(keep_gathered=True, memory_limit=tight), MemoryError)
    return found, text


def test_predictions_include_kept_units(pool2: Any) -> None:
    for found, text in pool2.run(predictions):
        assert found == [(each, each) for each in (6 * UNIT, 5 * UNIT, 2 * UNIT)]
        assert "keep_gathered=False: " in text


def refusals() -> list[str]:
    rank = dist.get_rank()
    return [
        message_of(lambda: stack(keep_gathered=rank == 0), zshard.DivergenceError),
        message_of(lambda: stack(keep_gathered=(rank + 1) * 1024), zshard.DivergenceError),
        message_of(lambda: stack(keep_gathered=None), TypeError),
        message_of(lambda: stack(keep_gathered=1.5), TypeError),
        message_of(lambda: stack(keep_gathered="all"), ValueError),
        message_of(lambda: stack(keep_gathered=-1), ValueError),
        message_of(lambda: stack(keep_gathered=0), ValueError),
    ]


def test_misuse_is_an_error_that_names_the_argument(pool2: Any) -> None:
    for differ, sizes, *texts in pool2.run(refusals):
        assert re.search(r"differ between ranks: keep_gathered.*True.*False", differ)
        assert re.search(r"differ between ranks: keep_gathered.*1024 bytes.*2048 bytes", sizes)
        for text in texts:
            assert text.startswith("keep_gathered must be ")


# --- when the choice is made ----------------------------------------------------------------------


def raise_first(model: Any, optimizer: Any) -> None:
    """Rank 0 raises in the middle of its first backward."""

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("planted")

    x = batch(0)
    with contextlib.suppress(KeyError, zshard.DivergenceError):
        out = model[:3](x)
        if dist.get_rank() == 0:
            out.register_hook(fail)
        loss_of(model[3:](out)).backward()
    optimizer.zero_grad()


def evaluate_first(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        with torch.no_grad():
            model(batch(0))


def forward_only(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        model(batch(0))


def accumulate(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        for step in range(3):
            loss_of(model(batch(step))).backward()


BEFORE = {each.__name__: each for each in (raise_first, evaluate_first, forward_only, accumulate)}


def decided_after(name: str) -> Any:
    results = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        BEFORE[name](model, optimizer)
        assert model[0]._zshard_state.unit.engine.kept()[0] == 0
        results.append(go(model, optimizer))
    return results


@pytest.mark.parametrize("name", BEFORE)
def test_nothing_is_decided_before_a_step(pool2: Any, name: str) -> None:
    for (_, losses), (gathers, ours) in pool2.run(decided_after, name):
        assert gathers[1:] == [BOTH, FORWARD, FORWARD] and ours == losses


def uneven() -> Any:
    results = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join(optimizer):
            for step in range(6 if dist.get_rank() == 0 else 1):
                loss_of(model(batch(step))).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()  # a rank that finished first has the others' sums by now
        results.append((model.state_dict(), go(model, optimizer)))
    (state, (_, losses)), (ours, (gathers, same)) = results
    torch.testing.assert_close(ours, state, rtol=0, atol=0)
    return gathers, losses == same


def test_join_and_later_steps(pool2: Any) -> None:
    (gathers, same), (theirs, likewise) = pool2.run(uneven)
    assert gathers == theirs and gathers[2:] == [FORWARD, FORWARD] and same and likewise


def stepped_in_backward() -> Any:
    results = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        model.optimizer_in_backward(optimizer)
        results.append(go(model, optimizer))
    return results


def test_optimizer_in_backward(pool2: Any) -> None:
    for (_, losses), (gathers, ours) in pool2.run(stepped_in_backward):
        assert gathers[2:] == [FORWARD, FORWARD] and ours == losses


# --- host memory ----------------------------------------------------------------------------------


@contextlib.contextmanager
def host(room: list[int], used: list[int]) -> Iterator[None]:
    """Context manager in which the process measures these numbers, and keeps returning the last
    ones."""

    def next_of(numbers: list[int]) -> int:
        return numbers.pop(0) if len(numbers) > 1 else numbers[0]

    before = spare.rooms, spare.resident
    spare.rooms = lambda sharing: [Room(next_of(room), "")]  # type: ignore[assignment]
    spare.resident = lambda: Resident(1000, next_of(used))  # type: ignore[assignment]
    try:
        yield
    finally:
        spare.rooms, spare.resident = before


def measured() -> Any:
    found = []
    limit = 100 * UNIT  # a tenth of it stays free
    for used in ([90 * UNIT], [87 * UNIT], [10 * UNIT], [87 * UNIT, 87 * UNIT, 92 * UNIT]):
        with host([limit - 1000], [*used]):
            model = stack()
            found.append(go(model, torch.optim.SGD(model.parameters(), 0.1), range(5))[0])
    kept = model[0]._zshard_state.unit.engine.kept()
    return found, kept, model.memory()["slots"] == model.memory("predicted")["slots"]


def test_auto_leaves_a_margin_and_drops_excess(pool2: Any) -> None:
    for (full, three, all_, dropped), kept, fits in pool2.run(measured):
        assert full[2:] == [BOTH] * 3
        assert three[2:] == [BOTH - 3] * 3
        assert all_[2:] == [FORWARD] * 3
        # The third step is the first with three kept units. It exceeded the limit by two.
        assert dropped == [BOTH + 1, BOTH, BOTH - 3, BOTH - 3, BOTH - 1]
        assert kept[:2] == (UNIT, UNIT) and fits


def later() -> Any:
    each, spare._EACH = spare._EACH, 5
    try:
        with host([100 * UNIT - 1000], [87 * UNIT] * 4 + [200 * UNIT]):
            model = stack()
            return go(model, torch.optim.SGD(model.parameters(), 0.1), range(12))[0]
    finally:
        spare._EACH = each


def test_later_steps_are_measured(pool2: Any) -> None:
    for gathers in pool2.run(later):
        assert gathers[2:11] == [BOTH - 3] * 9 and gathers[11] == BOTH


def two_models() -> Any:
    """Two models share the memory."""
    with host([100 * UNIT - 1000], [86 * UNIT]):
        models = [stack(), stack()]
        steppers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for step in range(2):
            for model, optimizer in zip(models, steppers, strict=True):
                loss_of(model(batch(step))).backward()
                optimizer.step()
        return [model[0]._zshard_state.unit.engine.kept()[0] for model in models]


def test_two_models_share_the_memory(pool2: Any) -> None:
    assert pool2.run(two_models) == [[4 * UNIT, 0]] * 2


def without_room() -> Any:
    """Rank 1 has no address space for kept units."""
    dist.init_process_group("gloo")
    os.environ["ZSHARD_HOST"] = f"host {dist.get_rank()}"  # within one host nothing is kept
    big = 1024
    torch.manual_seed(0)
    build = lambda: nn.Sequential(*[nn.Linear(big, big, bias=False) for _ in range(12)])  # noqa: E731
    model = FSDP(build(), transport="c10d", auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    x, losses, kept = torch.ones(1, big), [], []
    for step in range(spare._EACH + 3):
        if step == 2:
            kept.append(model[0]._zshard_state.unit.engine.kept()[0] // (4 << 20))
            if dist.get_rank() == 1:
                size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
                limit = (size << 10) + (36 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        if step == 3:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            kept.append(model[0]._zshard_state.unit.engine.kept()[0] // (4 << 20))
    kept.append(model[0]._zshard_state.unit.engine.kept()[0])
    return kept, losses


@pytest.mark.thorough
def test_failed_allocation_keeps_nothing() -> None:
    first, second = (result.value for result in fork_ranks(without_room, 2, check=True))
    assert first[0] == second[0] == [11, 0, 0] and first[1] == second[1]  # in the same step


# --- per-unit settings ----------------------------------------------------------------------------


def by_hand() -> Any:
    found = []
    for keep in (True, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model[0].set_reshard_after_forward(True)
        gathers = [go(model, optimizer)[0]]
        model[1].set_reshard_after_forward(True)  # after the decision
        gathers.append(go(model, optimizer)[0])
        model[1].set_reshard_after_forward(False)
        gathers.append(go(model, optimizer)[0])
        found.append(gathers)
    for reshard in (None, True):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        found.append(go(model, torch.optim.SGD(model.parameters(), 0.1))[0])
    return found


def test_per_unit_settings_take_precedence(pool2: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("ZSHARD_TRANSPORT", "c10d")
    for told, auto, *sharded in pool2.run(over_c10d, by_hand):
        for first, second, third in (told, auto):
            assert first[2:] == [FORWARD + 1] * 2
            assert second[1:] == [FORWARD + 2] * 3
            assert third[1:] == [FORWARD + 1] * 3
        assert sharded[0][2:] == [FORWARD] * 2
        assert sharded[1][2:] == [BOTH] * 2


def over_c10d(run: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZSHARD_TRANSPORT", "c10d")
        return run()


def copied() -> Any:
    """A copy decides independently, and one that is never trained takes nothing."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    go(model, optimizer)
    twin = copy.deepcopy(model)
    before = twin.memory()["slots"]
    gathers, losses = go(twin, torch.optim.SGD(twin.parameters(), 0.1))
    return before, gathers, losses == go(model, optimizer)[1]


def test_deepcopy(pool2: Any) -> None:
    for before, gathers, same in pool2.run(copied):
        assert before == 2 * UNIT and gathers[2:] == [FORWARD] * 2 and same


# --- bit-identical results ------------------------------------------------------------------------

BF16 = zshard.MixedPrecision(param_dtype=torch.bfloat16)


def case_with(name: str, precision: Any, keep: Any) -> Any:
    case = CASES[name]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    model = wrapped(case.make, ("full_shard", "c10d"), keep_gathered=keep, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train(model, case, optimizer, dist.get_rank(), steps=5), model.state_dict()


def differences_of(name: str, precision: Any) -> list[str]:
    losses, state = case_with(name, precision, False)
    wrong = []
    for keep in (True, "auto", 600):
        ours, values = case_with(name, precision, keep)
        wrong += [f"losses with {keep}"] if ours != losses else []
        wrong += [key for key in state if not torch.equal(values[key], state[key])]
    return wrong


@pytest.mark.sampled(5)
@ranks(2, 3)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dtypes"])
def test_kept_units_are_bit_identical(pool: Any, name: str, precision: Any) -> None:
    assert pool.run(differences_of, name, precision) == [[]] * pool.world


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()  # type: ignore[no-untyped-call]
        return x


def recomputed(reentrant: bool) -> Any:
    found = []
    for keep in (False, True, "auto"):
        model = FSDP(
            make(lambda: Checkpointed(reentrant)),
            transport="c10d",
            auto_wrap_policy={nn.Linear},
            keep_gathered=keep,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(4):
            loss = loss_of(model(batch(step).requires_grad_()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with zshard.FSDP.summon_full_params(model):
            total = sum(param.double().sum().item() for param in model.parameters())
        found.append((losses, total))
    return found


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_recomputed_layers(pool2: Any, reentrant: bool) -> None:
    for first, *others in pool2.run(recomputed, reentrant):
        assert others == [first] * 2


def with_files(directory: str) -> Any:
    """Parameters on a disk; saved while some units stay, and loaded into a model that keeps
    nothing."""
    found = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep, offload=directory)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        losses = go(model, optimizer)[1]
        zshard.save(f"{directory}/{keep}", model, optimizer)
        other = stack(keep_gathered=False)
        stepper = zshard.AdamW(other.parameters(), lr=0.01)
        zshard.load(f"{directory}/{keep}", other, stepper)
        found.append((losses, go(other, stepper)[1], go(model, optimizer)[1]))
    return found


def test_offload_and_checkpoints(pool2: Any, tmp_path: Any) -> None:
    for first, second in pool2.run(with_files, str(tmp_path)):
        assert first == second and first[1] == first[2]


def alone() -> Any:
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), keep_gathered=True)
    loss_of(model(torch.ones(1, 4))).backward()
    return model.memory()["slots"]


def test_world_size_one() -> None:
    assert [result.value for result in fork_ranks(alone, 1, check=True)] == [0]
