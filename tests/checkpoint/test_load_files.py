"""zshard.load of files from other tools, and what each rank reads of a file.

The values are those of the files, whatever the strategy and the number of ranks. All file calls can
be logged, so each rank's reads are known to the byte: the ranks of a host verify what they will
read, so the host reads each block from the disk once.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from groups import on_hosts
from models import CASES, COMBINATIONS, Net, differences, make, sharded, train, wrapped
from nursery import forked_python
from optim_states import rank
from power_cut import logged, read_log
from safetensors.torch import save_file
from scenarios import Stack, message_of
from spawn import ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP
from zshard.checkpoint.checkpoint import Checkpoint
from zshard.checkpoint.contents import ranks_of
from zshard.checkpoint.manifest import BLOCK, FileBlocks, own_blocks
from zshard.checkpoint.safetensors import OpenFile


def write(folder, state, files=1):
    """Write a state in Hugging Face's format: each tensor once, contiguous."""
    folder.mkdir(exist_ok=True)
    once = {tensor.data_ptr(): name for name, tensor in reversed(state.items()) if tensor.numel()}
    names = [n for n, t in state.items() if not t.numel() or once[t.data_ptr()] == n]
    homes = {name: f"part-{i * files // len(names)}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(homes.values())):
        inside = {n: state[n].contiguous() for n in names if homes[n] == file}
        save_file(inside, folder / ("model.safetensors" if files == 1 else file))
    if files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return str(folder)


def of_case(name, seed=7):
    return make(CASES[name].make, seed).state_dict()


def loaded(name, combination, path):
    """Return what differs from the state in the file."""
    model = sharded(name, combination)
    keys = zshard.load(path, model)
    assert keys.missing_keys == keys.unexpected_keys == []
    return differences(model.state_dict(), of_case(name))


@pytest.mark.sampled(2)
@ranks(2, 3)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "dtypes", "conv"])
def test_values_equal_the_files(pool, name, files, tmp_path):
    path = write(tmp_path / "x", of_case(name), files)
    for combination in COMBINATIONS:
        found = pool.run(loaded, name, combination, path)
        assert found == [[]] * pool.world, combination


LOOK = """
import sys, torch, zshard
model = zshard.FSDP(torch.nn.Linear(2, 2))
zshard.save(sys.argv[1] + "/own", model)
zshard.load(sys.argv[1] + "/own", model)
def extras():
    return {".".join(n.split(".")[2:3]) for n in sys.modules if n.startswith("zshard.extras")}
assert extras() == set(), extras()
zshard.load(sys.argv[1] + "/own/model.safetensors", model)
assert extras() == {"", "readers"}, extras()
"""


