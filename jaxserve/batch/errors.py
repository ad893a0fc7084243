"""What stops a batch, as opposed to what fails one of its lines."""


class BatchFileError(Exception):
    """A file of the batch cannot be used as asked; the message names it and says what to do."""


class LineError(Exception):
    """A line that is no request of a batch at all. `code` is for programs, in OpenAI's style."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
