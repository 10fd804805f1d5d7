"""Which libnccl is used: the search order, the error where there is none, and the exit of a process.

Stand-ins of several versions (tests/c/fake_nccl.c says what FAKE_NCCL_VERSION has at
the moment of loading) lie where a real one would; each case is a process forked from one that has
imported torch.
"""

import ctypes
import os
import shutil
import sys
from pathlib import Path

import pytest
from c_compile import BUILDS, C, compile_c
from nursery import fork_ranks

from zshard import _core
from zshard.ranks import nccl


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    link = ("-shared", "-Wl,-soname,libnccl.so.2", "-ldl", "-lm")
    return compile_c(folder / "libnccl.so.2", [C / "fake_nccl.c"], BUILDS["release"], link)


def look(named=None, folder=None, loaded=None, version=None):
    """What library() says, where ZSHARD_NCCL_LIB is `named`, `folder` is on Python's path, `loaded`
    is loaded, and a stand-in has that version."""
    os.environ.pop("ZSHARD_NCCL_LIB", None)
    env = {"ZSHARD_NCCL_LIB": named, "FAKE_NCCL_VERSION": version}
    os.environ.update({name: str(value) for name, value in env.items() if value is not None})
    if folder is not None:
        sys.path.insert(0, str(folder))
        sys.modules.pop("nvidia", None)
    if loaded is not None:
        ctypes.CDLL(str(loaded))
    try:
        return nccl.library()
    except NotImplementedError as error:
        return str(error)


def answer(*arguments, fn=look):
    (result,) = fork_ranks(fn, 1, *arguments, check=True)
    return result.value


def copy(fake, folder):
    """A copy of the stand-in: another library to the linker, with the same name."""
    folder.mkdir(parents=True)
    return Path(shutil.copy(fake, folder / "libnccl.so.2"))


def of_torch():
    """The libnccl that comes with `import torch`, as that of the CUDA build does, or None."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "/libnccl.so" in line), None)


def test_search_order(fake, tmp_path):
    site = tmp_path / "site"
    named, loaded = copy(fake, tmp_path / "named"), copy(fake, tmp_path / "loaded")
    packaged = copy(fake, site / "nvidia" / "nccl" / "lib")
    torchs = answer(fn=of_torch)
    assert answer(None, site)[1] == (torchs or str(packaged))
    assert answer(None, site, loaded)[1] == (torchs or str(loaded))
    assert answer(named, site, loaded, "23007") == ("2.30.7", str(named))


def test_version_numbers(fake):
    for number, text in (("2804", "2.8.4"), ("22105", "2.21.5"), ("23203", "2.32.3")):
        assert answer(fake, None, None, number)[0] == text


def test_missing_library_is_named(tmp_path):
    found = answer()
    if isinstance(found, str):  # a machine without NCCL
        assert "cannot find libnccl.so.2" in found and "ZSHARD_NCCL_LIB" in found
    found = answer(tmp_path / "nothing.so")
    assert "cannot load ZSHARD_NCCL_LIB" in found and "nothing.so" in found
    found = answer("libc.so.6")
    assert "lacks ncclGetVersion" in found and "libc.so.6" in found


def look_twice(fake):
    assert "cannot load ZSHARD_NCCL_LIB" in look("/nowhere/libnccl.so.2")
    return look(fake)


def test_missing_library_is_looked_for_again(fake):
    assert answer(fake, fn=look_twice) == ("2.28.9", str(fake))


def test_invalid_path_is_refused():
    with pytest.raises(ValueError, match="the path of libnccl is 600 bytes"):
        _core.nccl_library("x" * 600)
    with pytest.raises(TypeError):
        _core.nccl_library(3)


def end(fake):
    """End as a script does, here and in a forked child, with the library loaded if there is one."""
    if fake:
        look(fake)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # runs atexit's functions
    assert os.waitpid(child, 0)[1] == 0
    if fake:
        _core.nccl_abort("nothing is there to abort")


def test_exit_is_quiet(fake):
    usual, ours = (fork_ranks(end, 1, path, check=True)[0] for path in ("", str(fake)))
    # Triton, beside torch 2.15 on Python 3.13, reports leaks of its own.
    assert set(ours.stderr.splitlines()) <= set(usual.stderr.splitlines())