def test_readers_are_imported_for_what_others_wrote_alone(tmp_path):
    done = forked_python("-c", LOOK, str(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr


def test_single_rank(tmp_path):
    path = write(tmp_path / "x", of_case("net"))
    model = FSDP(make(Net))
    versions = [p._version for p in model.parameters()]
    zshard.load(path + "/model.safetensors", model)
    assert differences(model.state_dict(), of_case("net")) == []
    for (name, param), version in zip(model.named_parameters(), versions, strict=True):
        assert param._version > version, name


def in_chunks(path, dtype):
    """Cast while loading, in several chunks, as nn.Module casts."""
    model, plain = wrapped(Net, ("full_shard", "shm")), make(Net)
    chunk, zshard.state.source.CHUNK = zshard.state.source.CHUNK, 64
    try:
        zshard.load(path, model)
    finally:
        zshard.state.source.CHUNK = chunk
    plain.load_state_dict({name: value.to(dtype) for name, value in of_case("net").items()})
    return differences(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_dtypes_are_cast(pool2, dtype, tmp_path):
    path = write(tmp_path / "x", {k: v.to(dtype) for k, v in of_case("net").items()})
    assert pool2.run(in_chunks, path, dtype) == [[], []]


def with_strict_off(path):
    model = wrapped(Stack, ("full_shard", "shm"))
    before = copy.deepcopy(model.state_dict())
    keys = zshard.load(path, model, strict=False)
    before["head.bias"].fill_(2.0)
    return len(keys.missing_keys), keys.unexpected_keys, differences(model.state_dict(), before)


def test_strict_off(pool2, tmp_path):
    path = write(tmp_path / "x", {"head.bias": torch.full((2,), 2.0), "more": torch.ones(1)})
    for missing, unexpected, wrong in pool2.run(with_strict_off, path):
        assert missing == len(make(Stack).state_dict()) - 1
        assert unexpected == ["more"] and wrong == []


# --- models without values ------------------------------------------------------------------------


class Persistent(nn.Module):
    """A layer, and a buffer that the state dict may contain or omit."""

    def __init__(self, persistent=True):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.ones(4), persistent=persistent)

    def forward(self, x):
        return self.layer(x)


def from_meta(name, combination, path):
    """Return what differs from the file, and the bits of training afterwards."""
    case, rank = CASES[name], dist.get_rank()
    with torch.device("meta"):
        model = case.make()
    strategy, transport = combination
    model = FSDP(
        model,
        strategy=strategy,
        transport=transport,
        auto_wrap_policy=case.policy,
        param_init_fn=zshard.uninitialized,
    )
    blank = all(value.isnan().all() for value in model.state_dict().values() if value.dim())
    zshard.load(path, model)
    wrong = differences(model.state_dict(), of_case(name))
    plain = sharded(name, combination)
    plain.load_state_dict(of_case(name))
    losses = [
        train(each, case, torch.optim.SGD(each.parameters(), 0.1), rank) for each in (model, plain)
    ]
    return blank, wrong, losses[0] == losses[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["net", "tied", "frozen"])
def test_from_meta(pool2, name, tmp_path):
    path = write(tmp_path / "x", of_case(name))
    for combination in COMBINATIONS:
        found = pool2.run(from_meta, name, combination, path)
        assert found == [(True, [], True)] * 2, combination


def test_missing_entries_are_errors(tmp_path):
    path = write(tmp_path / "x", {"layer.weight": torch.ones(3, 5), "layer.bias": torch.ones(3)})
    with torch.device("meta"):
        model, other = Persistent(), Persistent(persistent=False)
    model = FSDP(model, param_init_fn=zshard.uninitialized)
    with pytest.raises(RuntimeError, match=r'Missing key.*"table"'):
        zshard.load(path, model)
    assert model.table.isnan().all() and model.layer.weight.isnan().all()
    with pytest.raises(
        ValueError, match=r"'table' is on the meta device, .*no state dict contains it"
    ):
        FSDP(other, param_init_fn=zshard.uninitialized)


# --- memory ---------------------------------------------------------------------------------------


def wide():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])


def bytes_of_loading(path, transport):
    """Return the most extra bytes on this rank."""
    model = FSDP(wide(), transport=transport, auto_wrap_policy={nn.Linear})
    zshard.load(path, model)  # touch all its pages
    trim()
    reset_high_water()
    before = high_water()
    zshard.load(path, model)
    return high_water() - before


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_below_one_unit(pool2, dtype, transport, tmp_path):
    path = write(tmp_path / "x", {k: v.to(dtype) for k, v in wide().state_dict().items()})
    unit, whole = 4 * 2**20, 64 * 2**20
    for extra in pool2.run(bytes_of_loading, path, transport):
        assert extra <= unit < whole / 8


# --- errors ---------------------------------------------------------------------------------------


def refused(path, path_of_1, kind):
    """(message, what has changed), of a load where rank 1 may see another file."""
    model = wrapped(Stack, ("full_shard", "shm"))
    before = copy.deepcopy(model.state_dict())
    mine = path if dist.get_rank() == 0 else path_of_1
    said = message_of(lambda: zshard.load(mine, model), kind)
    return said, differences(model.state_dict(), before)


def check_refused(pool, paths, kind, *words):
    """Check each rank's message."""
    found = pool.run(refused, *map(str, paths), kind)
    for said, changed in found:
        assert changed == [] and all(word in said for word in words), found
    return [said for said, _ in found]


def test_mismatches_are_listed(pool2, tmp_path):
    state = make(Stack, 7).state_dict()
    del state["blocks.0.up.bias"]
    state["head.weight"] = state["head.weight"].t().contiguous()
    state["head.bias"] = torch.ones(2, dtype=torch.int32)
    state["stranger"] = torch.ones(2)
    path = write(tmp_path / "x", state)
    words = (
        'key(s) in state_dict: "blocks.0.up.bias"',
        '"stranger"',
        "size mismatch for head.weight",
    )
    dtype = "dtype mismatch for head.bias: cannot cast torch.int32"
    check_refused(pool2, (path, path), RuntimeError, *words, dtype)


def test_wrong_file_on_one_rank_is_an_error_on_all(pool2, tmp_path):
    right = write(tmp_path / "x", make(Stack, 7).state_dict())
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((tmp_path / "x" / "model.safetensors").read_bytes()[:-1])
    first, second = check_refused(
        pool2, (right, broken), ValueError, "broken.safetensors' is not a valid"
    )
    assert first == f"rank 1: {second}"
    gone = tmp_path / "gone"
    check_refused(pool2, (right, gone), OSError, "No such file or directory", "gone")
    check_refused(pool2, (gone, gone), OSError, "No such file or directory", "gone")
    other = write(tmp_path / "y", make(Net, 7).state_dict())
    check_refused(
        pool2, (right, other), zshard.DivergenceError, "the checkpoints differ between ranks"
    )


