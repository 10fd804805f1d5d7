"""zshard.Keep: a run whose state outlives its ranks. The keeper process is in extras/keeping/."""
