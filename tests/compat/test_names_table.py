"""docs/names.md: it has each name that torch has, its tests exist, and what it calls an error is one.

The one idea: `tools/names_table.py` is the table; here each of its errors is tried, and each name that
works is looked up.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torchs
from models import Mlp, make
from named import problem_with
from scenarios import message_of

import zshard
from zshard import FSDP, DistributedDataParallel, fully_shard

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "names.py"
sys.path.append(str(TOOL.parent))

from names_of_engine import THEIRS, rows  # noqa: E402
from names_table import ERROR, NAMES, WORKS  # noqa: E402

from zshard._compat.attributes import AVAILABLE, REFUSED  # noqa: E402

ENTRIES = [
    (section, name, entry) for section, each in NAMES.items() for name, entry in each.items()
]
ATTRIBUTES = {
    *("FullyShardedDataParallel: methods", "FullyShardedDataParallel: attributes"),
    *("FSDPModule: methods", "DistributedDataParallel: methods"),
    *("DistributedDataParallel: attributes", "Names with an underscore that scripts use"),
}
_DIMS = zshard.DataParallelMeshDims("dp")
_FSDP1 = "FullyShardedDataParallel: "
_DDP = "DistributedDataParallel: "

# The errors that are not attributes: what to call, what it raises.
ACTIONS = {
    ("torch.distributed.fsdp", "DataParallelMeshDims"): lambda: fully_shard(make(Mlp), dp_mesh_dims=_DIMS),
    ("Enums and dataclasses", "DataParallelMeshDims.replicate"): lambda: fully_shard(make(Mlp), dp_mesh_dims=zshard.DataParallelMeshDims(replicate="dp")),
    ("Enums and dataclasses", "DataParallelMeshDims.shard"): lambda: fully_shard(make(Mlp), dp_mesh_dims=_DIMS),
    ("Enums and dataclasses", "MixedPrecision.keep_low_precision_grads"): lambda: FSDP(make(Mlp), mixed_precision=zshard.MixedPrecision(keep_low_precision_grads=True)),
    (f"{_FSDP1}arguments", "use_orig_params"): lambda: FSDP(make(Mlp), use_orig_params=False),
    (f"{_FSDP1}methods", "flatten_sharded_optim_state_dict"): lambda: FSDP.flatten_sharded_optim_state_dict({}, make(Mlp), None),
    (f"{_FSDP1}methods", "sharded_optim_state_dict"): lambda: FSDP.sharded_optim_state_dict(make(Mlp), None),
    ("fully_shard: arguments", "shard_placement_fn"): lambda: fully_shard(make(Mlp), shard_placement_fn=lambda param: None),
    ("fully_shard: arguments", "dp_mesh_dims"): lambda: fully_shard(make(Mlp), dp_mesh_dims=_DIMS),
    (f"{_DDP}arguments", "output_device"): lambda: DistributedDataParallel(make(Mlp), output_device=1),
    (f"{_DDP}arguments", "dim"): lambda: DistributedDataParallel(make(Mlp), dim=1),
    (f"{_DDP}arguments", "delay_all_reduce_named_params"): lambda: DistributedDataParallel(make(Mlp), delay_all_reduce_named_params=[]),
    (f"{_DDP}arguments", "param_to_hook_all_reduce"): lambda: DistributedDataParallel(make(Mlp), param_to_hook_all_reduce=torch.ones(1)),
    (f"{_DDP}arguments", "mixed_precision"): lambda: DistributedDataParallel(make(Mlp), mixed_precision=3),
}  # fmt: skip


def run_tool(code: str) -> str:
    """Ranks of torch's wrappers are made in a process of their own."""
    done = subprocess.run(
        [sys.executable, *code.split("\n")], capture_output=True, text=True, timeout=120
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_the_page_has_each_name_of_torch_and_no_other():
    page = (ROOT / "docs" / "names.md").read_text()
    written = re.search(r"from torch (\d+)\.(\d+)", page)
    assert written, "the page names its torch"
    if tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, written.groups())):
        pytest.skip(f"the page is of a newer torch than {torch.__version__}")
    assert run_tool(f"{TOOL}\n--check") == ""


@pytest.mark.thorough  # a process that imports torch, for the tool's own words
def test_what_is_missing_or_too_much_is_told():
    code = (
        f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import names; "
        "del names.NAMES['FSDPModule: methods']['unshard']; "
        "names.NAMES['fully_shard: arguments']['colour'] = names.Entry('works'); "
        "print(names.table_problems())"
    )
    told = run_tool(f"-c\n{code}").strip()
    assert "FSDPModule: methods: unshard is not in the table" in told
    assert "fully_shard: arguments: torch has no colour" in told and told.count(":") == 4


def test_what_works_names_its_test_and_what_does_not_its_remedy():
    problems = [problem_with(each.test) for _, _, each in ENTRIES if each.status != ERROR]
    assert [problem for problem in problems if problem] == []
    assert [name for _, name, each in ENTRIES if each.status == ERROR and not each.note] == []
    assert [
        name for _, name, each in ENTRIES if each.status not in (ERROR, WORKS) and not each.note
    ] == []


ERRORS = [(section, name) for section, name, entry in ENTRIES if entry.status == ERROR]