def reading_fails(path):
    """Reading data fails on rank 0, which has the most: the error is the same on both ranks, and
    both can continue."""
    model, usual = wrapped(Stack, ("full_shard", "shm")), OpenFile.read_into

    def read_into(file, memory, offset):
        if offset > os.path.getsize(file.path) // 2:
            raise OSError(5, "Input/output error", file.path)
        usual(file, memory, offset)

    OpenFile.read_into = read_into if dist.get_rank() == 0 else usual
    try:
        said = message_of(lambda: zshard.load(path, model), OSError)
    finally:
        OpenFile.read_into = usual
    zshard.load(path, model)
    return said, differences(model.state_dict(), make(Stack, 7).state_dict())


def test_read_error_is_raised_on_all_ranks(pool2, tmp_path):
    path = write(tmp_path / "x", make(Stack, 7).state_dict())
    for said, wrong in pool2.run(reading_fails, path):
        assert "Input/output error" in said and "model.safetensors" in said and wrong == []


def open_files(path):
    model, known = wrapped(Stack, ("full_shard", "shm")), set(os.listdir("/proc/self/fd"))
    zshard.load(path, model)
    message_of(lambda: zshard.load(path, wrapped(Net, ("full_shard", "shm"))), RuntimeError)
    return [f for f in set(os.listdir("/proc/self/fd")) - known if _is_file(f)]


def _is_file(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").endswith(".safetensors")
    except FileNotFoundError:
        return False


def test_files_are_closed(pool2, tmp_path):
    assert pool2.run(open_files, write(tmp_path / "x", make(Stack, 7).state_dict())) == [[], []]


def test_plain_model(tmp_path):
    path, model = write(tmp_path / "x", of_case("net")), make(Net)
    zshard.load(path, model)
    assert differences(model.state_dict(), of_case("net")) == []
    with torch.device("meta"):
        model = Net()
    with pytest.raises(RuntimeError, match="cannot load into tensors on the meta device"):
        zshard.load(path, model)


# --- which rank reads what ------------------------------------------------------------------------


WIDTH, LAYERS = 2048, 4
WEIGHT = WIDTH * WIDTH * 4  # bytes: four blocks


def layers(transport):
    """Layers that are one unit each."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return FSDP(model, auto_wrap_policy={nn.Linear}, transport=transport)


def blocks_of(begin, end):
    return set(range(begin // BLOCK, -(-end // BLOCK)))


def blocks_read(path, folder, hosts):
    """Return the blocks of the model's file that this rank reads, and the number of bytes in
    total."""
    with on_hosts(2) if hosts == 2 else contextlib.nullcontext():
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
def test_host_verifies_the_blocks_it_reads(pool, tmp_path):
    told = pool.run(blocks_read, tmp_path / "saved", tmp_path, 2)
    for host in (0, 1):
        own = set()
        for layer in range(LAYERS):
            begin = 4096 + layer * WEIGHT + WEIGHT * host // 2
            own |= blocks_of(begin, begin + WEIGHT // 2)
        found = set.union(*(blocks for blocks, _ in told[2 * host : 2 * host + 2]))
        assert own <= found <= own | {0}, host  # all ranks read the header


@ranks(2, 4)
def test_ranks_divide_the_reads(pool, tmp_path):
    for number, (_, size) in enumerate(pool.run(blocks_read, tmp_path / "saved", tmp_path, 1)):
        mine = LAYERS * WEIGHT // pool.world  # once to verify, once to load
        assert 2 * mine - BLOCK <= size <= 2 * mine + 2 * BLOCK, number


def who_checks(path, seed, hosts):
    """Return (file, block) that this rank wants, those that it must check, and all."""
    model = layers("c10d")
    if seed == 0:
        zshard.save(path, model, max_shard_size="40MB")
    chance = random.Random(f"{seed} {rank()}")
    with Checkpoint.opened(path) as found:
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
        mine = own_blocks(ranks_of(model), files, records, wanted, host)
        return touched, names_of(mine), set(names_of(FileBlocks.data(files, records)))


def names_of(blocks):
    return [(block.file.path.rpartition("/")[2], block.number) for block in blocks]


@pytest.mark.sampled(1)
@ranks(1, 3, 4)
def test_each_block_is_verified_once(pool, tmp_path):
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
