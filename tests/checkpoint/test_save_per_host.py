"""Checkpoints of hosts that share no disk: save(per_host=True), load() and collect.

Hosts are simulated on one machine (groups.py); each has a folder of its own. The states of models that
are saved by some hosts and loaded by others are the same, to the bit.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from damage import flip
from file_faults import file_faults
from groups import mesh_of, on_hosts
from nursery import fork_ranks
from optim_states import rank
from rows import all_refused
from spawn import RankPool, on_ranks
from torch import nn

import zshard
from zshard import FSDP, CheckpointError, __main__
from zshard.checkpoint import folder
from zshard.checkpoint.manifest import Manifest
from zshard.extras.per_host import hosts, write_parts
from zshard.extras.per_host.collect import collect
from zshard.ranks import meeting
from zshard.wrap import ModuleWrapPolicy

STEP = "step-00000003"
SEEN = {"loss": (1, 2.5), "seen": torch.arange(3)}


def on_nodes(per_host: int, function, *args, **options):
    """Call a function on ranks of hosts, node0 and so on, that have so many ranks each."""
    with on_hosts(per_host, "node"):
        return function(*args, **options)


def hosts_of(per_host: int, world: int):
    """Run the decorated test on each of `world` ranks of such hosts."""
    on_hosts = lambda body: functools.wraps(body)(functools.partial(on_nodes, per_host, body))  # noqa: E731
    return lambda body: on_ranks(world)(on_hosts(body))


def node() -> int:
    """Return the number of this rank's host."""
    return int(meeting.host_id().removeprefix("node"))


def disk(root, number: int | None = None) -> str:
    """Return the folder that only this host, or that one, has."""
    path = Path(root, f"disk{node() if number is None else number}")
    path.mkdir(parents=True, exist_ok=True)
    return str(path / "checkpoints")


def by_rank_0(action, *args) -> None:
    """Change the disks while no rank uses them."""
    dist.barrier()
    if rank() == 0:
        action(*args)
    dist.barrier()


def made(strategy="full_shard", transport=None, seed: int = 0):
    """Return a model and an optimizer of several units and dtypes, with a buffer."""
    torch.manual_seed(seed)
    kinds = nn.Linear(32, 257), nn.Linear(257, 65), nn.BatchNorm1d(65), nn.Linear(65, 3)
    options = {"strategy": strategy, "transport": transport, "timeout": 60}
    if strategy.startswith("hybrid"):
        options["device_mesh"] = mesh_of(2, 2)
    model = FSDP(nn.Sequential(*kinds), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    return model, zshard.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def digest(model, optimizer) -> str:
    """Return a checksum of all state. Collective."""
    state = dict(model.state_dict())
    for number, own in optimizer.state_dict()["state"].items():
        state |= {f"{number}.{key}": torch.as_tensor(value) for key, value in own.items()}
    checksum = hashlib.sha256()
    for name, value in sorted(state.items()):
        plain = value.contiguous().view(-1).view(torch.uint8)
        checksum.update(name.encode() + plain.numpy().tobytes())
    return checksum.hexdigest()


def save(root, strategy="full_shard", transport=None, steps=(3,)):
    """Train, save each step, and return the last one's digest."""
    model, optimizer = made(strategy, transport)
    for step in steps:
        train(model, optimizer)
        extra = {**SEEN, "rank": rank()}
        zshard.save(disk(root), model, optimizer, step=step, per_host=True, extra=extra)
    return digest(model, optimizer)


def load(root, strategy="full_shard", transport=None, number=None):
    """Return (digest, step, rank that saved)."""
    model, optimizer = made(strategy, transport, seed=1)
    loaded = zshard.load(disk(root, number), model, optimizer)
    assert loaded.verified
    assert loaded["seen"].tolist() == [0, 1, 2]
    return digest(model, optimizer), loaded.step, loaded["rank"]


def load_one(path):
    model, optimizer = made("zero2", seed=1)
    zshard.load(path, model, optimizer)
    return digest(model, optimizer)


def refused(root, number=None) -> str:
    """Return the error of a load, after which the ranks can still work together."""
    model, optimizer = made(seed=1)
    before = digest(model, optimizer)
    for verify in (True, False):
        with pytest.raises(CheckpointError) as error:
            zshard.load(disk(root, number), model, optimizer, verify=verify)
        assert digest(model, optimizer) == before
        if "is damaged" in str(error.value):
            break
    return str(error.value)


def gather_disks(root) -> None:
    """Copy all part files to the first disk."""
    for each in Path(root, "disk1/checkpoints", STEP).glob("*.part"):
        shutil.copy(each, Path(root, "disk0/checkpoints", STEP))


@pytest.fixture
def on(pools):
    """on(hosts, ranks per host, function, *args): what it returned on each rank of new hosts."""

    def run(count, per_host, function, *args):
        pool = pools.setdefault(count * per_host, RankPool(count * per_host))
        return pool.run(on_nodes, per_host, function, *args)

    return run


# --- all parts, wherever they are -----------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy,transport",
    [
        *(("full_shard", None), ("full_shard", "c10d"), ("zero1", None), ("hybrid_shard", None)),
        *(("hybrid_full", None), ("no_shard", "c10d")),
    ],
)
@hosts_of(2, 4)
def test_each_host_writes_only_its_own(tmp_path, strategy, transport):
    wanted = save(tmp_path, strategy, transport)
    assert load(tmp_path, strategy, transport) == (wanted, 3, rank())
    disks = [Path(disk(tmp_path, number), STEP) for number in (0, 1)]
    first, second = ({each.name for each in path.iterdir()} for path in disks)
    assert first & second == {"all-hosts.part", "zshard.json"}
    assert len({(path / "zshard.json").read_text() for path in disks}) == 1