@pytest.mark.parametrize(("section", "name"), ERRORS, ids=lambda each: each)
def test_each_error_is_one(section, name):
    if (section, name) in ACTIONS:
        text = message_of(ACTIONS[section, name], NotImplementedError)
        assert ":" in text  # the remedy, or why
        return
    assert section in ATTRIBUTES
    for model in (FSDP(make(Mlp)), fully_shard(make(Mlp)), DistributedDataParallel(make(Mlp))):
        assert not hasattr(model, name)
        text = message_of(lambda model=model: getattr(model, name), AttributeError)
        assert repr(name) in text and REFUSED[name] in text


def test_no_error_is_left_out():
    assert set(ACTIONS) <= set(ERRORS)
    assert set(REFUSED) <= {name for _, name in ERRORS}
    assert {name for _, name, each in ENTRIES if each.status == WORKS} >= AVAILABLE


def test_what_works_is_there():
    for section, name, entry in ENTRIES:
        if entry.status == ERROR:
            continue
        if section in ("torch.distributed.fsdp", "torch.distributed.fsdp.sharded_grad_scaler"):
            assert name in zshard.__all__, name
        elif section == "torch.distributed.fsdp.wrap":
            assert hasattr(zshard.wrap, name), name
        elif section == "Enums and dataclasses":
            kind, _, member = name.partition(".")
            fields = getattr(getattr(zshard, kind), "__dataclass_fields__", ())
            assert member in fields or hasattr(getattr(zshard, kind), member), name
        elif section in ATTRIBUTES and name not in (
            "__getitem__",
            "_set_params_and_buffers_to_ignore_for_model",
        ):
            assert hasattr(FSDP(make(Mlp)), name), name


@pytest.mark.usefixtures("group_ends")
def test_the_names_of_deepspeeds_engine():
    """tests/initialize/test_engine_names.py tries each error."""
    engine = zshard.initialize(model=make(Mlp), config={"train_batch_size": 2})[0]
    entries = {name: each for section in rows().values() for name, each in section.items()}
    assert set().union(*THEIRS.values()) == set(entries) and len(entries) > 250
    problems = [problem_with(each.test) for each in entries.values() if each.status != ERROR]
    assert [problem for problem in problems if problem] == []
    assert [name for name, each in entries.items() if each.status == ERROR and not each.note] == []
    assert [n for n, each in entries.items() if (each.status == ERROR) == hasattr(engine, n)] == []


def test_torchs_internals_are_an_attribute_error():
    code = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import names; print(*sorted(names.private_names()))"
    listed = {name for _, name, _ in ENTRIES}
    private = [name for name in run_tool(f"-c\n{code}").split() if name not in listed]
    assert len(private) > 50
    model = fully_shard(make(Mlp))
    assert [name for name in private if hasattr(model, name)] == []


# --- the values of attributes ------------------------------------------------------------------------------

DIFFERENT = {
    "find_unused_parameters": "they are always found",
    "module": "the model as an instance of its own class",
    "compute_device": "torch has it without an index, or with one",
}


def attribute_values(section, make_theirs, make_ours):
    """The attributes that differ from those of torch's wrapper of the same model and arguments."""
    theirs, ours = make_theirs(), make_ours()
    names = [n for n, each in NAMES[section].items() if each.status == WORKS and n not in DIFFERENT]
    found = []
    for name in names:
        value, expected = getattr(ours, name), getattr(theirs, name)
        if name == "process_group":
            value, expected = (dist.get_process_group_ranks(g) for g in (value, expected))
        elif dataclasses.is_dataclass(value):
            value = dataclasses.asdict(value)
            expected = None if expected is None else dataclasses.asdict(expected)
        if value != expected:
            found.append(f"{name}: {value!r}, not {expected!r}")
    assert len(names) >= 9
    return found


def fsdp1_attributes(options):
    theirs = {name: value for name, value in options.items() if name != "transport"}
    return attribute_values(
        f"{_FSDP1}attributes",
        lambda: torchs.FullyShardedDataParallel(
            make(Mlp), device_id=torch.device("cpu"), use_orig_params=True, **theirs
        ),
        lambda: FSDP(make(Mlp), **options),
    )


LOW = torchs.MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=True)
OPTIONS = [
    {},
    {"sharding_strategy": torchs.ShardingStrategy.SHARD_GRAD_OP, "limit_all_gathers": False},
    {"mixed_precision": LOW, "forward_prefetch": True, "transport": "c10d"},
    {"backward_prefetch": torchs.BackwardPrefetch.BACKWARD_POST},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attributes_have_the_values_of_fsdp1(pool2, options):
    assert pool2.run(fsdp1_attributes, options) == [[], []]


def ddp_attributes():
    torchs_ddp = torch.nn.parallel.DistributedDataParallel
    return attribute_values(
        f"{_DDP}attributes",
        lambda: torchs_ddp(make(Mlp)),
        lambda: DistributedDataParallel(make(Mlp)),
    )


def test_attributes_have_the_values_of_ddp(pool2):
    for found in pool2.run(ddp_attributes):
        (only,) = found  # DDP has None, and FSDP1 what zshard has
        assert only.startswith("mixed_precision: {'param_dtype': None")
