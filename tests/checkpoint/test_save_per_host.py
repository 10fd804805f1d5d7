"""Checkpoints of hosts that share no disk: save(per_host=True), load() and collect.

Hosts are simulated on one machine (groups.py); each has a folder of its own. The states of models that
are saved by some hosts and loaded by others are the same, to the bit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from groups import mesh_of, on_hosts
from nursery import fork_ranks
from spawn import RankPool
from torch import nn

import zshard
from zshard import FSDP, CheckpointError, __main__
from zshard.checkpoint import folder
from zshard.checkpoint.manifest import Manifest
from zshard.extras.per_host import hosts as of_hosts
from zshard.extras.per_host import write_parts as save_parts
from zshard.extras.per_host.collect import collect
from zshard.ranks import meeting
from zshard.wrap import ModuleWrapPolicy

STEP = "step-00000003"
SEEN = {"loss": (1, 2.5), "seen": torch.arange(3)}


def on_nodes(per_host: int, function, *args, **options):
    """Call a function on ranks of hosts, node0 and so on, that have so many ranks each."""
    with on_hosts(per_host, "node"):
        return function(*args, **options)


def node() -> int:
    """Return the number of this rank's host."""
    return int(meeting.host_id().removeprefix("node"))


def disk(root: str, number: int) -> str:
    """Return the folder that only this host has."""
    path = Path(root, f"disk{number}")
    path.mkdir(parents=True, exist_ok=True)
    return str(path / "checkpoints")


