"""What should become less only falls: lines by floor and folder, names that upper floors take from the
core, texts of errors, and what outlives a call.

`python tools/sizes.py` counts (and tools/ways.py which files and functions run in a call). Where a
count is above its limit, look for what can go; where it must rise, raise the limit and say why in
RAISED. Where it has fallen, lower the limit. Code that moves to tools, examples, docs, data files or
csrc counts where it came from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import sizes
from sizes import Lines

LINES = {  # lines with code, and all: at most so many, and not SLACK fewer
    "core": (12_992, 19_900),
    "core: (modules)": (1_371, 2_211),
    "core: checkpoint": (2_442, 3_578),
    "core: guard": (1_090, 1_615),
    "core: memory": (744, 1_112),
    "core: model": (1_225, 2_098),
    "core: optim": (1_821, 2_691),
    "core: ranks": (1_207, 1_844),
    "core: state": (1_215, 1_831),
    "core: units": (723, 1_210),
    "core: wrap": (1_154, 1_710),
    "extras": (8_628, 12_404),
    "extras: __main__": (52, 72),
    "extras: extras/__init__": (0, 3),
    "extras: extras/any_world": (231, 310),
    "extras: extras/averages": (373, 527),
    "extras: extras/checkpoint_cli": (246, 299),
    "extras: extras/checks": (356, 505),
    "extras: extras/data_position": (171, 263),
    "extras: extras/doctor": (150, 221),
    "extras: extras/join": (338, 445),
    "extras: extras/keeping": (589, 860),
    "extras: extras/optimizers": (1_358, 2_059),
    "extras: extras/per_host": (815, 1_150),
    "extras: extras/planner": (1_481, 2_164),
    "extras: extras/readers": (616, 843),
    "extras: extras/recovery": (755, 1_044),
    "extras: extras/run": (271, 376),
    "extras: extras/trace": (372, 555),
    "extras: extras/weights": (452, 703),
    "extras: planner": (2, 5),
    "integrations": (2_944, 4_331),
    "integrations: accelerate": (2, 5),
    "integrations: compat": (2, 4),
    "integrations: deepspeed": (3, 5),
    "integrations: integrations/__init__": (0, 2),
    "integrations: integrations/accelerate": (205, 317),
    "integrations: integrations/bitsandbytes": (118, 168),
    "integrations: integrations/compat": (298, 481),
    "integrations: integrations/deepspeed": (1_660, 2_356),
    "integrations: integrations/lightning": (443, 645),
    "integrations: integrations/peft": (31, 61),
    "integrations: integrations/transformers": (178, 277),
    "integrations: lightning": (2, 5),
    "integrations: transformers": (2, 5),
}
SLACK = Lines(30, 60)
COUNTS = {  # exactly
    "attributes_set": 21,
    "c_globals": 31,
    "globals": 16,
    "module_tables": 40,
    "names_from_core": 241,
    "text_lines": 3_534,
    "weak_dictionaries": 23,
}
C_LINES = 44_538
C_SLACK = 100
RAISED = {  # a limit that rose since 2026-11-29: why
    "csrc": "12 lines: a failed backward shares its sums at once",
    "names_from_core": "110: folders of the core became extras since, so their names count",
    "text_lines": "3,570 to 3,587: four check_...() of the core's questions to extensions",
}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Lines], dict[str, int]]:
    return sizes.sizes()


def test_lines_become_fewer(found: tuple[dict[str, Lines], dict[str, int]]) -> None:
    lines, counts = found
    assert lines.keys() == LINES.keys()
    wrong = {
        place: f"{here} where {limit} are allowed"
        for place, here in lines.items()
        for limit in [Lines(*LINES[place])]
        if not (0 <= limit.code - here.code < SLACK.code and 0 <= limit.all - here.all < SLACK.all)
    }
    assert wrong == {}
    assert 0 <= C_LINES - counts.pop("c_lines") < C_SLACK


def test_habits_become_fewer(found: tuple[dict[str, Lines], dict[str, int]]) -> None:
    counts = {name: count for name, count in found[1].items() if name != "c_lines"}
    assert counts == COUNTS


def test_lines_with_code() -> None:
    text = '"""Says\nso."""\n\n# Why.\nx = """a\nb"""  # how\n\n\ndef f():\n    "What."\n    return (\n        1\n    )\n'
    assert sizes.lines_of(text) == Lines(code=6, all=13)


def test_names_count_one_by_one() -> None:
    texts = {
        "__init__": "from zshard.fsdp import FSDP\nfrom zshard.extras.planner.search import plan",
        "fsdp": "",
        "extras/planner/search": "",
        "units/__init__": "",
        "units/units": "",
        "integrations/peft": "from zshard import FSDP, _core, units\n_core.grad_mode(); _core.grad_mode()\n"
        "units.units.units_of(x).append\n",
        "extras/planner/costs": "import zshard\nzshard.save(); zshard.plan()\nfrom zshard.extras.planner import search\n"
        "def f():\n    from zshard.units.units import State as S\n",
        "optim/step": "from zshard.ranks.agreement import gather",
    }
    assert sizes.names_taken(texts) == {"FSDP", "grad_mode", "units_of", "save", "State"}


def test_texts_count_by_lines() -> None:
    text = "def check_x():\n    f()\n\ndef words(x) -> str:\n    return 'forty characters are what makes this one'\n"
    text += "def short(x) -> str:\n    return 'x'\n\nif x:\n    raise E(\n        1)\n    warnings.warn(x)\n"
    assert sizes.habits([text])["text_lines"] == 2 + 2 + 2 + 1


def test_what_outlives_a_call_is_found() -> None:
    text = "a = {}\nb: dict[int, int] = {}\nc = {1: 2}\nd = WeakKeyDictionary[A, B]()\ne = frozenset()\n"
    text += "def f():\n    global a\n    torch.nn.x = 1\n    self._zshard_x = 2\n    m._zshard_x = 3\n    setattr(m, n, 4)\n"
    counts = sizes.habits([text])
    assert counts["module_tables"] == 3 and counts["weak_dictionaries"] == 1
    assert counts["globals"] == 1 and counts["attributes_set"] == 3


def test_variables_of_c_are_found() -> None:
    text = "static int a;\nint b = 3; /* why */\nstatic const int c = 1;\nstatic _Atomic(t *) d;\nint f(void);\n"
    text += "static thing e[3] = {\n    {1},\n};\nstruct s {\n    int x;\n};\nstatic PyMethodDef m[] = {\n};\n"
    assert sizes.c_globals(text) == ["a", "b", "d", "e"]
