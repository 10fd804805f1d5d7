"""PeerTimeoutError is a TimeoutError, and so an OSError: it must not be mistaken for one.

Much of zshard catches OSError, for files; waits for ranks must not be inside such code, and their
errors must reach the script unchanged.
"""

from __future__ import annotations

import ast
import copy
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import TRANSPORTS, Mlp, make
from nursery import fork_ranks
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, PeerTimeoutError, _core
from zshard.ranks import agreement as _agree

ROOT = Path(__file__).resolve().parents[2]
TEXT = "rank 0 waited 2.0 s for rank 1's part in exchange"

# --- the exception ---------------------------------------------------------------------------------


def test_bases_that_scripts_catch() -> None:
    assert PeerTimeoutError.__bases__ == (zshard.PeerError, TimeoutError)
    for kind in (TimeoutError, OSError, zshard.PeerError, RuntimeError):
        assert isinstance(PeerTimeoutError(TEXT), kind)
    for kind in (zshard.PeerError, zshard.DivergenceError, zshard.CudaError, zshard.NcclError):
        assert not issubclass(kind, OSError)


@pytest.mark.parametrize(
    "args", [(), (TEXT,), (TEXT, 2), (110, TEXT), (110, TEXT, "file"), (1,) * 5]
)
def test_arguments_are_kept_unchanged(args: tuple[Any, ...]) -> None:
    """OSError would turn two or more arguments into errno, strerror and a file name."""
    error = PeerTimeoutError(*args)
    plain = RuntimeError(*args)
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(6)]
    for each in (error, copy.copy(error), copy.deepcopy(error), *copies):
        assert type(each) is PeerTimeoutError and each.args == args
        assert str(each) == str(plain) and repr(each) == f"PeerTimeoutError{repr(plain)[12:]}"
        assert (each.errno, each.strerror, each.filename, each.filename2) == (None,) * 4


# --- whose timeout it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["auto", "shm"])
@pytest.mark.parametrize("second", ["c10d", "shm"])
@on_ranks(2)
def test_auto_stays_shm_beside_another_timeout(first, second):
    """Return the transports of models in a group of their own, the last of them with "auto"."""
    group: Any = dist.new_group([0, 1])
    asked = ((first, 5), (second, 6), ("auto", 6), ("auto", 7))
    models = [
        FSDP(nn.Linear(2, 2), process_group=group, transport=transport, timeout=timeout)
        for transport, timeout in asked
    ]
    found = [model.__dict__["_zshard_state"].comms.all.transport for model in models]
    assert found == ["shm", second, "shm", "shm"]


def limit_of(model: Any) -> float:
    return float(model.__dict__["_zshard_state"].comms.all.timeout)


def models_side_by_side(transport: str) -> tuple[list[float], list[float]]:
    """Return the models' timeouts when each is made, and when all are and have trained."""
    asked = (600, 5, None, 600, 7 if dist.get_rank() == 1 else 600, 5)
    models, first = [], []
    for timeout in asked:
        model = FSDP(nn.Linear(2, 2), timeout=timeout, transport=transport)
        models.append(model)
        first.append(limit_of(model))
    optimizer = zshard.SGD([p for each in models for p in each.parameters()], lr=0.1)
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return first, [limit_of(each) for each in models]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_model_keeps_its_timeout(pool2: Any, transport: str) -> None:
    ranks = pool2.run(models_side_by_side, transport)
    of_group = ranks[0][0][2]
    for rank, found in enumerate(ranks):
        asked = [600, 5, of_group, 600, 7 if rank == 1 else 600, 5]
        assert found == (asked, asked)


def nested(transport: str, inner: float | None, outer: float | None) -> str | float:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0] = FSDP(model[0], timeout=inner, transport=transport)
    try:
        return limit_of(FSDP(model, timeout=outer, transport=transport))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_has_one_timeout(pool2: Any, transport: str) -> None:
    assert pool2.run(nested, transport, 5, None) == [5.0, 5.0]
    assert pool2.run(nested, transport, 5, 5.0) == [5.0, 5.0]
    for said in pool2.run(nested, transport, 5, 6):
        assert "FSDP(timeout=6)" in said and "5 s" in said and "the same to both" in said


# --- a wait that times out -------------------------------------------------------------------------


def late(transport: str) -> tuple[str, str, tuple[Any, ...], Any]:
    """Return what rank 0 catches as a TimeoutError while rank 1 sleeps."""
    model = FSDP(make(Mlp), transport=transport, timeout=2.0)
    if os.environ["RANK"] == "1":
        time.sleep(60)
    try:
        model(torch.ones(2, 7)).sum().backward()
    except TimeoutError as error:
        return type(error).__name__, str(error), error.args, error.errno
    except Exception as error:
        return type(error).__name__, str(error), error.args, None
    return "", "", (), None


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_late_rank_raises_a_timeout_error(transport: str) -> None:
    result = fork_ranks(late, 2, transport, until=0)[0]
    assert result.value is not None, result.stderr
    kind, text, args, number = result.value
    assert kind == "PeerTimeoutError" and args == (text,) and number is None
    assert "rank 1" in text or "2000ms" in text


