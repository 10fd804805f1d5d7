"""Every operation that torch tests, on shards: the bits of the full result's shard, or ShardError.

The reference is torch's own list of operations with sample inputs (op_db), not the guard's list.
One process plays a rank that has some elements from the middle of each tensor.
"""

import itertools

import pytest
import torch
from guarded import part_like, part_of, shard_of
from torch.utils._pytree import tree_map

import zshard
from zshard import ShardTensor
from zshard.guard.rules import FACT, NEW, rules

UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "empty_permuted")
UNDEFINED += ("new_empty_strided",)
"""Operations whose results have no values."""


ELEMENTWISE = ("nn.functional.gelu",)
"""Operations that compute each element by itself, beside those that torch's list classes so."""


def is_cuttable(value):
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.dim() > 0 and value.numel() > 1 and not value.is_neg() and not value.is_conj()


def variants_of(op):
    variants = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    return {name: each for name, each in variants.items() if each is not None}


def run(variant, sample, change):
    """Return the variant's result for copies of the sample, after `change`."""

    def changed(value):
        return change(value.detach().clone()) if isinstance(value, torch.Tensor) else value

    inputs = tree_map(changed, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(3)
    with torch.no_grad():
        return variant(inputs[0], *inputs[1], **inputs[2])


def wrong_with(op, variant, sample):
    """Return the fault of an operation on shards; None if there is none."""
    part = part_like(sample.input)

    def cut(value):
        fits = is_cuttable(value) and value.shape == sample.input.shape
        return shard_of(value, part) if fits else value

    try:
        whole = run(variant, sample, lambda value: value)
        got = run(variant, sample, cut)
    except Exception:
        # torch refuses it for full tensors, the guard for shards, or torch's Python code took the
        # shard's shape for the full one, and failed
        return None
    if isinstance(whole, list | tuple):  # of views
        pairs = zip(got, whole, strict=True)
        texts = [wrong_value(ours, theirs, part_of(ours)) for ours, theirs in pairs]
        return next((text for text in texts if text is not None), None)
    if not isinstance(got, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return f"gave a {type(got).__name__}"
    if wrong_value(got, whole, part) is None or wrong_value(got, whole, part_of(got)) is None:
        return None  # a view
    if got.to_local().shape != part.local_shape or got.dtype != whole.dtype:
        return f"gave {got.dtype} of shape {tuple(got.shape)}"
    if not is_elementwise(op):
        return "other values"
    torch.testing.assert_close(got.to_local(), part.of(whole), equal_nan=True)
    of_plain_slice = run(variant, sample, lambda value: zshard.to_local(cut(value)))
    return None if bits_of(got.to_local()) == bits_of(of_plain_slice) else "other values"


def wrong_value(got, whole, part):
    """Return the fault of a shard of some elements of `whole`, bit for bit."""
    if type(got) is not ShardTensor or part.shape != whole.shape:
        return "gave a tensor that is not guarded, or not as what it is"
    if got.shape != part.local_shape or got.dtype != whole.dtype:
        return f"gave {got.dtype} of shape {tuple(got.shape)}"
    return None if bits_of(got.to_local()) == bits_of(part.of(whole)) else "other values"


def is_elementwise(op):
    """Return whether only the last bit of an element may depend on its place.

    Torch's kernels do not use vector instructions for the end of a tensor; which functions then
    round differently depends on the processor.
    """
    kinds = {kind.__name__ for kind in type(op).__mro__}
    return bool(kinds & {"UnaryUfuncInfo", "BinaryUfuncInfo"}) or op.name in ELEMENTWISE


def bits_of(tensor):
    return bytes(tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy())


def is_fact(op):
    return any(rules().get(each) == FACT for each in variants_of(op).values())


def checked(op, dtype):
    supported = dtype in op.supported_dtypes("cpu")
    return supported and not is_fact(op) and op.name not in (*UNDEFINED, *NEW)


SHARES = 18  # one share of torch's operations per run
SAMPLES = [(torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 4), (torch.int64, 4)]
CASES = [
    pytest.param(*each, share, marks=() if each[1] == 1 and share < 1 else pytest.mark.thorough)
    for each in SAMPLES
    for share in range(SHARES)
]


@pytest.mark.filterwarnings("ignore")  # torch's operations warn about themselves
@pytest.mark.parametrize(("dtype", "count", "share"), CASES, ids=str)
def test_each_operation_is_correct_on_shards_or_refused(dtype, count, share):
    """count: samples of each operation; share: which operations."""
    # Its import takes five seconds, which workers that run other files need not spend.
    from torch.testing._internal.common_methods_invocations import op_db

    wrong, compared = {}, 0
    for op in op_db[share::SHARES]:
        if not checked(op, dtype):
            continue
        cuttable = (s for s in op.sample_inputs("cpu", dtype) if is_cuttable(s.input))
        samples = [*itertools.islice(cuttable, count)]
        for name, variant in variants_of(op).items():
            texts = [wrong_with(op, variant, sample) for sample in samples]
            compared += len(texts)
            complaints = [text for text in texts if text is not None]
            if complaints:
                wrong[f"{op.full_name} as {name}"] = complaints
    assert wrong == {}
    assert compared > 500 // SHARES
