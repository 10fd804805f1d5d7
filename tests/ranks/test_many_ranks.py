"""Limits that many ranks reach, and sandboxes that deny what shm needs.

Whatever one rank lacks, all ranks get the same result at once: shm, one warning and c10d, or an
error that names the rank, the limit and the numbers. Then training and saving work.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sandbox
import torch
import torch.distributed as dist
from nursery import fork_ranks
from sandbox import deny, drop_capabilities, limit_addresses, limit_files, needs_x86
from torch import nn

from zshard import _core

MIB = 1 << 20
WIDTH = 64


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def trained(made: Any) -> float:
    import zshard

    optimizer = zshard.AdamW(made.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = made(torch.ones(2, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
    return float(loss)


def transport_of(made: Any) -> str:
    from zshard.units.units import state_of

    return state_of(made).comms.all.transport


Told = tuple[str, list[str], float]  # a transport or an error, warnings, seconds


def attempt(act: Callable[[], str]) -> Told:
    """Return what `act` returns or raises, and zshard's warnings meanwhile."""
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            said = act()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    texts = [str(each.message) for each in caught if "shm" in str(each.message)]
    return said, texts, time.monotonic() - start


def start() -> int:
    """Wait for all ranks; what follows is zshard's."""
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank()


def wrap_train_save(folder: Path, transport: str = "auto", **options: Any) -> str:
    import zshard
    from zshard import FSDP

    made = FSDP(model(), transport=transport, timeout=30.0, **options)
    trained(made)
    zshard.save(folder / "first", made)
    zshard.save(folder / "second", made)
    return transport_of(made)


def values_of(results: list[Any]) -> list[Any]:
    for result in results:
        assert result.returncode == 0, result.stdout + result.stderr
    return [result.value for result in results]


# --- many ranks ----------------------------------------------------------------------------------


def crowded(folder: Path, files: int | None) -> tuple[Told, int, int]:
    """Ranks without capabilities, with `files` open files each; None: as few as possible."""
    rank = start()
    world = dist.get_world_size()
    if files is None:
        needs = _core.Comm.shm_needs(world)
        # Saving has a transport of its own, and files; other code may open one for a moment.
        limit_files(needs["meeting"] + needs["descriptors"] + 6)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    drop_capabilities()
    before = sandbox.open_files()
    told = attempt(lambda: wrap_train_save(folder, "shm"))
    return told, sandbox.open_files() - before, rank


@pytest.mark.parametrize(
    ("world", "files"), [(10, None), pytest.param(32, 1024, marks=pytest.mark.thorough)]
)
def test_ranks_without_privileges_connect(tmp_path: Path, world: int, files: int | None) -> None:
    """All at once, 10 ranks would have 180 descriptors in flight, more than the limit here."""
    found = values_of(fork_ranks(crowded, world, tmp_path, files, timeout=300))
    assert [told[:2] for told, _, _ in found] == [("shm", [])] * world
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}