# --- not mistaken for a file error -----------------------------------------------------------------


class Waits:
    """A transport whose waits all fail."""

    rank, world, transport = 0, 2, "shm"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def wait(*args: Any) -> None:
            raise PeerTimeoutError(TEXT)

        return wait


def passes(action: Callable[[], Any]) -> None:
    with pytest.raises(PeerTimeoutError) as caught:
        action()
    assert str(caught.value) == TEXT and caught.value.__cause__ is None


def test_shared_outcome_propagates_it() -> None:
    def inside() -> None:
        with _agree.on_all_ranks(Waits()):  # type: ignore[arg-type]
            raise PeerTimeoutError(TEXT)

    def after() -> None:
        with _agree.on_all_ranks(Waits()):  # type: ignore[arg-type]
            raise OSError(5, "Input/output error")

    passes(inside)
    passes(after)  # the outcome could not be shared


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_propagates_it(tmp_path: Path, monkeypatch: Any, asynchronous: bool) -> None:
    from zshard.checkpoint import save as module

    def fails(*_: Any, **__: Any) -> None:
        raise PeerTimeoutError(TEXT)

    model = FSDP(nn.Linear(3, 3))
    path = tmp_path / "saved"
    for name in ("_write", "check_agreement"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            passes(lambda: zshard.save(path, model, asynchronous=asynchronous).wait())
        assert not path.exists()


def test_load_propagates_it(tmp_path: Path, monkeypatch: Any) -> None:
    from zshard.checkpoint import load as module

    def fails(*_: Any, **__: Any) -> None:
        raise PeerTimeoutError(TEXT)

    model = FSDP(nn.Linear(3, 3))
    zshard.save(tmp_path / "saved", model)
    for name in ("check_agreement", "_check", "_plan_model"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fails)
            passes(lambda: zshard.load(tmp_path / "saved", model))


WAITS = {name for name in dir(_core.Comm) if not name.startswith("_")} - {
    *("rank", "world", "transport", "timeout", "lost", "address"),  # its known facts
    *("shm", "shm_needs", "alone", "c10d", "gpu", "dry_run"),  # creates one, without communication
    *("close", "abort", "is_asked", "answer", "publish_failure"),
} | {"on_all_ranks", "check_agreement", "gather_bytes", "comm_for", "comm_beside", "comms_for"}
CATCHES = {"OSError", "IOError", "EnvironmentError", "TimeoutError", "Exception"}
ALLOWED = {
    *(
        "ranks/agreement.py:on_all_ranks",
        "ranks/agreement.py:told_to_all_ranks",
    ),  # have a clause for PeerError
    "ranks/meeting.py:connect_shm",  # reports to the other ranks why shm is not available
    "extras/keeping/client.py:_connect",  # a socket's connect(), not a transport's
    "extras/readers/torch_file.py:reading",  # within it, bytes of a file are read
}


def waits_within(source: str, file: str) -> set[str]:
    """Return the functions that wait for ranks where an OSError would be caught."""
    found: set[str] = set()
    if not any(word in source for word in CATCHES):
        return found
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            guards: list[ast.AST] = []
            if isinstance(node, ast.Try):
                guards = [handler.type for handler in node.handlers if handler.type is not None]
            elif isinstance(node, ast.With):
                calls = [item.context_expr for item in node.items]
                guards = [
                    c for c in calls if isinstance(c, ast.Call) and "suppress" in ast.unparse(c)
                ]
            words = {n.id for guard in guards for n in ast.walk(guard) if isinstance(n, ast.Name)}
            if not words & CATCHES or not isinstance(node, ast.Try | ast.With):
                continue
            inside = {
                getattr(call.func, "attr", getattr(call.func, "id", ""))
                for statement in node.body
                for call in ast.walk(statement)
                if isinstance(call, ast.Call)
            }
            yields = any(isinstance(n, ast.Yield) for s in node.body for n in ast.walk(s))
            if inside & WAITS or (yields and "Exception" in words):
                found.add(f"{file}:{function.name}")
    return found


def test_no_other_code_catches_wait_errors() -> None:
    found = set()
    package = ROOT / "zshard"
    for path in sorted(package.rglob("*.py")):
        found |= waits_within(path.read_text(), path.relative_to(package).as_posix())
    assert found == ALLOWED


BAD = """
def one(comm):
    try:
        comm.exchange(b"")
    except (ValueError, OSError):
        pass
def two(comm):
    with contextlib.suppress(OSError):
        comm.broadcast(tensor, 0)
def good(path):
    try:
        path.read_text()
    except OSError:
        pass
"""


def test_checker_finds_such_code() -> None:
    assert waits_within(BAD, "x") == {"x:one", "x:two"}
