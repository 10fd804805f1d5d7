"""Limits that many ranks reach, and sandboxes that deny what shm needs.

If one rank lacks something, all ranks get the same result at once: shm, one warning and c10d, or an
error that names the rank, the limit and the numbers. Then training and saving work. What containers
and old kernels deny, a seccomp filter answers here, which a forked rank installs for good.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenarios import transport_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision, _core
from zshard.model import shard_model
from zshard.units.units import state_of
from zshard.wrap.build import InitialValues

# x86-64's numbers; the other architectures share those above 400.
CALLS = {"mmap": 9, "memfd_create": 319, "pidfd_open": 434}
NO_EXECUTION = 8  # MFD_NOEXEC_SEAL
SHARED = 1  # MAP_SHARED

_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_CAPABILITIES = 0x20080522  # version 3

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64's system calls")


def deny(call: str, error: str, bits: tuple[int, int] | None = None, without: bool = False) -> None:
    """Make `call` fail with `error`, permanently, on this thread and those that it will create.

    bits: (argument, bits): only if the argument has one of these bits; `without`: none of them.
    """
    answer = (_RETURN, 0, 0, _ERRNO | getattr(errno, error))
    allow = (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, 0)]
    if bits is None:
        steps += [(_JUMP_EQUAL, 0, 1, CALLS[call]), answer, allow]
    else:
        argument, mask = bits
        found = (_JUMP_SET, 1, 0, mask) if without else (_JUMP_SET, 0, 1, mask)
        steps += [(_JUMP_EQUAL, 0, 3, CALLS[call]), (_LOAD, 0, 0, 16 + 8 * argument)]
        steps += [found, answer, allow]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.create_string_buffer(head), 0, 0) != 0:
        pytest.skip(f"no seccomp filters here: {os.strerror(ctypes.get_errno())}")


def drop_capabilities() -> None:
    """Leave this process as few capabilities as root has in a restricted container: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    head, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    if libc.capset(head, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def limit_files(left: int) -> None:
    """Limit this process to so many more open files than it has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + left,) * 2)


def limit_addresses(left: int) -> None:
    """Limit this process to so many more bytes of address space than it has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + left,) * 2)


MIB = 1 << 20
WIDTH = 64


def start() -> int:
    """Wait for all ranks; what follows is zshard's."""
    dist.init_process_group("gloo")
    dist.barrier()
    return dist.get_rank()


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return FSDP(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), **options)


