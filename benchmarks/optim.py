"""The optimizer's phase: zshard's steps, clipping and averages, compared with torch's and others'.

    python -m benchmarks.optim [--cases adam ema] [--sizes rounds=15 elements=50000000]
    python -m benchmarks.optim --cases muon --hosts 2x2     # over 10 Gbit/s; as root, see hosts.py

Each row of CASES is a function that takes its sizes and returns a record of plain values: a title,
and for each side its numbers. Ratios are of the same round; "per element" are bytes of state.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import math
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zshard
from benchmarks import harness, hosts
from benchmarks.harness import spread
from benchmarks.models import GPTBlock, gpt
from benchmarks.sides import build_side
from zshard import FSDP, AdamW, AdamW8bit, _core
from zshard.extras.optimizers.newton_schulz import orthogonalized

MODULE = "benchmarks.optim"
F32, BF16 = torch.float32, torch.bfloat16
Step = Callable[[], Any]
Sides = dict[str, dict[str, Any]]
Record = dict[str, Any]


def compared(
    steps: Mapping[str, Step],
    rounds: int,
    bases: Sequence[str],
    goals: Mapping[tuple[str, str], float] | None = None,
) -> Sides:
    """Return milliseconds of each side's steps, and their ratios to those of each base. Collective.

    A step that returns a float has timed itself. goals: (side, base) -> the largest median ratio.
    """

    def turn(step: Step, _number: int) -> tuple[float, ...]:
        begin = time.perf_counter()
        seconds = step()
        return (seconds if isinstance(seconds, float) else time.perf_counter() - begin,)

    samples = harness.interleave(
        {name: partial(turn, step) for name, step in steps.items()}, rounds, 2
    )
    sides: Sides = {}
    for name, mine in samples.items():
        times = [mine[i].times[0] * 1e3 for i in harness.clean_rounds(mine)]
        side = sides[name] = {"ms": spread(times)}
        for base in bases:
            ratio = side[f"x {base}"] = spread(harness.same_round_ratios(mine, samples[base]))
            if goal := (goals or {}).get((name, base)):
                side[f"goal, x {base}"] = harness.verdict(ratio["median"], goal)
        side["contended"] = sum(map(harness.contended, mine))
    return sides


def state_bytes(value: Any) -> int:
    """Return the bytes of all tensors in an optimizer's state, also of those inside of others."""
    if isinstance(value, Mapping):
        return sum(map(state_bytes, value.values()))
    if hasattr(value, "__tensor_flatten__"):
        return sum(state_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, Tensor) and value.dim() else 0


def param_of(elements: int, dtype: torch.dtype = F32) -> nn.Parameter:
    param = nn.Parameter(torch.randn(elements).to(dtype))
    param.grad = torch.randn_like(param)
    return param


def stack(layers: int, width: int) -> Any:
    return FSDP(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))


# --- one process: steps, moments in 8 bits -------------------------------------------------------


BASE = "AdamW, float32"
FUSED, MOVED = "torch AdamW, fused", "a copy"
WAYS: dict[str, tuple[Callable[..., torch.optim.Optimizer], torch.dtype]] = {
    BASE: (AdamW, F32),
    "AdamW8bit, float32": (AdamW8bit, F32),
    "AdamW8bit, bfloat16, master": (partial(AdamW8bit, master="int8"), BF16),
    "AdamW8bit, bfloat16": (AdamW8bit, BF16),
    "AdamW, bfloat16 stochastic": (partial(AdamW, stochastic_rounding=True), BF16),
    "AdamW, bfloat16 to nearest": (AdamW, BF16),
}
"""Optimizers and the dtypes of the parameters that they step."""
STEP_GOALS = {
    (BASE, FUSED): 1.03,
    ("AdamW8bit, float32", BASE): 0.9,
    ("AdamW8bit, bfloat16, master", BASE): 0.8,
}
TORCH = {
    FUSED: partial(torch.optim.AdamW, fused=True),
    "torch AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "torch AdamW": torch.optim.AdamW,
}