def made(strategy: str, transport: str | None = None, seed: int = 0):
    """Return a model and an optimizer of several units and dtypes, with a buffer."""
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(32, 257), nn.Linear(257, 65), nn.BatchNorm1d(65), nn.Linear(65, 3)
    )
    policy = ModuleWrapPolicy({nn.Linear})
    options = {"strategy": strategy, "transport": transport, "timeout": 60}
    if strategy.startswith("hybrid"):
        options["device_mesh"] = mesh_of(2, 2)
    model = FSDP(layers, auto_wrap_policy=policy, **options)
    return model, zshard.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(model, optimizer) -> str:
    """Return a checksum of all state. Collective."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    for number, own in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(own.items()):
            plain = torch.as_tensor(value).contiguous().view(-1).view(torch.uint8).numpy()
            found.update(f"{number}.{key}".encode() + plain.tobytes())
    return found.hexdigest()


# --- what ranks do --------------------------------------------------------------------------------


def save(root, strategy="full_shard", transport=None, steps=(3,), **options):
    model, optimizer = made(strategy, transport)
    digests = []
    for step in steps:
        train(model, optimizer)
        extra = {**SEEN, "rank": int(os.environ["RANK"])}
        saved = zshard.save(
            disk(root, node()), model, optimizer, step=step, per_host=True, extra=extra, **options
        )
        saved.wait()
        digests.append(digest(model, optimizer))
    return digests


def load(root, strategy="full_shard", transport=None, numbers=None):
    number = node() if numbers is None else numbers[node()]
    model, optimizer = made(strategy, transport, seed=1)
    loaded = zshard.load(disk(root, number), model, optimizer)
    assert loaded.verified
    assert loaded["seen"].tolist() == [0, 1, 2]
    return digest(model, optimizer), loaded.step, loaded["rank"]


def refused(root, number=None) -> str:
    """Return the error of a load, after which the ranks can still work together."""
    model, optimizer = made("full_shard", seed=1)
    before = digest(model, optimizer)
    for verify in (True, False):
        with pytest.raises(CheckpointError) as error:
            path = disk(root, node() if number is None else number)
            zshard.load(path, model, optimizer, verify=verify)
        assert digest(model, optimizer) == before
        if "is damaged" in str(error.value):
            break
    return str(error.value)


def folders(root) -> dict[str, list[str]]:
    """Return the files of the checkpoint, by disk."""
    return {
        path.name: sorted(each.name for each in (path / "checkpoints" / STEP).iterdir())
        for path in sorted(Path(root).iterdir())
    }


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


@pytest.fixture
def on(pools):
    """on(hosts, ranks per host, function, *args): what it returned on each rank of new hosts."""

    def run(hosts, per_host, function, *args):
        world = hosts * per_host
        pool = pools.setdefault(world, RankPool(world))
        return pool.run(on_nodes, per_host, function, *args)

    return run


# --- tests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy,transport",
    [
        *(("full_shard", None), ("full_shard", "c10d"), ("zero1", None), ("hybrid_shard", None)),
        *(("hybrid_full", None), ("no_shard", "c10d")),
    ],
)
def test_each_host_writes_only_its_own(on, root, strategy, transport):
    wanted = on(2, 2, save, root, strategy, transport)[0][-1]
    files = folders(root)
    assert set(files["disk0"]) & set(files["disk1"]) == {"all-hosts.part", "zshard.json"}
    manifests = {Path(root, d, "checkpoints", STEP, "zshard.json").read_text() for d in files}
    assert len(manifests) == 1
    found = on(2, 2, load, root, strategy, transport)
    assert found == [(wanted, 3, rank) for rank in range(4)]


def load_if_here(root):
    """Load on hosts that have changed places: only with all parts."""
    numbers = [1, 0, 2, 3]
    text = refused(root, numbers[node()])
    collect_on_hosts(root, numbers)
    return text, load(root, numbers=numbers)


@pytest.mark.parametrize("hosts,per_host", [(2, 2), (2, 1), (3, 1)])
def test_other_hosts_load_what_they_have_collected(on, root, hosts, per_host):
    wanted = on(2, 2, save, root)[0][-1]
    lacks = "host 'node2' has none" if hosts == 3 else r"host 'node[01]' \(ranks .*weight'"
    for text, (found, step, _) in on(hosts, per_host, load_if_here, root):
        assert (found, step) == (wanted, 3)
        assert re.search(lacks, text) and "ckpt collect" in text


def test_one_host_loads_the_parts_of_all(on, root):
    wanted = on(2, 2, save, root)[0][-1]
    gather_disks(root)
    assert {each[0] for each in on(1, 2, load, root)} == {wanted}


def refused_to_collect(root) -> str:
    with pytest.raises(CheckpointError) as error:
        collect([disk(root, node())])
    return str(error.value)


def test_a_lost_host_is_named_with_what_is_lost(on, root):
    on(2, 2, save, root)
    shutil.rmtree(Path(root, "disk1"))
    for text in on(2, 2, refused, root):
        assert "the host 'node1' has none" in text and "ckpt collect" in text
    for text in on(2, 2, refused_to_collect, root):
        assert "host 'node1' (ranks 2, 3)" in text
    assert any("weight'" in text for text in on(2, 2, refused_to_collect, root))


def load_collected(root, strategy):
    collect([disk(root, node())])
    return load(root, strategy)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
@pytest.mark.parametrize("lost", [0, 1])
def test_replicas_lose_nothing_with_a_host(on, root, strategy, lost):
    wanted = on(2, 2, save, root, strategy)[0][-1]
    shutil.rmtree(Path(root, f"disk{lost}"))
    assert {each[0] for each in on(2, 2, load_collected, root, strategy)} == {wanted}


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_hosts_of_unequal_size(pool3, root, strategy):
    """Two ranks write together what one rank writes alone; then each host has both."""
    [wanted] = pool3.run(on_nodes, 2, save, root, "no_shard", "c10d")[0]
    assert {each[0] for each in pool3.run(on_nodes, 2, load, root, "no_shard", "c10d")} == {wanted}
    assert {e[0] for e in pool3.run(on_nodes, 2, load_collected, root, strategy)} == {wanted}


def save_and_load_with(root, name):
    """Return the state of an optimizer whose matrices belong to one rank each, before and after."""
    digests = []
    for seed in (0, 1):
        model, _ = made("full_shard", seed=seed)
        if name == "Muon":
            optimizer = zshard.Muon(model)
        else:
            optimizer = zshard.WholeMatrix(torch.optim.Adafactor, model.parameters(), lr=0.01)
        if seed == 0:
            train(model, optimizer)
            zshard.save(disk(root, node()), model, optimizer, per_host=True)
        else:
            zshard.load(disk(root, node()), model, optimizer)
        digests.append(digest(model, optimizer))
    return digests


@pytest.mark.parametrize("name", ["Muon", "WholeMatrix"])
def test_state_on_one_rank_is_on_its_host(on, root, name):
    for before, after in on(2, 2, save_and_load_with, root, name):
        assert before == after


def save_two_steps(root):
    return save(root, steps=(3, 5))


def load_with_errors(root) -> str:
    """Warnings are errors: that of one rank is raised on all."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            load(root)
        except (RuntimeWarning, RuntimeError) as error:
            return str(error)
    return ""


