"""Store: the files of a save, written and read through the interfaces of `torch.distributed.checkpoint`.

    PATH/zplan.json                         the manifest: one JSON object; it names the folder that is the save
    PATH/data-<steps>-<hex>/rank-3.safetensors    what rank 3 wrote; every tensor in it is flat

The manifest is replaced last, in one move, so whoever reads sees the save before or the whole new one. Nothing is
pickled, and nothing that was pickled is read: tensors are safetensors, all else is JSON.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from zplan.errors import SpecError, StateError
from zplan.progress import Progress, quiet
from zplan.units import format_bytes
from zplan.version import __version__

FORMAT = "zplan checkpoint"
VERSION = 1
MANIFEST = "zplan.json"
FOLDER = re.compile(r"data-\d+-[0-9a-f]{8}")
# What is written and hashed at once: small enough to stay in a core's cache on the way to the file.
BLOCK = 1 << 20

# The words of the safetensors format.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
WORDS = {dtype: word for word, dtype in DTYPES.items()}


def word_of(dtype: torch.dtype, name: str) -> str:
    """The name of a dtype in files; `name`: whose it is."""
    if dtype not in WORDS:
        raise SpecError(f"{name} is {dtype}, and safetensors files hold none: {', '.join(map(str, WORDS))}")
    return WORDS[dtype]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class File(_Strict):
    """A file that was written whole."""

    name: str
    nbytes: int
    sha256: str


class Stored(_Strict):
    """A tensor on disk, flat: `chunks` are (file, start, stop), in order and without gaps."""

    dtype: str
    numel: int
    chunks: tuple[tuple[str, int, int], ...]


class Parameter(_Strict):
    """`states`: names of its element-wise optimizer states; `scalars`: those that are one value, encoded."""

    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    trainable: bool
    group: int | None
    states: tuple[str, ...] = ()
    scalars: dict[str, Any] = {}


class Buffer(_Strict):
    """`names`: all that it has in the model; `persistent`: those of them that are in a state_dict."""

    names: tuple[str, ...]
    persistent: tuple[str, ...]
    shape: tuple[int, ...]


class Named(_Strict):
    """An optimizer or a scheduler: its class, and its options or state, encoded."""

    name: str
    state: Any


class Scale(_Strict):
    """Of the loss in fp16, and the good steps since it last changed."""

    value: float
    finite: int


class Contents(_Strict):
    """What a save holds beside tensors."""

    steps: int
    world: int
    parameters: dict[str, Parameter]
    buffers: dict[str, Buffer]
    optimizer: Named
    schedulers: tuple[Named, ...]
    extra: Any
    loss_scale: Scale | None = None


class Manifest(_Strict):
    zplan: str
    folder: str
    files: dict[str, File]
    tensors: dict[str, Stored]
    contents: Contents


def file_of(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def parameter_key(name: str) -> str:
    return f"model/{name}"


def state_key(state: str, name: str) -> str:
    return f"optimizer/{state}/{name}"


def buffer_key(name: str) -> str:
    return f"buffer/{name}"


def rng_key(device: str, rank: int) -> str:
    return f"rng/{device}/{rank}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor for a file: `get` makes it when it is its turn, on any device, of this dtype and number of elements."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    get: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, entries: Sequence[Entry], *, what: str, progress: Progress = quiet) -> File:
    """Writes a safetensors file one tensor after another and hashes it on the way; memory: one tensor.

    `what` it belongs to, for the error, which leaves no file behind. `progress` gets "write" and the bytes so far.
    """
    # Wide dtypes first, so that each tensor starts at a multiple of its own element.
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.nbytes
        header[entry.key] = {
            "dtype": word_of(entry.dtype, entry.key),
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = 8 + len(text) + end
    digest = hashlib.sha256()
    written = 0
    try:
        with path.open("xb") as file:

            def put(block: bytes | memoryview) -> None:
                nonlocal written
                digest.update(block)
                file.write(block)
                written += len(block)

            put(struct.pack("<Q", len(text)))
            put(text)
            for entry in ordered:
                progress("write", written)
                if entry.nbytes:
                    data = memoryview(as_bytes(entry.get()))
                    assert len(data) == entry.nbytes, entry.key
                    for start in range(0, len(data), BLOCK):
                        put(data[start : start + BLOCK])
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise unwritten(what, path, error, f"{format_bytes(total)} ({total} bytes) were to be written") from error
        raise
    progress("write", written)
    return File(name=path.name, nbytes=total, sha256=digest.hexdigest())


def as_bytes(tensor: torch.Tensor) -> Any:
    """Its elements as they lie in memory, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def unwritten(what: str, path: Path, error: OSError, facts: str) -> StateError:
    free = ""
    for folder in path.parents:
        if folder.is_dir():
            free = f", {format_bytes(shutil.disk_usage(folder).free)} are free there"
            break
    return StateError(
        f"{what}: {path} cannot be written: {error.strerror or error}\n{facts}{free}\n"
        "nothing of it was left behind, and what was saved there before is as it was\n"
        "try: make room, or another path"
    )


