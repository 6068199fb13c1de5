"""The failures that only the agent knows. Exit codes as in DESIGN L7."""

from asp.errors import AspError


class OutputClosed(AspError):
    """What is to be shown on stdout cannot be written: the disk is full, or nobody reads it any more."""

    exit_code = 1


class ModelError(AspError):
    """The model side failed."""


class ModelSetupError(ModelError):
    """Configuration: no key, an unknown model or file, an SDK that is not installed."""

    exit_code = 2


class ModelRefused(ModelError):
    """The API refuses this request for good (400, 403, too long), or a script has no more turns."""

    exit_code = 1


class ContextFull(ModelRefused):
    """The API refuses the request because the conversation is longer than the model's context window."""


class ModelUnavailable(ModelError):
    """The API did not give a whole answer after the last try."""

    exit_code = 4