def resume(root):
    """Load, train, and save step 5."""
    path = disk(root, node())
    model, optimizer = made("full_shard")
    found = zshard.latest_checkpoint(path, model)
    assert found is not None and found.endswith(STEP)
    with pytest.warns(RuntimeWarning, match="step-00000005") if is_first() else nullcontext():
        zshard.load(path, model, optimizer)
    train(model, optimizer)
    zshard.save(path, model, optimizer, step=5, per_host=True, extra={**SEEN, "rank": 0})
    with pytest.raises(FileExistsError):
        zshard.save(path, model, optimizer, step=5, per_host=True)
    return digest(model, optimizer)


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def test_an_incomplete_newest_checkpoint_is_skipped_and_replaced(on, root):
    """A host was lost between the others' renames and its own."""
    first, second = on(2, 1, save_two_steps, root)[0]
    shutil.rmtree(Path(root, "disk1/checkpoints/step-00000005"))
    assert {each[:2] for each in on(2, 1, load, root)} == {(first, 3)}
    for text in on(2, 1, load_with_errors, root):
        assert "step-00000003' is taken" in text
    assert set(on(2, 1, resume, root)) == {second}
    assert {each[:2] for each in on(2, 1, load, root)} == {(second, 5)}


def collect_an_older_one(root) -> str:
    with pytest.warns(RuntimeWarning, match="no folder that was given has them"):
        return str(collect([disk(root, node())]))


def test_the_newest_complete_checkpoint_is_collected(on, root):
    wanted, _ = on(2, 1, save_two_steps, root)[0]
    shutil.rmtree(Path(root, "disk1/checkpoints/step-00000005"))
    assert STEP in on(2, 1, collect_an_older_one, root)[0]
    assert {each[:2] for each in on(2, 1, load, root)} == {(wanted, 3)}


def save_over(root, strategy) -> None:
    with pytest.raises(FileExistsError):
        save(root, strategy)


def test_what_one_host_has_alone_is_not_replaced_if_it_is_complete(on, root):
    """A replica of the other host, whose disk is new."""
    wanted = on(2, 1, save, root, "no_shard")[0][-1]
    shutil.rmtree(Path(root, "disk1"))
    on(2, 1, save_over, root, "no_shard")
    on(2, 1, load_collected, root, "no_shard")
    assert {each[0] for each in on(2, 1, load, root, "no_shard")} == {wanted}


