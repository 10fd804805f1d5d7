"""Failures that a script catches: every place, kind, rank and continuation, and the right results.

A cell is a short training script that raises, catches the exception and continues. It runs twice:
on two ranks with a sharded model, and on two threads with plain models whose gradients are averaged
as in DDP. The sharded run must give the plain run's result, or a zshard error on every rank. A
backward that failed midway contributes nothing to the plain run (torch leaves some of its gradients
there, which no other rank has).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from groups import own_group, passing_groups
from models import Block, loss_of, make, wrapped
from scenarios import WIDTH, floats
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, MixedPrecision

DEADLINE = 1.0  # seconds per wait of a cell


# --- exceptions and their places ------------------------------------------------------------------


class Unusual(BaseException):
    """Neither an Exception nor known to Python."""


class OfAPeer(zshard.PeerError):
    """zshard's exception for a peer, raised by the script."""


KINDS: dict[str, type[BaseException]] = {
    "Exception": LookupError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "BaseException": Unusual,
    "MemoryError": MemoryError,
    "PeerError": OfAPeer,
}


class Planted:
    """Raises once, where the cell specifies, and removes itself."""

    def __init__(self, what):
        self.kind = KINDS[what]
        self.handles = []

    def fail(self, *_):
        raise self.kind("planted")

    def on(self, register, hook=None, **how):
        self.handles.append(register(hook or self.fail, **how))

    def remove(self):
        for handle in self.handles:
            handle.remove()


def at_the_end(planted):
    """Return a hook that raises when the backward is over."""
    engine = torch.autograd.Variable._execution_engine
    return lambda *_: engine.queue_callback(planted.fail)


def again(planted):
    """Return a hook that raises at its second call: when the block is recomputed."""
    calls = itertools.count()
    return lambda *_: planted.fail() if next(calls) > 0 else None


def nowhere(planted, script, x):
    """`do_failing_step` raises on its own."""


PLACES: dict[str, Callable[..., None]] = {
    "before_forward": lambda p, s, x: p.on(s.model.register_forward_pre_hook, prepend=True),
    "within_forward": lambda p, s, x: p.on(s.block.down.register_forward_pre_hook),
    "before_unit": lambda p, s, x: p.on(s.block.register_forward_pre_hook),
    "after_unit": lambda p, s, x: p.on(s.block.register_forward_hook),
    "after_forward": lambda p, s, x: p.on(s.model.register_forward_hook),
    "method": lambda p, s, x: p.on(s.model.head.register_forward_hook),
    "before_method": nowhere,
    "first_in_backward": nowhere,
    "middle_of_backward": lambda p, s, x: p.on(s.block.up.weight.register_hook),
    "last_in_backward": lambda p, s, x: p.on(x.register_hook),
    "end_of_backward": lambda p, s, x: p.on(
        s.model.blocks[0].up.weight.register_hook, at_the_end(p)
    ),
    "gradient_hook": lambda p, s, x: p.on(s.model.head.weight.register_post_accumulate_grad_hook),
    "recomputation": lambda p, s, x: p.on(s.block.down.register_forward_hook, again(p)),
    "reentrant_recomputation": lambda p, s, x: p.on(s.block.down.register_forward_hook, again(p)),
    "before_step": lambda p, s, x: p.on(s.optimizer.register_step_pre_hook),
    "after_step": lambda p, s, x: p.on(s.optimizer.register_step_post_hook),
    "no_sync": lambda p, s, x: p.on(s.block.up.weight.register_hook),
    "accumulating": lambda p, s, x: p.on(s.block.up.weight.register_hook),
    "summon": nowhere,
    "save": lambda p, s, x: p.on(s.model.register_state_dict_pre_hook),
}


# --- cells ----------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "where": tuple(PLACES),
    "what": tuple(KINDS),
    "who": ("all", "one"),
    "then": ("train", "backward", "zero_grad", "evaluate", "save"),
    "transport": ("shm", "c10d"),
    "strategy": ("full_shard", "shard_grad_op", "zero1", "no_shard"),
    "dtype": ("float32", "bfloat16"),
    "held": (False, True),
}


