"""zshard.load of folders that torch.distributed.checkpoint wrote, and dcp.save of sharded models.

zshard loads what torch's own loading returns, and runs no pickle in the folder.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from compare import assert_same
from groups import kept_groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import CASES, ddp, differences, make, make_optimizer
from optim_states import FULL, differ, go_on, wrap
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zshard
from zshard import CheckpointError
from zshard.checkpoint.checkpoint import Checkpoint, Reader
from zshard.checkpoint.safetensors import CODES, OpenFile
from zshard.extras.readers import torch_file
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


def flat_by_torch(path, name, combination):
    """Save as TorchTitan does: the model's names at the top, the optimizer's flat; return what
    differs after a load."""
    model = make(CASES[name].make)
    module = fully_shard(model, mesh=mesh())
    params = list(model.parameters())
    groups = [{"params": params[:2], "lr": 0.5, "weight_decay": 0.0}, {"params": params[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    go_on(name, module, optimizer, 0)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    states = get_state_dict(module, optimizer, options=flat)
    beside = {"train_state": {"step": 3, "seen": torch.arange(2)}}
    dcp.save({**states[0], "optimizer": states[1], **beside}, checkpoint_id=path)
    wanted = [whole(each) for each in get_state_dict(module, optimizer)]
    other = wrap(name, combination, seed=3)
    params = list(other.parameters())
    theirs = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=7.0)
    result = zshard.load(path, other, theirs)
    found = differences(dict(result), {"train_state.step": 3, "train_state.seen": torch.arange(2)})
    found += differ(other.state_dict(), wanted[0])
    found += differ(zshard.optim_state_dict(other, theirs), wanted[1])
    mixed = zshard.AdamW(params)
    return found, message_of(lambda: zshard.load(path, other, mixed), RuntimeError)


def test_flat_optimizer_state_of_torch(pool2, tmp_path):
    for i, combination in enumerate((FULL, C10D)):
        for found, said in pool2.run(flat_by_torch, str(tmp_path / str(i)), "mlp", combination):
            assert found == []
            assert (
                "and 'first.weight' are both in param group 0, but the checkpoint has different options"
                in said
            )


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
    dcp.save(
        {"model": states[0], "optimizer": states[1], "epoch": 7, "n": (1, "a")}, checkpoint_id=path
    )
    return whole(states[0]), whole(states[1])


def into_zshard(path, name, combination, made):
    """Return what differs after a load into a sharded model."""
    model = wrap(name, combination, seed=3)
    optimizer = make_optimizer("zshard.AdamW", model)
    result = zshard.load(path, model, optimizer)
    found = zshard.optim_state_dict(model, optimizer)
    theirs = copy.deepcopy(made[1])
    assert dict(result) == {"epoch": 7, "n": (1, "a")} and not result.verified
    return differ(model.state_dict(), made[0]) + differ(found, theirs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("library", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["net", "frozen", "mlp"])
def test_models_and_optimizers_saved_by_torch(pools, pool2, library, name, tmp_path):
    path = str(tmp_path / "x")
    made = pool2.run(by_torch, path, library, name)[0]
    for combination in (FULL, C10D, ("zero1", "c10d")):
        assert pool2.run(into_zshard, path, name, combination, made) == [[], []]
    assert into_zshard(path, name, FULL, made) == []


def in_other_orders():
    """Convolutions in channels_last, a transposed matrix."""
    model = make(CASES["conv"].make).to(memory_format=torch.channels_last)
    model.head.weight = nn.Parameter(torch.randn(5, 3).t())
    return model


def by_numbers(path):
    """A plain model as torch saves it, its optimizer with numbers; return the state by name."""
    model = in_other_orders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, 7, 7)).sum().backward()
    optimizer.step()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return [whole(each) for each in get_state_dict(model, optimizer)]


def read_in_order(path, combination, made):
    """Return what differs after a load, and the message about other param groups."""
    model = wrap("conv", combination, seed=3)
    optimizer = zshard.AdamW(model.parameters())
    zshard.load(path, model, optimizer)
    found = differ(model.state_dict(), made[0])
    found += differ(zshard.optim_state_dict(model, optimizer), made[1])
    params = list(model.parameters())
    cut = zshard.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    return found, message_of(lambda: zshard.load(path, model, cut), RuntimeError)


def test_non_row_major_tensors_and_numbered_parameters(pool2, tmp_path):
    made = pool2.run(by_numbers, str(tmp_path))[0]
    for combination in (FULL, C10D):
        for found, said in pool2.run(read_in_order, str(tmp_path), combination, made):
            assert found == []
            assert "param groups have [14] parameters" in said and "[2, 12]" in said
    with Checkpoint.opened(tmp_path) as found:
        for name, wanted in made[0].items():
            flat = wanted.reshape(-1)
            for begin in range(0, flat.numel() - 1, 13):
                part = torch.empty(2, dtype=wanted.dtype)
                Reader().read(found.model[name], begin, part)
                assert_same(part, flat[begin : begin + 2], f"{name} from {begin} on")


def boxes(path):
    """Tensors of every dtype, cut in every way."""
    two = dist.init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    made, state = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2):
        values = torch.randint(0, 2, (5, 7, 6), generator=torch.Generator().manual_seed(3)).to(
            dtype
        )
        made[f"{dtype}"] = values
        state[f"{dtype}"] = values
    values = torch.arange(5 * 7 * 6).float().reshape(5, 7, 6)
    for i, places in enumerate(
        ((Shard(0), Shard(1)), (Shard(2), Shard(1)), (Replicate(), Shard(2)))
    ):
        made[f"cut.{i}"] = values
        state[f"cut.{i}"] = distribute_tensor(values, two, places)
    made["scalar"] = state["scalar"] = torch.tensor(4.0)
    made["none"] = state["none"] = torch.empty(0, 3)
    dcp.save(state, checkpoint_id=path)
    return {name: (values.float(), values.dtype) for name, values in made.items()}


@pytest.mark.thorough
def test_tensors_in_arbitrary_chunks(pool4, tmp_path):
    made = pool4.run(boxes, str(tmp_path / "x"))[0]
    with Checkpoint.opened(tmp_path / "x") as found:
        assert found.model.keys() == made.keys()
        for name, (wanted, dtype) in made.items():
            entry = found.model[name]
            assert entry.dtype == dtype and entry.shape == wanted.shape
            assert_same(filled(found.pending(name, entry)).float(), wanted, name)
            part, flat = torch.empty(11, dtype=entry.dtype), wanted.reshape(-1)
            for begin in range(0, wanted.numel() - 11, 17):
                Reader().read(entry, begin, part)
                assert_same(part.float(), flat[begin : begin + 11], f"{name} from {begin} on")


def of_every_kind():
    """Tensors of every supported dtype, and views of every kind."""
    made = torch.randn(10, 12, generator=torch.Generator().manual_seed(3))
    found = {f"{dtype}": made[:3, :5].abs().to(dtype) for dtype in CODES}
    found |= {"part": made[2:5, 3:9], "steps": made[::2, ::3], "columns": made.t()}
    found |= {"permuted": made.view(2, 5, 12).permute(2, 0, 1), "one row": made[:1].expand(3, 12)}
    found |= {"images": made.view(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    found |= {"scalar": torch.tensor(3.5), "none": made[:0], "neither": made[:, :0]}
    pairs = torch.view_as_complex(made.view(10, 6, 2))
    found |= {"conjugate": pairs.conj(), "negative": pairs.conj().imag}
    return found | {"trained": nn.Parameter(made[0]), "shared": made[0], "shared, too": made[:2]}


def test_tensors_of_every_kind(tmp_path):
    made = of_every_kind()
    dcp.save(made, checkpoint_id=tmp_path, no_dist=True)
    with Checkpoint.opened(tmp_path) as found:
        assert found.model.keys() == made.keys()
        for name, wanted in made.items():
            found.model[name].check()
            whole = torch.empty(wanted.shape, dtype=wanted.dtype)
            whole.copy_(wanted.detach())
            assert_same(filled(found.pending(name, found.model[name])), whole, name)


class TwoInDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))


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
    model = TwoInDouble()
    zshard.load(tmp_path, model)
    for param in model.parameters():
        assert_same(param.detach(), torch.arange(48.0).reshape(8, 6).double(), "the parameter")
    assert len(loads) == 4


# --- sharded models with torch's own functions ----------------------------------------------------


@pytest.mark.parametrize("kind", ["zshard.AdamW", "torch.SGD"])
@on_ranks(2)
def test_torchs_functions_on_sharded_models(kind, tmp_path):
    """dcp.save() and dcp.load() of a sharded model and its optimizer, which are Stateful."""
    path = str(tmp_path / "x")
    name = "tied"
    model = wrap(name, FULL)
    optimizer = make_optimizer(kind, model)
    go_on(name, model, optimizer, 0)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    expected = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    after = go_on(name, model, optimizer)
    other = wrap(name, C10D, seed=3)
    theirs = make_optimizer(kind, other)
    go_on(name, other, theirs, 0)  # dcp.load() reads into existing state
    dcp.load({"model": other, "optimizer": theirs}, checkpoint_id=path)
    found = differ([other.state_dict(), theirs.state_dict()], expected)
    found += differ(go_on(name, other, theirs), after)
    third = wrap(name, FULL, seed=4)
    fourth = make_optimizer(kind, third)
    zshard.load(path, third, fourth)
    assert found + differ([third.state_dict(), fourth.state_dict()], expected) == []


# --- pickles are not executed ---------------------------------------------------------------------


class Evil:
    """Unpickling this runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def folder(tmp_path):
    """Return a folder written by one rank, with the names of its files."""
    state = {"model": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))


