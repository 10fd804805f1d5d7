"""zshard.load of files from other tools, and each rank's reads of a file.

The values are those of the files, under any strategy and number of ranks. All file calls can
be logged, so each rank's reads are known to the byte: the ranks of a host verify the bytes that
they will read, so the host reads each block from the disk once.
"""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import on_hosts
from models import CASES, COMBINATIONS, Net, make, train, wrapped
from nursery import forked_python
from optim_states import FULL, rank
from power_cut import logged, read_log
from safetensors.torch import save_file
from scenario import sharded
from scenarios import Stack
from spawn import on_ranks
from torch import nn

import zshard
from benchmarks.memory import high_water, reset_high_water, trim
from zshard import FSDP
from zshard.checkpoint.manifest import BLOCK


def write(folder, state, files=1):
    """Write a state in Hugging Face's format: each tensor once, contiguous. On ranks, rank 0 does."""
    if rank() == 0:
        folder.mkdir(exist_ok=True)
        once = {t.data_ptr(): name for name, t in reversed(state.items()) if t.numel()}
        names = [n for n, t in state.items() if not t.numel() or once[t.data_ptr()] == n]
        homes = {n: f"part-{i * files // len(names)}.safetensors" for i, n in enumerate(names)}
        for file in sorted(set(homes.values())):
            inside = {n: state[n].contiguous() for n in names if homes[n] == file}
            save_file(inside, folder / ("model.safetensors" if files == 1 else file))
        if files > 1:
            index = json.dumps({"weight_map": homes})
            (folder / "model.safetensors.index.json").write_text(index)
    if dist.is_initialized():
        dist.barrier()
    return str(folder)


def of_case(name, seed=7):
    return make(CASES[name].make, seed).state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", ["net", "odds", "tied", "frozen", "dtypes", "conv"])
@on_ranks(2, 3)
def test_values_equal_the_files(name, files, tmp_path):
    path = write(tmp_path / "x", of_case(name), files)
    for combination in COMBINATIONS:
        model = sharded(name, combination)
        keys = zshard.load(path, model)
        assert keys.missing_keys == keys.unexpected_keys == []
        assert_same(model.state_dict(), of_case(name), f"{combination}")


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


@pytest.mark.parametrize("wrap", [FSDP, lambda model: model], ids=["one rank", "plain"])
def test_without_ranks(tmp_path, wrap):
    path = write(tmp_path / "x", of_case("net"))
    model = wrap(make(Net))
    versions = {name: param._version for name, param in model.named_parameters()}
    zshard.load(path + "/model.safetensors", model)
    assert_same(model.state_dict(), of_case("net"), "the model")
    for name, param in model.named_parameters():
        assert param._version > versions[name], name
    with torch.device("meta"):
        blank = Net()
    with pytest.raises(RuntimeError, match="cannot load into tensors on the meta device"):
        zshard.load(path, blank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@on_ranks(2)
def test_dtypes_are_cast(dtype, tmp_path):
    """While loading, in several chunks, as nn.Module casts."""
    state = {name: value.to(dtype) for name, value in of_case("net").items()}
    path = write(tmp_path / "x", state)
    model, plain = wrapped(Net, FULL), make(Net)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zshard.state.source.CHUNK", 64)
        zshard.load(path, model)
    plain.load_state_dict(state)
    assert_same(model.state_dict(), plain.state_dict(), "the model")


@on_ranks(2)
def test_strict_off(tmp_path):
    path = write(tmp_path / "x", {"head.bias": torch.full((2,), 2.0), "more": torch.ones(1)})
    model = wrapped(Stack, FULL)
    expected = copy.deepcopy(model.state_dict())
    keys = zshard.load(path, model, strict=False)
    expected["head.bias"].fill_(2.0)
    assert len(keys.missing_keys) == len(expected) - 1 and keys.unexpected_keys == ["more"]
    assert_same(model.state_dict(), expected, "the model")


# --- models without values ------------------------------------------------------------------------


class Persistent(nn.Module):
    """A layer, and a buffer that the state dict may contain or omit."""

    def __init__(self, persistent=True):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.ones(4), persistent=persistent)


@pytest.mark.parametrize("name", ["net", "tied", "frozen"])
@on_ranks(2)
def test_from_meta(name, tmp_path):
    """Training continues as from a model with values."""
    path, case = write(tmp_path / "x", of_case(name)), CASES[name]
    for strategy, transport in COMBINATIONS:
        with torch.device("meta"):
            model = case.make()
        options = {"strategy": strategy, "transport": transport, "auto_wrap_policy": case.policy}
        model = FSDP(model, param_init_fn=zshard.uninitialized, **options)
        assert all(value.isnan().all() for value in model.state_dict().values() if value.dim())
        zshard.load(path, model)
        assert_same(model.state_dict(), of_case(name), f"{strategy} {transport}")
        plain = sharded(name, (strategy, transport))
        plain.load_state_dict(of_case(name))
        first, second = (
            train(each, case, torch.optim.SGD(each.parameters(), 0.1), rank())
            for each in (model, plain)
        )
        assert first == second


def test_missing_entries_are_errors(tmp_path):
    path = write(tmp_path / "x", {"layer.weight": torch.ones(3, 5), "layer.bias": torch.ones(3)})
    with torch.device("meta"):
        model, other = Persistent(), Persistent(persistent=False)
    model = FSDP(model, param_init_fn=zshard.uninitialized)
    with pytest.raises(RuntimeError, match=r'Missing key.*"table"'):
        zshard.load(path, model)
    assert model.table.isnan().all() and model.layer.weight.isnan().all()
    with pytest.raises(ValueError, match="'table' is on the meta device"):
        FSDP(other, param_init_fn=zshard.uninitialized)