def mapped(units: int) -> tuple[int, int]:
    from zshard import FSDP, MixedPrecision

    start()
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(units)])
    made: Any = FSDP(
        layers, auto_wrap_policy={nn.Linear}, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    made(torch.ones(2, 8)).sum().backward()
    lines = Path("/proc/self/maps").read_text().splitlines()
    # Libraries may be in a folder "zshard".
    ours = [line for line in lines if "/memfd:zshard-" in line]
    return sum("zshard-flats" in line for line in ours), len(ours)


def test_mappings_grow_linearly_with_ranks() -> None:
    flats = 2 * 10  # each unit's shard, and its copy in bfloat16
    for world in (2, 4):
        for in_flats, all_of_them in values_of(fork_ranks(mapped, world, 10)):
            assert in_flats <= 3 * flats
            assert 0 < all_of_them - in_flats <= 8 * world  # control blocks; buckets of each rank


# --- one rank lacks a resource -------------------------------------------------------------------


def lacking(folder: Path, what: str, where: int | None, transport: str) -> Told:
    """Rank `where` (None: all) lacks `what` when the model is wrapped."""
    rank = start()
    if where in (None, rank):
        LACKS[what]()
    return attempt(lambda: wrap_train_save(folder, transport))


LACKS: dict[str, Callable[[], None]] = {
    "pidfd": lambda: deny("pidfd_open", "ENOSYS"),
    "pidfd forbidden": lambda: deny("pidfd_open", "EPERM"),
    "memfd": lambda: deny("memfd_create", "EACCES"),
    "executable memfd": lambda: deny("memfd_create", "EACCES", (1, sandbox.NO_EXECUTION), True),
    "memfd's flag": lambda: deny("memfd_create", "EINVAL", (1, sandbox.NO_EXECUTION)),
    "shared mappings": lambda: deny("mmap", "ENOMEM", (3, sandbox.SHARED)),
    "addresses": lambda: limit_addresses(150 * MIB),
    "files": lambda: limit_files(6),
}


@pytest.mark.sampled(1)
@pytest.mark.sampled(2)
@needs_x86
@pytest.mark.parametrize("where", [None, 1])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("pidfd", "pidfd_open needs Linux 5.3"),
        ("pidfd forbidden", "Operation not permitted"),
        ("memfd", "memfd_create): Permission denied"),
        ("shared mappings", "cannot map a shared control block"),
    ],
)
def test_auto_falls_back_with_one_warning(
    tmp_path: Path, what: str, words: str, where: int | None
) -> None:
    found = values_of(fork_ranks(lacking, 3, tmp_path, what, where, "auto"))
    assert [said for said, _, _ in found] == ["c10d"] * 3
    assert [len(texts) for _, texts, _ in found] == [1, 0, 0]
    text = found[0][1][0]
    assert words in text and f"rank {where or 0}" in text
    assert "ranks of one host use transport='c10d'" in text
    assert ("likewise on 1 more" in text) == (where is None)
    assert (tmp_path / "second").is_dir()


@needs_x86
def test_forced_shm_error_names_the_reason(tmp_path: Path) -> None:
    found = values_of(fork_ranks(lacking, 3, tmp_path, "pidfd", 2, "shm"))
    for said, texts, seconds in found:
        assert said.startswith("RuntimeError: transport='shm' is not available: rank 2: cannot ")
        assert said.endswith("Or pass 'c10d'") and not texts and seconds < 10


@needs_x86
@pytest.mark.parametrize("what", ["executable memfd", "memfd's flag"])
def test_non_executable_memory(tmp_path: Path, what: str) -> None:
    """vm.memfd_noexec=2 allows no other; kernels before 6.3 do not know the flag."""
    found = values_of(fork_ranks(lacking, 2, tmp_path, what, None, "auto"))
    assert [told[:2] for told in found] == [("shm", [])] * 2


def test_too_few_files_for_any_transport(tmp_path: Path) -> None:
    found = values_of(fork_ranks(lacking, 3, tmp_path, "files", 1, "auto"))
    needs = _core.Comm.shm_needs(3)["meeting"]
    for said, texts, seconds in found:
        assert said.startswith("RuntimeError: no transport is available: shm: rank 1 needs "), said
        assert f"rank 1 needs {needs} file descriptors to connect to 3 ranks" in said
        assert "has 6 left of " in said and "(ulimit -n)" in said
        assert "c10d: rank 1 has 6 file descriptors left" in said
        assert not texts and seconds < 10


def test_too_little_address_space_to_connect(tmp_path: Path) -> None:
    found = values_of(fork_ranks(lacking, 3, tmp_path, "addresses", 1, "shm"))
    for said, _, seconds in found:
        assert "rank 1 needs" in said and "bytes of address space to connect to 3 ranks" in said
        assert "ulimit -v" in said and seconds < 10


# --- failures while connecting -------------------------------------------------------------------


