"""The calculator of the site (docs/calculator.js): its script gives the planner's numbers for all
configurations (in Node.js), and its page shows them (in Chromium). Skipped without these programs.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zshard import Dims
from zshard.extras.planner.gpus import DEVICES, GIB, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.search import BETWEEN_HOSTS, STRATEGIES, Plan
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import decoder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import calculator_data  # noqa: E402

SCRIPT = (ROOT / "docs" / "calculator.js").read_text()
NODE = shutil.which("node")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

FAR = {"activations": 0.02}  # the tolerance, relative; 0.01 for all other parts
FEW = 4096  # bytes: scalars, and a process group's own

LLAMA = {"block": "llama", "tied": "no", "bias": "no"}
GPT = {"block": "gpt", "tied": "yes", "bias": "yes"}
SIZES = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq")
USUAL = {
    **{"gpu": "h100", "strategy": "no_shard", "precision": "bf16", "optimizer": "adamw"},
    **{"checkpointing": "none", "micro_batch": 1, "accumulate": 1},
}


def asked(sizes: tuple[int, ...], gpus: tuple[int, int], **more: Any) -> dict[str, str]:
    """Return the text of each field. sizes: as SIZES. gpus: all, and of a host."""
    dims = dict(zip(SIZES, sizes, strict=True))
    texts = {**USUAL, **LLAMA, **dims, "gpus": gpus[0], "per_host": gpus[1]} | more
    return {name: str(value) for name, value in texts.items()}


CASES = [
    # the embedding is a unit, larger than a block; even, odd, and odd numbers that three divides
    asked((32, 4096, 32, 8, 14336, 128256, 2048), (16, 8), checkpointing="selective"),
    asked((4, 512, 8, 2, 1408, 32000, 512), (12, 4), precision="fp32", checkpointing="full"),
    asked((5, 512, 8, 2, 1408, 32000, 512), (16, 8), micro_batch=2, accumulate=4),
    asked((9, 512, 8, 8, 1408, 32000, 512), (4, 1), checkpointing="full", optimizer="sgd"),
    # the embedding is a smaller unit, or the root's
    asked((6, 1024, 8, 8, 4096, 5000, 256), (8, 8), optimizer="adamw8bit"),
    asked((7, 1024, 8, 4, 4096, 1000, 1024), (8, 4), checkpointing="full", gpu="rtx-4090"),
    asked((2, 1024, 8, 4, 4096, 400, 128), (16, 8), optimizer="none", precision="fp32"),
    # tied: the root is larger or smaller than a block
    asked((12, 768, 12, 12, 3072, 50257, 1024), (16, 8), **GPT, optimizer="adamw8bit"),
    asked((2, 768, 12, 12, 3072, 50257, 64), (8, 4), **GPT, accumulate=8),
    asked((3, 512, 8, 8, 2048, 1000, 128), (8, 8), **GPT, precision="fp32", micro_batch=3),
    asked((8, 256, 4, 2, 1024, 32000, 512), (8, 4), tied="yes", checkpointing="selective"),
    # GPT's blocks
    asked((4, 512, 8, 8, 2048, 4000, 256), (16, 4), block="gpt", checkpointing="full"),
    asked((5, 512, 8, 2, 2048, 8000, 256), (8, 4), block="gpt", bias="yes", checkpointing="full"),
    # one GPU
    asked((4, 512, 8, 2, 1408, 32000, 512), (1, 1)),
    asked((5, 1024, 8, 8, 4096, 5000, 256), (1, 1), checkpointing="full"),
    asked((4, 512, 8, 2, 1408, 32000, 512), (1, 1), precision="fp32", checkpointing="full"),
    asked((12, 768, 12, 12, 3072, 50257, 1024), (1, 1), **GPT),
]
START = CASES[6]  # in the address when the page opens
MISUSED = {
    "hidden size 768 must be a multiple of 2 x attention heads, 14": {
        "width": "768",
        "heads": "7",
        "kv_heads": "7",
    },
    "attention heads 8 must be a multiple of KV heads, 3": {"heads": "8", "kv_heads": "3"},
    "layers must be a whole number from 1 to 1,000,000,000, got 0": {"layers": "0"},
    "vocabulary size must be a whole number from 1 to 1,000,000,000, got nothing": {"vocab": " "},
    "number of GPUs must be a whole number from 1 to 1,000,000,000, got 1.5": {"gpus": "1.5"},
    "intermediate size must be a whole number from 1 to 1,000,000,000, got -4": {"ffn": "-4"},
    "number of GPUs 12 must be a multiple of GPUs per node, 8": {"gpus": "12", "per_host": "8"},
    "this page needs at least 2 layers: use zshard.plan()": {"layers": "1"},
    "the embeddings are so large": {"vocab": "100000000"},
    "one GPU has nothing to shard: choose no_shard": {
        **{"gpus": "1", "per_host": "1", "strategy": "zero1"}
    },
    "hybrid_full needs several nodes with several GPUs each: choose full_shard": {
        **{"gpus": "8", "per_host": "8", "strategy": "hybrid_full"}
    },
    "GPU must be one of h100": {"gpu": "abacus"},
}
RUN = """
const found = cases.map((texts) => {
  const [asked, wrong] = zshardCalculator.read(texts);
  return wrong || zshardCalculator.offered(asked).map((strategy) => {
    const parts = zshardCalculator.memory(asked, strategy);
    return [strategy, parts, zshardCalculator.fits(asked, parts), zshardCalculator.line({...asked, strategy})];
  });
});
const messages = misused.map((texts) => zshardCalculator.read({...start, ...texts})[1]);
console.log(JSON.stringify({found, messages}));
"""
LOOK = """
const at = (name) => document.getElementById(`calculator-${name}`);
const rows = () => [...at("result").querySelectorAll("tr")].map((row) => row.innerText);
function enter(texts) {
  for (const [name, text] of Object.entries(texts)) at(name).value = text;
  at("layers").dispatchEvent(new Event("input", {bubbles: true}));
}
const page = {opened: rows(), line: at("result").querySelector("pre").innerText};
const legend = at("result").firstElementChild;
page.legend = [legend.innerText, legend.className, legend.nextElementSibling.tagName];
page.names = [...document.querySelectorAll("#calculator label")].map((each) => each.innerText);
page.labels = [...document.querySelectorAll("#calculator input, #calculator select")].map(
  (each) => [each.id, each.labels.length]);
