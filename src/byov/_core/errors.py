"""The exceptions for bad input and for failed training."""


class BadInput(Exception):
    """An input cannot be used; the message is one sentence that says what to do.

    The command line prints it and exits with 2; as a library, it is an ordinary exception.
    """


class SaidElsewhere(BadInput):
    """Bad input that another process reports: this one only stops."""


class TrainingFailed(Exception):
    """Training cannot continue, for example after a NaN; the last good checkpoint stays. The command exits with 1."""
