"""The one exception that a user's mistake raises, and the one that a failed run raises."""


class BadInput(Exception):
    """Something the user gave cannot be used. The message is one sentence that says what to do.

    The command line prints it and exits with 2; as a library, it is an ordinary exception.
    """


class SaidElsewhere(BadInput):
    """Bad input that another process has met, and tells of: this one only stops."""


class TrainingFailed(Exception):
    """Training cannot go on (a NaN, say). The last good checkpoint is kept. The command line exits with 1."""
