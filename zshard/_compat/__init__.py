"""The dialects of FSDP1 and FSDP2: thin faces over what zshard does anyway."""
