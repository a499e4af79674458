"""A worker: what it returns, and every way in which nothing comes back."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from refgrad.errors import WorkerError
from refgrad.worker import Worker


def test_results_come_back():
    with Worker() as worker:
        assert worker.call(math.gcd, 12, 18) == 6
        assert worker.call(dict, a=1) == {"a": 1}


def test_many_calls_in_one_process():
    with Worker() as worker:
        assert worker.call(os.getpid) == worker.call(os.getpid) != os.getpid()


def test_every_thread_gets_its_own_results():
    with Worker() as worker, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda k: worker.call(math.gcd, 6 * k, 9 * k), range(40))) == [3 * k for k in range(40)]


def test_an_exception_comes_back_as_its_message_and_leaves_the_process_alive():
    with Worker() as worker:
        process = worker.call(os.getpid)
        with pytest.raises(WorkerError, match=r"math domain error|nonnegative") as raised:
            worker.call(math.sqrt, -1.0)
        assert raised.value.verdict == "raised"
        assert worker.call(os.getpid) == process


def test_what_is_printed_is_no_answer():
    with Worker() as worker:
        assert worker.call(print, "loud") is None
        assert worker.call(os.write, 1, b"louder") == 6


def test_a_process_that_dies_at_work_has_crashed_and_is_started_again():
    with Worker() as worker:
        with pytest.raises(WorkerError, match=f"ended with -{int(signal.SIGABRT)}") as raised:
            worker.call(os.abort)
        assert raised.value.verdict == "crashed"
        assert worker.call(math.gcd, 12, 18) == 6


def test_what_a_dying_process_said_is_in_the_message():
    with Worker() as worker:
        worker.call(os.write, 2, b"gone")
        with pytest.raises(WorkerError, match="gone"):
            worker.call(os._exit, 3)


def test_a_process_that_takes_too_long_is_stopped_and_started_again():
    with Worker(seconds=0.5) as worker:
        with pytest.raises(WorkerError, match=r"nothing came back after 0\.5 s") as raised:
            worker.call(time.sleep, 60)
        assert raised.value.verdict == "timed out"
        worker.seconds = 60
        assert worker.call(math.gcd, 12, 18) == 6


def test_a_process_that_died_between_calls_is_started_again():
    with Worker() as worker:
        os.kill(worker.call(os.getpid), signal.SIGKILL)
        time.sleep(0.1)
        assert worker.call(math.gcd, 12, 18) == 6


def test_closing_leaves_no_process():
    with Worker() as worker:
        process = worker.call(os.getpid)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def path() -> list[str]:
    """Where this process looks for modules; to call it is to find this one."""
    return sys.path


def test_the_process_finds_the_same_modules():
    with Worker() as worker:
        found = {os.path.abspath(folder) for folder in worker.call(path)}
    assert {os.path.abspath(folder) for folder in sys.path if folder} <= found


def test_what_needs_more_memory_than_there_is_says_so_and_leaves_the_process_alive():
    with Worker(memory=2 << 30) as worker:
        process = worker.call(os.getpid)
        with pytest.raises(WorkerError) as raised:
            worker.call(bytearray, 3 << 30)
        assert (raised.value.verdict, raised.value.raised) == ("out of memory", "MemoryError")
        assert worker.call(os.getpid) == process


def test_the_class_of_an_exception_comes_back():
    with Worker() as worker:
        with pytest.raises(WorkerError) as raised:
            worker.call(int, "x")
        assert (raised.value.verdict, raised.value.raised) == ("raised", "ValueError")
