"""FSDP() refuses a model that cannot fit, on all ranks, and lists settings that fit.

Limits are passed, or those of the host are replaced, so that small models do not fit; all other tests, which use
this host's memory, show that fitting models are accepted. FSDP() does not know the optimizer: the
first step refuses an optimizer whose state does not fit.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, Block, Net, loss_of, make
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.memory import host_limits, spare
from zshard.memory.host_limits import room_of_cgroup, room_of_host
from zshard.options import parse_options
from zshard.units.units import state_of

MIB = 1 << 20


def stack(width=512, depth=8):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def predicted(strategy="full_shard", **options):
    with torch.device("meta"):
        model = stack()
    return zshard.predict_memory(
        model, dist.get_world_size(), strategy=strategy, auto_wrap_policy={nn.Linear}, **options
    )


def refused(model, **options):
    """Return the text of FSDP()'s MemoryError; fail unless the model is as before."""
    before = [(id(p), p.clone()) for p in model.parameters()]
    text = message_of(lambda: FSDP(model, auto_wrap_policy={nn.Linear}, **options), MemoryError)
    assert_same([(id(p), p) for p in model.parameters()], before, "the refused model")
    assert type(model) is nn.Sequential
    for module in model.modules():
        assert not (module._forward_pre_hooks or module._forward_hooks)
    return text


@pytest.mark.parametrize("on_rank", [None, 1])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_refused_on_all_ranks(strategy, transport, on_rank):
    limit = 11 * MIB if on_rank in (None, dist.get_rank()) else "100GiB"
    text = refused(stack(), strategy=strategy, transport=transport, memory_limit=limit)
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts[0] == texts[1] and (on_rank is None or "rank 1 of 2" in text)
    assert "only 11.0 MiB are available (memory_limit)" in text
    assert re.search(r"shards \d+\.\d, grads \d+\.\d, (slots \d+\.\d, )?buckets", text)
    for words in ("predict_memory()", "bfloat16", "smaller units", "memory_limit=None"):
        assert words in text, text


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_limit_equals_the_prediction(transport):
    total = predicted(transport=transport, optimizer=None)["total"]
    assert "does not fit" in refused(stack(), transport=transport, memory_limit=total - 1)
    FSDP(stack(), transport=transport, memory_limit=total, auto_wrap_policy={nn.Linear})


def limit_of_the_model(transport):
    """Return a limit within which a model fits, but not an optimizer's state."""
    parts = predicted(transport=transport)
    return parts["total"] - parts["optimizer"] + MIB


