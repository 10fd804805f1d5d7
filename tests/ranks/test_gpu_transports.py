"""The transport of a model on GPUs, with fakes of CUDA's driver and libnccl: NCCL, or c10d if ranks
share a GPU. tests/gpu tests these transports."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from nursery import fork_ranks
from scenario import Scenario
from stand_ins import environment

from zshard import _core
from zshard.ranks import nccl, transports
from zshard.units.units import state_of


def gpu_at(monkeypatch, bus: int, host: str = "a") -> bytes:
    """Return the id of a GPU, as transports derive it from torch's facts."""
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(nccl.meeting, "host_id", lambda: host)
    return nccl.gpu_id("cuda:0")


@pytest.mark.parametrize(
    ("peers", "wanted", "kind"),
    [
        ([("a", 2)], "auto", "nccl "),
        ([("a", 1)], "auto", "c10d gloo"),  # also two MIG instances
        ([("a", 2), ("a", 2)], "auto", "c10d gloo"),
        ([("b", 1)], "auto", "nccl "),  # on another host
        ([("b", 2), ("b", 2)], "auto", "c10d gloo"),
        ([("a", 1)], "nccl", "nccl "),
    ],
)
def test_chosen_transport(monkeypatch, peers, wanted, kind):
    chosen = []
    ids = [gpu_at(monkeypatch, bus, host) for host, bus in peers]
    gpu_at(monkeypatch, 1)
    control = SimpleNamespace(rank=1, exchange=lambda mine: [mine, *ids])
    fake = SimpleNamespace(
        gpu=lambda control, by, device, name, *rest: chosen.append(f"{by} {name}")
    )
    for name, value in {
        "comm_for": lambda *args: control,
        "library": lambda: None,
        "warn_together": lambda group, text: None,
        "new_group": lambda group, device, by: SimpleNamespace(group_name=by),
        "_core": SimpleNamespace(Comm=fake),
    }.items():
        monkeypatch.setattr(transports, name, value)
    transports.connect_gpu("cuda:0", None, wanted, 1.0)
    assert chosen == [kind] and _core.Comm is not fake


def on_gpus(env, visible):
    """Return the transport of ranks that each see some GPUs of the machine and use the first, and
    the warnings."""
    gpu = visible[int(os.environ["RANK"])]
    os.environ.update(env, ZSHARD_BACKEND="auto", FAKE_CUDA_VISIBLE=gpu)
    scenario = Scenario("mlp", options={"timeout": 20.0})
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        training = scenario.sharded()
    training.go(1)
    words = "\n".join(str(each.message) for each in warned)
    return state_of(training.model).comms.all.transport, words


@pytest.mark.parametrize("visible", [["0", "0", "1"], ["0", "0", "0"]], ids="-".join)
def test_ranks_that_share_a_gpu_train_by_default(visible):
    """NCCL refuses them, so it is not tried."""
    env = environment("nccl", late=0)
    first, *others = (r.value for r in fork_ranks(on_gpus, 3, env, visible, check=True))
    assert first[0] == "c10d_gpu" and {other[0] for other in others} == {"c10d_gpu"}
    assert "ranks 0 and 1 share a GPU, which NCCL does not support" in first[1]
    assert "share" not in others[0][1] + others[1][1]


def test_ranks_with_a_gpu_each_use_nccl_by_default():
    env = environment("nccl", late=0)
    for result in fork_ranks(on_gpus, 2, env, ["0", "1"], check=True):
        assert result.value == ("nccl", "")


def test_unknown_transport_error_lists_the_valid_ones():
    words = "of a model on cuda must be one of 'auto', 'nccl', 'c10d', got 'peer'"
    with pytest.raises(ValueError, match=words):
        transports.check_settings("peer", None, "cuda:0")