def load_if_here(root):
    """Load on hosts that have changed places: only with all parts."""
    number = [1, 0, 2, 3][node()]
    text = refused(root, number)
    with mock.patch.object(sys, "argv", ["zshard", "checkpoint", "collect", disk(root, number)]):
        assert __main__.main() == 0
    return text, load(root, number=number)


@pytest.mark.parametrize("count,per_host", [(2, 2), (2, 1), (3, 1)])
def test_other_hosts_load_what_they_have_collected(on, tmp_path, count, per_host):
    wanted = on(2, 2, save, tmp_path)[0]
    lacks = "host 'node2' has none" if count == 3 else r"host 'node[01]' \(ranks .*weight'"
    for text, (found, step, _) in on(count, per_host, load_if_here, tmp_path):
        assert (found, step) == (wanted, 3)
        assert re.search(lacks, text) and "ckpt collect" in text


@hosts_of(2, 4)
def test_a_lost_host_is_named_with_what_is_lost(tmp_path):
    save(tmp_path)
    by_rank_0(shutil.rmtree, tmp_path / "disk1")
    text = refused(tmp_path)
    assert "the host 'node1' has none" in text and "ckpt collect" in text
    with pytest.raises(CheckpointError, match=r"host 'node1' \(ranks 2, 3\)") as caught:
        collect([disk(tmp_path)])
    texts = [None] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert any("weight'" in text for text in texts)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "no_shard"])
@pytest.mark.parametrize("lost", [0, 1])
@hosts_of(2, 4)
def test_replicas_lose_nothing_with_a_host(tmp_path, strategy, lost):
    wanted = save(tmp_path, strategy)
    by_rank_0(shutil.rmtree, tmp_path / f"disk{lost}")
    collect([disk(tmp_path)])
    assert load(tmp_path, strategy)[0] == wanted


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@hosts_of(2, 3)
def test_hosts_of_unequal_size(tmp_path, strategy):
    """Two ranks write together what one rank writes alone; then each host has both."""
    wanted = save(tmp_path, "no_shard", "c10d")
    assert load(tmp_path, "no_shard", "c10d")[0] == wanted
    collect([disk(tmp_path)])
    assert load(tmp_path, strategy)[0] == wanted


@pytest.mark.parametrize("name", ["Muon", "WholeMatrix"])
@hosts_of(2, 4)
def test_state_on_one_rank_is_on_its_host(tmp_path, name):
    """The matrices of an optimizer belong to one rank each."""
    digests = []
    for seed in (0, 1):
        model, _ = made(seed=seed)
        if name == "Muon":
            optimizer = zshard.Muon(model)
        else:
            optimizer = zshard.WholeMatrix(torch.optim.Adafactor, model.parameters(), lr=0.01)
        if seed == 0:
            train(model, optimizer)
            zshard.save(disk(tmp_path), model, optimizer, per_host=True)
        else:
            zshard.load(disk(tmp_path), model, optimizer)
        digests.append(digest(model, optimizer))
    assert digests[0] == digests[1]


