"""zshard.load of folders that torch.distributed.checkpoint wrote, and dcp.save of sharded models.

zshard loads what torch's own loading returns, and runs no pickle in the folder.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_same
from groups import kept_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CASES, ddp, make, make_optimizer
from optim_states import FULL, differ, go_on
from rows import all_rows
from scenario import sharded
from spawn import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zshard
from zshard import CheckpointError
from zshard.checkpoint.checkpoint import Checkpoint, Reader
from zshard.checkpoint.safetensors import CODES, OpenFile
from zshard.extras.readers.other_states import optimizer_of_paths
from zshard.extras.readers.torch_file import parse
from zshard.state.source import filled

C10D = ("shard_grad_op", "c10d")


@functools.cache
def mesh():
    with kept_groups():
        return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def whole(state):
    """Return copies as plain tensors."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return state.full_tensor()
    return copy.deepcopy(state)


def fails_to_load(path, model, optimizer, *words):
    with pytest.raises(RuntimeError) as caught:
        zshard.load(path, model, optimizer)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def by_torch(path, library, name):
    """Train and save with torch's libraries; return the state by name."""
    model = make(CASES[name].make)
    if library == "ddp":
        module = ddp(model, find_unused_parameters=CASES[name].unused)
    else:
        for part in model.children():
            if any(True for _ in part.parameters()) and isinstance(part, nn.Linear | nn.Embedding):
                fully_shard(part, mesh=mesh())
        module = fully_shard(model, mesh=mesh())
    optimizer = make_optimizer("torch.AdamW", model)
    go_on(name, module, optimizer, 0)
    states = get_state_dict(module, optimizer)
    parts = {"model": states[0], "optimizer": states[1], "epoch": 7, "n": (1, "a")}
    dcp.save(parts, checkpoint_id=path)
    return whole(states[0]), whole(states[1])


def into_zshard(path, name, made):
    for combination in (FULL, C10D, ("zero1", "c10d")):
        model = sharded(name, combination, seed=3)
        optimizer = make_optimizer("zshard.AdamW", model)
        result = zshard.load(path, model, optimizer)
        assert dict(result) == {"epoch": 7, "n": (1, "a")} and not result.verified
        assert_same(model.state_dict(), made[0], f"the model under {combination}")
        assert differ(zshard.optim_state_dict(model, optimizer), made[1]) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("library", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["net", "frozen", "mlp"])
def test_models_and_optimizers_saved_by_torch(pool2, library, name, tmp_path):
    """On the same ranks, and on one."""
    made = pool2.run(by_torch, str(tmp_path), library, name)[0]
    pool2.run(into_zshard, str(tmp_path), name, made)
    into_zshard(str(tmp_path), name, made)


@on_ranks(2)
def test_non_row_major_tensors_and_numbered_parameters(tmp_path):
    """A plain model as torch saves it, its optimizer with numbers; convolutions in channels_last, a
    transposed matrix."""
    plain = make(CASES["conv"].make).to(memory_format=torch.channels_last)
    plain.head.weight = nn.Parameter(torch.randn(5, 3).t())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(1, 3, 7, 7)).sum().backward()
    optimizer.step()
    dcp.save({"model": plain, "optimizer": optimizer}, checkpoint_id=tmp_path)
    made = [whole(each) for each in get_state_dict(plain, optimizer)]
    for combination in (FULL, C10D):
        model = sharded("conv", combination, seed=3)
        optimizer = zshard.AdamW(model.parameters())
        zshard.load(tmp_path, model, optimizer)
        assert differ(model.state_dict(), made[0]) == []
        assert differ(zshard.optim_state_dict(model, optimizer), made[1]) == []
        params = list(model.parameters())
        cut = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
        words = "param groups have [14] parameters", "[2, 12]"
        fails_to_load(tmp_path, model, cut, *words)
    check_parts(tmp_path, made[0], 2)