def adam(threads: int = 1, elements: int = 50_000_000, rounds: int = 15) -> Record:
    """A step, compared with torch's, with 8-bit steps of installed libraries, and with a copy that
    reads and writes 28 bytes an element, as AdamW does in float32. Sides share parameters."""
    params = {dtype: param_of(elements, dtype) for dtype in (F32, BF16)}
    made = {name: make([params[dtype]]) for name, (make, dtype) in WAYS.items()}
    made |= {name: make([params[F32]]) for name, make in TORCH.items()}
    for name in ("bitsandbytes", "torchao"):
        with contextlib.suppress(ImportError):
            peer = import_module(f"{name}.optim").AdamW8bit
            made[f"{name}.AdamW8bit"] = peer([param_of(elements)])
    source, target = torch.randn(2, elements * 7 // 2)
    steps = {name: optimizer.step for name, optimizer in made.items()}
    steps[MOVED] = lambda: target.copy_(source)
    sides = compared(steps, rounds, (BASE, FUSED, MOVED), STEP_GOALS)
    for name, optimizer in made.items():
        sides[name]["per element"] = state_bytes(optimizer.state) / elements
    return {"title": f"A step of {elements:,} elements, {threads} threads", "sides": sides}


# --- ranks: averages, clipping, torch's steps on shards ------------------------------------------


def ema(elements: int = 50_000_000, layers: int = 200, rounds: int = 15) -> Record:
    """An update of float32 averages of an FSDP model: by EMA.update(), by a loop of lerp_() over
    parameters, and by AveragedModel; and two averages, by one EMA and by two."""
    model = stack(layers, round((elements / layers) ** 0.5))
    decay, twin = 0.999, copy.deepcopy(model)
    both = zshard.EMA(model, (decay, 0.9999))
    apart = [zshard.EMA(model, each) for each in both.decays]
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @torch.no_grad()
    def lerp() -> None:
        for mean, value in zip(twin.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)

    updates: dict[str, Step] = {
        "zshard": zshard.EMA(model, decay).update,
        "lerp": lerp,
        "averaged": lambda: averaged.update_parameters(model),
        "two decays": both.update,
        "two passes": lambda: [each.update() for each in apart],
    }
    what = f"{elements:,} elements in {2 * layers} parameters"
    return {"title": f"Averages of {what}", "sides": compared(updates, rounds, ["lerp"])}


def clipping(layers: int = 5, width: int = 2048, rounds: int = 15) -> Record:
    """unscale_, clip_grad_norm_ and step together: "clip" and "scale" in the step's own pass, where
    "apart" has second names for gradients, so that they need their own passes. Bytes are what
    zshard's loops read and write; torch's product in "apart" is not counted, 8 an element."""
    moved: dict[str, float] = {}

    def side(name: str) -> Step:
        scaler, model = zshard.GradScaler(enabled="scale" in name), stack(layers, width)
        params, inputs = list(model.parameters()), torch.randn(8, width)
        optimizer = AdamW(params, lr=1e-4)

        def step() -> float:
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().sum()).backward()
            second_names = [zshard.to_local(p.grad) for p in params if "apart" in name]
            dist.barrier()
            passed, begin = _core.bytes_passed(), time.perf_counter()
            scaler.unscale_(optimizer)
            if name != "step":
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            seconds = time.perf_counter() - begin
            scaler.update()
            del second_names
            moved[name] = (_core.bytes_passed() - passed) / sum(p.numel() for p in params)
            return seconds

        return step

    steps = {name: side(name) for name in ("step", "clip", "apart", "scale", "scale apart")}
    sides = compared(steps, rounds, ["step"], {(name, "step"): 1.1 for name in ("clip", "scale")})
    for name in steps:
        sides[name]["bytes moved"] = moved[name]
    return {"title": "The optimizer's phase with clipping", "sides": sides}


