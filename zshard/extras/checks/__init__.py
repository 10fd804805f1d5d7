"""FSDP(nonfinite=..., check_replicas=...): what ranks check together before an optimizer's step."""


class NonFiniteError(FloatingPointError):
    """A gradient is infinite or NaN, and FSDP(nonfinite="raise") refused the step on all ranks. The
    message names the parameter and, where known, the rank that it comes from."""
