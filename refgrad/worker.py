"""A process that calls functions for this one: what can abort, or run for ever, then ends that process and not this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

from refgrad.errors import WorkerError

SECONDS = 60.0
_LONGEST = 2000  # characters of an exception's message that come back
_LAST_WORDS = 2.0  # seconds that a process has to end after it closed its pipe
_ORPHANED = 1.0  # seconds until a process notices that it belongs to nobody any more
_START = "import sys; from refgrad.worker import serve; serve(int(sys.argv[1]))"
_NO_MEMORY = re.compile("bad_?alloc|bad allocation|out of memory|cannot allocate|failed to allocate", re.I)


class Worker:
    """The process is started when it is needed, serves many calls, and is started again after it died.

    Calls from several threads are served one after the other.

    >>> import math
    >>> with Worker() as worker:
    ...     worker.call(math.gcd, 12, 18)
    6

    :param seconds: how long one call may take, the start of the process included.
    :param memory: how many bytes the process may have, where the system can limit it (not on Windows); 0 for any number.
    """

    def __init__(self, seconds: float = SECONDS, memory: int = 0) -> None:
        self.seconds, self.memory = seconds, memory
        self._turn = threading.Lock()
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # its stderr: a pipe that nobody reads would block it

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """What `function`, one of a module, returns over there. Everything that goes there and back is pickled.

        :raises WorkerError: it raised, the process ended, or the time or the memory was over.
        """
        with self._turn:
            return self._call(function, arguments, keywords)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        late = threading.Event()
        process, said = self._started()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(self.seconds, stop)
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with _error_instead_of_signal():
                pickle.dump((function, arguments, keywords), process.stdin)
                process.stdin.flush()
            result, failure = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = _end(process)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            if late.is_set():
                raise WorkerError("timed out", f"nothing came back after {self.seconds:g} s") from error
            message = lines[-1] if lines else "no message"
            verdict = "out of memory" if self.memory and _NO_MEMORY.search(message) else "crashed"
            raise WorkerError(verdict, f"its process ended with {code}: {message}") from error
        finally:
            timer.cancel()
            if process.poll() is not None or late.is_set():
                self.close()
        if failure is not None:
            raised, message = failure
            exhausted = raised == "MemoryError" or (self.memory and _NO_MEMORY.search(message))
            raise WorkerError("out of memory" if exhausted else "raised", message, raised)
        return result

    def stop(self) -> None:
        """End the process and call nothing any more: a call that waits in another thread fails at once."""
        self._stopped = True
        if (process := self._process) is not None:
            _kill(process)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._said is not None:
            _kill(self._process)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._said):
                if pipe is not None:
                    _close(pipe)
            self._process = self._said = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._stopped:
            raise WorkerError("crashed", "the run has ended")
        if self._process is None or self._said is None:
            self._said = tempfile.TemporaryFile(prefix="refgrad-")  # noqa: SIM115  (closed with the process)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
            if self._stopped:  # meanwhile, by another thread
                _kill(self._process)
        return self._process, self._said


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that closed its end of the pipe: it may still be about to end by itself."""
    try:
        return process.wait(_LAST_WORDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: one of these would keep the pipe open."""
    if sys.platform == "win32":
        process.kill()
    elif process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is not yet in its own group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _close(pipe: IO[bytes]) -> None:
    # What was not written is of no use any more.
    with contextlib.suppress(BrokenPipeError), _error_instead_of_signal():
        pipe.close()


@contextlib.contextmanager
def _error_instead_of_signal() -> Iterator[None]:
    """Writing to a process that is gone raises, also in a program that lets SIGPIPE end it, as `refgrad` does."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(memory: int) -> None:
    """What the process does: read a call, make it, answer with the result or with the exception's class and message.

    Until stdin ends.
    """
    threading.Thread(target=_outlive_nobody, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    if memory and sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        try:
            function, arguments, keywords = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reply: tuple[Any, tuple[str, str] | None]
        try:
            reply = function(*arguments, **keywords), None
        except Exception as error:  # whatever it is, the caller has to know
            name = type(error).__name__
            said = " ".join(str(error).split())[:_LONGEST].encode(errors="backslashreplace").decode()
            reply = None, (name, said or name)
        pickle.dump(reply, answers)
        answers.flush()


def _outlive_nobody(parent: int) -> None:
    """End this process, whatever it is doing, when the one that it works for is gone: killed, it closes nothing."""
    while os.getppid() == parent:
        time.sleep(_ORPHANED)
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
