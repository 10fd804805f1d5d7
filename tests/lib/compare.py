"""Describe how tensors differ, bit for bit: which entry, how many elements, the first of them.

A rank reports what differs, not whether: a failed `assert [True, False] == [True, True]` does not
identify the tensor. So a function on ranks asserts in place, and its failure fails the test.

    assert_same(model(x), plain(x), "the output")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import zshard

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHOWN = 12  # entries that a message lists


def differences(ours: Any, theirs: Any, nans: bool = False) -> list[str]:
    """Return what differs between two tensors, or two dicts or lists of tensors and other values;
    of sharded tensors, compares this rank's shards.

    Bitwise, so 0.0 differs from -0.0. A NaN differs from everything, since a NaN on both sides
    proves nothing; with `nans`, it equals a NaN with the same bits.
    """
    if not isinstance(ours, Tensor | Mapping):
        ours, theirs = list(ours), list(theirs)  # also generators, and a tuple against a list
    found: list[str] = []
    _compare("", ours, theirs, nans, found)
    return sorted(found)


def assert_same(ours: Any, theirs: Any, what: str, nans: bool = False) -> None:
    """Fail with `what` and the differences, if there are any."""
    __tracebackhide__ = True
    found = differences(ours, theirs, nans)
    if found:
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise AssertionError("\n    ".join([f"{what} differs:", *found[:SHOWN], *more]))


def _compare(name: str, ours: Any, theirs: Any, nans: bool, found: list[str]) -> None:
    """Add the differences between two values to `found`."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        text = _between(zshard.to_local(ours).detach(), zshard.to_local(theirs).detach(), nans)
        found += [_named(name, text)] if text else []
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        found += [_named(name, f"only ours has {key}") for key in ours.keys() - theirs.keys()]
        found += [_named(name, f"only theirs has {key}") for key in theirs.keys() - ours.keys()]
        for key in ours.keys() & theirs.keys():
            _compare(f"{name}/{key}" if name else str(key), ours[key], theirs[key], nans, found)
    elif isinstance(ours, list | tuple) and type(ours) is type(theirs):
        if len(ours) != len(theirs):
            found.append(_named(name, f"{len(ours)} entries, not {len(theirs)}"))
        for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            _compare(f"{name}[{i}]", a, b, nans, found)
    elif isinstance(ours, Tensor) or isinstance(theirs, Tensor) or ours != theirs:
        found.append(_named(name, f"{_shown(ours)}, not {_shown(theirs)}"))


def _between(a: Tensor, b: Tensor, nans: bool) -> str:
    """Describe how two plain tensors differ; "" if they do not."""
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return f"{_shown(a)}, not {_shown(b)}"
    if not a.numel():
        return ""
    unlike = _bits(a) != _bits(b)
    if a.is_complex():
        unlike = unlike.any(-1)
    if not nans and a.dtype.is_floating_point | a.is_complex():
        unlike |= (a.double() if a.element_size() == 1 else a).isnan()
    count = int(unlike.sum())
    if not count:
        return ""
    first = [int(i) for i in unlike.nonzero()[0]]
    one, other = a[tuple(first)].item(), b[tuple(first)].item()
    text = f"{count} of {a.numel()} elements differ, the first at {first}: {one}, not {other}"
    wide = torch.complex128 if a.is_complex() else torch.float64
    return f"{text}; by up to {float((a.to(wide) - b.to(wide)).abs().max()):.3g}"


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements' bits as integers; for complex numbers, two integers each."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.contiguous().view(INTEGERS[plain.element_size()])


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{place}"
    return repr(value)


def _named(name: str, text: str) -> str:
    return f"{name}: {text}" if name else text
