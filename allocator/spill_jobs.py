"""Run a file's reads and writes in a few threads.

Covers jobs, the threads, forks, and the mark of several jobs. Does not know what a job does.

1. Jobs begin in the order in which they were given, so one may wait for any that was given before.
2. A job that fails keeps its error for whoever waits; its thread goes on.
3. No thread runs in a forked child: a job given there runs at once. A fork waits for the jobs that
   were given before it, so that the child finds none half done.
4. No job takes a lock that a caller holds while it waits.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from dynamemo.allocator.copier import DONE, Mark
from dynamemo.allocator.errors import SpillError

__all__ = ["Job", "JobsMark", "Workers", "give_up", "given_up", "raise_again", "wait_quietly"]

#: Enough to keep a disk busy while others compute checksums.
_THREADS = 4


class Job:
    """One piece of work, done at most once.

    Parameters
    ----------
    work : callable
        What is to be done; forgotten when it is done.
    """

    __slots__ = ("_ended", "_unclaimed", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._unclaimed = threading.Lock()
        self._ended = threading.Event()
        #: Why it failed, where it did.
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do the work, unless somebody else has begun it or it was cancelled."""
        work = self._work
        if work is None or not self._unclaimed.acquire(blocking=False):
            return
        try:
            work()
        except BaseException as error:
            self.error = _without_frames(error)
        finally:
            self._work = None
            self._ended.set()

    def cancel(self) -> None:
        """Let it never begin, where it has not begun: it fails."""
        if self._unclaimed.acquire(blocking=False):
            self._work = None
            self.error = given_up()
            self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for its end; raises nothing."""
        self._ended.wait()

    def check(self) -> None:
        """Raise why it failed, where it did."""
        if self.error is not None:
            raise_again(self.error)


class JobsMark:
    """The end of some jobs; the compute stream is held by letting the host wait.

    Parameters
    ----------
    jobs : iterable of Job
        What has to end.
    earlier : Mark, optional
        What has to end too, whether it fails or not.
    """

    __slots__ = ("_earlier", "_jobs")

    def __init__(self, jobs: Iterable[Job], earlier: Mark = DONE) -> None:
        self._jobs = tuple(jobs)
        self._earlier = DONE if earlier.is_done else earlier

    @property
    def is_done(self) -> bool:
        """Whether all have ended."""
        return all(job.is_done for job in self._jobs) and self._earlier.is_done

    def hold_compute(self) -> None:
        """Let the host wait: no stream knows of a file."""
        self.wait()

    def wait(self) -> None:
        """Let the host wait for all, also where one fails; then raise the first error."""
        wait_quietly(self._earlier)
        self._earlier = DONE
        for job in self._jobs:
            job.wait()
        for job in self._jobs:
            job.check()


class Workers:
    """A few threads, started when there is work; they end with the object."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._executor: ThreadPoolExecutor | None = None
        self._under_way: set[Job] = set()
        _all_workers.add(self)

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made it, not a forked child."""
        return os.getpid() == self._process

    def submit(self, job: Job) -> None:
        """Have a thread run a job; where there can be none, run it now."""
        if not self.is_at_home:
            job.run()
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="dynamemo-spill")
        self._under_way.add(job)
        try:
            self._executor.submit(_run, job, self._under_way)
        except RuntimeError:  # the interpreter is ending, or the machine has no more threads
            _run(job, self._under_way)

    def drain(self) -> None:
        """Wait for the jobs given so far."""
        for job in list(self._under_way) if self.is_at_home else ():
            job.wait()

    def close(self) -> None:
        """Give up the jobs that have not begun and end the threads. May be called twice."""
        if self._executor is not None and self.is_at_home:
            give_up(list(self._under_way))
            self._executor.shutdown()


def give_up(jobs: Collection[Job]) -> None:
    """Let no job begin any more, and wait for those that have begun."""
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.wait()


def given_up() -> SpillError:
    """Return the error of what was given up before it was done."""
    return SpillError("a copy between memory and the spill file was given up before its end")


def raise_again(error: BaseException) -> NoReturn:
    """Raise an error that is kept: a `SpillError` of its own for each who asks."""
    if isinstance(error, SpillError):
        raise copy.copy(error) from error.__cause__
    raise error


def wait_quietly(mark: Mark) -> None:
    """Wait for the end of a copy whose failure is somebody else's affair."""
    with contextlib.suppress(SpillError):
        mark.wait()


def _run(job: Job, under_way: set[Job]) -> None:
    job.run()
    under_way.discard(job)


def _without_frames(error: BaseException) -> BaseException:
    """Let go of what the frames of a finished thread refer to."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause.__context__, cause = None, cause.__cause__
    return error


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


def _drain_all() -> None:
    for workers in list(_all_workers):
        workers.drain()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_drain_all)
