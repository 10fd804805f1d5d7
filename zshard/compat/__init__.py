"""The dialects of FSDP1, FSDP2 and DDP: thin faces over what zshard does anyway."""
