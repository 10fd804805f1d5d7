"""What each rank reads when a checkpoint is loaded: who checks which blocks.

Every call on files can be written down, so what a rank has read is known to the byte.
What the ranks of a host check they are going to read, so the host reads each block once from the
disk, but for those that several hosts or none have a use for.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest
from meshes import on_two_hosts
from optim_states import rank
from power_cut import logged, read_log
from spawn import ranks
from torch import nn

import zshard
from zshard import FSDP
from zshard.checkpoint.contents import ranks_of
from zshard.checkpoint.manifest import BLOCK
from zshard.checkpoint.opening import opened
from zshard.checkpoint.manifest import data_runs, own_runs

WIDTH, LAYERS = 2048, 4
WEIGHT = WIDTH * WIDTH * 4  # bytes: four blocks


def layers(transport):
    """Layers that are a unit each."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return FSDP(model, auto_wrap_policy={nn.Linear}, transport=transport)


def blocks_of(begin, end):
    return set(range(begin // BLOCK, -(-end // BLOCK)))


def blocks_read(path, folder, hosts):
    """The blocks of the model's file that this rank reads, and how many bytes in all."""
    with on_two_hosts() if hosts == 2 else contextlib.nullcontext():
        model = layers("c10d")
        zshard.save(path, model)
        log = folder / f"{rank()}.log"
        with logged(log):
            assert zshard.load(path, model).verified
    found, size, paths = set(), 0, {}
    for call in read_log(log):
        if call.name == "open" and call.error == 0:
            paths[call.fd] = call.path
        elif call.name == "read" and paths[call.fd].endswith("model.safetensors"):
            found |= blocks_of(call.offset, call.offset + call.length)
            size += call.length
    return found, size


@ranks(4)
def test_a_host_checks_what_it_is_going_to_read(pool, tmp_path):
    told = pool.run(blocks_read, tmp_path / "saved", tmp_path, 2)
    for host in (0, 1):
        own = set()
        for layer in range(LAYERS):
            begin = 4096 + layer * WEIGHT + WEIGHT * host // 2
            own |= blocks_of(begin, begin + WEIGHT // 2)
        found = set.union(*(blocks for blocks, _ in told[2 * host : 2 * host + 2]))
        assert own <= found <= own | {0}, host  # all ranks read the header


@ranks(2, 4)
def test_ranks_share_the_work(pool, tmp_path):
    for number, (_, size) in enumerate(pool.run(blocks_read, tmp_path / "saved", tmp_path, 1)):
        mine = LAYERS * WEIGHT // pool.world  # once to be checked, once into place
        assert 2 * mine - BLOCK <= size <= 2 * mine + 2 * BLOCK, number


def who_checks(path, seed, hosts):
    """(file, block) that this rank wants, and those that it is to check; and all."""
    model = layers("c10d")
    if seed == 0:
        zshard.save(path, model, max_shard_size="40MB")
    chance = random.Random(f"{seed} {rank()}")
    with opened(path) as found:
        files, records = found.files, found.manifest.files
        wanted, touched = [], set()
        for name, file in files.items():
            for _ in range(chance.randrange(3) if name.endswith(".safetensors") else 0):
                begin = chance.randrange(file.size)
                end = chance.randrange(begin, min(begin + 3 * BLOCK, file.size) + 1)
                wanted.append((file, begin, end))
                if begin < end:
                    touched |= {(name, at) for at in blocks_of(begin, end)}
        host = f"host {rank() % hosts}"
        mine = own_runs(ranks_of(model), files, records, wanted, host)
        return touched, names_of(mine), set(names_of(data_runs(files, records)))


def names_of(runs):
    return [(run.file.path.rpartition("/")[2], at) for run in runs for at in range(*run[2:])]


@pytest.mark.sampled(1)
@ranks(1, 3, 4)
def test_each_block_is_checked_once(pool, tmp_path):
    for seed in range(8):
        hosts = min(1 + seed % 3, pool.world)
        told = pool.run(who_checks, str(tmp_path / "saved"), seed, hosts)
        everything = told[0][2]
        assert len(everything) > 12
        checked = Counter(block for _, mine, _ in told for block in mine)
        assert checked == dict.fromkeys(everything, 1)
        wants = [set().union(*(each[0] for each in told[host::hosts])) for host in range(hosts)]
        count = Counter(block for want in wants for block in want)
        alone = {block for block in everything if count[block] == 1}
        for host, want in enumerate(wants):
            near = [set(each[1]) for each in told[host::hosts]]
            assert want & alone <= set().union(*near)
            sizes = [len(mine & alone) for mine in near]
            assert max(sizes) - min(sizes) <= 1
        rest = [len(set(each[1]) - alone) for each in told]
        assert max(rest) - min(rest) <= 1
