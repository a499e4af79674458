"""Ctrl-C and SIGTERM in the command `refgrad`: they end it with their exit code and without a traceback, and none is lost.

So does the end of its time. A command that has results by then may write them: it catches `STOPS` and calls `finish`.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

CODE = 130  # the exit code of a command that was interrupted
NUMBERS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED, OUT_OF_TIME = "interrupted", "out of time"  # what `why` says
_AT_ONCE = 1.0  # seconds within which two signals count as one: the whole group got it, and the parent passed it on
_AGAIN = 0.05  # seconds until an interruption that was swallowed comes again

_told = 0  # the signal that was sent to end this command
_when = -_AT_ONCE
_finishing: list[Callable[[], None]] = []  # tell the waiting process that this one writes what it has


class OutOfTime(BaseException):
    """The time of `--max-seconds` is over. No handler of errors takes it for one of its own."""


STOPS = (KeyboardInterrupt, OutOfTime)


def why(stop: BaseException) -> str:
    """`OUT_OF_TIME` or `INTERRUPTED`: why something was stopped by one of `STOPS`."""
    return OUT_OF_TIME if isinstance(stop, OutOfTime) else INTERRUPTED


def end_quietly() -> None:
    """Let Ctrl-C end this process at once if it is the command, which has nothing to clean up yet."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background it is ignored
    if is_usual and _is_command() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: the command has begun."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def begin() -> None:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt in this process, which is the command's own.

    Python swallows every exception of a callback that it calls by itself, such as a finalizer. An interruption is raised again.
    """
    if signal.getsignal(signal.SIGINT) in (_end, signal.default_int_handler):
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _swallowed


def over(code: int) -> int:
    """Return the exit code of the command, which has ended. From now on no signal changes it."""
    for number in NUMBERS:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_IGN)
    return 128 + _told if _told else code


def finish() -> None:
    """Ask for more time than a command has to end that was stopped: it writes what it has reached."""
    for ask in _finishing:
        ask()


def when_finishing(ask: Callable[[], None]) -> None:
    """Let `finish` call `ask`."""
    _finishing.append(ask)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _told, _when
    before, _when = _when, time.monotonic()
    if _told and _when - before < _AT_ONCE:
        return
    _told = _told or number
    raise KeyboardInterrupt


def _swallowed(unraisable: sys.UnraisableHookArgs) -> None:
    if _told and issubclass(unraisable.exc_type, KeyboardInterrupt):
        with contextlib.suppress(RuntimeError):  # no thread can be started: the process that waits ends this one
            _thread.start_new_thread(_come_again, ())  # not one of `threading`, whose locks may be held here
    else:
        sys.__unraisablehook__(unraisable)


def _come_again() -> None:
    global _when
    time.sleep(_AGAIN)
    _when = -_AT_ONCE
    os.kill(os.getpid(), _told)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _is_command() -> bool:
    """True if this process was started as `refgrad` or `python -m refgrad`."""
    if getattr(sys, "argv", [])[:1] != ["-m"]:  # which it is until Python has found the module
        return bool(getattr(sys, "argv", [])) and Path(sys.argv[0]).stem == "refgrad"
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1 :][:1] == ["refgrad"]
