"""The progress bar of saves, loads and exports: on rank 0 of a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
import re
import struct
import sys
import termios
import threading
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from file_faults import file_faults
from groups import on_hosts
from optim_states import rank
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, AdamW
from zshard.checkpoint import progress, write

pytest.importorskip("tqdm")


@contextlib.contextmanager
def terminal(delay: float = 0.0):
    """Make stderr a terminal of 80 columns; yields what says what was drawn there since."""
    reading, writing = os.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    os.set_blocking(reading, False)

    def drawn() -> str:
        found = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(reading, 65536):
                found += part
        return found.decode()

    with (
        open(writing, "w", encoding="utf-8") as screen,
        mock.patch.object(sys, "stderr", screen),
        mock.patch.dict(progress._OPTIONS, {"delay": delay, "mininterval": 0}),
        mock.patch.object(write, "_MOST", 4096),
    ):
        yield drawn
    os.close(reading)


def built(transport=None, width=64):
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    model = FSDP(plain, transport=transport)
    optimizer = AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def bars(text: str) -> list[str]:
    """What the bars were of, in order; each ended, whether it was erased or not."""
    assert not text or text.endswith("\r"), "the last bar is still there"
    return list(dict.fromkeys(re.findall(r"zshard: (\w+): +\d+%", text)))


def shares(text: str) -> set[int]:
    return {int(each) for each in re.findall(r"(\d+)%", text)}


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_rank_0_of_a_terminal_has_bars(transport, tmp_path):
    model, optimizer = built(transport, width=768)  # checksums of more than the headers
    with terminal() as drawn:
        zshard.save(tmp_path / "a", model, optimizer)
        saved = drawn()
        zshard.load(tmp_path / "a", model, optimizer)
        loaded = drawn()
        zshard.export(model, bucket="1MiB").save(tmp_path / "b")
        exported = drawn()
    mine = [["saving"], ["verifying", "loading"], ["exporting"]] if rank() == 0 else [[], [], []]
    assert [bars(each) for each in (saved, loaded, exported)] == mine
    if rank() == 0:
        assert len(shares(saved)) > 5 and max(shares(saved)) == 100
        assert max(shares(exported)) == 100 and "B/s" in saved


@on_ranks(2)
def test_short_work_has_none(tmp_path):
    model, optimizer = built()
    with terminal(delay=60) as drawn:
        zshard.save(tmp_path / "a", model, optimizer)
        zshard.load(tmp_path / "a", model, optimizer)
        assert drawn() == ""


@on_ranks(2)
def test_none_where_it_is_off(tmp_path):
    model, optimizer = built()
    before = threading.active_count()
    with terminal() as drawn:
        with mock.patch.dict(os.environ, {"TQDM_DISABLE": "1"}), mock.patch.dict(sys.modules):
            for name in [each for each in sys.modules if each.startswith("tqdm")]:
                del sys.modules[name]  # it reads the variable when it is imported
            zshard.save(tmp_path / "a", model, optimizer)
        with mock.patch.dict(sys.modules, {"tqdm": None}):  # not installed
            zshard.save(tmp_path / "b", model, optimizer)
        old = mock.Mock(tqdm=type("tqdm", (), {}))
        old.tqdm.__init__ = mock.Mock(side_effect=KeyError("Unknown argument(s): 'delay'"))
        with mock.patch.dict(sys.modules, {"tqdm": old}):
            zshard.save(tmp_path / "e", model, optimizer)
        zshard.save(tmp_path / "c", model, optimizer, asynchronous=True).wait()
        with mock.patch.object(sys, "stderr", None):
            zshard.save(tmp_path / "d", model, optimizer)
        with open(os.devnull, "w") as file, mock.patch.object(sys, "stderr", file):
            zshard.load(tmp_path / "d", model, optimizer)  # as in a notebook or a log
        with mock.patch.object(sys, "stderr", file):  # closed
            zshard.load(tmp_path / "d", model, optimizer)
        assert drawn() == ""
    assert threading.active_count() == before


@on_ranks(2)
def test_a_terminal_that_is_closed_fails_no_save(tmp_path):
    model, optimizer = built()
    with terminal():

        class Screen:
            """Fails at each write after the first."""

            encoding = "utf-8"
            writes = 0

            def isatty(self):
                return True

            def flush(self):
                pass

            def write(self, text):
                self.writes += 1
                if self.writes > 1:
                    raise RuntimeError if self.writes % 2 else BrokenPipeError(32, "Broken pipe")

        with mock.patch.object(sys, "stderr", screen := Screen()):
            zshard.save(tmp_path / "a", model, optimizer)
            zshard.load(tmp_path / "a", model, optimizer)
    assert rank() != 0 or screen.writes > 1
    tqdm = importlib.import_module("tqdm").tqdm
    others = threading.Thread(target=lambda: list(tqdm(range(2), file=io.StringIO())), daemon=True)
    others.start()
    others.join(10)
    assert not others.is_alive(), "the script's own bars wait for a lock"


@on_ranks(2)
def test_an_error_ends_the_bar(tmp_path):
    model, optimizer = built()
    with terminal() as drawn:
        for nth in (5, 9, 14):
            file_faults(nth, "ENOSPC")
            with pytest.raises(OSError):
                zshard.save(tmp_path / "a", model, optimizer)
            file_faults(0)
        with (
            mock.patch.object(write.Writer, "_flush", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            zshard.save(tmp_path / "a", model, optimizer)
        bars(drawn())
        zshard.save(tmp_path / "a", model, optimizer)
        assert bars(drawn()) == (["saving"] if rank() == 0 else [])
        assert progress._shown.get() is None


@on_ranks(2)
def test_two_saves_at_once(tmp_path):
    """One in the background, one that waits for it, and one by another thread."""
    model, optimizer = built()
    with terminal() as drawn:
        zshard.save(tmp_path / "a", model, optimizer, asynchronous=True)
        zshard.save(tmp_path / "b", model, optimizer)
        saved = drawn()
        thread = threading.Thread(target=zshard.save, args=(tmp_path / "c", model, optimizer))
        thread.start()
        thread.join()
        assert drawn() == ""
    assert bars(saved) == (["saving"] if rank() == 0 else [])
    if rank() == 0:
        assert max(shares(saved)) == 100


@on_ranks(2)
def test_hosts_without_a_shared_disk(tmp_path):
    with on_hosts(1, "node"), terminal() as drawn:
        model, optimizer = built()
        own = tmp_path / str(rank())
        own.mkdir()
        zshard.save(own / "a", model, optimizer, per_host=True)
        saved = drawn()
        zshard.load(own / "a", model, optimizer)
        loaded = drawn()
    assert bars(saved) == (["saving"] if rank() == 0 else [])
    assert bars(loaded) == (["verifying", "loading"] if rank() == 0 else [])


def test_commands(command, tmp_path):
    model = nn.Sequential(*[nn.Linear(768, 768) for _ in range(4)])
    zshard.save(tmp_path / "a", model)
    with terminal() as drawn:
        assert command("verify", tmp_path / "a")[0] == 0
        text = drawn()
        assert command("export", tmp_path / "a", tmp_path / "b")[0] == 0
        assert bars(drawn()) == ["verifying", "exporting"]
    assert bars(text) == ["verifying"] and max(shares(text)) == 100


@on_ranks(2)
def test_a_folder_of_torch(tmp_path):
    model, _ = built()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "a")
    with terminal() as drawn:
        zshard.load(tmp_path / "a", model)
        assert bars(drawn()) == (["loading"] if rank() == 0 else [])