@on_ranks(2)
def test_warning_if_the_optimizer_does_not_fit():
    limit = limit_of_the_model("shm")
    options = {"auto_wrap_policy": {nn.Linear}, "transport": "shm", "memory_limit": limit}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = FSDP(stack(), **options)
    loss_of(model(torch.ones(2, 512))).backward()
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) == (1 if dist.get_rank() == 0 else 0)
    assert all("and Adam's state" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises((RuntimeWarning, RuntimeError), match="and Adam's state"):
            FSDP(stack(), **options)


@on_ranks(2)
def test_ranks_with_and_without_a_limit():
    with pytest.raises(zshard.DivergenceError, match="memory_limit"):
        FSDP(stack(), memory_limit=None if dist.get_rank() == 0 else "auto")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_outer_calls(transport):
    """Inner units count, whether or not they fit in an outer call."""
    case, model = CASES["net"], make(Net)
    options = {"transport": transport, "auto_wrap_policy": None}
    for module in reversed(list(model.modules())):
        if isinstance(module, Block):
            FSDP(module, **options)
    with pytest.raises(MemoryError, match="smaller units"):
        FSDP(model, memory_limit=1, **options)
    FSDP(model, **options)
    loss_of(model(case.batch(0, dist.get_rank()))).backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(3, fresh=True)
def test_mappings_are_counted_before_any_is_made(transport):
    """The last rank may create 50 more mappings."""
    dist.init_process_group("gloo")
    FSDP(stack(8, 1))
    if dist.get_rank() == 2:
        zshard.memory.fits.room_of_mappings = lambda: 50
    if transport == "c10d":
        FSDP(stack(8, 30), transport=transport, auto_wrap_policy={nn.Linear})
    else:
        text = refused(stack(8, 30), transport=transport)
        assert re.search(r"rank 2 of 3 needs \d+, and the kernel allows 50 more", text)
        assert "raise vm.max_map_count" in text


@pytest.mark.parametrize("device", ["cpu", "meta"])
@on_ranks(2, fresh=True)
def test_existing_parameters_are_not_counted_twice(device):
    """64 MiB of parameters, which exist or not, and the same of gradients."""
    dist.init_process_group("gloo")
    with torch.device(device):
        model = stack(1024, 16)
    host_limits.room_of_host = lambda: 2 * 96 * MIB  # for two ranks
    how = {"strategy": "no_shard", "transport": "c10d", "auto_wrap_policy": {nn.Linear}}
    if device == "cpu":
        FSDP(model, **how)
    else:
        words = r"96.0 MiB are available \(the host's MemAvailable, divided among"
        with pytest.raises(MemoryError, match=words):
            FSDP(model, **how)


# --- formats of limits ----------------------------------------------------------------------------


V1 = "sys/fs/cgroup/memory/memory"
GROUPS = {  # files, and the bytes that the control group leaves
    "no files": ({}, None),
    "version 2": (
        {
            "proc/self/cgroup": "0::/job/rank\n",
            "sys/fs/cgroup/job/rank/memory.max": "max\n",
            "sys/fs/cgroup/job/rank/memory.current": "500\n",
            "sys/fs/cgroup/job/memory.max": "1000\n",
            "sys/fs/cgroup/job/memory.current": "900\n",
            "sys/fs/cgroup/job/memory.stat": "anon 400\ninactive_file 300\nactive_file 150\n",
        },
        1000 - (900 - 450),
    ),
    "version 1 in a container": (  # the path is the host's; the mount's top is the process's group
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
            f"{V1}.limit_in_bytes": "2000\n",
            f"{V1}.usage_in_bytes": "1500\n",
            f"{V1}.stat": "inactive_file 7\ntotal_inactive_file 100\n",
        },
        600,
    ),
    "no limit": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            f"{V1}.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            f"{V1}.usage_in_bytes": "1500\n",
        },
        None,
    ),
}


def test_room_of_control_groups_and_hosts(tmp_path):
    assert room_of_host(tmp_path) is None
    with all_rows() as row:
        for name, (files, room) in GROUPS.items():
            for file, text in files.items():
                path = tmp_path / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            with row(name):
                assert room_of_cgroup(tmp_path / name)[0] == room
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   10 kB\n")
    assert room_of_host(tmp_path) == 10 * 1024


def test_limits_as_arguments():
    limits = {"1.5GiB": 3 << 29, "1536m": 3 << 29, None: None, "auto": "auto", 7: 7}
    for limit, parsed in limits.items():
        assert parse_options({"memory_limit": limit}).limit == parsed
    for wrong, kind in (("much", ValueError), (0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(kind, match="memory_limit"):
            FSDP(stack(8, 1), memory_limit=wrong)


# --- the optimizer's state -------------------------------------------------------------------------


def four_layers(limit):
    model = FSDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), memory_limit=limit)
    model(torch.ones(1, 512)).sum().backward()
    return model


