"""PeerTimeoutError is a TimeoutError, and so an OSError: it must not be mistaken for one.

Much of zshard catches OSError, for files; waits for ranks must not be inside such code, and their
errors must reach the script unchanged. Each model has its own timeout.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import TRANSPORTS
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, PeerTimeoutError
from zshard.checkpoint import load as load_module
from zshard.checkpoint import save as save_module
from zshard.ranks import agreement as _agree
from zshard.units.units import state_of

TEXT = "rank 0 waited 2.0 s for rank 1's part in exchange"

# --- the exception ---------------------------------------------------------------------------------


def test_bases_that_scripts_catch() -> None:
    assert PeerTimeoutError.__bases__ == (zshard.PeerError, TimeoutError)
    assert issubclass(zshard.PeerError, RuntimeError)
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
    group: Any = dist.new_group([0, 1])
    asked = ((first, 5), (second, 6), ("auto", 6), ("auto", 7))
    models = [
        FSDP(nn.Linear(2, 2), process_group=group, transport=transport, timeout=timeout)
        for transport, timeout in asked
    ]
    transports = [state_of(model).comms.all.transport for model in models]
    assert transports == ["shm", second, "shm", "shm"]


def limit_of(model: Any) -> float:
    return float(state_of(model).comms.all.timeout)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_each_model_keeps_its_timeout(transport):
    of_group = limit_of(FSDP(nn.Linear(2, 2), transport=transport))
    asked = (600, 5, None, 600, 7 if dist.get_rank() == 1 else 600, 5)
    wanted, models = [of_group if limit is None else limit for limit in asked], []
    for limit, number in zip(asked, wanted, strict=True):
        models.append(FSDP(nn.Linear(2, 2), timeout=limit, transport=transport))
        assert limit_of(models[-1]) == number
    optimizer = zshard.SGD([p for each in models for p in each.parameters()], lr=0.1)
    for model in models:
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [limit_of(each) for each in models] == wanted


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_model_has_one_timeout(transport):
    for outer in (None, 5.0, 6):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0] = FSDP(model[0], timeout=5, transport=transport)
        if outer != 6:
            assert limit_of(FSDP(model, timeout=outer, transport=transport)) == 5.0
            continue
        with pytest.raises(ValueError, match=r"FSDP\(timeout=6\).* 5 s.*the same to both"):
            FSDP(model, timeout=outer, transport=transport)


# --- not mistaken for a file error -----------------------------------------------------------------


class Waits:
    """A transport whose waits all fail."""

    rank, world, transport = 0, 2, "shm"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return times_out


def times_out(*_: Any, **__: Any) -> None:
    raise PeerTimeoutError(TEXT)


def passes(action: Callable[[], Any]) -> None:
    with pytest.raises(PeerTimeoutError) as caught:
        action()
    assert str(caught.value) == TEXT and caught.value.__cause__ is None


def test_shared_outcome_propagates_it() -> None:
    def fails(error: Exception) -> None:
        with _agree.on_all_ranks(Waits()):  # type: ignore[arg-type]
            raise error

    passes(lambda: fails(PeerTimeoutError(TEXT)))
    passes(lambda: fails(OSError(5, "Input/output error")))  # the outcome could not be shared


@pytest.mark.parametrize("asynchronous", [False, True])
def test_save_propagates_it(tmp_path: Path, monkeypatch: Any, asynchronous: bool) -> None:
    model = FSDP(nn.Linear(3, 3))
    path = tmp_path / "saved"
    for name in ("_write", "check_agreement"):
        with monkeypatch.context() as patch:
            patch.setattr(save_module, name, times_out)
            passes(lambda: zshard.save(path, model, asynchronous=asynchronous).wait())
        assert not path.exists()


def test_load_propagates_it(tmp_path: Path, monkeypatch: Any) -> None:
    model = FSDP(nn.Linear(3, 3))
    zshard.save(tmp_path / "saved", model)
    for name in ("check_agreement", "_check", "_plan_model"):
        with monkeypatch.context() as patch:
            patch.setattr(load_module, name, times_out)
            passes(lambda: zshard.load(tmp_path / "saved", model))
