"""Jobs: finding the function of a user's file that says what to train, and what it trains on."""

import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zplan.api import Job
from zplan.errors import SpecError, nearest


def load_job(where: str) -> Job:
    """Imports FILE.py and calls JOB; a `SpecError` says which of both is wrong."""
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise SpecError(f"{where!r} is no FILE.py:JOB, such as examples/gpt_text.py:job")
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise SpecError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise SpecError(f"{path} has no function {name}{nearest(name, found)}; it has {', '.join(found) or 'none'}")
    job = function()
    if not isinstance(job, Job):
        raise SpecError(f"{where} returned a {type(job).__name__}, and must return a zplan.Job")
    return job


def stream_of(batches: Any, rank: int, world: int) -> Iterable[Any]:
    stream: Iterable[Any] = batches(rank, world) if callable(batches) else batches
    return stream


def first(batches: Any, rank: int, world: int) -> Any:
    for batch in stream_of(batches, rank, world):
        return batch
    raise SpecError("the job has no batches")


def chain_first(batch: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield batch
    yield from rest