def shards(layers: int = 60, width: int = 256, rounds: int = 15) -> Record:
    """zero_grad() and step() of shards, against the same of plain parameters of the same sizes, and
    against the same shards with the guard of slices off: what zshard and its guard add."""
    model = stack(layers, width)
    model(torch.randn(8, width)).square().mean().backward()
    mine = list(model.parameters())
    copies = [param_of(zshard.to_local(param).numel()) for param in mine]
    foreach = {"foreach": True, "lr": 1e-9}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        **{name: partial(make, lr=1e-9) for name, make in TORCH.items()},
        "torch SGD": partial(torch.optim.SGD, momentum=0.9, **foreach),
        "torch RMSprop": partial(torch.optim.RMSprop, **foreach),
        "torch Adagrad": partial(torch.optim.Adagrad, **foreach),
        "torch Adamax": partial(torch.optim.Adamax, **foreach),
        "zshard.AdamW": partial(AdamW, lr=1e-9),
    }

    def step(optimizer: torch.optim.Optimizer, context: Callable[[], Any]) -> None:
        with context():
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()

    ways = {"shards": (mine, contextlib.nullcontext), "plain": (copies, contextlib.nullcontext)}
    ways["guard off"] = (mine, torch._C.DisableTorchFunctionSubclass)
    goals = {("shards", "plain"): 1.05, ("shards", "guard off"): 1.02}
    sides: Sides = {}
    for name, make in makers.items():
        steps = {way: partial(step, make(of), how) for way, (of, how) in ways.items()}
        sides[name] = compared(steps, rounds, ("plain", "guard off"), goals)["shards"]
    return {"title": f"A step of {2 * layers} shards, against plain parameters", "sides": sides}


def muon(layers: int = 4, width: int = 192, ns_dtype: str = "bfloat16", rounds: int = 5) -> Record:
    """Muon's step, from a barrier on, against DDP with torch.optim.Muon and a fused AdamW, where
    each rank computes the update of each matrix. Both sides train the same GPT."""
    workload = gpt("gpt", layers, width, seq=64, rows=2)
    replica, sharded = workload.build(), FSDP(workload.build(), auto_wrap_policy={GPTBlock})
    groups = zshard.Muon(replica).param_groups
    chosen = [[p for g in groups if g["use_muon"] == own for p in g["params"]] for own in (1, 0)]
    matrices = torch.optim.Muon(chosen[0], lr=0.02)
    rest = torch.optim.AdamW(chosen[1], lr=1e-3, fused=True)
    ours = zshard.Muon(sharded, lr=0.02, ns_dtype=ns_dtype, adamw={"lr": 1e-3})
    sides: dict[str, Any] = {
        "ddp": (nn.parallel.DistributedDataParallel(replica), (matrices, rest)),
        "zshard": (sharded, (ours,)),
    }

    def step(name: str) -> float:
        model, optimizers = sides[name]
        model.zero_grad(set_to_none=True)
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        dist.barrier()
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        return time.perf_counter() - begin

    batch = workload.batch(harness.generator())
    steps = {name: partial(step, name) for name in sides}
    times = compared(steps, rounds, ["ddp"], {("zshard", "ddp"): 0.55})
    return {"title": f"Muon's step, {workload.parameters():,} parameters", "sides": times}


def products(height: int = 768, width: int = 3072, rounds: int = 3) -> Record:
    """An update of a matrix by Muon with symmetric=True, against False."""
    options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}
    sides: Sides = {}
    for dtype in (F32, BF16):
        update = torch.randn(height, width).to(dtype)

        def step(how: bool, update: Tensor = update) -> None:
            orthogonalized(update.clone(), {**options, "symmetric": how})

        steps = {"symmetric": partial(step, True), "all": partial(step, False)}
        sides[str(dtype)] = compared(steps, rounds, ["all"])["symmetric"]
    return {"title": f"Symmetric products, {height} x {width}", "sides": sides}


def norms(layers: int = 4, width: int = 256, steps: int = 20, max_norm: float = 0.5) -> Record:
    """The error of each library's norm for clipping: the exact norm is that of the side's own full
    gradients in float64. Errors are in units in the last place, 24 bits. All sides train the same
    GPT with AdamW in float32."""

    def full(tensor: Any) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else zshard.full_tensor(tensor)

    workload = gpt("gpt", layers, width, seq=64, rows=4)
    sides: Sides = {}
    for name in ("ddp", "fsdp2", "zshard-full_shard", "zshard-shard_grad_op", "zshard-no_shard"):
        side: Any = build_side(name, workload)
        generator, errors = harness.generator(), []
        for _ in range(steps):
            side.forward(workload.batch(generator)).backward()
            params = list(side.module.parameters())
            exact = math.sqrt(sum(full(p.grad).double().square().sum().item() for p in params))
            norm = full(torch.nn.utils.clip_grad_norm_(params, max_norm)).item()
            side.optimizer.step()
            side.zero_grad()
            errors.append(abs(norm - exact) / math.ldexp(1.0, math.frexp(exact)[1] - 24))
        sides[name] = {"error": spread(errors)}
    return {"title": f"Errors of norms, {workload.parameters():,} parameters", "sides": sides}


