"""Newton-Schulz iterations, which make a matrix's singular values about equal: torch.optim.Muon's.

With the option `symmetric`, of each product X X' only the upper half is computed, in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cost_of", "orthogonalized"]

_LEAST_ROWS, _MOST_BLOCKS = 128, 8
"""Of the blocks of a symmetric product: smaller ones take longer than they save."""


def cost_of(rows: int, columns: int) -> int:
    """Return the multiplications of one iteration."""
    n, m = min(rows, columns), max(rows, columns)
    return n * n * (2 * m + n)


def orthogonalized(update: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return US'V' of an update USV', with the values of S' around 1. Overwrites it.

    options: of Muon's param group. Without `symmetric`: torch's operations in torch's order.
    """
    a, b, c = options["ns_coefficients"]
    is_tall = update.size(0) > update.size(1)
    x = update.T if is_tall else update
    x.div_(x.norm().clamp(min=options["eps"]))
    for _ in range(options["ns_steps"]):
        if options["symmetric"]:
            gram = _times_itself(x)
            polynomial = _times_itself(gram, gram, b, c)
        else:
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def _times_itself(
    x: Tensor, other: Tensor | None = None, beta: float = 0, alpha: float = 1
) -> Tensor:
    """Return beta * other + alpha * x @ x.T. Of each block of rows, computes the columns from the
    diagonal on, and mirrors them. other: symmetric."""
    n = x.size(0)
    step = max(_LEAST_ROWS, -(-n // _MOST_BLOCKS))
    out = x.new_empty(n, n)
    for i in range(0, n, step):
        j = min(i + step, n)
        added = (out if other is None else other)[i:j, i:]
        torch.addmm(added, x[i:j], x[i:].T, beta=beta, alpha=alpha, out=out[i:j, i:])
        out[j:, i:j].copy_(out[i:j, j:].T)
    return out