@dataclass(frozen=True)
class Cell:
    where: str
    what: str
    who: str
    then: str
    transport: str
    strategy: str
    dtype: str
    held: bool

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))


def reason_to_leave_out(cell: Cell) -> str | None:
    """Return why a cell is not a script that could be written, or None."""
    if cell.strategy == "zero1" and cell.transport == "shm":
        return "over shm, zero1 is full_shard"
    if cell.then == "backward" and cell.where in ("before_step", "after_step", "summon", "save"):
        return "the optimizer has changed the weights that the earlier graph needs, or comes first"
    if cell.what != "Exception" and cell.where == "save":
        return "a state dict hook raises what a forward hook does; one kind is enough"
    return None


def all_cells() -> list[Cell]:
    every = (Cell(*values) for values in itertools.product(*FACTORS.values()))
    return [cell for cell in every if reason_to_leave_out(cell) is None]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Return a small subset of `cells` that covers each pair of values of two factors.

    Greedy and deterministic: of the next few cells with new pairs, take the one with the most,
    until none has any. (Checking all each time takes seconds, and saves hardly a cell.)
    """
    bits: dict[Any, int] = {}
    pairs_of = {}
    for cell in cells:
        pairs = itertools.combinations(vars(cell).items(), 2)
        pairs_of[cell] = sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)
    left, taken = (1 << len(bits)) - 1, []
    pool = sorted(cells, key=hash_of)
    while left:
        next_few = itertools.islice((cell for cell in pool if pairs_of[cell] & left), 300)
        best = max(next_few, key=lambda cell: (pairs_of[cell] & left).bit_count())
        taken.append(best)
        left &= ~pairs_of[best]
    return taken


def hash_of(cell: Cell) -> int:
    """Return a sort key that is the same in each process and independent of the factors."""
    return zlib.crc32(str(cell).encode())


# --- the model ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks that are units; one may be checkpointed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, 2)
        self.how = "plain"

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i == 1 and self.how != "plain":
                x = checkpoint(block, x, use_reentrant="reentrant" in self.how)
            else:
                x = block(x)
        return self.head(x)

    def scores(self, x):
        return self.head(self.blocks[0](x))


class Script:
    """One rank's script; the two sides differ in how they build, average and read: each defines
    build, forward, method, backward, no_sync, whole and parameters. link: its connection to the
    peer."""

    def __init__(self, cell, rank, link):
        self.cell, self.rank, self.link = cell, rank, link
        self.fails = cell.who == "all" or rank == 0
        self.seen = []
        self.build()
        self.block = self.model.blocks[1]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)

    def learn(self, step):
        self.backward(loss_of(self.forward(floats(self.rank, step))))

    def zero_grad(self):
        if not self.cell.held:
            self.optimizer.zero_grad()

    def train(self, step):
        self.zero_grad()
        self.learn(step)
        self.optimizer.step()

    def evaluate(self, step):
        self.model.eval()
        with torch.no_grad():
            out = self.forward(floats(0, step))
        self.model.train()
        return out.float()

    def plant(self, planted, x):
        PLACES[self.cell.where](planted, self, x)

    def failing_step(self):
        """A step in which the failing ranks raise."""
        planted, x = Planted(self.cell.what), floats(self.rank, 1).requires_grad_()
        if self.fails:
            self.plant(planted, x)
        try:
            self.do_failing_step(x, planted)
        finally:
            planted.remove()
            self.model.how = "plain"

    def do_failing_step(self, x, planted):
        where, model = self.cell.where, self.model
        self.zero_grad()
        if "recomputation" in where:
            model.how = where
        elif where == "accumulating":
            self.learn(7)
        elif where == "save":
            model.state_dict()
        elif where == "summon":
            with self.whole():
                if self.fails:
                    planted.fail()
        if where == "last_in_backward":
            x = x * 1.0  # so that all parameters' gradients exist before the input's
        if where == "before_method" and self.fails:
            self.method(None)
        out = self.method(x) if where == "method" else self.forward(x)
        if where == "first_in_backward" and self.fails:
            planted.on(out.register_hook)
        with self.no_sync() if where == "no_sync" else contextlib.nullcontext():
            self.backward(loss_of(out))
        if where == "no_sync":
            self.learn(8)
        self.optimizer.step()

    def run(self) -> list[Any]:
        self.train(0)
        then = self.cell.then
        kept = loss_of(self.forward(floats(self.rank, 5))) if then == "backward" else None
        try:
            self.failing_step()
        except (KINDS[self.cell.what], TypeError, AttributeError) as error:
            if self.cell.where != "before_method" and isinstance(error, TypeError | AttributeError):
                raise
            self.seen.append("caught")
            if kept is not None:
                self.zero_grad()
                self.backward(kept)
                self.optimizer.step()
        else:
            self.seen.append("not raised")
        if then == "zero_grad":
            self.optimizer.zero_grad()
        if then in ("train", "zero_grad"):
            self.train(2)
        if then != "save":
            self.seen.append(self.evaluate(3))
        self.seen.append(self.parameters())
        self.train(4)
        self.seen.append(self.parameters())
        return self.seen


# --- the sharded side -----------------------------------------------------------------------------


class Sharded(Script):
    def build(self):
        low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = wrapped(
            Net,
            (self.cell.strategy, self.cell.transport),
            process_group=own_group(),
            mixed_precision=low if self.cell.dtype == "bfloat16" else None,
            timeout=self.link,
        )
        zshard.register_forward_method(self.model, "scores")

    def forward(self, x):
        return self.model(x)

    def method(self, x):
        return self.model.scores(x)

    def backward(self, loss):
        loss.backward()

    def no_sync(self):
        return self.model.no_sync()

    def whole(self):
        return FSDP.summon_full_params(self.model)

    def parameters(self):
        return {name: t.detach().clone() for name, t in self.model.state_dict().items()}


OWN_ERRORS = (zshard.DivergenceError, zshard.PeerError, zshard.PeerTimeoutError)


@passing_groups()
def sharded(cell: Cell, deadline: float = DEADLINE) -> tuple[str, Any]:
    """Return ("seen", the script's values), or ("error", the text of the zshard error that ended
    it)."""
    try:
        return "seen", Sharded(cell, dist.get_rank(), deadline).run()
    except BaseException as error:
        own = isinstance(error, OWN_ERRORS) and not isinstance(error, OfAPeer)  # which is planted
        told = isinstance(error, RuntimeError) and "call zero_grad() on all ranks" in str(error)
        return "error" if own or told else "wrong", f"{type(error).__name__}: {error}"


# --- the plain side -------------------------------------------------------------------------------


class Waits(Exception):
    """The other rank never came: DDP would wait indefinitely."""


class Average:
    """Two threads average their gradients, in the order in which they arrive."""

    def __init__(self):
        self.given = [[], []]
        self.ended = [False, False]
        self.changed = threading.Condition()

    def of(self, rank, mine):
        """Return the means with the other rank's values at the exchange of the same number."""
        with self.changed:
            self.given[rank].append(mine)
            self.changed.notify()
            number, others = len(self.given[rank]), self.given[1 - rank]
            self.changed.wait_for(lambda: len(others) >= number or self.ended[1 - rank])
            if len(others) < number:
                raise Waits
            sums = map(add, mine, others[number - 1])
        return [None if each is None else each / 2 for each in sums]

    def end(self, rank):
        with self.changed:
            self.ended[rank] = True
            self.changed.notify()