def train(made: Any) -> None:
    optimizer = zshard.AdamW(made.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        made(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()


def wrap_train_save(folder: Path, transport: str = "auto", **options: Any) -> Any:
    """Return the model."""
    made = model(transport=transport, timeout=30.0, **options)
    train(made)
    zshard.save(folder / "first", made)
    zshard.save(folder / "second", made)
    return made


def warned(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `act` returns, and zshard's warnings meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = act()
    return result, [str(each.message) for each in caught if "shm" in str(each.message)]


def error_of(act: Callable[[], Any]) -> str:
    """Return the error that `act` raises, soon and without a warning."""
    began = time.monotonic()

    def fails() -> str:
        with pytest.raises(Exception) as caught:
            act()
        return f"{caught.type.__name__}: {caught.value}"

    text, texts = warned(fails)
    assert not texts and time.monotonic() - began < 20
    return text


# --- many ranks ----------------------------------------------------------------------------------


@on_ranks(10, pytest.param(32, marks=pytest.mark.thorough), fresh=True, timeout=300)
def test_ranks_without_privileges_connect(tmp_path: Path) -> None:
    """Without capabilities; 32 with 1,024 open files each, 10 with as few as possible: all at once,
    these would have 180 descriptors in flight, more than the limit here."""
    start()
    if dist.get_world_size() == 32:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    else:
        needs = _core.Comm.shm_needs(10)
        # A save has its own transport, and files; other code may open one for a moment.
        limit_files(needs["meeting"] + needs["descriptors"] + 6)
    drop_capabilities()
    made, texts = warned(lambda: wrap_train_save(tmp_path, "shm"))
    assert (transport_of(made), texts) == ("shm", [])
    assert (tmp_path / "first").is_dir() and (tmp_path / "second").is_dir()


@on_ranks(2, 4, fresh=True)
def test_mappings_grow_linearly_with_ranks() -> None:
    start()
    units = 10
    made: Any = FSDP(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(units)]),
        auto_wrap_policy={nn.Linear},
        mixed_precision=MixedPrecision(torch.bfloat16),
    )
    made(torch.ones(2, 8)).sum().backward()
    lines = Path("/proc/self/maps").read_text().splitlines()
    # Libraries may be in a folder "zshard".
    ours = [line for line in lines if "/memfd:zshard-" in line]
    flats = sum("zshard-flats" in line for line in ours)
    assert flats <= 3 * 2 * units  # each unit's shard, and its copy in bfloat16
    # Control blocks, and buckets of each rank.
    assert 0 < len(ours) - flats <= 8 * dist.get_world_size()


# --- one rank lacks a resource -------------------------------------------------------------------

LACKS: dict[str, Callable[[], None]] = {
    "pidfd": lambda: deny("pidfd_open", "ENOSYS"),
    "pidfd forbidden": lambda: deny("pidfd_open", "EPERM"),
    "memfd": lambda: deny("memfd_create", "EACCES"),
    "executable memfd": lambda: deny("memfd_create", "EACCES", (1, NO_EXECUTION), True),
    "memfd's flag": lambda: deny("memfd_create", "EINVAL", (1, NO_EXECUTION)),
    "shared mappings": lambda: deny("mmap", "ENOMEM", (3, SHARED)),
    "addresses": lambda: limit_addresses(150 * MIB),
    "files": lambda: limit_files(6),
}


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
@on_ranks(3, fresh=True)
def test_auto_falls_back_with_one_warning(tmp_path, what, words, where):
    """Rank `where` (None: all) lacks it."""
    rank = start()
    if where in (None, rank):
        LACKS[what]()
    made, texts = warned(lambda: wrap_train_save(tmp_path))
    assert transport_of(made) == "c10d"
    assert len(texts) == (rank == 0)
    for text in texts:
        assert words in text and f"rank {where or 0}" in text
        assert "ranks of one host use transport='c10d'" in text
        assert ("likewise on 1 more" in text) == (where is None)


@needs_x86
@pytest.mark.parametrize("what", ["executable memfd", "memfd's flag"])
@on_ranks(2, fresh=True)
def test_non_executable_memory(tmp_path, what):
    """vm.memfd_noexec=2 allows no other; kernels before 6.3 do not know the flag."""
    start()
    LACKS[what]()
    made, texts = warned(lambda: wrap_train_save(tmp_path))
    assert (transport_of(made), texts) == ("shm", [])


SHORT_OF_FILES = (
    "RuntimeError: no transport is available: shm: rank 1 needs ",
    f"rank 1 needs {_core.Comm.shm_needs(3)['meeting']} file descriptors to connect to 3 ranks",
    "has 6 left of ",
    "(ulimit -n)",
    "c10d: rank 1 has 6 file descriptors left",
)
SHORT_OF_ADDRESSES = ("rank 1 needs", "bytes of address space to connect to 3 ranks", "ulimit -v")
NO_PIDFD = ("RuntimeError: transport='shm' is not available: rank 1: cannot ", "Or pass 'c10d'")


@needs_x86
@pytest.mark.parametrize(
    ("what", "transport", "words"),
    [
        ("files", "auto", SHORT_OF_FILES),
        ("addresses", "shm", SHORT_OF_ADDRESSES),
        ("pidfd", "shm", NO_PIDFD),
    ],
)
@on_ranks(3, fresh=True)
def test_error_names_the_rank_and_what_it_lacks(tmp_path, what, transport, words):
    if start() == 1:
        LACKS[what]()
    text = error_of(lambda: wrap_train_save(tmp_path, transport))
    assert [each for each in words if each not in text] == [], text


# --- failures while connecting -------------------------------------------------------------------


@needs_x86
@pytest.mark.parametrize("when", ["make_unit", "plan_forward"])
@on_ranks(3, fresh=True)
def test_failed_mapping_on_one_rank_fails_on_all(tmp_path, when):
    """From then on, rank 1 cannot map shared memory."""
    rank, usual, calls = start(), getattr(shard_model, when), []

    def from_now_on(*args: Any) -> Any:
        calls.append(when)
        if rank == 1 and len(calls) == 1:
            LACKS["shared mappings"]()
        return usual(*args)

    setattr(shard_model, when, from_now_on)
    text = error_of(lambda: wrap_train_save(tmp_path, "shm", auto_wrap_policy={nn.Linear}))
    assert text.startswith("MemoryError: " + ("" if rank == 1 else "rank 1: ")), text
    assert "cannot map" in text


@pytest.mark.parametrize("same", [True, False])
@on_ranks(3, fresh=True)
def test_exception_between_exchanges_reaches_all_ranks(tmp_path, same):
    """same: all ranks have rank 0's values, so that none waits for a unit's."""
    rank, usual = start(), InitialValues.give

    def give(self: InitialValues, spec: Any) -> None:
        if rank == 1:
            raise MemoryError("no memory for a copy")
        usual(self, spec)

    InitialValues.give = give  # type: ignore[method-assign]
    InitialValues.compare = lambda self, _: setattr(self, "is_shared", same)  # type: ignore[assignment, method-assign]
    text = error_of(lambda: wrap_train_save(tmp_path))
    of_others = "MemoryError: rank 1: " if same else "PeerError: rank 1 "
    kind = "MemoryError: " if rank == 1 else of_others
    assert text.startswith(kind) and text.endswith("no memory for a copy")


@needs_x86
@on_ranks(3, fresh=True)
def test_a_warning_that_is_an_error_is_raised_on_all_ranks():
    """The script makes warnings errors, and catches that of zshard."""
    if start() == 1:
        LACKS["pidfd"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(RuntimeWarning, match="ranks of one host use transport='c10d'"):
            model()
    assert transport_of(model(transport="c10d")) == "c10d"


# --- a second connection -------------------------------------------------------------------------


@needs_x86
@pytest.mark.parametrize("transport", ["auto", "shm"])
@on_ranks(3, fresh=True)
def test_saving_falls_back_independently(tmp_path, transport):
    """The model has shm; its resources are unavailable when a checkpoint is saved."""
    rank, made = start(), model(transport=transport)
    train(made)
    if rank == 1:
        LACKS["memfd"]()

    def save() -> None:
        zshard.save(tmp_path / "saved", made)
        zshard.save(tmp_path / "again", made)

    _, texts = warned(save)
    assert len(texts) == (rank == 0)
    train(made)
    assert transport_of(made) == "shm"
    assert (tmp_path / "saved").is_dir() and (tmp_path / "again").is_dir()


@on_ranks(4, fresh=True)
def test_second_group_reports_its_own_shortage():
    """The first model and its group leave too few descriptors on rank 1 for another group's."""
    rank, first = start(), model()
    train(first)
    other = dist.new_group()
    if rank == 1:
        limit_files(_core.Comm.shm_needs(4)["meeting"] - 8)  # one may be closed meanwhile
    text = error_of(lambda: train(model(process_group=other)))
    assert text.startswith("RuntimeError: no transport is available: shm: rank 1 needs"), text
    train(first)
    assert transport_of(first) == "shm"


@needs_x86
@on_ranks(4, fresh=True)
def test_shard_groups_fall_back_together():
    """Only the second shard group cannot use shm: its ranks connect last."""
    rank = start()
    mesh = dist.init_device_mesh("cpu", (2, 2))
    if rank == 3:
        LACKS["pidfd"]()
    made, texts = warned(lambda: model(strategy="hybrid_shard", device_mesh=mesh))
    train(made)
    comms = state_of(made).comms
    assert (comms.all.transport, comms.shard_group.transport) == ("c10d", "c10d")
    assert len(texts) == [2, 0, 1, 0][rank]
    if rank == 0:
        assert "that of rank 2 has no shm: see its own warning" in texts[1]