def lacking_later(folder: Path, when: str, transport: str) -> Told:
    """From `when` on, rank 1 cannot map shared memory."""
    rank = start()
    from zshard.model import shard_model

    original = getattr(shard_model, when)
    calls = 0

    def from_now_on(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 1:
            deny("mmap", "ENOMEM", (3, sandbox.SHARED))
        return original(*args)

    setattr(shard_model, when, from_now_on)
    options = {"auto_wrap_policy": {nn.Linear}}
    return attempt(lambda: wrap_train_save(folder, transport, **options))


@needs_x86
@pytest.mark.parametrize("when", ["make_unit", "plan_forward"])
def test_failed_mapping_on_one_rank_fails_on_all(tmp_path: Path, when: str) -> None:
    found = values_of(fork_ranks(lacking_later, 3, tmp_path, when, "shm"))
    for rank, (said, _, seconds) in enumerate(found):
        assert said.startswith("MemoryError: " + ("" if rank == 1 else "rank 1: ")), said
        assert "cannot map" in said and seconds < 10


def fails_in_between(folder: Path) -> Told:
    """Rank 1 runs out of memory between two exchanges."""
    rank = start()
    from zshard.wrap.build import InitialValues

    original = InitialValues.give

    def give(self: InitialValues, spec: Any) -> None:
        if rank == 1:
            raise MemoryError("no memory for a copy")
        original(self, spec)

    InitialValues.give = give  # type: ignore[method-assign]
    return attempt(lambda: wrap_train_save(folder))


def test_exception_between_exchanges_reaches_all_ranks(tmp_path: Path) -> None:
    found = values_of(fork_ranks(fails_in_between, 3, tmp_path))
    for rank, (said, _, seconds) in enumerate(found):
        kind = "MemoryError: " if rank == 1 else "PeerError: rank 1 "
        assert said.startswith(kind) and said.endswith("no memory for a copy") and seconds < 10


# --- a second connection -------------------------------------------------------------------------


def saves_without(folder: Path, transport: str) -> tuple[str, Told]:
    """The model has shm; its resources are unavailable when a checkpoint is saved."""
    rank = start()
    import zshard
    from zshard import FSDP

    made = FSDP(model(), transport=transport)
    trained(made)
    if rank == 1:
        deny("memfd_create", "EACCES")

    def save() -> str:
        zshard.save(folder / "saved", made)
        zshard.save(folder / "again", made)
        return "saved"

    told = attempt(save)
    trained(made)
    return transport_of(made), told


@needs_x86
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_saving_falls_back_independently(tmp_path: Path, transport: str) -> None:
    found = values_of(fork_ranks(saves_without, 3, tmp_path, transport))
    assert [(kind, told[0]) for kind, told in found] == [("shm", "saved")] * 3
    assert [len(told[1]) for _, told in found] == [1, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "again"}


def second_model() -> tuple[str, Told]:
    """The first model and its group leave too few descriptors on rank 1 for another group's."""
    rank = start()
    from zshard import FSDP

    first: Any = FSDP(model())
    trained(first)
    other = dist.new_group()
    if rank == 1:
        limit_files(_core.Comm.shm_needs(4)["meeting"] - 8)  # one may be closed meanwhile

    def second() -> str:
        made: Any = FSDP(model(), process_group=other)
        trained(made)
        return transport_of(made)

    told = attempt(second)
    trained(first)
    return transport_of(first), told


def test_second_group_reports_its_own_shortage() -> None:
    found = values_of(fork_ranks(second_model, 4))
    for kind, (said, _, seconds) in found:
        assert kind == "shm" and seconds < 20
        assert said.startswith("RuntimeError: no transport is available: shm: rank 1 needs"), said


def hybrid() -> tuple[str, str, list[str]]:
    """Only the second shard group cannot use shm: its ranks connect last."""
    rank = start()
    from zshard import FSDP
    from zshard.units.units import state_of

    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    if rank == 3:
        deny("pidfd_open", "ENOSYS")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made: Any = FSDP(model(), strategy="hybrid_shard", device_mesh=mesh)
        trained(made)
    comms = state_of(made).comms
    texts = [str(each.message) for each in caught if "shm" in str(each.message)]
    return comms.all.transport, comms.shard_group.transport, texts


def warned_as_error() -> str:
    """The script makes warnings errors, and catches that of zshard."""
    if start() == 1:
        deny("pidfd_open", "ENOSYS")
    from zshard import FSDP

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            FSDP(model())
        except RuntimeWarning as error:
            found = str(error)
    return f"{transport_of(FSDP(model(), transport='c10d'))}: {found}"


@needs_x86
def test_a_warning_that_is_an_error_is_raised_on_all_ranks() -> None:
    for said in values_of(fork_ranks(warned_as_error, 3)):
        assert said.startswith("c10d: ranks of one host use transport='c10d'")


@needs_x86
def test_shard_groups_fall_back_together() -> None:
    found = values_of(fork_ranks(hybrid, 4))
    assert [each[0] for each in found] == ["c10d"] * 4
    assert [each[1] for each in found] == ["c10d"] * 4  # all use the same kind
    assert [len(each[2]) for each in found] == [2, 0, 1, 0]
    assert "that of rank 2 has no shm: see its own warning" in found[0][2][1]