def check_parts(path, expected, count):
    """Check all tensors of a folder, whole and in parts of `count` elements."""
    with Checkpoint.opened(path) as checkpoint:
        for name, values in expected.items():
            entry = checkpoint.model[name]
            entry.check()
            plain = torch.empty(values.shape, dtype=values.dtype).copy_(values.detach())
            assert_same(filled(checkpoint.pending(name, entry)), plain, name)
            part, flat = torch.empty(count, dtype=entry.dtype), plain.reshape(-1)
            for begin in range(0, flat.numel() - count, 17):
                Reader().read(entry, begin, part)
                assert_same(part, flat[begin : begin + count], f"{name} from {begin} on")
        assert checkpoint.model.keys() == expected.keys()


@pytest.mark.thorough
@on_ranks(4)
def test_tensors_in_arbitrary_chunks(tmp_path):
    """Tensors of every dtype, cut in every way."""
    two = dist.init_device_mesh("cpu", (2, 2))
    draw = torch.Generator().manual_seed(3)
    dtypes = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2
    made = {f"{each}": torch.randint(0, 2, (5, 7, 6), generator=draw).to(each) for each in dtypes}
    made |= {"scalar": torch.tensor(4.0), "none": torch.empty(0, 3)}
    values = torch.arange(5 * 7 * 6).float().reshape(5, 7, 6)
    cuts = (Shard(0), Shard(1)), (Shard(2), Shard(1)), (Replicate(), Shard(2))
    cut = {f"cut.{i}": distribute_tensor(values, two, places) for i, places in enumerate(cuts)}
    dcp.save(made | cut, checkpoint_id=tmp_path)
    check_parts(tmp_path, made | dict.fromkeys(cut, values), 11)


