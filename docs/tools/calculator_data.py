"""The calculator's (docs/calculator.js) data from zshard: GPUs, limits, and traced activations.

    python docs/tools/calculator_data.py > calculator_data.js

`make docs` generates it again (site_pages.py), so it is never older than the planner.

The planner traces a decoder (extras/planner/kernels.py), which a browser cannot do. But a decoder's
tensors have few sizes, each a product of dimensions. Here a small decoder is traced whose sizes all
differ, so a tensor's size says which product it is, and the memory at each moment is a sum of
products. Only moments that no other exceeds, for any dimensions, can be a peak.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from svg import MEMORY

from zshard.extras.optimizers.codes import GROUP, MIN_8BIT_SIZE
from zshard.extras.planner.decoder import Dims, decoder_of
from zshard.extras.planner.gpus import DEVICES
from zshard.extras.planner.kernels import FORWARD, _Meter, _Tracing
from zshard.extras.planner.search import COMMENTS, GAP

Sum = dict[str, float]  # name of a product -> its factor; see products()
Variant = tuple[bool, bool, str, str]  # gated, fewer kv_heads than heads, checkpointing, precision

BATCH, SEQ, HEADS, HEAD, FFN, VOCAB = 5, 101, 6, 14, 262, 1009  # no two products are the same
LAYERS = 3  # first, middle, last
VARIANTS: list[Variant] = list(
    itertools.product((True, False), (True, False), ("", "selective", "full"), ("bf16", "fp32"))
)
STAGES = ("end", "end", "embed", "embed", "first", "first", "middle", "middle", "last", "last")
"""Of backward[i] between the marks of _traced(). Behind these, no gradient is there: "none"."""

SMALLER = (("n", "nh", "nk", "nw"), ("wk", "ww"))
"""Each product is at most the next one: kv_heads and heads are at most width / 2."""


def products(dims: Dims) -> dict[int, Sum]:
    """Return the sum of products that a number of elements represents.

    The names: n: tokens of a micro-batch; w: width; k: of keys, kv_heads * head; f: ffn; v: vocab;
    h: heads; s: seq. Tensors with only one dimension of the weights are too small to count.
    """
    n, width, k = BATCH * SEQ, dims.width, dims.kv_heads * HEAD
    sizes = {"n": n, "nh": n * HEADS, "nw": n * width, "nf": n * FFN, "nv": n * VOCAB}
    sizes |= {"ww": width * width, "wf": width * FFN, "wv": width * VOCAB, "sw": SEQ * width}
    if k != width:
        sizes |= {"nk": n * k, "wk": width * k}
    found: dict[int, Sum] = {size: {name: 1} for name, size in sizes.items()}
    found |= {sizes[name] // 2: {name: 0.5} for name in ("nw", "nk") if name in sizes}
    small = (1, 2, width, FFN, VOCAB, SEQ, SEQ * HEAD)
    found |= {size: {} for size in small}
    qkv = {"w": 1, "k": 2} if k != width else {"w": 3}  # GPT's Q, K and V are one matrix
    if not dims.gated:
        for rows, name in ((n, "n"), (width, "w")):
            found[rows * (width + 2 * k)] = {name + part: times for part, times in qkv.items()}
    return found


class _Sums(_Meter):
    """A meter that also notes the sum of products that is alive at each moment."""

    def __init__(self, names: Mapping[int, Sum]) -> None:
        super().__init__()
        self._names = names
        self._alive: Counter[tuple[int, int]] = Counter()  # (elements, bytes of one) -> tensors
        self._sizes: dict[int, tuple[int, int]] = {}
        self.seen: dict[tuple[str, int], list[Sum]] = {}

    def begin(self, phase: str, i: int) -> None:
        super().begin(phase, i)
        self._note()

    def _note(self) -> None:
        total: Sum = {}
        for (size, item), count in self._alive.items():
            for name, times in self._names[size].items():
                total[name] = total.get(name, 0) + count * item * times
        there = {name: value for name, value in sorted(total.items()) if value}
        self.seen.setdefault((self.phase, self._at), []).append(there)

    def _track(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if not super()._track(tensor):
            return False
        size = (storage.nbytes() // tensor.itemsize, tensor.itemsize)
        if size[0] not in self._names:
            raise ValueError(f"a tensor of {tuple(tensor.shape)} has a size that products() lacks")
        self._sizes[id(storage)] = size
        self._alive[size] += 1
        self._note()
        return True

    def _free(self, key: int, size: int) -> None:
        super()._free(key, size)
        self._alive[self._sizes.pop(key)] -= 1


def _traced(variant: Variant) -> dict[tuple[str, int], list[Sum]]:
    """Return the sums alive in each part of a step, as they change, by (phase, place)."""
    gated, grouped, checkpointing, precision = variant
    dims = Dims(LAYERS, HEADS * HEAD, HEADS, 2 if grouped else HEADS, FFN, VOCAB, SEQ, gated)
    model = decoder_of(dims, checkpointing)
    tracing = _Tracing([model, model.embed, *model.blocks, model.head])
    meter = tracing.meter = _Sums(products(dims))
    dtype = torch.bfloat16 if precision == "bf16" else None
    tracing.of(model, lambda each: each(torch.zeros(BATCH, SEQ, dtype=torch.int64)), dtype)
    return meter.seen


def _never_less(a: Sum, b: Sum) -> bool:
    """Return whether the sum `a` is at least `b` for all dimensions."""
    over = {name: a.get(name, 0) - b.get(name, 0) for name in {*a, *b}}
    for chain in SMALLER:
        left = 0.0
        for name in reversed(chain):
            left += over.pop(name, 0)
            if left < 0:
                return False
    return min(over.values(), default=0) >= 0


def _peaks(sums: Sequence[Sum]) -> list[Sum]:
    found = [dict(items) for items in sorted({tuple(each.items()) for each in sums})]
    return [b for b in found if not any(a != b and _never_less(a, b) for a in found)]


def activations(variant: Variant) -> dict[str, Any]:
    """Return the possible peaks of a decoder of three layers, by stage, and each layer's share.

    Stages: "none": no gradients are there; "last": those of the head are, and the last block's come
    next; "middle", "first" and "embed" accordingly.
    """
    seen = _traced(variant)
    stages: dict[str, list[Sum]] = {}
    for (phase, i), sums in seen.items():
        stage = "none" if phase == FORWARD or i >= len(STAGES) else STAGES[i]
        stages.setdefault(stage, []).extend(sums)
    before, after = seen[FORWARD, 6][0], seen[FORWARD, 8][0]  # the middle block, and the last one
    layer = {name: after[name] - before.get(name, 0) for name in after}
    peaks = {stage: _peaks(sums) for stage, sums in sorted(stages.items()) if stage != "end"}
    return {"layer": {k: v for k, v in layer.items() if v}, **peaks}


def name_of(variant: Variant) -> str:
    """Return the name under which calculator.js looks for a variant."""
    gated, grouped, checkpointing, precision = variant
    words = ("llama" if gated else "gpt", "grouped" if grouped else "all")
    return " ".join((*words, checkpointing or "none", precision))


def script(variants: Sequence[Variant] = VARIANTS) -> str:
    """Return the file, with the activations of these variants."""
    facts = {
        "gpus": {name: each.memory - each.reserved for name, each in DEVICES.items()},
        "gap": GAP,
        "group8bit": GROUP,
        "smallest8bit": MIN_8BIT_SIZE,
        "parts": MEMORY,
        "comments": COMMENTS,
    }
    lines = [
        "// Made by docs/tools/calculator_data.py from zshard's planner.",
        "var zshardFacts = {",
    ]
    lines += [f"  {name}: {json.dumps(value)}," for name, value in facts.items()]
    lines.append("  activations: {")
    for each in variants:
        lines.append(f"    {json.dumps(name_of(each))}: {json.dumps(activations(each))},")
    return "\n".join([*lines, "  },\n};\n"])


if __name__ == "__main__":
    print(script(), end="")