@pytest.mark.parametrize("optimizer", [zshard.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("limit", ["auto", "1GiB"])
def test_oversized_state_is_refused_before_allocation(optimizer, limit, monkeypatch):
    model, free = four_layers(limit), four_layers(None)
    monkeypatch.setattr(host_limits, "room_of_host", lambda: 5 << 20)
    made = optimizer(model.parameters())
    with pytest.raises(MemoryError, match=r"Adam\w* does not fit.* needs 8.0 MiB .* 5.0 MiB are"):
        made.step()
    assert len(made.state) == 0
    torch.optim.SGD(model.parameters(), 0.1).step()  # the error's remedy
    optimizer(free.parameters()).step()
    monkeypatch.setattr(host_limits, "room_of_host", lambda: 9 << 20)
    made.step()
    made.step()


TORCHS = [
    *("Adam", "Adadelta", "Adagrad", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]
MADE = {
    **{name: getattr(torch.optim, name) for name in TORCHS},
    "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "RMSprop of all kinds": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "zshard.AdamW": zshard.AdamW,
    "zshard's amsgrad": lambda params: zshard.Adam(params, amsgrad=True),
    "zshard's momentum": lambda params: zshard.SGD(params, 0.1, momentum=0.9),
    "AdamW8bit": zshard.AdamW8bit,
    "AdamW8bit in 32 bits": lambda params: zshard.AdamW8bit([{"params": params, "bits": 32}]),
    "AdamW8bit for all": lambda params: zshard.AdamW8bit(params, min_8bit_size=0),
    "SGD8bit": lambda params: zshard.SGD8bit(params, 0.1),
    "momentum in 8 bits": lambda params: zshard.SGD8bit(params, 0.1, momentum=0.9),
    "Muon": lambda params: zshard.Muon(hidden_and_others(params)),
    "Muon with 8 bits": lambda params: zshard.Muon(hidden_and_others(params), adamw={"bits": 8}),
}


def hidden_and_others(params):
    hidden, *others = list(params)
    return [{"params": [hidden]}, {"params": others, "use_muon": False}]


def bytes_in(state):
    return sum(
        value.numel() * value.itemsize
        for entries in state.values()
        for value in entries.values()
        if torch.is_tensor(value) and value.dim() > 0
    )


@pytest.mark.parametrize("name", MADE)
def test_bytes_of_the_state_are_known(name, monkeypatch):
    model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)), memory_limit="1GiB")
    loss_of(model(torch.ones(2, 64))).backward()
    optimizer = MADE[name](model.parameters())
    before, needs, gather = bytes_in(optimizer.state), [], spare.gather
    monkeypatch.setattr(
        spare, "gather", lambda comm, need: (needs.append(need[2]), gather(comm, need))[1]
    )
    optimizer.step()
    assert sum(needs) == bytes_in(optimizer.state) - before
    assert (sum(needs) > 0) == (name not in ("SGD", "SGD8bit", "Adagrad"))


def model_within(limit, **options):
    """Return a model after a backward; that the optimizer will not fit is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(stack(), auto_wrap_policy={nn.Linear}, memory_limit=limit, **options)
    loss_of(model(torch.ones(2, 512))).backward()
    return model


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("on_rank", [None, 1])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, zshard.AdamW])
@on_ranks(2)
def test_state_beyond_memory_limit_is_refused_on_all_ranks(transport, on_rank, kind):
    """One rank's limit, or all ranks', leaves room for the model alone."""
    limit = limit_of_the_model(transport) if on_rank in (None, dist.get_rank()) else "100GiB"
    model = model_within(limit, transport=transport)
    optimizer = kind(model.parameters(), lr=0.1)
    before = {name: param.clone() for name, param in model.state_dict().items()}
    text = message_of(optimizer.step, MemoryError)
    assert message_of(optimizer.step, MemoryError) == text
    assert on_rank is None or "rank 1 of 2 needs 8.0 MiB for its state" in text
    assert re.search(r"only 1.0 MiB are left \(of the \d+\.\d MiB of memory_limit\)", text)
    assert len(optimizer.state) == 0
    assert_same(model.state_dict(), before, "the model")
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    loss_of(model(torch.ones(2, 512))).backward()


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_first_step_fits_exactly(transport):
    total = predicted(transport=transport)["total"]
    model = model_within(total - 1, transport=transport)
    message_of(zshard.AdamW(model.parameters()).step, MemoryError)
    model = model_within(total, transport=transport)
    zshard.AdamW(model.parameters()).step()
    assert model.memory("peak")["total"] <= 1.01 * total


def test_limit_of_an_inner_call_is_not_the_outer_ones():
    model = stack(512, 4)
    FSDP(model[0], memory_limit="3MiB")
    FSDP(model, memory_limit="1GiB")
    loss_of(model(torch.ones(2, 512))).backward()
    zshard.AdamW(model.parameters()).step()


def test_the_number_of_a_freed_engine_is_not_used_again():
    """A block that was sharded alone first has lost its engine to the model's. If the model's engine
    had the same number on one rank, that rank would check the first step twice, and wait there."""
    numbers = [state_of(FSDP(nn.Linear(4, 4))).unit.engine_id for _ in range(20)]
    assert len(set(numbers)) == 20


def test_state_of_an_earlier_optimizer_counts():
    model = four_layers("13MiB")  # 4 MiB of parameters, and 8 MiB for Adam
    earlier = zshard.AdamW(model.parameters())
    earlier.step()
    with pytest.raises(MemoryError, match=r"needs 4.0 MiB .* only 1.0 MiB are"):
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9).step()