def test_tensors_of_every_kind(tmp_path):
    """Tensors of every supported dtype, and views of every kind."""
    base = torch.randn(10, 12, generator=torch.Generator().manual_seed(3))
    made = {f"{dtype}": base[:3, :5].abs().to(dtype) for dtype in CODES}
    made |= {"part": base[2:5, 3:9], "steps": base[::2, ::3], "columns": base.t()}
    made |= {"permuted": base.view(2, 5, 12).permute(2, 0, 1), "one row": base[:1].expand(3, 12)}
    made |= {"images": base.view(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    made |= {"scalar": torch.tensor(3.5), "none": base[:0], "neither": base[:, :0]}
    pairs = torch.view_as_complex(base.view(10, 6, 2))
    made |= {"conjugate": pairs.conj(), "negative": pairs.conj().imag}
    made |= {"trained": nn.Parameter(base[0]), "shared": base[0], "shared, too": base[:2]}
    dcp.save(made, checkpoint_id=tmp_path, no_dist=True)
    check_parts(tmp_path, made, 1)


class Two(nn.Module):
    def __init__(self, *a, **options):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(*(a or (2, 3)), **options))
        self.b = nn.Parameter(torch.zeros(*(a or (4,)), **options))


def in_columns(path):
    """Save two matrices, each rank some of the columns."""
    values = torch.arange(48.0).reshape(8, 6)
    state = {name: distribute_tensor(values, mesh(), [Shard(1)]) for name in ("a", "b")}
    dcp.save({"model": state}, checkpoint_id=path)


def test_each_chunk_is_read_once_whatever_the_pieces(pool2, tmp_path, monkeypatch):
    """Values that are cast are read in pieces, here of a row and a part; each has all chunks."""
    pool2.run(in_columns, str(tmp_path))
    loads, load = [], torch.load
    monkeypatch.setattr("zshard.state.source.CHUNK", 32)
    monkeypatch.setattr(torch, "load", lambda *args, **own: loads.append(1) or load(*args, **own))
    model = Two(8, 6, dtype=torch.float64)
    zshard.load(tmp_path, model)
    for param in model.parameters():
        assert_same(param.detach(), torch.arange(48.0).reshape(8, 6).double(), "the parameter")
    assert len(loads) == 4


# --- sharded models with torch's own functions ----------------------------------------------------


@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD"])
@on_ranks(2)
def test_torchs_functions_on_sharded_models(kind, tmp_path):
    """dcp.save() and dcp.load() of a sharded model and its optimizer, which are Stateful."""
    model = sharded("tied", FULL)
    optimizer = make_optimizer(kind, model)
    go_on("tied", model, optimizer, 0)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    expected = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    after = go_on("tied", model, optimizer)
    other = sharded("tied", C10D, seed=3)
    theirs = make_optimizer(kind, other)
    go_on("tied", other, theirs, 0)  # dcp.load() reads into existing state
    dcp.load({"model": other, "optimizer": theirs}, checkpoint_id=tmp_path)
    assert differ([other.state_dict(), theirs.state_dict()], expected) == []
    assert differ(go_on("tied", other, theirs), after) == []
    third = sharded("tied", FULL, seed=4)
    fourth = make_optimizer(kind, third)
    zshard.load(tmp_path, third, fourth)
    assert differ([third.state_dict(), fourth.state_dict()], expected) == []


# --- damaged folders; pickles are not executed (test_load_hostile.py) -------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder written by one rank, with the names of its files."""
    state = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def refused(folder, words):
    model = Two()
    with pytest.raises((CheckpointError, RuntimeError), match=words) as caught:
        zshard.load(folder, model)
    assert str(folder) in str(caught.value) or "dtype mismatch" in str(caught.value)
    assert [name for name, param in model.named_parameters() if param.any()] == []


@pytest.mark.parametrize("kind", [OSError, CheckpointError, KeyboardInterrupt])
def test_an_error_while_a_folder_is_read_is_raised_as_it_is(folder, kind, monkeypatch):
    """Any read fails, by torch or elsewhere."""
    read, calls = OpenFile.read_into, []

    def fails(self, memory, offset):
        calls.append(offset)
        if len(calls) == last:
            raise kind("a sign")
        read(self, memory, offset)

    monkeypatch.setattr(OpenFile, "read_into", fails)
    for last in itertools.count(1):
        calls.clear()
        try:
            zshard.load(folder, Two())
            break
        except BaseException as error:
            assert type(error) is kind and str(error) == "a sign", (last, error)
    assert last > 10


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("how", ["named", "numbered", "flat"])
def test_many_param_groups(tmp_path, is_tensor, how):
    """Each of a dozen has its own option, a number or a tensor."""

    def built(first):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
        rates = [torch.tensor(first + i) if is_tensor else float(first + i) for i in range(12)]
        pairs = zip(model.parameters(), rates, strict=True)
        return model, torch.optim.AdamW([{"params": [param], "lr": lr} for param, lr in pairs])

    model, optimizer = built(1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
    state = get_state_dict(model, optimizer, options=options)[1]
    state = optimizer.state_dict() if how == "numbered" else state
    beside = {"train_state": {"step": 3, "seen": torch.arange(2)}}  # as TorchTitan saves
    parts = {"model": model, "optimizer": state, **beside}
    dcp.save(parts, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = built(50)
    extra = dict(zshard.load(tmp_path, other, loaded))
    assert_same(extra, {"train_state.step": 3, "train_state.seen": torch.arange(2)}, "extra")
    assert_same(loaded.state_dict(), optimizer.state_dict(), "the optimizer")
    words = (
        "both in param group 0, but the checkpoint has different options" if how == "flat" else ""
    )
    fails_to_load(tmp_path, other, torch.optim.AdamW(other.parameters()), words)


def test_lists_whose_elements_several_ranks_have_written():
    """In the metadata they come in the order of the ranks."""
    paths = {("param_groups", 0, "params", i): f"p{i}" for i in (1, 2, 0)}
    found = optimizer_of_paths({}, {**paths, ("param_groups", 0, "lr"): 0.5}, [])
    assert found.groups == [{"params": ["p0", "p1", "p2"], "lr": 0.5}]


def test_state_by_strange_names_is_refused(tmp_path):
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    (model.a.sum() + model.b.sum()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {f"no. {n}": own for n, own in state["state"].items()}
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    fails_to_load(tmp_path, model, optimizer, "no usable optimizer state: it is keyed by unknown")


def stored(**facts):
    """Change where model.a is stored."""

    def change(metadata):
        infos = metadata.storage_data.items()
        vars(next(info for index, info in infos if index.fqn == "model.a")).update(facts)

    return change


def chunk(**facts):
    """Change the type of model.a's chunk."""
    return lambda metadata: vars(chunks_of(metadata)[0]).update(facts)


def dtype_of_a(dtype):
    return lambda m: setattr(m.state_dict_metadata["model.a"].properties, "dtype", dtype)


def chunks_of(metadata):
    return metadata.state_dict_metadata["model.a"].chunks


NOT_ONCE = "the chunks of 'model.a' in .* overlap, leave a gap or exceed its shape"
NOT_THERE = " has .* bytes, but 'model.a' is at bytes"
NO_ZIP = "'model.a' at bytes 7 to .* is damaged: .* not a zip file"
NOT_BFLOAT16 = r"expected a tensor of shape \(2, 3\), torch.bfloat16"
WRONG = {
    "a file elsewhere": (stored(relative_path="../x"), "is not in its folder"),
    "a missing file": (stored(relative_path="gone"), "gone' is missing"),
    "beyond the file": (stored(offset=10**9), NOT_THERE),
    "negative": (stored(offset=-1), NOT_THERE),
    "another place": (stored(offset=7), NO_ZIP),
    "compressed": (stored(transform_descriptors=["zstd"]), "compressed"),
    "outside": (chunk(sizes=torch.Size((3, 3))), NOT_ONCE),
    "elsewhere": (chunk(offsets=torch.Size((0, 1))), "is damaged: KeyError"),
    "too little": (chunk(sizes=torch.Size((1, 3))), NOT_ONCE),
    "no chunk": (lambda metadata: chunks_of(metadata).clear(), NOT_ONCE),
    "twice": (lambda metadata: chunks_of(metadata).extend(chunks_of(metadata)[:1]), NOT_ONCE),
    "another dtype": (dtype_of_a(torch.int32), "is damaged at bytes|dtype mismatch"),
    "another floating-point dtype": (dtype_of_a(torch.bfloat16), NOT_BFLOAT16),
    "an unsupported dtype": (dtype_of_a(torch.complex128), "'model.a' in .* unsupported dtype"),
    "no storage": (lambda metadata: metadata.storage_data.clear(), "metadata' is damaged: KeyErr"),
}


def test_invalid_metadata(folder):
    file = folder / ".metadata"
    right = file.read_bytes()
    with all_rows() as row:
        for name, (change, words) in WRONG.items():
            with row(name):
                metadata = pickle.loads(right)
                change(metadata)
                file.write_bytes(pickle.dumps(metadata))
                refused(folder, words)
        for length in range(0, len(right), 7):
            with row("truncated", length):
                file.write_bytes(right[:length])
                refused(folder, "metadata' is damaged: ")
        with row("a dict"):
            file.write_bytes(pickle.dumps({}))
            refused(folder, "is not torch.distributed.checkpoint metadata")


@settings(max_examples=100)
@given(data=st.data())
def test_plain_data_round_trips(data):
    """Plain data that Python can pickle is loaded unchanged. (fuzz_checkpoint.py changes
    pickles.)"""
    leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    inner = st.recursive(
        leaf | st.binary(),
        lambda each: st.lists(each) | st.tuples(each) | st.dictionaries(st.text(), each),
        max_leaves=10,
    )
    value = data.draw(inner)
    text = pickle.dumps(value, protocol=data.draw(st.sampled_from([2, 3, 4, 5])))
    if b"bytes" not in text:  # protocol 2 calls bytes() for b""
        assert parse(text) == value
