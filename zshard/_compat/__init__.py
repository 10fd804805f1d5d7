"""FSDP2's dialect: a thin face over what zshard does anyway."""
