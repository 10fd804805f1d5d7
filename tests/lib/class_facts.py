"""Facts about a class for its row of docs/transformers_classes.md, found by ranks: the units that
"auto" chooses, their source, and whether training has DDP's bits."""

from __future__ import annotations

import collections
import math
from typing import Any

import tiny_classes
import torch
import torch.distributed as dist
import transformers
import transformers.models.llama.modeling_llama  # the parts of all models, once for all ranks
from compare import differences

from zshard import FSDP
from zshard.wrap import plan_units
from zshard.wrap.auto import stated_blocks
from zshard.wrap.tree import ModuleTree

STEPS = 3
SHOWN = 4  # differences, and kinds of units, that a row lists
transformers.logging.set_verbosity_error()


def trained(name: str) -> dict[str, Any]:
    """trained_here() on a fresh rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return trained_here(name)


def trained_here(name: str) -> dict[str, Any]:
    """Train a class on this rank; return the facts of its row."""
    rank = dist.get_rank()
    found: list[Any] = [None]
    if rank == 0:
        try:
            found = [tiny_classes.find(name)]
        except tiny_classes.Misfit as misfit:
            found = [str(misfit)]
    dist.broadcast_object_list(found)
    tiny = found[0]
    if isinstance(tiny, str):
        return {"misfit": tiny}
    facts = units_of(tiny)
    theirs = by_ddp(tiny, rank)
    model = FSDP(tiny.build())
    ours = tiny_classes.train(model, tiny, rank, STEPS), model.state_dict()
    facts["differs"] = differences(ours, theirs, nans=True)[:SHOWN]
    facts["finite"] = all(map(math.isfinite, theirs[0]))
    if facts["differs"]:
        facts["ddp differs"] = differences(by_ddp(tiny, rank), theirs, nans=True)[:SHOWN]
    return facts


def units_of(tiny: tiny_classes.Tiny) -> dict[str, Any]:
    """Return which units "auto" chooses in the model, and what states them."""
    model = tiny.build()
    stated = {
        node.module: attribute for node, attribute in stated_blocks(ModuleTree(model)).items()
    }
    units = [unit.module for unit in plan_units(model)[:-1]]
    sources = {stated.get(module, "rule") for module in units}
    order = ("_fsdp_plan", "_no_split_modules", "rule")
    return {
        "source": next((each for each in order if each in sources), "rule"),
        "units": dict(collections.Counter(type(module).__name__ for module in units)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "inputs": list(tiny.draw(0)),
    }


def by_ddp(tiny: tiny_classes.Tiny, rank: int) -> tuple[list[float], dict[str, Any]]:
    model = tiny.build()
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, broadcast_buffers=False
    )
    return tiny_classes.train(parallel, tiny, rank, STEPS), model.state_dict()
