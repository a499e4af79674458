"""A command in a process of its own: what a malformed file makes of a library then ends that process, with a message."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from refgrad import interruption
from refgrad.errors import choices
from refgrad.model import writing as files
from refgrad.worker import last_words, limit_room

_PATIENCE = 1.0  # seconds
_NOTICED = 3.0  # seconds that a copy has to end after a signal: native code may keep it from noticing
_FINISHED = 60.0  # seconds that it has to write what it has reached
_BY_THE_TERMINAL = 0x80  # SI_KERNEL of <signal.h>: the terminal sends the signal to this process and its copy
_END_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_FRAME = re.compile(r'^  File "(.+)", line \d+ in (\S+)', re.MULTILINE)
_COPIES = 2  # how much more than the values that it holds a command may take: kernels and files need copies
_SLACK = 1 << 27  # bytes for everything else
_STOPPED = 1  # the exit code of a process that faulthandler ends

_GRACE = 3.0  # seconds that a command whose time is over has to end by itself
_TIMEOUT = re.compile(r"^Timeout \(", re.MULTILINE)  # faulthandler's first line

_is_contained = False
_said: IO[bytes] | None = None  # what the copy says of its death
_ends_later = False  # the command has a time
_ledger: IO[bytes] | None = None  # its temporary files, and a mark once it writes what it has reached
_FINISHING = b"finishing"


def contain(refused: int, complain: Callable[[str], None], suspects: Sequence[str] = ()) -> None:
    """Go on in a copy of this process if the system can make one. This process waits for the copy and ends with its exit code.

    If the copy dies, this process complains and ends with the code `refused`. If it does not end soon after SIGINT or
    SIGTERM, this process kills it and ends with the code of the signal. Temporary files that the copy leaves are removed.
    A copy takes milliseconds to make; a new process would import everything again.

    :param suspects: the names of builders and executors whose code may end the copy.
    """
    global _is_contained, _said, _ledger
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return
    _flush()
    gc.freeze()  # a collection in the copy would write to all that the two share
    said, ledger = last_words(), last_words()  # the copy writes to them until it ends
    parent = os.getpid()
    asked = {number for number in interruption.NUMBERS if signal.getsignal(number) is not signal.SIG_IGN}
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # if the parent ignores it, this process inherits that, and cannot wait for the copy
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {*asked, signal.SIGCHLD}
    )  # a signal that comes meanwhile is passed on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries have threads, which they start again in a copy
        child = os.fork()
    if not child:
        _is_contained, _said, _ledger = True, said, ledger
        ctypes.CDLL(None).prctl(_END_ON_DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(refused)
        faulthandler.enable(said)
        files.announce = partial(_announce, ledger.fileno())
        interruption.when_finishing(partial(_write, ledger.fileno(), _FINISHING))
        interruption.when_finishing(_end_still_later)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    number, code = _waited_for(child, asked, ledger)
    for path in _left(ledger):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if number and code == -signal.SIGKILL:
        complain(
            f"{signal.Signals(number).name} ended this command while a library was running that ignores signals. "
            "Each output file is complete, or was not written."
        )
        code = 128 + number
    elif code < 0 or (code == _STOPPED and _TIMEOUT.search(_words(said))):
        code = _died(-code, said, refused, complain, suspects)
    _flush()
    os._exit(code)


def _waited_for(child: int, asked: set[signal.Signals], ledger: IO[bytes]) -> tuple[int, int]:
    """The signal that was sent to end the copy, or 0, and the exit code of the copy."""
    number, told_at = 0, 0.0
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended:
        told = signal.sigtimedwait({*asked, signal.SIGCHLD}, _PATIENCE)
        if told is not None and told.si_signo in asked:
            if not number:
                number, told_at = told.si_signo, time.monotonic()
            if told.si_code != _BY_THE_TERMINAL:
                os.kill(child, told.si_signo)
        if number and time.monotonic() - told_at > (_FINISHED if _FINISHING in _entries(ledger) else _NOTICED):
            os.kill(child, signal.SIGKILL)
        ended, status = os.waitpid(child, os.WNOHANG)
    return number, os.waitstatus_to_exitcode(status)


def _announce(ledger: int, path: Path, is_there: bool) -> None:
    """Tell the waiting process that a temporary file is there, or is gone."""
    _write(ledger, (b"+" if is_there else b"-") + os.fsencode(path.absolute()))


def _write(ledger: int, entry: bytes) -> None:
    os.write(ledger, entry + b"\0")  # which no path has


def _entries(ledger: IO[bytes]) -> list[bytes]:
    return os.pread(ledger.fileno(), os.fstat(ledger.fileno()).st_size, 0).split(b"\0")


def _left(ledger: IO[bytes]) -> set[bytes]:
    """The temporary files that the copy made and did not remove."""
    left: set[bytes] = set()
    for entry in _entries(ledger):
        if entry[:1] == b"+":
            left.add(entry[1:])
        else:
            left.discard(entry[1:])
    return left


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the shell closed it
            stream.flush()


def _died(number: int, said: IO[bytes], refused: int, complain: Callable[[str], None], suspects: Sequence[str]) -> int:
    if number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGQUIT,
    ):  # somebody wanted it to
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        own = f", or {choices(suspects)}," if suspects else ""
        complain(
            "The process of this command was killed. The system does that when memory runs out: "
            f"a file that the command read{own} needs more memory than there is."
        )
        return refused
    words = _words(said)
    if number == -_STOPPED:
        complain(words.partition("\n")[0])
        return refused
    frames = _FRAME.findall(words)
    place = f" in {frames[0][1]} of {'/'.join(Path(frames[0][0]).parts[-2:])}" if frames else ""
    own = f"The code of {choices(suspects)} may have ended it. Or a" if suspects else "A"
    complain(
        f"The process of this command died{place}: {signal.strsignal(number)}. "
        f"{own} file that it read is malformed in a way that no check finds, or needs more memory than --max-memory."
    )
    return refused


def _words(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode(errors="replace")


@contextmanager
def end_later(seconds: float, message: str) -> Iterator[None]:
    """End a contained command soon after so many seconds, whatever native code it is in then. It complains by `message`."""
    global _ends_later
    if not _is_contained or _said is None:
        yield
        return
    _said.write(f"{message}\n".encode())
    _said.flush()
    _ends_later = True
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True, file=_said)
    try:
        yield
    finally:
        _ends_later = False
        faulthandler.cancel_dump_traceback_later()


def _end_still_later() -> None:
    """Give a command whose time is over as long as one that was interrupted to write what it has reached."""
    if _ends_later and _said is not None:
        faulthandler.dump_traceback_later(_FINISHED, exit=True, file=_said)


def limit_memory(size: int) -> None:
    """Let this command take no more memory than values of `size` bytes need, where it has a process of its own."""
    if _is_contained:
        limit_room(_COPIES * size + _SLACK)
