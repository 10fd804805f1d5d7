"""Other libraries' names and hooks, on the core: trainers, adapters, quantized weights, DeepSpeed's
configs, torch's wrappers. Each imports its library when it is used."""
