"""Asynchronous saves, and the detection of NaN and infinite values while a checkpoint is written.

The files have the values at the time of the call, also if training continues meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from checkpoints import inside, manifest_in, unlike, whole
from compare import differences
from file_faults import file_faults
from models import CASES, train
from nursery import fork_ranks
from optim_states import FULL, HYBRID, rank, trained
from rows import all_refused, all_rows
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, _core
from zshard.checkpoint import save
from zshard.checkpoint.safetensors import DTYPES
from zshard.ranks.agreement import bytes_of
from zshard.units import units


class Held:
    """Context manager in which saves do not start to write until `go` is set."""

    def __enter__(self):
        self.go, self._write = threading.Event(), save._write

        def write(*args):
            assert self.go.wait(60)
            self._write(*args)

        save._write = write
        return self

    def __exit__(self, *_):
        self.go.set()
        save._write = self._write


def check_while_training(name, combination, kind, folder, **options):
    """Fail unless the files have the state at the call."""
    model, optimizer = trained(name, combination, kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    named, extra = zshard.optim_state_dict(model, optimizer), {"list": [1]}
    os.makedirs(folder, exist_ok=True)
    options |= {"extra": extra, "asynchronous": True}
    with Held() as held:
        saving = zshard.save(f"{folder}/x", model, optimizer, **options)
        assert not saving.done() and not os.path.exists(saving.path)
        extra["list"].append(2)
        train(model, CASES[name], optimizer, rank(), steps=1)
        held.go.set()
        saving.wait()
    assert saving.done()
    if dtype := options.get("dtype"):
        state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in state.items()}
    assert unlike(saving.path, state, named) == []
    assert manifest_in(saving.path).extra_of(0) == {"list": [1]}


@pytest.mark.parametrize("name", ["odds", "net", "tied", "mlp"])
@on_ranks(1, 2)
def test_files_have_the_state_at_the_call(name, tmp_path):
    check_while_training(name, FULL, "zshard.AdamW", tmp_path)


@on_ranks(4)
def test_copies_of_a_model_and_other_strategies(tmp_path):
    for combination in (HYBRID[0], ("no_shard", "shm"), ("zero1", "shm"), ("shard_grad_op", "shm")):
        kind = "zshard.AdamW" if combination == HYBRID[0] else "torch.SGD"
        check_while_training("net", combination, kind, tmp_path / str(combination))
    check_while_training("mlp", FULL, "zshard.AdamW", tmp_path / "cast", dtype=torch.bfloat16)


@on_ranks(2)
def test_one_at_a_time(tmp_path):
    """A second save waits for the first and reuses its memory."""
    model, optimizer = trained("net", FULL, "zshard.AdamW")
    first = zshard.save(tmp_path, model, optimizer, step=1, asynchronous=True)
    memory = units.state_of(model).model.buffer.data_ptr()
    train(model, CASES["net"], optimizer, rank(), steps=1)
    second = zshard.save(tmp_path, model, optimizer, step=2, asynchronous=True)
    assert first.done() and units.state_of(model).model.buffer.data_ptr() == memory
    zshard.save(tmp_path, model, optimizer, step=3)
    assert second.done()
    assert zshard.latest_checkpoint(tmp_path) == str(tmp_path / "step-00000003")
    states = [whole(tmp_path / f"step-0000000{i}") for i in (1, 3)]
    assert states[0].keys() == states[1].keys() and differences(*states) != []


def test_a_save_continues_if_the_wait_for_it_is_interrupted(tmp_path):
    """The next save waits for it again: it has the same memory."""
    model, waits = nn.Linear(4, 4), []
    with Held() as held:
        saving = zshard.save(tmp_path / "a", model, asynchronous=True)
        join = saving._thread.join

        def interrupted():
            waits.append(saving.done())
            if len(waits) == 1:
                raise KeyboardInterrupt
            held.go.set()
            join()

        saving._thread.join = interrupted
        with pytest.raises(KeyboardInterrupt):
            zshard.save(tmp_path / "b", model, asynchronous=True)
        last = zshard.save(tmp_path / "b", model, asynchronous=True)
    last.wait()
    assert waits[:2] == [False, False] and inside(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("how", ["wait", "next"])
@on_ranks(2)
def test_failure_is_raised_on_all_ranks(how, tmp_path):
    """A save fails on rank 1 in the background: each wait() raises the error, or the next save."""
    model = FSDP(nn.Linear(64, 64))  # large enough for shards on both ranks
    optimizer = zshard.AdamW(model.parameters())
    with Held() as held:
        saving = zshard.save(tmp_path / "x", model, optimizer, asynchronous=True)
        if rank() == 1:
            file_faults(2, "EIO")
        held.go.set()
        while not saving.done():
            time.sleep(0.01)
    for _ in range(2) if how == "wait" else ():
        with pytest.raises(OSError, match="rror"):
            saving.wait()
    if how == "next":
        with pytest.raises(OSError, match="rror"):
            zshard.save(tmp_path / "y", model, optimizer)
        zshard.save(tmp_path / "y", model, optimizer)
    assert "x" not in inside(tmp_path)
    zshard.save(tmp_path / "z", model, optimizer)  # training and saving can continue
    assert "z" in inside(tmp_path)


# --- process exit ----------------------------------------------------------------------------------


def ends_at_once(folder, fault="", transport=None):
    """A script that ends when its save has just started; with a transport, since training fails on one
    rank, and therefore on the other."""
    model = FSDP(nn.Linear(64, 64), transport=transport)
    write = save._write

    def slow(*args):
        time.sleep(1)
        if fault:
            file_faults(1, fault)
        write(*args)

    save._write = slow
    zshard.save(f"{folder}/x", model, asynchronous=True)
    if transport is not None:
        if rank() == 1:
            raise ValueError("the training fails")
        model(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize("world", [1, 2])
def test_exiting_process_waits(world, tmp_path):
    fork_ranks(ends_at_once, world, str(tmp_path), timeout=60, check=True)
    assert set(whole(tmp_path / "x")) == {"weight", "bias"}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_failing_process_waits(transport, tmp_path):
    for result in fork_ranks(ends_at_once, 2, str(tmp_path), "", transport, timeout=60):
        assert result.returncode == 1 and "the training fails" in result.stderr
        assert "failed to save" not in result.stderr
    assert set(whole(tmp_path / "x")) == {"weight", "bias"}


@pytest.mark.parametrize("world", [1, 2])
def test_unreported_failure_sets_the_exit_status(world, tmp_path):
    for result in fork_ranks(ends_at_once, world, str(tmp_path), "ENOSPC", timeout=60):
        assert result.returncode == 1
        assert "failed to save the checkpoint" in result.stderr and "No space left" in result.stderr
    assert inside(tmp_path) == []


def test_memory_is_freed_with_the_model(tmp_path):
    model = FSDP(nn.Linear(64, 64))
    zshard.save(tmp_path / "x", model, asynchronous=True).wait()
    buffer = weakref.ref(units.state_of(model).model.buffer)
    del model
    assert buffer() is None


# --- NaN ------------------------------------------------------------------------------------------


BLOCK = 1 << 20
FORMATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def new_file(tmp_path):
    return _core.File.create(str(tmp_path / "file"), 0)


def near_misses(dtype, count):
    """Numbers of all kinds, none of them NaN or infinite."""
    facts = torch.finfo(dtype)
    kinds = [0.0, -0.0, facts.max, facts.min, facts.tiny, facts.smallest_normal / 2, 1.0, -3.5]
    return torch.tensor(kinds, dtype=dtype).repeat(-(-count // len(kinds)))[:count]


@pytest.mark.parametrize("code", FORMATS)
def test_nonfinite_value_at_any_position(tmp_path, code):
    dtype = FORMATS[code]
    item = dtype.itemsize
    count = 5 * BLOCK // 2 // item + 3  # blocks and pieces end inside it, at an odd offset
    good, values = near_misses(dtype, count), near_misses(dtype, count)
    offset = BLOCK - 8 * item
    edges = [8, 8 + (256 << 10) // item, 8 + BLOCK // item, 8 + 2 * BLOCK // item, count]
    places = {0, count // 2, *(each - 1 for each in edges), *(each for each in edges[:-1])}
    with new_file(tmp_path) as file:
        strange = []
        rows = [(offset, bytes_of(good), code)]
        right = file.write(rows, BLOCK, strange)
        assert strange == [] and right == file.write([row[:2] for row in rows], BLOCK)
        for number, place in enumerate(sorted(places)):
            values[place] = (float("nan"), float("inf"), -float("inf"))[number % 3]
            rows = [(0, b"1234"), (offset, bytes_of(values), code), (0, bytes_of(good[:4]), code)]
            file.write(rows, BLOCK, strange := [])
            assert strange == [1], place
            file.write([row[:2] for row in rows], BLOCK, strange := [])  # no check requested
            assert strange == [], place
            values[place] = good[place]


@pytest.mark.parametrize("code", FORMATS)
def test_memory_of_any_address(tmp_path, code):
    item = FORMATS[code].itemsize
    room = bytearray(100 * item + 1)
    view = memoryview(room)[1:]
    one = torch.tensor([float("nan")], dtype=FORMATS[code])
    nan = bytes(bytes_of(one))
    with new_file(tmp_path) as file:
        for place in range(100):
            for content, found in ((nan, [0]), (bytes(item), [])):
                view[place * item : (place + 1) * item] = content
                file.write([(0, view, code)], BLOCK, strange := [])
                assert strange == found


def test_unsupported_arguments_are_refused(tmp_path):
    eight, tuples = b"12345678", r"a range must be a tuple (offset, memory"
    with new_file(tmp_path) as file:
        write = lambda row, block=8, to=None: lambda: file.write([(0, eight), row], block, to or [])  # noqa: E731
        formats = "'F8' is not a number format: expected 'BF16'"
        table = {
            "format": (write((0, eight, "F8")), ValueError, formats),
            "number": (write((0, eight, 4)), ValueError, "4 is not a number format"),
            "offset": (write((2, eight, "F32")), ValueError, "8 bytes at offset 2 in blocks"),
            "length": (write((0, eight[2:], "F32")), ValueError, "6 bytes at offset 0 in blocks"),
            "block": (write((0, eight, "F64"), 12), ValueError, "in blocks of 12"),
            "long": (write((0, eight, "F64", 1)), TypeError, tuples),
            "no list": (lambda: file.write([], 8, ()), TypeError, "list"),
            "read": (lambda: file.read([(0, bytearray(8), "F32")]), TypeError, tuples),
        }
        all_refused(table)
        assert file.size == 0


@on_ranks(2)
def test_warnings_of_a_save(tmp_path):
    """The last rank sets the last number of its last parameter, or of its state, to infinity."""
    for dtype, saved_as in (
        *((torch.float32, None), (torch.bfloat16, None)),
        (torch.float32, torch.float16),
    ):
        for spoiled in ("model", "optimizer", "nothing"):
            layers = (nn.Linear(256, 256, bias=False, dtype=dtype) for _ in range(3))
            model = FSDP(nn.Sequential(*layers))
            optimizer = zshard.AdamW(model.parameters())
            model(torch.randn(4, 256, dtype=dtype)).sum().backward()
            optimizer.step()
            last = list(model.parameters())[-1]
            values = {"model": last, "optimizer": optimizer.state[last]["exp_avg"]}.get(spoiled)
            with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                if rank() == 1 and values is not None:
                    zshard.to_local(values).view(-1)[-1] = float("inf")
                warnings.simplefilter("always")
                zshard.save(tmp_path / "x", model, optimizer, dtype=saved_as, overwrite=True)
            assert manifest_in(tmp_path / "x").finite == (spoiled != "model")
            assert len(caught) == (spoiled == "model" and rank() == 0)
            for each in caught:
                assert "has NaN or infinite values in '2.weight'" in str(each.message)
            dist.barrier()


OTHERS = [
    dtype
    for code, dtype in DTYPES.items()
    if code not in FORMATS and (dtype.is_complex or dtype.is_floating_point)
]
SPOILED = {  # tensors, and where they get NaN
    f"{dtype}, each {step}.": (torch.ones(8).to(dtype)[::step], 6 // step)
    for dtype in OTHERS
    for step in (1, 2)
}
SPOILED |= {
    f"{width} channels last, {place}": (torch.ones(width, width, 3, 3), (place,) * 4)
    for width in (4, 64)
    for place in (0, -1)
}


def test_nonfinite_values_that_the_core_does_not_check(tmp_path):
    """Dtypes without their own check, small tensors, and tensors with another memory layout."""
    model = nn.Module()
    with all_rows() as row, torch.no_grad():
        for name, (values, at) in SPOILED.items():
            if values.dim() == 4:
                values = values.to(memory_format=torch.channels_last)
            model.weight = nn.Parameter(values, requires_grad=False)
            model.weight[at] = 1.0
            with row(name), warnings.catch_warnings():
                warnings.simplefilter("error")
                zshard.save(tmp_path / "x", model, overwrite=True)
                assert manifest_in(tmp_path / "x").finite
                model.weight[at] = float("nan")
                with pytest.warns(UserWarning, match="NaN or infinite values in 'weight'"):
                    zshard.save(tmp_path / "x", model, overwrite=True)
                assert not manifest_in(tmp_path / "x").finite
