"""Weights: those of a save as safetensors files that transformers' `from_pretrained` reads; no ranks, no training.

    OUT/model.safetensors                          or, where that is larger than one shard may be:
    OUT/model-00001-of-00003.safetensors           with model.safetensors.index.json: tensor -> file
    OUT/config.json, OUT/generation_config.json    copied, where `config` says from where

All is written into a hidden folder beside OUT, which takes its name at the end.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from zplan.errors import SpecError, StateError, nearest
from zplan.graph.lift import dtype_name, dtype_of
from zplan.progress import Progress, quiet
from zplan.runtime import store
from zplan.runtime.store import DTYPES, Contents, Entry, Manifest, Reader, unwritten
from zplan.units import parse_size

SHARD = "5GB"
CAST = ("fp32", "bf16", "fp16", "fp64")
CONFIG = "config.json"
# What is copied where it is there.
BESIDE = ("generation_config.json",)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. `nbytes` of tensors; `tied`: name -> the name it was written under; `left_out`: by prefix."""

    folder: Path
    steps: int
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: dict[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to be written: its name in the files, its key in the save, and its own dtype."""

    name: str
    key: str
    shape: tuple[int, ...]
    stored: torch.dtype
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return Entry(self.name, self.dtype, self.shape, torch.Tensor).nbytes


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    shard: int | str = SHARD,
    prefix: str = "",
    config: str | Path | None = None,
    progress: Progress = quiet,
) -> Exported:
    """Writes the weights of the save `checkpoint` into the folder `out`, which is new or empty; whole or not at all.

    Trained, frozen and unused parameters and persistent buffers, rank 0's; a tied parameter once, under its first name.
    As they were held: of `precision="bf16"` the fp32 masters. `dtype` casts what is floating. `prefix`: only what is
    under it, without it. `config`: the folder of a config.json, which is copied and not changed.

    Checks all of the save's checksums first. Memory: one tensor. Raises `SpecError` for a save that is damaged or none,
    and `StateError` where it cannot be written.
    """
    root, target = Path(checkpoint), Path(out).resolve()
    cast = _cast(dtype)
    limit = parse_size(shard, what="shard")
    copied = _config(config)
    manifest = store.read_manifest(root)
    _refuse_what_is_there(target)
    weights, tied, left_out = _weights(manifest, cast, prefix, root)
    store.verify(root, manifest, manifest.files, progress=progress)
    reader = Reader(root, manifest)
    what = f"export to {out}"
    with _whole_or_not(target, what) as folder:
        files = _write(folder, list(_shards(weights, limit)), reader, what, progress)
        for path in copied:
            _put(folder / path.name, path.read_bytes(), what)
        progress("commit", 0)
    return Exported(
        Path(out), manifest.contents.steps, files, len(weights), sum(w.nbytes for w in weights), tied, left_out
    )


def _cast(dtype: str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype not in CAST:
        raise SpecError(f"dtype {dtype!r} is none of {', '.join(CAST)}{nearest(dtype, list(CAST))}")
    return dtype_of(dtype)


def _config(config: str | Path | None) -> tuple[Path, ...]:
    if config is None:
        return ()
    folder = Path(config)
    folder = folder.parent if folder.name == CONFIG and folder.is_file() else folder
    if not (folder / CONFIG).is_file():
        raise SpecError(f"{config} has no {CONFIG} to be copied")
    return tuple(folder / name for name in (CONFIG, *BESIDE) if (folder / name).is_file())


def _refuse_what_is_there(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise SpecError(f"{target} is a file, and weights are exported into a folder")
    if target.is_dir() and any(target.iterdir()):
        raise SpecError(
            f"{target} is not empty, and nothing in it is replaced: give another folder, or remove it first"
        )


def _weights(
    manifest: Manifest, cast: torch.dtype | None, prefix: str, root: Path
) -> tuple[list[Weight], dict[str, str], tuple[str, ...]]:
    """What is written, which names are tied to it, and the names that `prefix` leaves out."""
    start = f"{prefix.rstrip('.')}." if prefix else ""
    weights: list[Weight] = []
    tied: dict[str, str] = {}
    left_out: list[str] = []
    for names, once, key, shape in _tensors(manifest.contents):
        found = [name.removeprefix(start) for name in names if name.startswith(start)]
        if not found:
            left_out.append(names[0])
            continue
        stored = DTYPES[manifest.tensors[key].dtype]
        dtype = cast if cast is not None and stored.is_floating_point else stored
        written = found[:1] if once else found
        weights += [Weight(name, key, shape, stored, dtype) for name in written]
        tied |= {name: found[0] for name in found[len(written) :]}
    if not weights:
        there = sorted({name.partition(".")[0] for name in left_out})
        near = nearest(start.rstrip("."), there) or f"; there are {', '.join(f'{name}.' for name in there)}"
        raise SpecError(f"prefix {prefix!r} is that of no parameter in {root}{near}")
    return weights, tied, tuple(left_out)


def _tensors(contents: Contents) -> Iterator[tuple[tuple[str, ...], bool, str, tuple[int, ...]]]:
    """(names in a state_dict, whether one of them is enough, key in the save, shape) of all that a state_dict has.

    A model ties its parameters itself when it is loaded, but not its buffers.
    """
    for name, parameter in contents.parameters.items():
        yield parameter.aliases, True, store.parameter_key(name), parameter.shape
    for name, buffer in contents.buffers.items():
        if buffer.persistent:
            yield buffer.persistent, False, store.buffer_key(name), buffer.shape


def _shards(weights: Iterable[Weight], limit: int) -> Iterator[list[Weight]]:
    """In order, each as full as `limit` bytes allow; a tensor that is larger has one of its own."""
    shard: list[Weight] = []
    nbytes = 0
    for weight in weights:
        if shard and nbytes + weight.nbytes > limit:
            yield shard
            shard, nbytes = [], 0
        shard.append(weight)
        nbytes += weight.nbytes
    yield shard


def _write(folder: Path, shards: list[list[Weight]], reader: Reader, what: str, progress: Progress) -> tuple[str, ...]:
    """Writes the files, and the index where there are several; returns the names of those with tensors."""
    count = len(shards)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = ["model.safetensors"] if count == 1 else names
    before = 0
    for name, shard in zip(names, shards, strict=True):

        def more(phase: str, written: int, before: int = before) -> None:
            progress(phase, before + written)

        entries = [Entry(w.name, w.dtype, w.shape, partial(_read, reader, w)) for w in shard]
        before += store.write_tensors(folder / name, entries, what=what, progress=more).nbytes
    if count > 1:
        weights = [weight for shard in shards for weight in shard]
        size = {"total_size": sum(weight.nbytes for weight in weights)}
        where = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
        index = {"metadata": size, "weight_map": dict(sorted(where.items()))}
        _put(folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode(), what)
    return tuple(names)


def _read(reader: Reader, weight: Weight) -> torch.Tensor:
    try:
        flat = reader.read(weight.key)
    except (OSError, SafetensorError) as error:  # the checksums were right a moment ago
        raise StateError(
            f"{weight.name} cannot be read any more: {error}\n"
            f"the save {reader.root} was changed or replaced while it was exported: export it again"
        ) from error
    cast = flat.to(weight.dtype)
    if cast.dtype is not flat.dtype and not cast.isfinite().all() and flat.isfinite().all():
        raise SpecError(
            f"{weight.name} does not fit into {dtype_name(weight.dtype)}: it goes up to {flat.abs().max().item():.4g}, "
            f"and {torch.finfo(weight.dtype).max:.4g} is the most"
        )
    return cast


def _put(path: Path, content: bytes, what: str) -> None:
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritten(what, path, error, f"{len(content)} bytes were to be written") from error


@contextmanager
def _whole_or_not(target: Path, what: str) -> Iterator[Path]:
    """A folder beside `target` to write into, which becomes it at the end; removes what killed exports to it left."""
    unfinished = re.compile(re.escape(f".{target.name}.unfinished-") + "[0-9a-f]{8}")
    folder = target.parent / f".{target.name}.unfinished-{secrets.token_hex(4)}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in list(target.parent.iterdir()):
            if unfinished.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise unwritten(what, folder, error, "a folder was to be made") from error
    try:
        yield folder
        try:
            store.sync_folder(folder)
            # Takes the place of an empty folder too; of no other one.
            os.rename(folder, target)
            store.sync_folder(target.parent)
        except OSError as error:
            raise unwritten(what, target, error, "all was written, and was to get its name") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