enter(misused[0]);
page.wrong = [at("wrong").innerText, rows()];
at("named").value = "GPT-2 124M";
at("named").dispatchEvent(new Event("input", {bubbles: true}));
page.named = [at("width").value, new URLSearchParams(location.hash.slice(1)).get("vocab"), at("wrong").innerText];
"""


def variant_of(texts: dict[str, str]) -> calculator_data.Variant:
    grouped = int(texts["kv_heads"]) < int(texts["heads"])
    kind = texts["checkpointing"].replace("none", "")
    return texts["block"] == "llama", grouped, kind, texts["precision"]


VALUES = {"cases": CASES, "start": START, "misused": list(MISUSED.values())}
DATA = f"const {{cases, start, misused}} = {json.dumps(VALUES)};"


def facts() -> str:
    return calculator_data.script(sorted(set(map(variant_of, CASES))))


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script computes, and says of misuse."""
    if NODE is None:
        pytest.skip("no Node.js: apt-get install nodejs")
    file = tmp_path_factory.mktemp("node") / "all.js"
    file.write_text("\n".join([facts(), SCRIPT, DATA, RUN]))
    done = subprocess.run([NODE, file], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page shows."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("calculator")
    lines = ["<!doctype html><meta charset=utf-8><div id=calculator></div><pre id=found></pre>"]
    out = "document.getElementById('found').textContent = JSON.stringify(page);"
    lines += [f"<script>{code}</script>" for code in (facts(), SCRIPT, DATA + LOOK + out)]
    (folder / "index.html").write_text("\n".join(lines))
    fragment = "&".join(f"{name}={text}" for name, text in START.items())
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command += [f"file://{folder / 'index.html'}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    text = re.search(r"<pre id=.found.>(.+)</pre>", done.stdout)
    assert text, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(html.unescape(text.group(1)))


def predicted(texts: dict[str, str], strategy: str) -> tuple[dict[str, int], bool, str]:
    """Return the planner's memory, whether it fits, and its line."""
    gpus, per_host = int(texts["gpus"]), int(texts["per_host"])
    sizes = [int(texts[name]) for name in SIZES]
    flags = (texts["block"] == "llama", texts["tied"] == "yes", texts["bias"] == "yes")
    device = DEVICES[texts["gpu"]]
    way = Way(
        strategy,
        precision=texts["precision"],
        checkpointing=variant_of(texts)[2],
        micro_batch=int(texts["micro_batch"]),
        accumulate=int(texts["accumulate"]),
        optimizer=None if texts["optimizer"] == "none" else texts["optimizer"],
    )
    workload, network = decoder(Dims(*sizes, *flags)), Network(device.link, device.nic, per_host)
    each = predict(workload, way, Cluster(device, gpus, network))
    limit = (device.memory - device.reserved) * GIB
    plan = Plan([each], each, "", texts["gpu"], gpus, workload.unit, limit)
    return each.memory, plan.fits(each), plan.line()


@pytest.fixture(scope="module")
def planned() -> list[list[tuple[str, dict[str, int], bool, str]]]:
    def strategies(texts: dict[str, str]) -> tuple[str, ...]:
        gpus, per_host = int(texts["gpus"]), int(texts["per_host"])
        hosts = gpus > per_host > 1
        return ("no_shard",) if gpus == 1 else STRATEGIES + (BETWEEN_HOSTS if hosts else ())

    return [[(each, *predicted(case, each)) for each in strategies(case)] for case in CASES]


def differences(found: list[Any], planned: list[Any]) -> list[str]:
    """Return what the page says otherwise than the planner."""
    wrong = []
    for case, of_page, of_planner in zip(CASES, found, planned, strict=True):
        if [row[0] for row in of_page] != [row[0] for row in of_planner]:
            wrong.append(f"{case}: {of_page}")
            continue
        for (strategy, parts, *rest), (_, memory, *wanted) in zip(of_page, of_planner, strict=True):
            off = [
                f"{part} {parts.get(part)} for {size}"
                for part, size in memory.items()
                if part != "offloaded"
                and parts.get(part) != pytest.approx(size, rel=FAR.get(part, 0.01), abs=FEW)
            ]
            off += [f"{a} for {b}" for a, b in zip(rest, wanted, strict=True) if a != b]
            wrong += [f"{strategy} of {case}: {each}" for each in off]
    return wrong


def test_every_part_is_that_of_the_planner(computed, planned):
    assert sum(len(rows) for rows in planned) >= 40
    assert differences(computed["found"], planned) == []


def test_misuse_is_explained(computed):
    for text, message in zip(MISUSED, computed["messages"], strict=True):
        assert message.startswith(text)


def test_the_page_shows_what_its_address_says(page, planned):
    rows = planned[CASES.index(START)]
    heads, shares = page["opened"][0], page["opened"][1 : 1 + len(rows)]
    assert "limit: 71.9 GiB" in heads
    for text, (strategy, memory, fits, _) in zip(shares, rows, strict=True):
        assert text.startswith(strategy) and f"{memory['total'] / GIB:.1f}" in text
        assert text.endswith("fits" if fits else "does not fit")
    assert page["line"] == next(line for strategy, *_, line in rows if strategy == "no_shard")
    total = next(memory["total"] for strategy, memory, *_ in rows if strategy == "no_shard")
    assert page["opened"][-1].split() == ["total", f"{total / GIB:.1f}"]
    assert page["wrong"] == [next(iter(MISUSED)), []]


def test_inputs_have_labels_and_a_named_model_fills_them(page):
    assert len(page["labels"]) == 20 and all(count == 1 for _, count in page["labels"])
    assert page["named"] == ["768", "50257", ""]


def test_labels_are_those_of_the_field(page):
    names = "layers, hidden size, attention heads, KV heads, intermediate size, vocabulary size"
    names += ", sequence length, number of GPUs, GPUs per node, micro-batch size"
    assert {*names.split(", "), "gradient accumulation steps"} <= set(page["names"])
    words = " ".join(words for words, _ in calculator_data.MEMORY.values())
    assert page["legend"][0].split() == words.split()
    assert page["legend"][1:] == ["calculator-legend", "TABLE"]


def test_the_page_asks_no_other_host():
    text = (ROOT / "docs" / "calculator.md").read_text() + SCRIPT
    assert re.findall(r"https?://|fetch\(|XMLHttp|import\(", text) == []
