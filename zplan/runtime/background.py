"""Background: a save that goes on while steps do.

No collective runs in the thread: ranks tell the first one by small files in the save's own folder that their part is
there, and it commits. A rank that could not write takes its `pending` file away, which needs no room on the disk.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from zplan.errors import StateError
from zplan.runtime import agree
from zplan.runtime.comm import Comm
from zplan.runtime.store import File, Writer

POLL_SECONDS = 0.02
# How long the first rank waits for the others when its own program has ended: they may have been killed.
LAST_SECONDS = 60.0


class Saving:
    """A save under way. `wait()` on every rank for its end, or let the next `save`, `load` or `close` do that."""

    def __init__(
        self, comm: Comm, writer: Writer, write: Callable[[], File], commit: Callable[[Sequence[File]], None]
    ) -> None:
        self._comm = comm
        self._writer = writer
        self._write = write
        self._commit = commit
        self._folder = writer.root / writer.folder
        self._mine = self._folder / f"rank-{comm.rank}.pending"
        self._mine.touch()
        self._wrote = threading.Event()
        self._cancelled = threading.Event()
        self._error: Exception | None = None
        self._outcome: Exception | None = None
        self._waited = False
        self._thread = threading.Thread(target=self._run, name="zplan save")

    def start(self) -> None:
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank has nothing more to write; on the first rank: whether the save is there."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the save is there, and raises on every rank where it failed on one; a collective."""
        if not self._waited:
            self._waited = True
            try:
                self._settle()
            except Exception as error:
                self._outcome = error
                raise
        elif self._outcome is not None:
            raise self._outcome

    @property
    def waited(self) -> bool:
        return self._waited

    def cancel(self) -> None:
        """Gives it up on this rank, without the others."""
        self._cancelled.set()

    def _settle(self) -> None:
        # First every rank's own part: this call ends where a rank is gone, and the thread's wait for it would not.
        self._wrote.wait()
        failed: Exception | None = None
        try:
            agree.attempt(self._comm, self._raise_own, lambda _: agree.Report())
        except Exception as error:
            failed = error
        self._thread.join()
        if failed is not None:
            raise failed
        agree.attempt(self._comm, self._raise_own, lambda _: agree.Report())

    def _raise_own(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            try:
                file = self._write()
                self._tell(file)
            except Exception as error:
                self._error = error
                file = None
            finally:
                # After the other file, if that is there.
                with suppress(OSError):
                    self._mine.unlink(missing_ok=True)
                self._wrote.set()
            if self._comm.rank == 0:
                self._finish()
        except Exception as error:
            self._error = self._error or error

    def _finish(self) -> None:
        """On the first rank alone."""
        try:
            files = self._files()
            if self._error is None:
                for rank in range(self._comm.world):
                    self._answer(rank).unlink()
                self._commit([file for file in files if file is not None])
        finally:
            self._writer.discard()

    def _files(self) -> list[File | None]:
        """What each rank has written, when all have. Sets the error where one could not."""
        missing, since, files = set(range(self._comm.world)), time.monotonic(), {}
        while missing:
            for rank in sorted(missing):
                pending = (self._folder / f"rank-{rank}.pending").exists()
                if self._answer(rank).exists():
                    files[rank] = File.model_validate_json(self._answer(rank).read_text())
                elif pending:
                    continue
                else:
                    lost = f"save to {self._writer.root}: rank {rank} could not write its part"
                    self._error = self._error or StateError(lost)
                missing.discard(rank)
                since = time.monotonic()
            late = not threading.main_thread().is_alive() and time.monotonic() - since > LAST_SECONDS
            if missing and (self._cancelled.is_set() or late):
                raise StateError(f"save to {self._writer.root}: given up; ranks {sorted(missing)} did not write")
            if missing:
                time.sleep(POLL_SECONDS)
        return [files.get(rank) for rank in range(self._comm.world)]

    def _answer(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.json"

    def _tell(self, file: File) -> None:
        beside = self._folder / f"rank-{self._comm.rank}.json.new"
        beside.write_text(file.model_dump_json())
        beside.replace(self._answer(self._comm.rank))