# --- incomplete and damaged checkpoints -----------------------------------------------------------


@hosts_of(1, 2)
def test_an_incomplete_newest_checkpoint_is_skipped_and_replaced(tmp_path):
    """A host was lost between the others' renames and its own."""
    second, path = save(tmp_path, steps=(3, 5)), disk(tmp_path)
    by_rank_0(shutil.rmtree, tmp_path / "disk1/checkpoints/step-00000005")
    first, step, _ = load(tmp_path)
    assert step == 3
    with warnings.catch_warnings():  # errors: that of one rank is raised on all
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises((RuntimeWarning, RuntimeError), match="step-00000003' is taken"):
            load(tmp_path)
    with pytest.warns(RuntimeWarning, match="no folder that was given has them"):
        assert STEP in str(collect([path])) or rank() == 1
    assert load(tmp_path)[:2] == (first, 3)
    model, optimizer = made()
    assert zshard.latest_checkpoint(path, model).endswith(STEP)
    told = pytest.warns(RuntimeWarning, match="step-00000005") if rank() == 0 else nullcontext()
    with told:
        zshard.load(path, model, optimizer)
    train(model, optimizer)
    extra = {**SEEN, "rank": 0}
    zshard.save(path, model, optimizer, step=5, per_host=True, extra=extra)
    with pytest.raises(FileExistsError):
        zshard.save(path, model, optimizer, step=5, per_host=True)
    assert digest(model, optimizer) == second
    assert load(tmp_path)[:2] == (second, 5)


@hosts_of(1, 2)
def test_what_one_host_has_alone_is_not_replaced_if_it_is_complete(tmp_path):
    """A replica of the other host, whose disk is new."""
    wanted = save(tmp_path, "no_shard")
    by_rank_0(shutil.rmtree, tmp_path / "disk1")
    with pytest.raises(FileExistsError):
        save(tmp_path, "no_shard")
    collect([disk(tmp_path)])
    assert load(tmp_path, "no_shard")[0] == wanted


@hosts_of(1, 2)
def test_damage_is_found_where_the_file_is(tmp_path):
    """A load that fails leaves the next one as it was."""
    wanted = save(tmp_path)
    with pytest.raises(RuntimeError, match="Missing key"):
        zshard.load(disk(tmp_path), FSDP(nn.Linear(3, 3)))
    assert [load(tmp_path)[0] for _ in range(2)] == [wanted, wanted]
    path = next(Path(disk(tmp_path, 1), STEP).glob("rank*.part"))
    by_rank_0(flip, path, -5)
    text = refused(tmp_path)
    assert f"'{path}' is damaged" in text and "'0.weight'" in text
    with pytest.raises(CheckpointError, match=f"'{path}' is damaged"):
        collect([disk(tmp_path)])


@hosts_of(1, 2)
def test_misuse(tmp_path):
    model, optimizer = made()
    path, number, differ = disk(tmp_path), node(), zshard.DivergenceError
    (tmp_path / "shared").mkdir(exist_ok=True)

    def saving(where=path, **options):
        return lambda: zshard.save(where, model, optimizer, **{"per_host": True, **options})

    shared = saving(f"{tmp_path}/shared")
    all_refused(
        {
            "shared": (shared, ValueError, "share the folder"),
            "overwrite": (saving(overwrite=True), ValueError, "overwrite=True is not available"),
            "replicas": (saving(replicas=1), ValueError, "replicas= was removed"),
            "on one host": (saving(per_host=number == 0), differ, "per_host"),
            "other paths": (saving(path + str(number)), differ, "path"),
            "no folder": (saving(path + "/a/b"), FileNotFoundError, "does not exist"),
        }
    )
    train(model, optimizer)
    saving()()
    names = ["all-hosts.part", f"rank-0000{number}-of-00002.part", "zshard.json"]
    assert sorted(os.listdir(path)) == names
    zshard.load(path, model, optimizer)
    with pytest.raises(ValueError, match="under torchrun, pass one path"):
        collect([path, path])
    with pytest.raises(TypeError, match="path must be"):
        zshard.load(path if number == 0 else None, model, optimizer)
    assert zshard.latest_checkpoint(f"{tmp_path}/nowhere", model) is None
    assert sorted(os.listdir(tmp_path)) == ["disk0", "disk1", "shared"]
    assert os.listdir(tmp_path / "shared") == []


