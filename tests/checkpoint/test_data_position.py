"""zshard.DataPosition: a run that is resumed trains on the rest of the epoch, on any number of ranks."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import fork_ranks
from rows import all_refused
from spawn import RankFailure, RankPool, on_ranks
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import zshard
from zshard import DataPosition, DivergenceError

N = 103  # divided by neither 2 nor 3 nor a batch


def numbers(n: int = N) -> list[int]:
    return list(range(n))


def loader_of(position: DataPosition, batch_size: int = 4, **options: Any) -> DataLoader:
    data = numbers(position._order["n_samples"])
    return DataLoader(data, batch_size=batch_size, sampler=position.sampler, **options)


def taken(position: DataPosition, loader: Any, most: int | None = None) -> list[list[int]]:
    """The batches of an epoch, or the first `most` of them."""
    return [batch.tolist() for batch in itertools.islice(position.batches(loader), most)]


# --- without a resume: torch's sampler ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
@on_ranks(2, 3)
def test_samples_are_those_of_distributed_sampler(options: dict[str, Any]) -> None:
    for n in (N, 96, 5, 2, 1):
        position = DataPosition(n, seed=3, **options)
        theirs = DistributedSampler(numbers(n), seed=3, **options)
        loader = loader_of(position)
        for epoch in range(3):
            assert position.epoch == epoch
            theirs.set_epoch(epoch)
            wanted = [b.tolist() for b in DataLoader(numbers(n), batch_size=4, sampler=theirs)]
            assert len(loader) == len(wanted)
            assert taken(position, loader) == wanted


# --- resumed --------------------------------------------------------------------------------------


def some(state: Any, most: int | None, batch_size: int, workers: int, drop: bool) -> Any:
    """(batches of this rank, the state after them)"""
    position = DataPosition(N, seed=1, drop_last=drop)
    if state is not None:
        position.load_state_dict(state)
    loader = loader_of(position, batch_size, num_workers=workers)
    found = []
    for batch in position.batches(loader):  # the state is taken within the loop, as scripts do
        found.append(batch.tolist())
        state = position.state_dict()
        if len(found) == most:
            break
    return found, state


def flat(on_ranks: list[Any]) -> list[int]:
    return [sample for found, _ in on_ranks for batch in found for sample in batch]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_other_ranks_train_on_the_rest(
    pool2: RankPool, pool3: RankPool, workers: int, drop: bool
) -> None:
    first = pool2.run(some, None, 3, 4, workers, drop)
    states = [state for _, state in first]
    assert states[0] == states[1]
    second = pool3.run(some, states[0], 2, 5, workers, drop)
    third = [some(second[0][1], 3, 6, workers, drop)]
    fourth = pool2.run(some, third[0][1], None, 8, workers, drop)
    seen = [flat(each) for each in (first, second, third, fourth)]
    assert [len(each) for each in seen[:3]] == [3 * 4 * 2, 2 * 5 * 3, 3 * 6]
    counts = Counter(itertools.chain(*seen))
    repeated = sum(counts.values()) - len(counts)
    assert (len(counts), repeated) == ((N - 1, 0) if drop else (N, 1))


@on_ranks(2)
def test_the_same_ranks_repeat_the_run() -> None:
    unbroken, _ = some(None, None, 4, 0, False)
    begun, state = some(None, 5, 4, 2, False)
    ended, _ = some(state, None, 4, 2, False)
    assert begun + ended == unbroken


def test_a_state_of_the_end_begins_the_next_epoch() -> None:
    position = DataPosition(N, seed=1)
    unbroken = [taken(position, loader_of(position)) for _ in range(2)]
    _, last = some(None, None, 4, 0, False)
    resumed = DataPosition(N, seed=1)
    resumed.load_state_dict(last)
    loader = loader_of(resumed)
    assert (resumed.epoch, len(loader), taken(resumed, loader)) == (0, 0, [])
    assert (resumed.epoch, taken(resumed, loader)) == (1, unbroken[1])


def test_a_loop_that_was_left_continues() -> None:
    """By a break or an error."""
    position, whole = DataPosition(N, seed=1), DataPosition(N, seed=1)
    loader = loader_of(position, num_workers=2, persistent_workers=True)
    found = [taken(position, loader, 3), taken(position, loader, 4)]
    with pytest.raises(KeyError):
        for batch in position.batches(loader):
            found.append([batch.tolist()])
            raise KeyError("out of memory, say")
    found.append(taken(position, loader))
    assert list(itertools.chain(*found)) == taken(whole, loader_of(whole))
    assert position.epoch == 1


def test_a_state_may_be_loaded_twice() -> None:
    _, state = some(None, 3, 4, 0, False)
    position, found = DataPosition(N, seed=1), []
    for _ in range(2):
        position.load_state_dict(state)
        assert position.state_dict() == state
        found.append(taken(position, loader_of(position), 5))
    assert found[0] == found[1]


# --- with a checkpoint ----------------------------------------------------------------------------


def run_page(folder: str, epochs: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    os.chdir(folder)
    names: dict[str, Any] = {}
    exec(blocks[0].replace("epoch, 3)", f"epoch, {epochs})"), names)
    assert names["position"].epoch == int(epochs)


def test_documented_script_resumes_on_other_ranks(
    pool2: RankPool, pool3: RankPool, tmp_path: Any
) -> None:
    pool2.run(run_page, str(tmp_path), "1")
    pool3.run(run_page, str(tmp_path), "2")


# --- misuse ---------------------------------------------------------------------------------------


def test_other_orders_and_wrong_loaders_are_refused() -> None:
    _, state = some(None, 3, 4, 0, False)
    position, other = DataPosition(N), DataPosition(N)
    own, shuffled = loader_of(position), DataLoader(numbers(), batch_size=4, shuffle=True)

    def loads(state: Any, **options: Any) -> Any:
        return lambda: DataPosition(**{"n_samples": N, **options}).load_state_dict(state)

    def takes(loader: Any, position: DataPosition = position) -> Any:
        return lambda: next(position.batches(loader))

    sampler, alone = "pass sampler=position.sampler", "iterate position.batches"
    stateful = "needs torchdata's StatefulDataLoader"
    table: dict[str, Any] = {
        "saved with seed=1, but this run has seed=2": (loads(state, seed=2), ValueError),
        "saved with shuffle=True": (loads(state, seed=1, shuffle=False), ValueError),
        "n_samples=103, but this run has n_samples=99": (loads(state, n_samples=99), ValueError),
        "but this run has n_samples=None": (loads(state, n_samples=None), ValueError),
        "saved with n_samples=None": (loads({}), ValueError),
        sampler: (takes(loader_of(other)), ValueError),
        sampler[5:]: (takes(shuffled), ValueError),
        "needs a batch_size": (takes(loader_of(position, None)), TypeError),  # type: ignore[arg-type]
        stateful: (takes(DataLoader(numbers()), DataPosition()), TypeError),
        "has no sampler: pass n_samples": (lambda: len(DataPosition().sampler), TypeError),
        "n_samples must be at least 1": (lambda: DataPosition(0), ValueError),
        "accumulate must be at least 1": (lambda: DataPosition(N, accumulate=0), ValueError),
        alone: (lambda: next(iter(own)), RuntimeError),
    }
    all_refused({text: (*row, text) for text, row in table.items()})
    taken(position, own, 2)
    with pytest.raises(RuntimeError, match=alone):
        next(iter(own))
    with pytest.raises(RuntimeError, match="changed within its loop: leave it before"):
        for _ in position.batches(own):
            taken(position, own, 1)


def test_a_state_within_an_optimizer_step_is_refused() -> None:
    position = DataPosition(22, accumulate=4)
    loader, refused = loader_of(position), []
    for _ in position.batches(loader):
        try:
            position.state_dict()
            refused.append(False)
        except RuntimeError as error:
            assert "of 4 batches: save after optimizer.step()" in str(error)
            refused.append(True)
    assert refused == [True, True, True, False, True, False]  # the last window has two batches
    assert position.state_dict()["epoch"] == 1


@pytest.mark.parametrize("how", ["seed", "n_samples", "batch_size"])
@on_ranks(2)
def test_ranks_with_other_orders_are_refused(how: str) -> None:
    rank = dist.get_rank()
    facts = {"seed": 1, "n_samples": N, "batch_size": 4}
    facts[how] += rank
    position = DataPosition(facts["n_samples"], seed=facts["seed"])
    with pytest.raises(DivergenceError, match=f"{how} is .* on rank 0 and .* on rank 1"):
        next(position.batches(loader_of(position, facts["batch_size"])))


def lone() -> None:
    """Rank 1 ends before its loop."""
    zshard.FSDP(torch.nn.Linear(2, 2))
    if dist.get_rank() == 0:
        position = DataPosition(N)
        next(position.batches(loader_of(position)))


def test_a_rank_without_a_loader_ends_the_others() -> None:
    first, second = fork_ranks(lone, 2)
    assert (first.returncode, second.returncode) == (1, 0)
    said = "PeerError: a rank may have exited while the ranks were comparing their data positions"
    assert said in first.stderr


# --- torchdata ------------------------------------------------------------------------------------


needs_torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None,
    reason="needs zshard[trainers]: make test-trainers",
)


class Stateful:
    """A data set with a state: how many samples this worker has read."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Counting(Stateful, Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.at += 1
        return index, self.at