def add(a, b):
    """Return the sum of two gradients; either may be None."""
    return (a if b is None else b) if a is None or b is None else a + b


class Plain(Script):
    syncs, fails_late = True, False

    def build(self):
        self.model = make(Net)
        self.params = dict(self.model.named_parameters())
        self.total = {}

    def call(self, x, method):
        self.restore()
        if self.cell.dtype == "float32":
            return method(x)
        for name, param in self.params.items():  # as param_dtype does; gradients return in float32
            module, leaf = self.owner(name)
            del module._parameters[leaf]
            setattr(module, leaf, param.to(torch.bfloat16))
        return method(x.to(torch.bfloat16) if x is not None else None)

    def owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def restore(self) -> None:
        """Restore the parameters; until then a block may be recomputed with the cast ones."""
        for name, param in self.params.items():
            module, leaf = self.owner(name)
            if leaf not in module._parameters:
                delattr(module, leaf)
                module._parameters[leaf] = param

    def forward(self, x):
        return self.call(x, self.model)

    def method(self, x):
        return self.call(x, self.model.scores)

    def backward(self, loss):
        try:
            self.reduce(loss)
        finally:
            self.restore()

    def reduce(self, loss):
        """Run a backward. `total` is the earlier content of .grad."""
        for name, param in self.params.items():
            self.total[name], param.grad = param.grad, None
        try:
            loss.backward()
        except BaseException:
            late = all(param.grad is not None for param in self.params.values())
            if self.syncs and not late and self.cell.strategy != "no_shard":
                for param in self.params.values():
                    param.grad = None
            self.accumulate(self.syncs and late)
            raise
        self.accumulate(self.syncs)
        if self.fails_late:
            self.fails_late = False
            raise KINDS[self.cell.what]("planted")

    def accumulate(self, synchronize: bool) -> None:
        """Add new gradients to .grad. DDP's rule: accumulated gradients take part in the mean."""
        grads = [add(self.total[name], param.grad) for name, param in self.params.items()]
        if synchronize:
            grads = self.link.of(self.rank, grads)
        for param, grad in zip(self.params.values(), grads, strict=True):
            param.grad = grad

    def failing_step(self):
        self.restore()  # hooks go onto the parameters themselves
        super().failing_step()

    def plant(self, planted, x):
        if self.cell.where == "gradient_hook":  # ours run when the gradient is reduced
            self.fails_late = True
        else:
            super().plant(planted, x)

    @contextlib.contextmanager
    def no_sync(self):
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def whole(self):
        return contextlib.nullcontext()

    def parameters(self):
        self.restore()
        return {name: t.detach().clone() for name, t in self.params.items()}