@pytest.mark.parametrize("where", ["_write_part", "FileBlocks", "write_text", "commit"])
@hosts_of(1, 2)
def test_a_failure_on_one_host_leaves_nothing_on_any(tmp_path, where):
    """Rank 1 fails within a save, then all ranks save again."""
    model, optimizer = made()
    train(model, optimizer)
    path, options = disk(tmp_path), {"step": 3, "per_host": True, "extra": {**SEEN, "rank": 0}}
    owner = {"FileBlocks": hosts, "commit": folder.Staging}.get(where, write_parts)
    full = mock.patch.object(owner, where, side_effect=OSError(errno.ENOSPC, "no space left"))
    with full if node() == 1 else nullcontext(), pytest.raises(OSError, match="no space"):
        zshard.save(path, model, optimizer, **options)
    assert [each for each in os.listdir(path) if "lock" not in each] == []
    zshard.save(path, model, optimizer, **options)
    assert load(tmp_path)[0] == digest(model, optimizer)


# --- collecting, and one process ------------------------------------------------------------------


def test_collect(on, tmp_path, command):
    """Also: one host, and one process, load the parts of all."""
    wanted = on(2, 2, save, tmp_path)[0]
    disks = [disk(tmp_path, number) for number in (0, 1)]
    out = str(tmp_path / "one")
    status, said, errors = command("collect", *disks, out)
    assert status == 0 and "wrote" in said, errors
    assert Manifest.read(out).more == {}
    assert command("verify", out)[0] == 0
    stems = {"model.safetensors", "optimizer.safetensors"}
    assert {*os.listdir(out)} == stems | {"zshard.json", *(f"{each}.index.json" for each in stems)}
    gather_disks(tmp_path)
    assert {each[0] for each in on(1, 2, load, tmp_path)} == {wanted}
    assert set(on(1, 2, load_one, out)) == {wanted}
    assert load_one(disks[0]) == wanted


def test_commands_name_what_is_missing(on, tmp_path, command):
    on(2, 1, save, tmp_path)
    one = disk(tmp_path, 0)
    out = tmp_path / "out"
    for words in (["verify", one], ["collect", one, out], ["export", one, out]):
        status, _, errors = command(*words)
        assert status == 1 and "host 'node1'" in errors, errors
    lines = command("inspect", one)[1].splitlines()
    parts = [line.rpartition(": ")[2] for line in lines if ".part of host 'node" in line]
    assert parts == ["here", "here", "not in this folder"]
    gather_disks(tmp_path)
    for words in (["verify", one], ["export", one, tmp_path / "exported"]):
        assert command(*words)[0] == 0, words
    parts = json.loads(command("inspect", one, "--json")[1])["parts"].values()
    assert [part["host"] for part in parts] == ["node0", "node0", "node1"]
    assert all(part["here"] for part in parts)


@hosts_of(1, 2)
def test_documented_block(tmp_path):
    text = Path(__file__).parents[2].joinpath("docs", "checkpoints.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", text, re.S)
    [block] = [each for each in blocks if "per_host" in each]
    model, optimizer = made()
    names = {"zshard": zshard, "model": model, "optimizer": optimizer, "step": 3}
    exec(block.replace("/scratch/checkpoints", disk(tmp_path)), names)
    assert names["loaded"].step == 3


# --- a host that is killed ------------------------------------------------------------------------


def save_until_killed(root, victim, call):
    """Save two steps; at one of its calls in the second one, a host is killed."""
    os.environ["ZSHARD_HOST"] = f"node{os.environ['RANK']}"
    model, optimizer = made()
    options = {"per_host": True, "extra": {**SEEN, "rank": 0}, "keep_last": 1}
    for step in (1, 2):
        train(model, optimizer, 1)
        Path(root, f"digest{step}").write_text(digest(model, optimizer))
        file_faults(call if step == 2 and node() == victim else 0, "kill")
        zshard.save(disk(root), model, optimizer, step=step, asynchronous=True, **options).wait()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("call", range(1, 46, 4))
@pytest.mark.sampled(1)
def test_a_complete_checkpoint_survives_a_host_that_is_killed(on, tmp_path, victim, call):
    codes = [each.returncode for each in fork_ranks(save_until_killed, 2, tmp_path, victim, call)]
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] is not None
    found, step, _ = on(2, 1, load, tmp_path)[0]
    assert found == (tmp_path / f"digest{step}").read_text()