def refused(folder, words):
    model = Two()
    with pytest.raises(CheckpointError, match=words) as caught:
        zshard.load(folder, model)
    assert str(folder) in str(caught.value)
    assert [name for name, param in model.named_parameters() if param.any()] == []


def test_malicious_pickle_is_refused(folder, tmp_path):
    sign = tmp_path / "ran"
    right = (folder / ".metadata").read_bytes()
    for protocol in (0, 2, 4):
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(sign), protocol=protocol))
        refused(folder, "as plain data: it contains posix.system")
    (folder / ".metadata").write_bytes(pickle.dumps({}))
    refused(folder, "is not torch.distributed.checkpoint metadata")
    (folder / ".metadata").write_bytes(right)
    dcp.save(
        {"model": dict(Two().state_dict()), "step": Evil(sign)}, checkpoint_id=folder, no_dist=True
    )
    sign.unlink(missing_ok=True)
    refused(folder, "cannot read 'step' at bytes .* as plain data: it contains posix.system")
    assert not sign.exists()


@pytest.mark.parametrize("kind", [OSError, CheckpointError, KeyboardInterrupt])
def test_an_error_while_a_folder_is_read_is_raised_as_it_is(folder, kind, monkeypatch):
    """Whichever read fails, torch or not in between."""
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


