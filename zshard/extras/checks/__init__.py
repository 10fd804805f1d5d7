"""FSDP(nonfinite=..., check_replicas=...): what ranks check together before an optimizer's step."""
