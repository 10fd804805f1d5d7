"""DeepSpeed's config and engine: what `zshard.initialize` is made of."""
