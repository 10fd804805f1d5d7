"""State that survives the death of a run's ranks: the keeper process, and its client."""


class KeeperError(ConnectionError):
    """The keeper of a run does not answer, or refuses a request; the message names the reason and
    what to do."""
