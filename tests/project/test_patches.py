"""zshard's changes to torch: none at import, and only to names that torch has.

Separate processes report their findings, since in this one zshard has long changed torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from nursery import forked_python

from zshard import _patches

ROOT = Path(__file__).resolve().parents[2]

FINGERPRINT = """
import inspect, os, warnings
import torch
from torch.distributed import distributed_c10d
from torch.nn.modules import module
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils import _foreach_utils

HOLDERS = (
    torch.nn, torch.nn.Module, torch.nn.Parameter, torch.nn.init, torch.nn.utils, torch.optim,
    torch.optim.Optimizer, torch.amp.GradScaler, torch.Tensor, torch.distributed, distributed_c10d,
    module, clip_grad, optimizer, _foreach_utils, torch.nn.parallel.DistributedDataParallel,
    *(getattr(torch.optim, n) for n in torch.optim.__all__ if n[0].isupper()),
)

def fingerprint():
    found = {}
    for holder in HOLDERS:
        for name, value in list(vars(holder).items()):
            cells = getattr(value, "__closure__", None) or ()
            inner = [id(c.cell_contents) for c in cells]
            size = len(value) if isinstance(value, (list, dict)) else 0
            found[holder.__name__, name] = id(value), inner, size
    return found
"""


IMPORTED = """
before = fingerprint()
import zshard
print(sorted(key for key in before if before[key] != fingerprint().get(key)))
"""

MODELS = """
import zshard
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])  # torch changes step() then
before = fingerprint()

def in_a_fork(act, *args):
    if not os.fork():
        print(act(*args), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""

CHANGED = """
def count_changes():
    zshard.FSDP(torch.nn.Linear(2, 2))
    return len([key for key in before if before[key] != fingerprint()[key]])

in_a_fork(count_changes)
"""

OLDER_OPTIMIZER = """
def same_states():
    layer = torch.nn.Linear(4, 4)
    plain = torch.nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for each, stepped in ((layer, optimizer), (plain, other)):
        each(torch.ones(2, 4)).sum().backward()
        stepped.step()
    model = zshard.FSDP(layer)
    for each, stepped in ((model, optimizer), (plain, other)):
        for _ in range(2):
            stepped.zero_grad()
            each(torch.ones(2, 4)).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            stepped.step()
    state = optimizer.state_dict()["state"], other.state_dict()["state"]
    return all(torch.equal(state[0][i]["exp_avg"], state[1][i]["exp_avg"]) for i in range(2))

in_a_fork(same_states)
"""

WITHOUT_A_PLACE = """
from zshard import _patches

def train_without(number):
    patch = _patches._PATCHES[number]
    place = patch.places[-1]._replace(takes=("something", "else"))
    strange = patch._replace(places=(*patch.places[:-1], place))
    _patches._PATCHES = tuple(strange if p is patch else p for p in _patches._PATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = zshard.FSDP(torch.nn.Linear(2, 2))
        zshard.FSDP(torch.nn.Linear(2, 2))
    found = [w for w in caught if "zshard does not know" in str(w.message)]
    assert len(found) == 1 and found[0].category is RuntimeWarning, found
    assert str(place) in str(found[0].message) and patch.lost in str(found[0].message)
    model(torch.ones(1, 2)).sum().backward()
    return number

for number in range(len(_patches._PATCHES)):
    in_a_fork(train_without, number)
"""


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The lines that a process prints in which no model was made: each is made in a fork of it."""
    script = "".join((FINGERPRINT, MODELS, CHANGED, OLDER_OPTIMIZER, WITHOUT_A_PLACE))
    done = forked_python("-c", script, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_import_leaves_torch_unchanged():
    done = subprocess.run(
        [sys.executable, "-c", FINGERPRINT + IMPORTED], capture_output=True, text=True, timeout=250
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_a_model_changes_torch(said):
    assert int(said[0]) > 10


def test_an_optimizer_older_than_the_first_model(said):
    assert said[1] == "True"


def test_unknown_torch_function_is_a_warning(said):
    """Each place in turn is taken for one that zshard does not know."""
    assert said[2:] == [str(number) for number in range(len(_patches._PATCHES))]


TESTS_OF_PRIVATE_PLACES = {
    "Variable._execution_engine": "tests/training/test_entries.py",
    "torch.nn.init._calculate_fan_in_and_fan_out": "tests/guard/test_initialization.py",
    "torch.nn.init._no_grad_trunc_normal_": "tests/guard/test_initialization.py",
    "torch.distributed.distributed_c10d._check_single_tensor": "tests/guard/test_situations.py",
    "torch.nn.utils.clip_grad._get_total_norm": "tests/optim/test_clip.py",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": "tests/optim/test_deferred_clipping.py",
    "GradScaler._unscale_grads_": "tests/optim/test_grad_scaler.py",
}
"""Tests that fail without the place."""


def test_few_places_are_changed_and_each_private_one_has_a_test():
    places = [place for patch in _patches._PATCHES for place in patch.places]
    assert len(places) <= 12
    private = {str(place) for place in places if place.name.startswith("_")}
    assert private == set(TESTS_OF_PRIVATE_PLACES)
    assert all((ROOT / path).exists() for path in TESTS_OF_PRIVATE_PLACES.values())