FLAGS = ("-std=c11", "-O3", "-DNDEBUG", "-pthread", "-ffp-contract=off")
FLAGS += ("-fno-math-errno", "-fno-trapping-math")
SOURCES = ("optim/kept_area", "optim/kept_step", "optim/optim_cpu", "optim/optim_compact")
SOURCES += ("optim/optim_lanes", "device/device_cpu", "base/simd", "base/status", "base/clock")


def kept_step(elements: int = 40_000_000, rounds: int = 8) -> Record:
    """A step that another process can finish, against the plain one: the loops of AdamW in float32
    alone, on one thread, without Python (kept_step.c), which take turns of 131,072 elements."""
    program, csrc = harness.ROOT / "build" / "kept_step", harness.ROOT / "csrc"
    files = [harness.ROOT / "benchmarks" / "kept_step.c", *(csrc / f"{n}.c" for n in SOURCES)]
    compiler = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, f"-iquote{csrc}"]
    subprocess.run([*compiler, *map(str, files), "-lm", "-o", str(program)], check=True)
    command = [str(program), str(elements), str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    pairs = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    columns = {"plain, ns": [a for a, _ in pairs], "kept, ns": [b for _, b in pairs]}
    columns["ratio"] = [kept / base for base, kept in pairs]
    sides = {"kept": {name: spread(values) for name, values in columns.items()}}
    return {"title": "A kept step, ns per element", "sides": sides}


CASES: dict[str, tuple[Callable[..., Record], int, dict[str, Any]]] = {
    "adam": (adam, 1, {"elements": 1_000_000, "rounds": 3}),
    "clipping": (clipping, 0, {"layers": 2, "width": 256, "rounds": 3}),
    "ema": (ema, 0, {"elements": 1_000_000, "rounds": 3}),
    "shards": (shards, 0, {"layers": 4, "rounds": 3}),
    "kept-step": (kept_step, 1, {"elements": 1_000_000, "rounds": 1}),
    "norms": (norms, 0, {"width": 64, "steps": 3}),
    "muon": (muon, 0, {"layers": 2, "width": 64, "rounds": 2}),
    "products": (products, 1, {"height": 128, "width": 256}),
}
"""The function, its ranks (0: --ranks), and the sizes of --quick; other sizes are the
function's defaults."""
USUAL = ["adam", "clipping", "ema", "shards", "kept-step"]


def measure(case: str, sizes: Mapping[str, Any]) -> Record:
    return {"case": case, **CASES[case][0](**sizes)}


def show(record: Mapping[str, Any]) -> None:
    harness.show(record["title"], record["sides"])


def main(argv: Sequence[str] | None = None) -> None:
    if harness.under_torchrun():
        harness.run_task(measure, show)
    full = {"cases": USUAL, "sizes": [], "hosts": None, "ranks": 2}
    args = harness.options("Time the optimizer's phase.", argv, full, {}, {"cases": CASES})
    harness.finish(args, "optim", [run(name, args) for name in args.cases])


def run(name: str, args: argparse.Namespace) -> Any:
    """Measure a case on its own ranks."""
    function, ranks, quick = CASES[name]
    defaults = inspect.signature(function).parameters
    asked = dict(each.split("=") for each in args.sizes)
    sizes = {key: type(defaults[key].default)(value) for key, value in asked.items()}
    sizes = {**(quick if args.quick else {}), **sizes}
    task = {"case": name, "sizes": sizes}
    if args.hosts is None or ranks:
        env = {"OMP_NUM_THREADS": str(sizes.get("threads", 1))}
        return harness.collect(MODULE, ranks or args.ranks, task, env)
    count, each = hosts.layout(args.hosts)
    with hosts.Hosts(count, 10.0) as made:
        return hosts.collect(made, each, MODULE, task)


if __name__ == "__main__":
    harness.start(main)