def plain(cell: Cell) -> list[tuple[str, Any]]:
    """Return what two ranks of DDP see: ("seen", ...), ("waits", None), or ("error", ...)."""
    average = Average()
    scripts = [Plain(cell, rank, average) for rank in range(2)]

    def run(rank: int) -> tuple[str, Any]:
        try:
            return "seen", scripts[rank].run()
        except Waits:
            return "waits", None
        except BaseException as error:
            return "error", f"{type(error).__name__}: {error}"
        finally:
            average.end(rank)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


# --- verdict --------------------------------------------------------------------------------------


def difference(a: Any, b: Any, tolerance: float) -> str:
    if isinstance(a, str):
        return "" if a == b else f"{a!r} instead of {b!r}"
    try:
        torch.testing.assert_close(a, b, rtol=0.0, atol=tolerance, check_dtype=False)
    except AssertionError as error:
        return str(error)
    return ""


def verdict(cell: Cell, ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> str | None:
    """Return the fault of a cell, or None."""
    wrong = [text for kind, text in ours if kind == "wrong"]
    if wrong:
        return f"an exception that is none of zshard's: {wrong}"
    if [kind for kind, _ in theirs if kind == "error"]:
        return f"the plain run fails: {theirs}"
    errors = [kind == "error" for kind, _ in ours]
    if all(errors):
        return None
    waits = [kind == "waits" for kind, _ in theirs]
    if any(errors) and not any(waits):
        return f"an error on one rank only: {[text for kind, text in ours if kind == 'error']}"
    tolerance = 1e-5 if cell.dtype == "float32" else 0.02
    for rank in range(2):
        if errors[rank]:
            continue
        if waits[rank]:
            return f"rank {rank}: no error, where DDP waits for ever"
        for i, (a, b) in enumerate(zip(ours[rank][1], theirs[rank][1], strict=True)):
            if gap := difference(a, b, tolerance):
                return f"rank {rank}, look {i}: {gap}"
    return None