class Stream(Stateful, IterableDataset):
    """Rank and worker read their own numbers."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        base = 1000 * (worker.id if worker else 0)
        while self.at < 30:
            self.at += 1
            yield base + self.at
        self.at = 0


def stateful(kind: str, state: Any, most: int | None, workers: int, folder: str) -> Any:
    """(batches of two epochs, or the first `most`; the state), which went through a checkpoint."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    position = DataPosition(N, seed=1) if kind == "map" else DataPosition()
    model = torch.nn.Linear(2, 2)
    if state:
        position.load_state_dict(zshard.load(folder, model)["data"])
    source = {"dataset": Counting(), "sampler": position.sampler} if kind == "map" else {}
    source = source or {"dataset": Stream()}
    loader = StatefulDataLoader(batch_size=4, num_workers=workers, **source)
    found: list[Any] = []
    try:
        while position.epoch < 2:
            for batch in position.batches(loader):
                found.append(torch.stack(list(batch)).tolist() if kind == "map" else batch.tolist())
                if len(found) == most:
                    extra = {"data": position.state_dict()}
                    zshard.save(folder, model, extra=extra, overwrite=True)
                    return found, extra["data"]
    finally:
        loader._iterator = None  # ends its workers: at a garbage collection, they wait for 5 s
    return found, None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "most"), [("map", 3), ("map", 13), ("map", 14), ("iterable", 3), ("iterable", 13)]
)
@needs_torchdata
@on_ranks(2)
def test_a_stateful_loader_repeats_the_run(
    tmp_path: Any, kind: str, workers: int, most: int
) -> None:
    folder = str(tmp_path / "run")
    unbroken, _ = stateful(kind, None, None, workers, folder)
    begun, _ = stateful(kind, None, most, workers, folder)
    ended, _ = stateful(kind, True, None, workers, folder)
    assert begun + ended == unbroken


@needs_torchdata
def test_a_stateful_loader_on_other_ranks(pool2: RankPool, pool3: RankPool, tmp_path: Any) -> None:
    folder = str(tmp_path / "run")
    begun = pool2.run(stateful, "map", None, 3, 2, folder)
    ended = pool3.run(stateful, "map", True, None, 2, folder)
    counts = Counter(s for found, _ in begun + ended for batch in found for s in batch[0])
    assert sorted(counts.values())[: N - 5] == [2] * (N - 5)
    assert sum(counts.values()) <= 2 * N + 4  # what fills up the ends of two epochs
    pool2.run(stateful, "iterable", None, 3, 0, folder)
    with pytest.raises(RankFailure, match="was saved on 2 ranks with batches of 4, but this run"):
        pool3.run(stateful, "iterable", True, None, 0, folder)
