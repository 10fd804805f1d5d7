"""Selection of cases (sampling.py, shards.py), and fixtures for all tests: pools of ranks that live
as long as the session (spawn.py), and one thread for torch."""

import gc
import importlib.util
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import sampling
import shards
import torch
import torch.distributed as dist
from asserts import rewrite_helpers
from nursery import start_nursery
from spawn import RankPool

rewrite_helpers()  # before a test imports them
gc.disable()  # while modules are imported and cases are made

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # Examples share cores with standing ranks: a time limit on each would only measure that.
    settings.register_profile("zshard", deadline=None)
    settings.load_profile("zshard")


CASES = pytest.StashKey[list[int]]()  # in this run, and left out of it


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CASES] = [0, 0]
    if not hasattr(config, "workerinput"):
        if config.getoption("numprocesses", None):  # while the workers collect, it imports
            start_nursery()
        if config.option.shard and not config.option.collectonly:
            config.pluginmanager.register(shards.Shard(config.option.shard))


def pytest_report_header() -> list[str]:
    """The tested build, in place, installed or sanitized; and the last run of all cases."""
    spec = importlib.util.find_spec("zshard")
    origin = spec.origin if spec else "not importable; run `make test`"
    return [f"zshard: {origin}", f"cases: {shards.when_all_ran()}"]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Keep the samples only."""
    yield
    if not sampling.runs_all(metafunc.config):
        metafunc.config.stash[CASES][1] += sampling.keep_a_sample(metafunc)


@pytest.hookimpl(tryfirst=True)  # before `-k` and `-m` select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases that this run does not want, and skip those that this machine cannot run."""
    ended = shards.Shard(config.option.shard).ended() if config.option.shard else {}
    left = [
        item
        for item in items
        if sampling.is_left_out(config, item) or ended.get(item.nodeid, "failed") != "failed"
    ]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
    config.stash[CASES][1] += len(left)
    skip_without_fma([item for item in items if item.get_closest_marker("needs_fma")])


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[CASES][0] = len(session.items)
    gc.freeze()  # else each collection scans all cases again
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the controller, which collects nothing."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cases"] = session.config.stash[CASES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[CASES] = getattr(node, "workeroutput", {}).get("cases", [0, 0])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run, left = config.stash[CASES]
    terminalreporter.write_line(f"{run:,} of {run + left:,} cases in this run")


def skip_without_fma(marked: list[pytest.Item]) -> None:
    """Skip what needs fused multiply-adds where this machine, or ATEN_CPU_CAPABILITY, has none."""
    if not marked:
        return
    import zshard

    if zshard.available_features()["loops"] == "base" and platform.machine() == "x86_64":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="the CPU's loops do not use FMA here"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """torch computes on one thread, as it does in ranks; tests of threads ask for theirs.

    OpenMP's threads spin while they wait for each other: where something else runs on the cores, a
    small model takes fifty times as long.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def leaves_no_group_behind() -> Iterator[None]:
    """A process group left in pytest's own process fails tests that come later, of other files."""
    before = dist.is_initialized()
    yield
    if dist.is_initialized() and not before:
        dist.destroy_process_group()
        pytest.fail("the test has left a process group behind: use the fixture group_ends")


@pytest.fixture
def group_ends(leaves_no_group_behind: None) -> Iterator[None]:
    """Ends the process group of one process that the test makes, as zshard.initialize() does."""
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """The session's pools by world size; each starts its ranks when it is first used."""
    made: dict[int, RankPool] = {}
    yield made
    for pool in made.values():  # all at once
        pool.hang_up()
    for pool in made.values():
        pool.close(patience=5.0)


def _pool(world: int, pools: dict[int, RankPool]) -> RankPool:
    return pools.setdefault(world, RankPool(world))


@pytest.fixture
def pool(request: pytest.FixtureRequest, pools: dict[int, RankPool]) -> RankPool:
    """The pool of the size that `@ranks(...)` gave."""
    return _pool(request.param, pools)


@pytest.fixture
def pool2(pools: dict[int, RankPool]) -> RankPool:
    """The pool of two ranks."""
    return _pool(2, pools)


@pytest.fixture
def pool3(pools: dict[int, RankPool]) -> RankPool:
    """The pool of three ranks."""
    return _pool(3, pools)


@pytest.fixture
def pool4(pools: dict[int, RankPool]) -> RankPool:
    """The pool of four ranks."""
    return _pool(4, pools)