class Writer(StorageWriter):
    """Writes one rank's file into `root/folder`; `finish`, on the first rank alone, makes it the save at `root`.

    `metadata.planner_data` is the `Contents`.
    """

    def __init__(self, root: Path, folder: str, rank: int, *, progress: Progress = quiet) -> None:
        self.root = root
        self.folder = folder
        self.rank = rank
        self.progress = progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.root = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Removes what killed saves have left, and makes the folder."""
        if is_coordinator:
            if self.root.exists() and not self.root.is_dir():
                raise SpecError(f"save: {self.root} is a file, and a save is a folder: give another path")
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self.progress("clean", 0)
                clean(self.root)
                (self.root / self.folder).mkdir()
            except OSError as error:
                raise unwritten("save", self.root / self.folder, error, "a folder was to be made") from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = self.write(plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results_of(plan, file))
        return future

    def write(self, plan: SavePlan, planner: SavePlanner) -> File:
        entries = []
        for item in plan.items:
            assert item.tensor_data is not None

            def get(item: Any = item) -> torch.Tensor:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                return data

            data = item.tensor_data
            entries.append(Entry(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), get))
        path = self.root / self.folder / file_of(self.rank)
        if not path.parent.is_dir():
            raise StateError(
                f"save to {self.root}: rank {self.rank} does not see the folder{_every_rank_sees(self.root)}"
            )
        return write_tensors(path, entries, what=f"save to {self.root}", progress=self.progress)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the manifest beside the old one, puts it in its place, and removes the save before."""
        files: dict[str, File] = {}
        where: dict[str, list[tuple[str, int, int]]] = {key: [] for key in metadata.state_dict_metadata}
        for result in (result for of_rank in results for result in of_rank):
            file: File = result.storage_data
            files[file.name] = file
            assert result.index.offset is not None
            start = result.index.offset[0]
            stored = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(stored, TensorStorageMetadata)
            where[result.index.fqn].append((file.name, start, start + result.size_in_bytes // _itemsize(stored)))
        tensors = {}
        for key, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            chunks = tuple(sorted(where[key], key=lambda chunk: chunk[1:]))
            tensors[key] = Stored(dtype=word_of(stored.properties.dtype, key), numel=stored.size[0], chunks=chunks)
        manifest = Manifest(
            zplan=__version__, folder=self.folder, files=files, tensors=tensors, contents=metadata.planner_data
        )
        _complete(manifest, "save")
        try:
            sync_folder(self.root / self.folder)
            commit(self.root, manifest, self.progress)
        except OSError as error:
            raise unwritten(f"save to {self.root}", self.root / MANIFEST, error, "the manifest was to be") from error
        self.progress("remove", 0)
        clean(self.root)

    def discard(self) -> None:
        """Removes what a failed save has written. Never raises: it runs where something is wrong already."""
        with contextlib.suppress(OSError):
            clean(self.root)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(str(checkpoint_id))


def results_of(plan: SavePlan, file: File) -> list[WriteResult]:
    found = []
    for item in plan.items:
        assert item.tensor_data is not None
        nbytes = item.tensor_data.chunk.sizes[0] * item.tensor_data.properties.dtype.itemsize
        found.append(WriteResult(item.index, nbytes, file))
    return found


def _itemsize(stored: TensorStorageMetadata) -> int:
    return stored.properties.dtype.itemsize


def commit(root: Path, manifest: Manifest, progress: Progress) -> None:
    body = manifest.model_dump(mode="json")
    content = {"format": FORMAT, "version": VERSION, "sha256": checksum(body), "body": body}
    beside = root / f".{MANIFEST}.new"
    with beside.open("w", encoding="utf-8") as file:
        json.dump(content, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    progress("commit", 0)
    os.replace(beside, root / MANIFEST)
    sync_folder(root)


def checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder outlive a power cut, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clean(root: Path) -> None:
    """Removes every data folder that the manifest does not name; leaves all else, whoever put it there."""
    (root / f".{MANIFEST}.new").unlink(missing_ok=True)
    try:
        kept = read_manifest(root).folder if (root / MANIFEST).exists() else None
    except SpecError:  # it cannot say what is its own: leave everything
        return
    for folder in root.iterdir():
        if FOLDER.fullmatch(folder.name) and folder.name != kept:
            shutil.rmtree(folder, ignore_errors=True)


def holds_save(root: str | Path) -> bool:
    return (Path(root) / MANIFEST).exists()


def read_manifest(root: Path) -> Manifest:
    """Raises `SpecError` for what is foreign, cut short, changed, or of another version."""
    path = root / MANIFEST
    if not root.exists():
        raise SpecError(f"there is no checkpoint {root}")
    if not path.exists():
        raise SpecError(f"{root} is no checkpoint of zplan: it has no {MANIFEST}{_what_is(root)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is damaged, or zplan did not write it: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SpecError(f"{path} is JSON, but no checkpoint of zplan (it has no format {FORMAT!r})")
    if content.get("version") != VERSION:
        raise SpecError(
            f"{path} is of version {content.get('version')}, and this zplan ({__version__}) reads version {VERSION}"
        )
    body = content.get("body")
    if content.get("sha256") != checksum(body):
        raise SpecError(f"{path} was changed after it was written: its checksum does not match")
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise SpecError(f"{path} holds no checkpoint: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    _complete(manifest, str(path))
    return manifest


def _what_is(root: Path) -> str:
    if not root.is_dir():
        return ", it is a file"
    if (root / ".metadata").exists():
        return "; it looks like one of torch.distributed.checkpoint, whose .metadata is a pickle: zplan reads none"
    if any(FOLDER.fullmatch(each.name) for each in root.iterdir()):
        return "; a save there was interrupted before it was done"
    return ""


def _complete(manifest: Manifest, where: str) -> None:
    """Every element of every tensor is in one chunk, and every chunk in a file that is there."""
    for key, stored in manifest.tensors.items():
        end = 0
        for file, start, stop in stored.chunks:
            if start != end or stop <= start or file not in manifest.files:
                break
            end = stop
        if end != stored.numel:
            raise SpecError(f"{where}: {key} is not whole: {end} of its {stored.numel} elements are there")


def verify(root: Path, manifest: Manifest, names: Iterable[str], *, progress: Progress = quiet) -> None:
    """Compares size and SHA-256 of files with the manifest; names the first that is missing or damaged."""
    done = 0
    for name in names:
        file = manifest.files[name]
        path = root / manifest.folder / name
        digest = hashlib.sha256()
        try:
            found = path.stat().st_size
            if found != file.nbytes:
                raise SpecError(f"{path} is damaged: it has {found} bytes, and {file.nbytes} were written")
            with path.open("rb") as handle:
                while block := handle.read(BLOCK):
                    digest.update(block)
                    done += len(block)
                    progress("verify", done)
        except FileNotFoundError:
            raise SpecError(f"{path} is missing, a part of the checkpoint{_every_rank_sees(root)}") from None
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}") from None
        if digest.hexdigest() != file.sha256:
            raise SpecError(f"{path} is damaged: it is not what was written (its SHA-256 does not match)")


def _every_rank_sees(root: Path) -> str:
    return f"\n{root} must be on a file system that every rank sees"


class Reader(StorageReader):
    """Reads what `Writer` wrote; `torch.distributed.checkpoint.load` takes it too, for flat tensors by their keys."""

    def __init__(self, root: str | Path, manifest: Manifest | None = None, *, progress: Progress = quiet) -> None:
        self.root = Path(root)
        self.manifest = manifest
        self.progress = progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.root, self.manifest = Path(checkpoint_id), None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.manifest is None:
            self.manifest = read_manifest(self.root)
        return Metadata({key: _as_metadata(stored) for key, stored in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the manifest says where everything is."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        manifest = self.manifest
        assert manifest is not None
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            chunks = manifest.tensors[item.storage_index.fqn].chunks
            by_file.setdefault(next(file for file, start, _ in chunks if start == offset[0]), []).append(item)
        done = 0
        for name, items in by_file.items():
            with safe_open(self.root / manifest.folder / name, framework="pt") as file:
                for item in items:
                    start = item.storage_offsets[0]
                    target = planner.resolve_tensor(item)
                    target.copy_(file.get_slice(item.storage_index.fqn)[start : start + item.lengths[0]])
                    planner.commit_tensor(item, target)
                    done += target.nbytes
                    self.progress("read", done)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor, flat, on the CPU."""
        manifest = self.manifest
        assert manifest is not None
        stored = manifest.tensors[key]
        out = torch.empty(stored.numel, dtype=DTYPES[stored.dtype])
        for name, start, stop in stored.chunks:
            with safe_open(self.root / manifest.folder / name, framework="pt") as file:
                out[start:stop] = file.get_tensor(key)
        return out

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return holds_save(Path(checkpoint_id))


def _as_metadata(stored: Stored) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([stop - start])) for _, start, stop in stored.chunks]
    return TensorStorageMetadata(TensorProperties(DTYPES[stored.dtype]), torch.Size([stored.numel]), chunks)


def metadata_of(
    plans: Sequence[SavePlan], whole: Mapping[str, tuple[torch.dtype, int]], contents: Contents | None
) -> Metadata:
    """What all ranks write together. `whole`: dtype and elements of every tensor, those without elements included."""
    found = {
        key: TensorStorageMetadata(TensorProperties(dtype), torch.Size([numel]), [])
        for key, (dtype, numel) in whole.items()
    }
    for item in (item for plan in plans for item in plan.items):
        data = item.tensor_data
        assert data is not None
        if item.index.fqn not in found:
            found[item.index.fqn] = TensorStorageMetadata(data.properties, data.size, [])
        found[item.index.fqn].chunks.append(data.chunk)
    return Metadata(dict(found), planner_data=contents)
