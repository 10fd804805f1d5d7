"""A text to classify that every machine has: which package of Python's do these words come from?

Samples are runs of words from the sources of some of the standard library's packages. Every fourth
file of a package is held out.
"""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from pathlib import Path

import corpus
import torch
from torch import Tensor

PACKAGES = ["asyncio", "ctypes", "email", "importlib"]
PACKAGES += ["multiprocessing", "unittest", "wsgiref", "xml"]
VOCABULARY = 2048  # token 0 begins each sample, 1 is every rarer word


def load(length: int, count: int, held_out: bool) -> tuple[Tensor, Tensor]:
    """Random samples, (count, length) tokens as int64, and the numbers of their packages, (count,).

    Every call returns the same ones. Packages take turns.
    """
    common = Counter(word for package in PACKAGES for word in words_of(package, False))
    number = {word: i for i, (word, _) in enumerate(common.most_common(VOCABULARY - 2), 2)}
    texts = [
        torch.tensor([number.get(word, 1) for word in words_of(package, held_out)])
        for package in PACKAGES
    ]
    draw = torch.Generator().manual_seed(int(held_out))
    labels = torch.arange(count) % len(PACKAGES)
    samples = torch.zeros(count, length, dtype=torch.long)
    for i, label in enumerate(labels.tolist()):
        start = int(torch.randint(len(texts[label]) - length, (1,), generator=draw))
        samples[i, 1:] = texts[label][start : start + length - 1]
    return samples, labels


def words_of(package: str, held_out: bool) -> list[str]:
    """The words of one side of a package, in order."""
    root = Path(sysconfig.get_path("stdlib")) / package
    names = enumerate(corpus.source_files(root))
    chosen = [name for i, name in names if (i % 4 == 3) == held_out]
    return re.findall(r"\w+", " ".join((root / name).read_text("utf-8") for name in chosen))
