"""A pool of gloo ranks, started once per test run; each task is a function that every rank of a world runs.

`Pool.run(world, function, *args)` calls `function(comm, *args)` on ranks 0 .. world - 1 and returns what each
returned. The first rank that raises ends the task for all: the pool is killed, and the next task starts a new one.
"""

import contextlib
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zplan.runtime.comm import Comm

SIZE = 4
TIMEOUT = 180.0


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


class Pool:
    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._processes: list[Any] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any, within: float = TIMEOUT) -> list[Any]:
        if not self._processes:
            self._start()
        for rank in range(world):
            self._tasks[rank].put((world, function, args))
        results: dict[int, Any] = {}
        while len(results) < world:
            try:
                rank, result, error = self._answers.get(timeout=within)
            except queue.Empty:
                self.close()
                raise RankError(f"ranks {sorted(set(range(world)) - set(results))} did not answer") from None
            if error:
                self.close()
                raise RankError(f"rank {rank}: {error}")
            results[rank] = result
        return [results[rank] for rank in range(world)]

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._answers = context.Queue()
        self._tasks = [context.Queue() for _ in range(self.size)]
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            arguments = (rank, self.size, store, self._tasks[rank], self._answers)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._processes:
            self._processes = []
            self._folder.cleanup()


def _serve(rank: int, size: int, store: str, tasks: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    groups = {world: dist.new_group(list(range(world))) for world in range(1, size + 1)}
    while True:
        world, function, args = tasks.get()
        try:
            comm = Comm(groups[world])
            result = function(comm, *args)
            answers.put((rank, result, ""))
        except BaseException:
            with contextlib.suppress(Exception):
                answers.put((rank, None, traceback.format_exc()))
