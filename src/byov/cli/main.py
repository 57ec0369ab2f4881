"""The entry point: find the command, run it, turn errors into one sentence and an exit code.

Everything heavy is imported by the command that needs it, so that `byov --help` is quick.
"""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module

from byov._core.errors import BadInput, SaidElsewhere, TrainingFailed
from byov.cli import interrupted
from byov.cli.process import BAD_INPUT, DONE, FAILED, INTERRUPTED, one_of_many, rank

COMMANDS = {  # name: what it does; its code is in commands/NAME.py
    "train": "Train an encoder on images, with or without labels.",
    "evaluate": "Measure a run: accuracy, calibration, and the quality of its uncertainty.",
    "score": "Find odd images and uncertain features, without labels.",
    "prune": "Write a pruned run, with its accuracy at each sparsity.",
    "export": "Write a run's encoder to a file that can be used without byov.",
    "report": "Write one self-contained page about one or more runs.",
    "study": "Reproduce a figure or table; trains the runs it needs.",
    "ledger": "Check the paper's claims against the studies made so far.",
    "data": "List the image sources, or fetch one.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    if not one_of_many() and threading.current_thread() is threading.main_thread():
        # Treated as Ctrl-C, which saves what is done. Not for one of several processes: others may wait for it.
        signal.signal(signal.SIGTERM, interrupted)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be UTF-8; stderr does so by itself
    try:
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        for name in (*arguments, os.getcwd()):  # noqa: PTH109 (as text)
            name.encode()  # safetensors and Parquet take only valid paths; files in a folder of images may have any
        code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
    except (BadInput, TrainingFailed) as error:
        _report(error)
        code = BAD_INPUT if isinstance(error, BadInput) else FAILED
    except BrokenPipeError:  # the reader (`| head`) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it closes stdout
        code = FAILED
    except OSError as error:
        if error.filename is None:
            raise
        reason = (error.strerror or str(error)).lower()
        print(f"byov: cannot use {error.filename}: {reason}; check the path and its permissions.", file=sys.stderr)
        code = BAD_INPUT
    except UnicodeEncodeError as error:
        told = f"{error.object!a} is not valid UTF-8: rename the file or folder, or give a link to it."
        print(f"byov: {told}", file=sys.stderr)
        code = BAD_INPUT
    except RuntimeError as error:
        if not _is_lost_process(error):
            raise
        print(
            "byov: another process of this run has ended, so this one stops: see its message, or what killed it; "
            "finished work is saved, repeat the command to continue (train: with --resume).",
            file=sys.stderr,
        )
        code = FAILED
    except KeyboardInterrupt:  # a command that has state to save handles this itself
        if rank() == 0:
            print("byov: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    if one_of_many():
        # A thread of gloo may still hold the last tensor, and would abort while Python shuts down.
        if lock := sys.modules.get("byov._core.lock"):
            lock.release_all()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_lost_process(error: RuntimeError) -> bool:
    """Whether a collective operation failed because another process has ended; gloo raises a plain RuntimeError."""
    text = str(error).lower()
    return one_of_many() and any(word in text for word in ("gloo", "nccl", "connection closed by peer", "tcpstore"))


def _report(error: Exception) -> None:
    """Print what is wrong. Of several processes one does: the first, or the one that failed after they connected.

    torchrun stops all processes as soon as one exits. So a process that should stay silent waits; if it is still
    running after that, only it has failed, and it prints.
    """
    torch = sys.modules.get("torch")
    connected = torch is not None and bool(torch.distributed.is_initialized())
    if isinstance(error, SaidElsewhere) or (rank() > 0 and not connected):
        time.sleep(3)
    if not isinstance(error, SaidElsewhere):
        print(f"byov: {error}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in COMMANDS:
        return int(import_module(f"byov.cli.commands.{command}").run(arguments[1:]))
    if command == "--version":
        from byov import __version__

        print(f"byov {__version__}")
    elif command in ("-h", "--help"):
        print(_overview())
    elif command in ("--tyro-print-completion", "--tyro-write-completion"):
        from byov.cli.parsing import completion

        completion({name: import_module(f"byov.cli.commands.{name}").Options for name in COMMANDS}, arguments)
    else:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean `byov {near[0]}`?" if near else f"use one of {', '.join(COMMANDS)} (`byov --help`)."
        raise BadInput(f"there is no command {command!r}; {hint}")
    return DONE


def _overview() -> str:
    commands = "\n".join(f"  {name:10}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: byov COMMAND ...\n\n"
        "Give it images without labels; it gives back an encoder that knows what it does not know.\n\n"
        f"{commands}\n\n"
        "`byov COMMAND --help` shows the options of a command."
    )
