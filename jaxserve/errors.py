"""The errors a user can meet. Each message says what was got, what was wanted and what to do."""


class InvalidRequestError(ValueError):
    """A request that can never be served as asked (HTTP 400).

    `param` names the offending field as the user typed it, or is None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """The waiting queue is at its limit (HTTP 429); the caller may retry later."""


class EngineDeadError(RuntimeError):
    """The engine's loop has ended or cannot recover (HTTP 503)."""


class ModelLoadError(ValueError):
    """A checkpoint, tokenizer or configuration that cannot be loaded; names the file and tensor."""


class PullError(RuntimeError):
    """A model could not be fetched (network, checksum, unknown name)."""