def test_complete_folder_loads(folder):
    model = Two()
    result = zshard.load(folder, model)
    assert dict(result) == {"step": 3} and model.a[1, 2] == 5 and model.b.sum() == 4


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("how", ["named", "numbered", "flat"])
def test_many_param_groups(tmp_path, is_tensor, how):
    """Each of a dozen has an option of its own, a number or a tensor."""

    def built(first):
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(12)))
        rates = [torch.tensor(first + i) if is_tensor else float(first + i) for i in range(12)]
        groups = [
            {"params": [p], "lr": lr} for p, lr in zip(model.parameters(), rates, strict=True)
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = built(1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=how == "flat")
    state = get_state_dict(model, optimizer, options=options)[1]
    state = optimizer.state_dict() if how == "numbered" else state
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, loaded = built(50)
    zshard.load(tmp_path, other, loaded)
    assert differences(loaded.state_dict(), optimizer.state_dict()) == []


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
    before = model.a.clone()
    with pytest.raises(RuntimeError, match="has no usable optimizer state: it is keyed by unknown"):
        zshard.load(tmp_path, model, optimizer)
    zshard.load(tmp_path, model)
    assert_same(model.a, before, "the parameter")


@pytest.mark.parametrize("state", [{"a": 1}, {"model": None}])
def test_another_layout(state, tmp_path):
    """A plain state dict without a key belongs to the model."""
    values = dict(Two().state_dict())
    values["a"] = torch.ones(2, 3)
    state = values if "a" in state else {"app": {"model": values, "optim": {"state": {}}}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    model = Two()
    zshard.load(tmp_path, model)
    assert model.a.sum() == 6


def changed(folder, change):
    """Apply `change(metadata)` to the metadata file, in torch's format."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def info_of(metadata, name):
    return next(v for k, v in metadata.storage_data.items() if k.fqn == name)


def set_info(name, **facts):
    return lambda metadata: vars(info_of(metadata, name)).update(facts)


def set_chunk(name, **facts):
    def change(metadata):
        chunk = metadata.state_dict_metadata[name].chunks[0]
        for key, value in facts.items():
            setattr(chunk, key, value)

    return change


NOT_ONCE = "the chunks of 'model.a' in .* overlap, leave a gap or exceed its shape"
WRONG = {
    "a file elsewhere": (set_info("model.a", relative_path="../x"), "is not in its folder"),
    "a missing file": (set_info("model.a", relative_path="gone"), "gone' is missing"),
    "beyond the file": (
        set_info("model.a", offset=10**9),
        " has .* bytes, but 'model.a' is at bytes",
    ),
    "negative": (set_info("model.a", offset=-1), " has .* bytes, but 'model.a' is at bytes"),
    "another place": (
        set_info("model.a", offset=7),
        "'model.a' at bytes 7 to .* is damaged: .* not a zip file",
    ),
    "compressed": (set_info("model.a", transform_descriptors=["zstd"]), "compressed"),
    "outside": (set_chunk("model.a", sizes=torch.Size((3, 3))), NOT_ONCE),
    "elsewhere": (set_chunk("model.a", offsets=torch.Size((0, 1))), "is damaged: KeyError"),
    "too little": (set_chunk("model.a", sizes=torch.Size((1, 3))), NOT_ONCE),
    "no chunk": (lambda m: m.state_dict_metadata["model.a"].chunks.clear(), NOT_ONCE),
    "twice": (
        lambda m: m.state_dict_metadata["model.a"].chunks.append(
            m.state_dict_metadata["model.a"].chunks[0]
        ),
        NOT_ONCE,
    ),
    "another dtype": (
        lambda m: setattr(m.state_dict_metadata["model.a"].properties, "dtype", torch.int32),
        "is damaged at bytes|dtype mismatch",
    ),
    "another floating-point dtype": (
        lambda m: setattr(m.state_dict_metadata["model.a"].properties, "dtype", torch.bfloat16),
        r"expected a tensor of shape \(2, 3\), torch.bfloat16",
    ),
    "an unsupported dtype": (
        lambda m: setattr(m.state_dict_metadata["model.a"].properties, "dtype", torch.complex128),
        "'model.a' in .* has an unsupported dtype",
    ),
    "no storage": (lambda m: m.storage_data.clear(), "'.*metadata' is damaged: KeyError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_metadata(folder, what):
    change, words = WRONG[what]
    changed(folder, change)
    model = Two()
    with pytest.raises((CheckpointError, RuntimeError), match=words):
        zshard.load(folder, model)
    assert [name for name, param in model.named_parameters() if param.any()] == []


def test_truncated_metadata(folder):
    file = folder / ".metadata"
    right = file.read_bytes()
    for length in range(0, len(right), 7):
        file.write_bytes(right[:length])
        refused(folder, "metadata' is damaged: ")


@settings(max_examples=100, deadline=None)
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


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_folders_with_changed_bytes(folder, data):
    """Changed values go unnoticed, as there is no checksum; any other change is an error."""
    copied = folder.parent / "y"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(folder, copied)
    file = data.draw(st.sampled_from(sorted(copied.iterdir())))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = data.draw(st.binary(max_size=2))
    file.write_bytes(bytes(content))
    try:
        zshard.load(copied, Two())
    except (CheckpointError, RuntimeError, FileNotFoundError) as error:
        assert str(copied) in str(error) or "Error(s) in loading" in str(error)


def test_no_module_executes_pickles():
    """Checkpoint modules neither import nor call anything that runs pickles, except in one module:
    torch.load(weights_only=True), and Python's unpickler, whose subclass looks up no name."""
    names, used, loads = set(), set(), []
    folders = (Path(zshard.__file__).parent / each for each in ("checkpoint", "extras/readers"))
    for file in (file for folder in folders for file in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
                names |= imported - {"pickle"} if file.name == "torch_file.py" else imported
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
            elif isinstance(node, ast.Call):
                names.add(ast.unparse(node.func))
                if ast.unparse(node.func) == "torch.load":
                    loads.append((file.name, [ast.unparse(each) for each in node.keywords]))
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
                used.add(node.attr)
    bad = {"pickle", "marshal", "shelve", "eval", "exec", "compile", "__import__"}
    assert not names & bad and len(names) > 100
    assert loads == [("torch_file.py", ["weights_only=True", "mmap=False"])]
    assert {each for each in used if not each.isupper()} == {"_Unpickler"}
    own = {"find_class", "persistent_load"}
    assert own <= vars(torch_file._Unpickler).keys() and "super().find_class" not in names