def damage(root, lost: int) -> Path:
    """Flip a bit of a tensor in a part file."""
    path = next(Path(root, f"disk{lost}", "checkpoints", STEP).glob("rank*.part"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return path


def test_damage_is_found_where_the_file_is(on, root):
    on(2, 1, save, root)
    path = damage(root, 1)
    for text in on(2, 1, refused, root):
        assert f"'{path}' is damaged" in text and "'0.weight'" in text
    for text in on(2, 1, refused_to_collect, root):
        assert f"'{path}' is damaged" in text


def load_another_model(root):
    """Fail to load, with another model; then load in the same processes."""
    other = FSDP(nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="Missing key"):
        zshard.load(disk(root, node()), other)
    return [load(root) for _ in range(2)]


def test_a_load_that_fails_leaves_the_next_one_as_it_was(on, root):
    wanted = on(2, 1, save, root)[0][-1]
    for found in on(2, 1, load_another_model, root):
        assert [each[0] for each in found] == [wanted, wanted]


def misuse(root):
    number = node()
    model, optimizer = made("full_shard")
    path = disk(root, number)
    shared = str(Path(root, "shared"))
    for error, text, where, options in (
        (ValueError, "share the folder", shared, {"per_host": True}),
        (
            ValueError,
            "overwrite=True is not available",
            path,
            {"per_host": True, "overwrite": True},
        ),
        (ValueError, "replicas= was removed", path, {"per_host": True, "replicas": 1}),
        (zshard.DivergenceError, "per_host", path, {"per_host": number == 0}),
        (zshard.DivergenceError, "path", path + str(number), {"per_host": True}),
        (FileNotFoundError, "does not exist", path + "/a/b", {"per_host": True}),
    ):
        with pytest.raises(error, match=text):
            zshard.save(where, model, optimizer, **options)
    train(model, optimizer)
    zshard.save(path, model, optimizer, per_host=True)
    assert sorted(os.listdir(path)) == [
        "all-hosts.part", f"rank-0000{number}-of-00002.part", "zshard.json"
    ]  # fmt: skip
    zshard.load(path, model, optimizer)
    with pytest.raises(ValueError, match="under torchrun, pass one path"):
        collect([path, path])
    with pytest.raises(TypeError, match="path must be"):
        zshard.load(path if number == 0 else None, model, optimizer)
    assert zshard.latest_checkpoint(str(Path(root, "nowhere")), model) is None
    return sorted(os.listdir(root)), os.listdir(Path(root, "shared"))


def test_misuse(on, root):
    Path(root, "shared").mkdir()
    assert on(2, 1, misuse, root) == [(["disk0", "disk1", "shared"], [])] * 2


# --- failures in the middle -----------------------------------------------------------------------


def fail_in_the_middle(root, where):
    """Rank 1 fails within a save, then all ranks save again."""
    model, optimizer = made("full_shard")
    train(model, optimizer)
    path = disk(root, node())
    options = {"step": 3, "per_host": True, "extra": {**SEEN, "rank": 0}}
    owner = of_hosts if where == "FileBlocks" else save_parts
    with failing_on_node1(owner, where), pytest.raises(OSError, match="no space"):
        zshard.save(path, model, optimizer, **options)
    assert os.listdir(path) == []
    zshard.save(path, model, optimizer, **options)
    return digest(model, optimizer)


def failing_on_node1(where, name):
    """A context in which a function of zshard fails on that host."""
    error = OSError(errno.ENOSPC, "no space left")
    return mock.patch.object(where, name, side_effect=error) if node() == 1 else nullcontext()


@pytest.mark.parametrize("where", ["_write_part", "FileBlocks", "write_text"])
def test_a_failure_on_one_host_leaves_nothing_on_any(on, root, where):
    wanted = on(2, 1, fail_in_the_middle, root, where)[0]
    assert {each[0] for each in on(2, 1, load, root)} == {wanted}


def fail_to_rename(root):
    model, optimizer = made("full_shard")
    path = disk(root, node())
    with failing_on_node1(folder.Staging, "commit"), pytest.raises(OSError, match="no space"):
        zshard.save(path, model, optimizer, step=3, per_host=True)
    return [each for each in os.listdir(path) if "lock" not in each]


def test_a_host_that_cannot_rename_makes_all_take_it_back(on, root):
    assert on(2, 1, fail_to_rename, root) == [[], []]


def become_node() -> int:
    """Make this forked rank a host; return its number."""
    os.environ["ZSHARD_HOST"] = f"node{os.environ['RANK']}"
    return node()


def gather_disks(root) -> None:
    """Copy all part files to the first disk."""
    for each in Path(root, "disk1/checkpoints", STEP).glob("*.part"):
        shutil.copy(each, Path(root, "disk0/checkpoints", STEP))


# --- collecting, and one process ------------------------------------------------------------------


def collect_on_hosts(root, numbers):
    command = ["zshard", "checkpoint", "collect", disk(root, numbers[node()])]
    with mock.patch.object(sys, "argv", command):
        assert __main__.main() == 0


def test_collect(on, root, command):
    wanted = on(2, 2, save, root)[0][-1]
    disks = [str(Path(root, name, "checkpoints")) for name in ("disk0", "disk1")]
    out = str(Path(root, "one"))
    status, said, errors = command("collect", *disks, out)
    assert status == 0 and "wrote" in said, errors
    assert Manifest.read(out).more == {}
    status, _, errors = command("verify", out)
    assert status == 0, errors
    assert set(os.listdir(out)) == {
        *("model.safetensors", "model.safetensors.index.json", "optimizer.safetensors"),
        *("optimizer.safetensors.index.json", "zshard.json"),
    }
    assert set(on(1, 2, load_one, out)) == {wanted}


def load_one(path):
    model, optimizer = made("zero2", seed=1)
    zshard.load(path, model, optimizer)
    return digest(model, optimizer)


def test_commands_name_what_is_missing(on, root, command):
    on(2, 1, save, root)
    one = str(Path(root, "disk0/checkpoints"))
    for words in (["verify", one], ["collect", one, f"{root}/out"], ["export", one, f"{root}/o"]):
        status, _, errors = command(*words)
        assert status == 1 and "host 'node1'" in errors, (words, errors)
    status, said, _ = command("inspect", one)
    parts = [
        line.rpartition(": ")[2] for line in said.splitlines() if ".part of host 'node" in line
    ]
    assert status == 0 and parts == ["here", "here", "not in this folder"]
    gather_disks(root)
    for words in (["verify", one], ["export", one, f"{root}/exported"]):
        status, _, errors = command(*words)
        assert status == 0, (words, errors)
    parts = json.loads(command("inspect", one, "--json")[1])["parts"]
    assert [(part["host"], part["here"]) for part in parts.values()] == [
        ("node0", True),
        ("node0", True),
        ("node1", True),
    ]


def test_one_process_loads_what_one_folder_has_of_all_hosts(on, root):
    wanted = on(2, 1, save, root)[0][-1]
    gather_disks(root)
    assert load_one(f"{root}/disk0/checkpoints") == wanted


def run_documented_block(root):
    text = Path(__file__).parents[2].joinpath("docs", "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    [block] = [each for each in blocks if "per_host" in each]
    model, optimizer = made("full_shard")
    names = {"zshard": zshard, "model": model, "optimizer": optimizer, "step": 3}
    exec(block.replace("/scratch/checkpoints", disk(root, node())), names)
    return names["loaded"].step


def test_documented_block(on, root):
    assert on(2, 1, run_documented_block, root) == [3, 3]


# --- a host that is killed at any time ------------------------------------------------------------


def save_until_killed(root, seed):
    """Save at every step; one host is killed at a random time."""
    number = become_node()
    model, optimizer = made("full_shard")
    zshard.save(disk(root, number), model, optimizer, step=1, per_host=True)  # connects the ranks
    if number == seed % 2:
        delay = random.Random(seed).uniform(0, 0.6)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    options = {"per_host": True, "keep_last": 1, "extra": {**SEEN, "rank": 0}}
    with Path(root, f"log{number}").open("a", buffering=1) as log:
        for step in range(2, 1000):
            train(model, optimizer, 1)
            log.write(f"{step} {digest(model, optimizer)}\n")
            handle = zshard.save(
                disk(root, number), model, optimizer, step=step, asynchronous=True, **options
            )
            handle.wait()
            log.write(f"{step} saved\n")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(1)
def test_a_complete_checkpoint_survives_a_host_that_is_killed(on, root, seed):
    codes = [each.returncode for each in fork_ranks(save_until_killed, 2, root, seed)]
    assert codes[seed % 2] == -signal.SIGKILL and codes[1 - seed % 2] not in (0, None)
    digests, saved_steps = {1: None}, [1]
    for log in Path(root).glob("log*"):
        for line in log.read_text().splitlines():
            step, what = line.split()
            if what == "saved":
                saved_steps.append(int(step))
            else:
                digests[int(step)] = what
    found, step = on(2, 1, load_any, root)[0]
    assert step >= max(saved_steps)
    assert digests[step] in (None, found)


def load_any(root):
    model, optimizer = made("full_shard", seed=1)
    loaded = zshard.load(disk(root, node()), model, optimizer)
    assert loaded.verified
    return digest(model, optimizer), loaded.step