class Rotary(nn.Module):
    """As in Hugging Face's models: no checkpoint has its tables, the model's _init_weights does."""

    def __init__(self, fills=("table", "mask")):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_buffer("table", torch.ones(4), persistent=False)
        self.inner.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.fills = fills

    def _init_weights(self, module):
        for name in self.fills if module is self.inner else ():
            getattr(module, name).copy_(torch.tensor([1, 0, 1, 1]))
            nn.init.normal_(module.weight)

    def forward(self, x):
        return self.inner(x) * self.inner.table * self.inner.mask


@on_ranks(2)
def test_what_no_checkpoint_has_is_initialized_by_the_model(tmp_path):
    state = {"inner.weight": torch.arange(16.0).view(4, 4), "inner.bias": torch.ones(4)}
    path = write(tmp_path / "x", state)
    with torch.device("meta"):
        model, no_table, no_mask = Rotary(), Rotary(["mask"]), Rotary(["table"])
    model.load_state_dict({"inner.weight": state["inner.weight"]}, strict=False, assign=True)
    model = FSDP(model, param_init_fn=zshard.uninitialized)
    assert_same(model.state_dict()["inner.weight"], state["inner.weight"], "what it had before")
    zshard.load(path, model)
    assert_same(model.state_dict(), state, "the parameters")
    assert_same(model(torch.ones(4)), torch.tensor([7.0, 0, 39, 55]), "a result")
    for other, name in ((no_table, "table"), (no_mask, "mask")):
        with pytest.raises(ValueError, match=f"'inner.{name}' is on the meta device"):
            FSDP(other, param_init_fn=zshard.uninitialized)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_peak_memory_is_below_one_unit(dtype, transport, tmp_path):
    plain = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])
    path = write(tmp_path / "x", {k: v.to(dtype) for k, v in plain.state_dict().items()})
    model = FSDP(plain, transport=transport, auto_wrap_policy={nn.Linear})
    zshard.load(path, model)  # touch all its pages
    trim()
    reset_high_water()
    before = high_water()
    zshard.load(path, model)
    unit, whole = 4 * 2**20, 64 * 2**20
    assert high_water() - before <= unit < whole / 8


# --- errors ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_files_are_errors_on_all_ranks(tmp_path):
    """Rank 1 may see another file."""
    state = make(Stack, 7).state_dict()
    right = write(tmp_path / "x", state)
    other = write(tmp_path / "y", make(Net, 7).state_dict())
    broken, gone = tmp_path / f"broken{rank()}.safetensors", tmp_path / "gone"
    broken.write_bytes((tmp_path / "x" / "model.safetensors").read_bytes()[:-1])
    del state["blocks.0.up.bias"]
    state["head.weight"] = state["head.weight"].t().contiguous()
    state["head.bias"] = torch.ones(2, dtype=torch.int32)
    state["stranger"] = torch.ones(2)
    unlike = write(tmp_path / "z", state)
    listed = 'key(s) in state_dict: "blocks.0.up.bias"', '"stranger"', "mismatch for head.weight"
    dtype = "dtype mismatch for head.bias: cannot cast torch.int32"
    prefix = "rank 1: " if rank() == 0 else ""
    model = wrapped(Stack, FULL)
    before = copy.deepcopy(model.state_dict())
    for paths, kind, *words in (
        ((unlike, unlike), RuntimeError, *listed, dtype),
        ((right, broken), ValueError, f"{prefix}'{tmp_path}/broken1.safetensors' is not a valid"),
        ((right, gone), OSError, "No such file or directory", "gone"),
        ((gone, gone), OSError, "No such file or directory", "gone"),
        ((right, other), zshard.DivergenceError, "the checkpoints differ between ranks"),
    ):
        with pytest.raises(kind) as caught:
            zshard.load(paths[rank()], model)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert_same(model.state_dict(), before, f"the model after {kind}")


# --- which rank reads what ------------------------------------------------------------------------


WIDTH, LAYERS = 2048, 4
WEIGHT = WIDTH * WIDTH * 4  # bytes: four blocks


def layers():
    """Layers that are one unit each."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return FSDP(model, auto_wrap_policy={nn.Linear}, transport="c10d")


def blocks_of(begin, end):
    return set(range(begin // BLOCK, -(-end // BLOCK)))


def blocks_read(path, folder, hosts):
    """Return the blocks of the model's file that this rank reads, and the number of bytes in
    total."""
    with on_hosts(2) if hosts == 2 else contextlib.nullcontext():
        model = layers()
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


def check_size(size):
    """Fail unless this rank has read its part of the model twice: once to verify, once to load."""
    mine = LAYERS * WEIGHT // dist.get_world_size()
    assert 2 * mine - BLOCK <= size <= 2 * mine + 2 * BLOCK


@on_ranks(4)
def test_host_verifies_the_blocks_it_reads(tmp_path):
    everyone, host, own = [None] * 4, rank() // 2, set()
    mine, size = blocks_read(tmp_path / "saved", tmp_path, 2)
    check_size(size)
    dist.all_gather_object(everyone, mine)
    for layer in range(LAYERS):
        begin = 4096 + layer * WEIGHT + WEIGHT * host // 2
        own |= blocks_of(begin, begin + WEIGHT // 2)
    found = everyone[2 * host] | everyone[2 * host + 1]
    assert own <= found <= own | {0}  # all ranks read the header


@on_ranks(2, 4)
def test_ranks_divide_the_reads(tmp_path):
    check_size(blocks_read(tmp_path / "saved", tmp_path, 1)[1])
