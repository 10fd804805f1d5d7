"""What survives the death of a run's ranks: the keeper process, and how ranks speak to it."""
