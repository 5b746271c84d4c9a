"""Sites: which line of the user's own code is behind an op or an exception."""

import linecache
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from types import CodeType, FrameType, TracebackType

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_ZPLAN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class Whose(IntEnum):
    USER = 0
    PACKAGE = 1  # a library that is neither torch nor zplan
    INSIDE = 2


@dataclass(frozen=True, slots=True)
class Site:
    """`inside`: the line of a package that the user's own line led to, where there is one."""

    file: str
    line: int
    inside: "Site | None" = None

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class Sites:
    """Sorts source files once each, so that finding the line behind an op is a short walk over frames."""

    def __init__(self) -> None:
        self._whose: dict[str, Whose] = {}

    def of_frame(self, frame: FrameType | None, root: CodeType) -> Site | None:
        """The innermost line of the user's own, within the call of `root`; a package's, where none is the user's."""
        return self._nearest(_outwards(frame, root))

    def of_error(self, error: BaseException) -> Site | None:
        return self._nearest(reversed(list(_inwards(error.__traceback__))))

    def _nearest(self, steps: Iterable[tuple[str, int]]) -> Site | None:
        package: Site | None = None
        for file, line in steps:
            whose = self._whose.get(file)
            if whose is None:
                whose = self._whose[file] = _whose(file)
            if whose is Whose.USER:
                return Site(file, line, inside=package)
            if whose is Whose.PACKAGE and package is None:
                package = Site(file, line)
        return package


def _whose(file: str) -> Whose:
    if file.startswith(("<", _TORCH, _ZPLAN)):
        return Whose.INSIDE
    if any(part in file for part in _PACKAGES):
        return Whose.PACKAGE
    return Whose.INSIDE if file.startswith(_STANDARD) else Whose.USER


def _outwards(frame: FrameType | None, root: CodeType) -> Iterator[tuple[str, int]]:
    while frame is not None and frame.f_code is not root:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _inwards(traceback: TracebackType | None) -> Iterator[tuple[str, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        traceback = traceback.tb_next
