"""The exceptions for bad input and for failed training."""


class BadInput(Exception):
    """An input cannot be used; the message is one sentence that says what to do.

    The command line prints it and exits with 2; as a library, it is an ordinary exception.

    Args:
        message: What is wrong, and what to do.

    Example:
        >>> try:
        ...     byov.load("nowhere")
        ... except byov.BadInput as error:
        ...     print(error)
        there is no run nowhere: ...
    """


class SaidElsewhere(BadInput):
    """Bad input that another process reports: this one only stops."""


class TrainingFailed(Exception):
    """Training cannot continue, for example after a NaN; the last good checkpoint stays. The command exits with 1.

    Args:
        message: What happened, and where the last good checkpoint is.

    Example:
        >>> wild = {"lr": 1e30, "clip": None, "epochs": 2, "batch_size": 16}
        >>> try:
        ...     byov.train("digits", "runs/nan", "digits", images=64, say=print, optim=wild)
        ... except byov.TrainingFailed as error:
        ...     print(error)
        byov on digits...last.safetensors...
    """
