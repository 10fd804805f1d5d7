"""zshard.save and zshard.load called with what is no path, no step, or where no folder is.

An error says which argument it is and what to do, and nothing is made.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zshard

PATHS = {
    "none": (
        None,
        TypeError,
        "path must be a string or a pathlib.Path, got None; zshard.latest_checkpoint",
    ),
    "bytes": (b"x", TypeError, "path must be a string or a pathlib.Path, got b'x'"),
    "a number": (3, TypeError, "expected str, bytes or os.PathLike object, not int"),
    "a NUL byte": ("a\0b", ValueError, r"path='a\x00b' contains a NUL byte"),
}


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.parametrize("call", [zshard.save, zshard.load])
def test_no_path(call, case):
    path, kind, text = PATHS[case]
    with pytest.raises(kind) as caught:
        call(path, nn.Linear(1, 1))
    assert text in str(caught.value)


def test_a_folder_that_is_to_be_made_first(tmp_path):
    missing = tmp_path / "runs"
    for path, options in ((missing / "x", {}), (missing / "run" / "x", {"step": 1})):
        with pytest.raises(
            FileNotFoundError, match=f"'{path.parent}.*does not exist; create it first"
        ):
            zshard.save(path, nn.Linear(1, 1), **options)
    assert list(tmp_path.iterdir()) == []


STEPS = {
    "text": ({"step": "7"}, TypeError, "step='7': 'str' object cannot be interpreted"),
    "too large": ({"step": 2**63}, ValueError, "0 to 2**63 - 1, got 9223372036854775808"),
    "keep_last": ({"step": 1, "keep_last": 1.5}, TypeError, "keep_last=1.5: 'float' object cannot"),
}


@pytest.mark.parametrize("case", STEPS)
def test_no_step(case, tmp_path):
    options, kind, text = STEPS[case]
    with pytest.raises(kind) as caught:
        zshard.save(tmp_path, nn.Linear(1, 1), **options)
    assert text in str(caught.value) and list(tmp_path.iterdir()) == []


def test_the_largest_step(tmp_path):
    zshard.save(tmp_path, nn.Linear(1, 1), step=torch.tensor(2**63 - 1))
    assert zshard.load(tmp_path, nn.Linear(1, 1)).step == 2**63 - 1
