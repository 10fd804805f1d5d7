"""Lists the files and functions of zshard that run in a call, and the modules that an import loads.

    torchrun --standalone --nproc-per-node 2 tools/ways.py

A net of two blocks on CPU ranks, as a first script has it. Rank 0 prints, for each call, how many
files and functions of zshard's Python it enters (by sys.setprofile); then the modules and lines
that are loaded after `import zshard`, and after a step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PACKAGE = Path(__file__).resolve().parents[1] / "zshard"
LOADED = "import sys, zshard; print(*(m for m in sys.modules if f'{m}.'.startswith('zshard.')))"


class Block(nn.Module):
    """A unit: two linear layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + y


class Way(set[tuple[str, str]]):
    """(file, function) pairs of zshard that ran within `with Way() as way`."""

    def __enter__(self) -> Way:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = not code.co_name.startswith("<")  # no comprehension or lambda
        if event == "call" and is_function and code.co_filename.startswith(str(PACKAGE)):
            self.add((os.path.relpath(code.co_filename, PACKAGE), code.co_qualname))

    def counts(self) -> tuple[int, int]:
        """Return how many files and functions."""
        return len({file for file, _ in self}), len(self)


def lines_of(modules: list[str]) -> tuple[int, int]:
    """Return how many of zshard's modules are written in Python, and their lines."""
    paths = [PACKAGE.parent / Path(*name.split(".")) for name in modules]
    files = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    texts = [file.read_text() for file in files if file.exists()]
    return len(texts), sum(text.count("\n") for text in texts)


def ways(folder: str, transport: str) -> dict[str, Way]:
    """Return what runs in each call, in the order of a script."""
    import zshard

    found: dict[str, Way] = {}

    def within(name: str, call: Callable[[], Any]) -> Any:
        with Way() as found[name]:
            return call()

    torch.manual_seed(0)
    net, batch = nn.Sequential(Block(), Block()), torch.randn(4, 32)
    options: dict[str, Any] = {"transport": transport, "auto_wrap_policy": {Block}}
    model = within("FSDP(model)", lambda: zshard.FSDP(net, **options))
    optimizer = within("AdamW(params)", lambda: zshard.AdamW(model.parameters(), lr=1e-3))
    for step in ("first", "later"):
        loss = within(f"{step} forward", lambda: model(batch).square().mean())
        within(f"{step} backward", loss.backward)
        within(f"{step} clip", lambda: model.clip_grad_norm_(1.0))
        within(f"{step} step", optimizer.step)
        optimizer.zero_grad()
    save, load = zshard.save, zshard.load  # this imports them
    within("save", lambda: save(folder, model, optimizer))
    within("load", lambda: load(folder, model, optimizer))
    within("model.state_dict()", model.state_dict)
    within("optimizer.state_dict()", optimizer.state_dict)
    return found


def main() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True
    ).stdout.split()
    dist.init_process_group("gloo")
    kept = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(kept)
    for transport in ("shm", "c10d"):
        found = ways(f"{kept[0]}/{transport}", transport)
        whole = Way().union(*(found[f"first {part}"] for part in ("forward", "backward", "step")))
        whole |= found["FSDP(model)"]
        if dist.get_rank() == 0:
            print(f"\n{transport:28} files functions")
            for name, way in {**found, "FSDP() and a first step": Way(whole)}.items():
                print(f"{name:28} {way.counts()[0]:5} {way.counts()[1]:9}")
    if dist.get_rank() == 0:
        after = [name for name in sys.modules if f"{name}.".startswith("zshard.")]
        print("\nloaded                       files     lines")
        for name, modules in {"import zshard": loaded, "after the above": after}.items():
            print(f"{name:28} {lines_of(modules)[0]:5} {lines_of(modules)[1]:9}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
