"""The helpers that run tests on ranks (tests/lib/spawn.py): they notice every failure of a rank.

This file imports no torch at its head, so that its fresh ranks start fast.
"""

import contextlib
import os
import select
import signal
import sys
import time

import pytest
from nursery import fork_ranks, forked_python
from spawn import RankFailure, RankPool, run_ranks


def seed_and_pid():
    import torch

    return float(torch.rand(1)), os.getpid()


def fail_on(rank, how):
    print("a word on stdout")
    if int(os.environ["RANK"]) != rank:
        return "fine"
    if how == "raise":
        raise ValueError("planted")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(3600)
    if how == "late":
        import atexit

        atexit.register(os._exit, 7)
    return "fine"


def test_pool_keeps_its_ranks_and_seeds_each_call(pool2):
    first, second = pool2.run(seed_and_pid), pool2.run(seed_and_pid)
    assert first == second
    assert first[0][0] == first[1][0] and first[0][1] != first[1][1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "reason", "code"),
    [
        ("raise", "rank 1 of 2 failed\n(.|\n)*ValueError: planted", 1),
        ("exit", "rank 1 of 2 failed\n(.|\n)*a word on stdout", 3),
        ("kill", "rank 1 of 2 died with exit status -9", -9),
        ("late", "rank 1 of 2 returned, but then ended with 7", 7),
    ],
)
def test_failing_rank_is_reported(how, reason, code):
    with pytest.raises(RankFailure, match=reason):
        run_ranks(fail_on, 2, 1, how)
    results = run_ranks(fail_on, 2, 1, how, check=False)
    assert [result.returncode for result in results] == [0, code]
    assert results[0].value == "fine"


@pytest.mark.thorough
def test_pool_shows_a_failure_and_restarts():
    pool = RankPool(2)
    try:
        pids = {pid for _, pid in pool.run(seed_and_pid)}
        for how, reason in (("raise", "ValueError: planted"), ("kill", "died with exit status -9")):
            with pytest.raises(RankFailure, match=f"rank 1 of 2 (.|\n)*{reason}"):
                pool.run(fail_on, 1, how)
            fresh = {pid for _, pid in pool.run(seed_and_pid)}
            assert not pids & fresh
            pids |= fresh
        with pytest.raises(RankFailure, match=r"rank 1 .* no answer within 1 s(.|\n)*in fail_on"):
            pool.run(fail_on, 1, "hang", timeout=1)
    finally:
        pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


SAYS = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ.get("ZSHARD_TEST_OLD"), os.environ["ZSHARD_TEST_NEW"])
print("a word", file=sys.stderr)
sys.exit("torch" not in sys.modules or 5)
"""


def test_forked_python_is_like_python(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SAYS)
    monkeypatch.setenv("ZSHARD_TEST_OLD", "old")
    for words in (["-c", SAYS], ["-u", "-m", "script"], ["script.py"]):
        done = forked_python(*words, "a b", 7, cwd=tmp_path, env={"ZSHARD_TEST_NEW": "new"})
        assert done.stdout == f"['a b', '7'] {tmp_path} old new\n"
        assert (done.stderr, done.returncode) == ("a word\n", 5)


def with_a_child(folder):
    child = os.fork()
    if not child:
        time.sleep(3600)
    (folder / os.environ["RANK"]).write_text(str(child))
    if os.environ["RANK"] == "1":
        raise EOFError("planted")


def test_a_rank_that_ends_takes_its_children_along(tmp_path):
    results = fork_ranks(with_a_child, 2, tmp_path)
    assert [result.returncode for result in results] == [0, 1]
    assert "EOFError: planted" in results[1].stderr
    for rank in "01":
        with contextlib.suppress(ProcessLookupError):  # it has ended
            end = os.pidfd_open(int((tmp_path / rank).read_text()))
            assert select.select([end], [], [], 60)[0]
            os.close(end)
