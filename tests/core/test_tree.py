"""The order in which gradients of micro-batches are added (base/tree.c), for all small trees and
numbers of ranks: each sum is that of the two children of a node, and the root is the same for all.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from c_compile import BUILDS, compile_c
from c_sources import sources

ADD = -1
ORDINARY = [*range(1, 25), 31, 32, 33, 47, 64, 100]
RUN = 32  # ZS_TREE_RUN


class Leaves(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_int), ("end", ctypes.c_int))


class Tree(ctypes.Structure):
    _fields_ = (
        ("n_leaves", ctypes.c_int),
        ("world", ctypes.c_int),
        ("sections", ctypes.c_int),
        ("depth", ctypes.c_int),
        ("order", ctypes.POINTER(ctypes.c_int)),
        ("n_order", ctypes.c_size_t),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    target = tmp_path_factory.mktemp("tree") / "tree.so"
    flags = [*BUILDS["release"], "-shared", "-fPIC"]
    made = ctypes.CDLL(str(compile_c(Path(target), sources("status.c", "tree.c"), flags)))
    made.zs_tree_run.restype = Leaves
    made.zs_tree_joins.argtypes = [ctypes.POINTER(Tree), Leaves, Leaves]
    made.zs_tree_joins.restype = ctypes.c_bool
    made.zs_tree_cover.argtypes = [ctypes.POINTER(Tree), Leaves, ctypes.POINTER(Leaves)]
    return made


def tree_of(library: Any, n_leaves: int, world: int) -> Any:
    made = ctypes.POINTER(Tree)()
    assert library.zs_tree_new(n_leaves, world, ctypes.byref(made)) == 0
    return made


def sum_of_run(library: Any, tree: Any, run: range) -> list[tuple[range, Any]]:
    """Add leaf by leaf, as a rank does: the nodes, each with how it was added up."""
    nodes: list[tuple[range, Any]] = []
    for leaf in run:
        last: tuple[range, Any] = (range(leaf, leaf + 1), leaf)
        while nodes and library.zs_tree_joins(
            tree, Leaves(nodes[-1][0].start, nodes[-1][0].stop), Leaves(last[0].start, last[0].stop)
        ):
            before = nodes.pop()
            last = (range(before[0].start, last[0].stop), (before[1], last[1]))
        nodes.append(last)
    return nodes


def sum_of_all(library: Any, tree: Any) -> Any:
    """Add the ranks' nodes in the tree's order: how the root was added up."""
    parts: dict[int, Any] = {}
    world, sections = tree.contents.world, tree.contents.sections
    for rank in range(world):
        run = library.zs_tree_run(tree, rank)
        nodes = sum_of_run(library, tree, range(run.begin, run.end))
        covered = (Leaves * RUN)()
        assert library.zs_tree_cover(tree, run, covered) == len(nodes) <= sections
        for k, (leaves, how) in enumerate(nodes):
            assert (covered[k].begin, covered[k].end) == (leaves.start, leaves.stop)
            parts[rank * sections + (0 if k == len(nodes) - 1 else k + 1)] = how
    stack: list[Any] = []
    for i in range(tree.contents.n_order):
        what = tree.contents.order[i]
        stack.append((stack.pop(-2), stack.pop()) if what == ADD else parts.pop(what))
        assert len(stack) <= tree.contents.depth
    assert not parts and len(stack) == 1
    return stack[0]


@pytest.mark.parametrize("n_leaves", ORDINARY)
def test_all_numbers_of_ranks_add_in_one_order(library: Any, n_leaves: int) -> None:
    alone = tree_of(library, n_leaves, 1)
    expected = sum_of_all(library, alone)
    worlds = range(1, n_leaves + 1) if n_leaves < 40 else (2, 3, 4, 5, 7, 8, 16, n_leaves)
    for world in worlds:
        tree = tree_of(library, n_leaves, world)
        assert sum_of_all(library, tree) == expected
        library.zs_tree_free(tree)
    library.zs_tree_free(alone)


def test_runs_are_even_and_cover_all_leaves(library: Any) -> None:
    for n_leaves in range(1, 30):
        for world in range(1, n_leaves + 1):
            tree = tree_of(library, n_leaves, world)
            runs = [library.zs_tree_run(tree, rank) for rank in range(world)]
            assert [leaf for run in runs for leaf in range(run.begin, run.end)] == [
                *range(n_leaves)
            ]
            sizes = [run.end - run.begin for run in runs]
            passes = library.zs_tree_passes(tree)
            assert max(sizes) == passes and min(sizes) >= passes - 1
            for rank, run in enumerate(runs):
                counted = []
                for each in range(passes):
                    counts = ctypes.c_bool()
                    leaf = library.zs_tree_leaf(tree, rank, each, ctypes.byref(counts))
                    assert run.begin <= leaf < run.end
                    counted += [leaf] if counts else []
                assert counted == [*range(run.begin, run.end)]
            library.zs_tree_free(tree)


@pytest.mark.parametrize(("n_leaves", "world"), [(0, 1), (3, 4), (1 << 15, 2)])
def test_impossible_trees_are_refused(library: Any, n_leaves: int, world: int) -> None:
    assert library.zs_tree_new(n_leaves, world, ctypes.byref(ctypes.POINTER(Tree)())) == 1
    library.zs_clear_error()
