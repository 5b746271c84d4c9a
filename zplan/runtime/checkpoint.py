"""Checkpoint: which part of a training step goes into a save, and back from one of any world, stage and bucket size.

A *share* is the part of a flat tensor that a rank holds. `Ownership` says which rank writes which share; a rank that
loads asks for its own shares, whatever those of the ranks that wrote were, and reads no more than them.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zplan.errors import SpecError, StateError
from zplan.planner.buckets import Slot
from zplan.planner.ownership import Slice
from zplan.planner.plan import Plan
from zplan.progress import Progress, quiet
from zplan.runtime import agree, store
from zplan.runtime.background import Saving
from zplan.runtime.comm import Comm
from zplan.runtime.compatible import check
from zplan.runtime.encode import decode, encode
from zplan.runtime.optim import LossScale
from zplan.runtime.state import State
from zplan.runtime.store import DTYPES, Buffer, Contents, Manifest, Named, Parameter, Reader, Scale, Writer

# How a step is computed, not what: what runs now keeps its own.
HOW = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Training:
    """What a step is made of. `steps`: optimizer steps done."""

    plan: Plan
    state: State
    optimizer: torch.optim.Optimizer
    comm: Comm
    steps: int = 0
    loss_scale: LossScale | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Elements `[start, start + len(data))` of a flat tensor of `numel`; data: 1-D, a view of what is held."""

    numel: int
    start: int
    data: torch.Tensor


class SharesToSave(SavePlanner):
    """Every rank writes the shares that are its own: there is nothing to decide together."""

    def set_up_planner(
        self, state_dict: Mapping[str, Share], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.shares = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(key, share) for key, share in self.shares.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, store.metadata_of(all_plans, {}, None)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.shares[write_item.index.fqn].data


class SharesToLoad(LoadPlanner):
    """Asks for what overlaps with this rank's shares, and has it read into them."""

    def set_up_planner(
        self, state_dict: Mapping[str, Share], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.shares = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, share in self.shares.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            wanted = ChunkStorageMetadata(torch.Size([share.start]), torch.Size([share.data.numel()]))
            items += create_read_items_for_chunk_list(key, stored, [wanted])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise StateError(f"{read_item.dest_index.fqn}: a save of zplan holds tensors alone")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        share = self.shares[read_item.dest_index.fqn]
        return share.data.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: `tensor` is a view of what is held."""


def _write_item(key: str, share: Share) -> WriteItem:
    start, numel = torch.Size([share.start]), torch.Size([share.data.numel()])
    data = TensorWriteData(
        ChunkStorageMetadata(start, numel), TensorProperties(share.data.dtype), torch.Size([share.numel])
    )
    return WriteItem(MetadataIndex(key, start), WriteItemType.SHARD, tensor_data=data)


@dataclass
class Gathered:
    """What one rank gives to a save. `agreed`: what must be the same on every rank, by the user's name of it."""

    contents: Contents
    shares: dict[str, Share] = field(default_factory=dict)
    whole: dict[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    states: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = field(default_factory=dict)
    agreed: dict[str, str] = field(default_factory=dict)


def save(
    training: Training,
    path: str | Path,
    *,
    scheduler: Any = None,
    extra: Any = None,
    blocking: bool = True,
    progress: Progress = quiet,
) -> Saving | None:
    """Writes a save at `path`, whole or not at all; a collective. Returns what waits for its end, if not blocking."""
    comm, root = training.comm, Path(path)
    mine = agree.attempt(comm, lambda: _gather_up(training, root, scheduler, extra), _nothing)
    folder = f"data-{training.steps}-{secrets.token_hex(4)}"
    planner = SharesToSave()
    planner.set_up_planner(mine.shares, is_coordinator=comm.rank == 0)
    local = planner.create_local_plan()
    shown = comm.exchange((mine.agreed, folder, local, mine.whole, mine.states))
    _same([agreed for agreed, *_ in shown])
    writer = Writer(root, shown[0][1], comm.rank, progress=progress)
    _together(comm, lambda: writer.set_up_storage_writer(comm.rank == 0))
    plans = [plan for _, _, plan, *_ in shown]
    whole = {key: kind for *_, kinds, _ in shown for key, kind in kinds.items()}
    metadata = store.metadata_of(plans, whole, _with_states(mine.contents, [states for *_, states in shown]))

    def commit(files: Sequence[store.File]) -> None:
        writer.finish(metadata, [store.results_of(plan, file) for plan, file in zip(plans, files, strict=True)])

    if not blocking:

        def start() -> Saving:
            planner.shares = {
                key: replace(s, data=s.data.detach().to("cpu", copy=True)) for key, s in mine.shares.items()
            }
            return Saving(comm, writer, lambda: writer.write(local, planner), commit)

        try:
            saving = agree.attempt(comm, start, _nothing)
        except Exception:
            if comm.rank == 0:
                writer.discard()
            raise
        saving.start()
        return saving
    try:
        file = agree.attempt(comm, lambda: writer.write(local, planner), _nothing)
        files = comm.exchange(file)
        _together(comm, lambda: commit(files) if comm.rank == 0 else None)
    except Exception:
        if comm.rank == 0:
            writer.discard()
        raise
    return None


def load(training: Training, path: str | Path, *, scheduler: Any = None, progress: Progress = quiet) -> "Loading":
    """Finds out whether the save at `path` fits and is whole, on all ranks together; changes nothing yet."""
    comm, root = training.comm, Path(path)

    def looked_at() -> Manifest:
        manifest = store.read_manifest(root)
        check(manifest, training.plan, training.state, training.optimizer, _listed(scheduler), scheduler is None, root)
        return manifest

    manifest = agree.attempt(comm, looked_at, _nothing)
    _same(
        [{f"the checkpoint {root}": found} for found in comm.exchange(store.checksum(manifest.model_dump(mode="json")))]
    )
    names = sorted(manifest.files, key=lambda name: -manifest.files[name].nbytes)
    _together(comm, lambda: store.verify(root, manifest, names[comm.rank :: comm.world], progress=progress))
    return Loading(training, Reader(root, manifest, progress=progress), manifest, _listed(scheduler))


@dataclass
class Loading:
    """A save that was found to fit."""

    training: Training
    reader: Reader
    manifest: Manifest
    schedulers: tuple[Any, ...]

    def finish(self) -> Any:
        """Reads it into what this rank holds, and returns `extra`; a collective."""
        return agree.attempt(self.training.comm, lambda: [self._finish()], _nothing)[0]

    def _finish(self) -> Any:
        training, contents = self.training, self.manifest.contents
        fetch = self.reader.read
        # First what is decoded: what cannot be is found before anything is changed.
        extra = decode(contents.extra, fetch)
        options = [decode(group, fetch) for group in contents.optimizer.state]
        schedules = [decode(each.state, fetch) for each in contents.schedulers]
        training.optimizer.state.clear()
        shares = {key: share for key, share, _ in _parameters(training, all_that_is_held=True)}
        states = list(_empty_states(training, contents, self.manifest))
        for _, _, found in states:
            shares |= found
        planner = SharesToLoad()
        planner.set_up_planner(shares, self.reader.read_metadata(), training.comm.rank == 0)
        self.reader.read_data(planner.create_local_plan(), planner).wait()
        for parameter, state, _ in states:
            training.optimizer.state[parameter] = state
        for group, saved in zip(training.optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in saved.items() if key not in HOW or key not in group})
        for name, buffer in training.state.buffers().items():
            known = contents.buffers.get(name)
            if known is not None and known.shape == tuple(buffer.shape):
                flat = fetch(store.buffer_key(name)) if buffer.numel() else buffer.detach().cpu().reshape(-1)
                buffer.copy_(flat.view(buffer.shape))
        for each, saved in zip(self.schedulers, schedules, strict=False):
            each.load_state_dict(saved)
        scale, saved_scale = training.loss_scale, contents.loss_scale
        if scale is not None and saved_scale is not None:
            scale.value.fill_(saved_scale.value)
            scale.finite = saved_scale.finite
        _restore_rng(training, self.manifest, fetch)
        return extra


def _nothing(_: object) -> agree.Report:
    return agree.Report()


def _together(comm: Comm, work: Callable[[], object]) -> None:
    """Does it on every rank; all raise where one fails."""

    def done() -> bool:
        work()
        return True

    agree.attempt(comm, done, _nothing)


def _same(shown: Sequence[Mapping[str, str]]) -> None:
    for rank, other in enumerate(shown):
        for what in {**shown[0], **other}:
            if other.get(what) != shown[0].get(what):
                raise SpecError(
                    f"{what} is not the same on rank 0 and on rank {rank}, and one of them is saved or loaded for all\n"
                    "try: the same on every rank; what belongs to each rank, gathered into a list by rank"
                )


def _listed(scheduler: Any) -> tuple[Any, ...]:
    if scheduler is None:
        return ()
    return tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)


def _gather_up(training: Training, root: Path, scheduler: Any, extra: Any) -> Gathered:
    plan, optimizer, rank = training.plan, training.optimizer, training.comm.rank
    tensors: dict[str, torch.Tensor] = {}
    groups, schedulers, agreed = [], [], {"path": str(root)}

    def encoded(value: Any, where: str) -> Any:
        found: dict[str, torch.Tensor] = {}
        written = encode(value, where, found)
        content = [json.dumps(written, sort_keys=True), *(_digest(tensor) for tensor in found.values())]
        agreed[where] = hashlib.sha256("".join(content).encode()).hexdigest()
        tensors.update(found)
        return written

    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append(encoded(options, f"optimizer.group{index}"))
    for index, each in enumerate(_listed(scheduler)):
        if not callable(getattr(each, "state_dict", None)):
            raise SpecError(f"scheduler is a {type(each).__name__} without state_dict(): give a scheduler, or several")
        schedulers.append(Named(name=type(each).__name__, state=encoded(each.state_dict(), f"scheduler{index}")))
    more = encoded(extra, "extra")
    buffers = training.state.buffers()
    contents = Contents(
        steps=training.steps,
        world=training.comm.world,
        parameters={
            t.name: Parameter(aliases=t.aliases, shape=t.shape, trainable=t.trainable, group=t.group)
            for t in plan.graph.tensors
        },
        buffers={
            name: Buffer(names=b.names, persistent=b.persistent, shape=b.shape)
            for name, b in training.state.buffer_names().items()
        },
        optimizer=Named(name=type(optimizer).__name__, state=groups),
        schedulers=tuple(schedulers),
        extra=more,
        loss_scale=None
        if training.loss_scale is None
        else Scale(value=float(training.loss_scale.value), finite=training.loss_scale.finite),
    )
    found = Gathered(contents, agreed=agreed)
    for key, share, (slot, states) in _parameters(training, all_that_is_held=False):
        found.shares[key] = share
        element_wise, scalars = [], {}
        for name, value in states[1].items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.numel() != states[0].numel:
                    raise StateError(f"optimizer state {name} of {slot.tensor} is no tensor of one value per element")
                start = slot.offset + share.start - states[0].start
                data = value.reshape(-1)[start : start + share.data.numel()]
                found.shares[store.state_key(name, slot.tensor)] = Share(slot.numel, share.start, data)
                element_wise.append(name)
            else:
                scalars[name] = _scalar(value, f"optimizer state {name} of {slot.tensor}")
        found.states[slot.tensor] = tuple(element_wise), scalars
    if rank == 0:
        tensors |= {store.buffer_key(name): buffer.detach() for name, buffer in buffers.items()}
        for key, tensor in tensors.items():
            store.word_of(tensor.dtype, key)
            found.whole[key] = (tensor.dtype, tensor.numel())
            if tensor.numel():
                found.shares[key] = Share(tensor.numel(), 0, tensor.reshape(-1))
        for bucket in plan.ownership.buckets:
            dtype = training.state.held[bucket.name].dtype
            found.whole |= {store.parameter_key(slot.tensor): (dtype, slot.numel) for slot in bucket.slots}
    for device, state in _rng(training).items():
        found.shares[store.rng_key(device, rank)] = Share(state.numel(), 0, state)
    for key, share in found.shares.items():
        store.word_of(share.data.dtype, key)
    return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(store.as_bytes(tensor)).hexdigest()


_States = tuple[Slice, dict[str, Any]]


def _parameters(training: Training, *, all_that_is_held: bool) -> Iterator[tuple[str, Share, tuple[Slot, _States]]]:
    """This rank's shares of parameters, with the optimizer's states of the slice that each is in.

    Of what every rank holds whole, the first rank alone writes, and all read.
    """
    ownership, rank = training.plan.ownership, training.comm.rank
    slices = {(piece.bucket, piece.group): (piece, parameter) for piece, parameter in _slices(training)}
    for bucket in ownership.buckets:
        held = training.state.held[bucket.name]
        low = 0 if bucket.whole_at_rest else rank * bucket.part
        for slot in bucket.slots:
            for interval in ownership.intervals(slot.tensor):
                if interval.rank != rank and not (bucket.whole_at_rest and all_that_is_held):
                    continue
                start = slot.offset + interval.start - low
                data = held[start : start + interval.stop - interval.start]
                piece, parameter = _NONE
                if bucket.trains and slot.group is not None:
                    piece, parameter = slices[bucket.name, slot.group]
                states = dict(training.optimizer.state.get(parameter, {}))
                yield store.parameter_key(slot.tensor), Share(slot.numel, interval.start, data), (slot, (piece, states))


_NONE: tuple[Slice, Any] = (Slice("", 0, 0, 0), None)


def _slices(training: Training) -> Iterator[tuple[Slice, torch.Tensor]]:
    """What this rank updates, with the optimizer's parameter for it: those of a group come in the order of slices."""
    taken = [iter(group["params"]) for group in training.optimizer.param_groups]
    for piece in training.plan.ownership.slices(training.comm.rank):
        yield piece, next(taken[piece.group])


def _scalar(value: Any, where: str) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": store.word_of(value.dtype, where), "value": value.item(), "device": value.device.type}
    if value is not None and type(value) not in (bool, int, float):
        raise StateError(f"{where} is a {type(value).__name__}, and a save takes tensors and numbers")
    return {"dtype": None, "value": value, "device": ""}


def _with_states(contents: Contents, of_ranks: Sequence[Mapping[str, Any]]) -> Contents:
    parameters = dict(contents.parameters)
    for found in of_ranks:
        for name, (states, scalars) in found.items():
            parameters[name] = parameters[name].model_copy(update={"states": states, "scalars": scalars})
    return contents.model_copy(update={"parameters": parameters})


def _empty_states(
    training: Training, contents: Contents, manifest: Manifest
) -> Iterator[tuple[torch.Tensor, dict[str, Any], dict[str, Share]]]:
    """For each slice: the optimizer's parameter, its states to be read into, and the shares of tensors in them.

    Padding gets zeros.
    """
    ownership = training.plan.ownership
    for piece, parameter in _slices(training):
        bucket = ownership.bucket[piece.bucket]
        slots = [slot for slot in bucket.slots if slot.group == piece.group and slot.numel]
        known = _like(slots, contents, piece.group)
        if known is None or not (known[1].states or known[1].scalars):
            continue
        name, like = known
        state: dict[str, Any] = {key: _from_scalar(value, parameter) for key, value in like.scalars.items()}
        shares: dict[str, Share] = {}
        for key in like.states:
            dtype = DTYPES[manifest.tensors[store.state_key(key, name)].dtype]
            flat = state[key] = torch.zeros(piece.numel, dtype=dtype, device=parameter.device)
            for slot in slots:
                low, high = max(slot.offset, piece.start), min(slot.end, piece.stop)
                if low < high:
                    data = flat[low - piece.start : high - piece.start]
                    shares[store.state_key(key, slot.tensor)] = Share(slot.numel, low - slot.offset, data)
        yield parameter, state, shares


def _like(slots: Sequence[Slot], contents: Contents, group: int) -> tuple[str, Parameter] | None:
    """A parameter whose states say which ones a slice has; one of its group where the slice is padding alone."""
    names = [slot.tensor for slot in slots]
    names += [name for name, each in contents.parameters.items() if each.group == group and each.scalars and not slots]
    return (names[0], contents.parameters[names[0]]) if names else None


def _from_scalar(saved: Mapping[str, Any], parameter: torch.Tensor) -> Any:
    if saved["dtype"] is None:
        return saved["value"]
    device = parameter.device if saved["device"] == parameter.device.type else "cpu"
    return torch.tensor(saved["value"], dtype=DTYPES[saved["dtype"]], device=device)


def _rng(training: Training) -> dict[str, torch.Tensor]:
    """The states of this rank's generators: the CPU's, and that of the device that trains."""
    found = {"cpu": torch.get_rng_state()}
    if training.plan.graph.device == "cuda":
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_rng(training: Training, manifest: Manifest, fetch: Callable[[str], torch.Tensor]) -> None:
    """A rank that the save does not know seeds itself from the first one's state and its own number."""
    rank = training.comm.rank
    first = store.as_bytes(fetch(store.rng_key("cpu", 0))).tobytes()
    seed = int.from_bytes(hashlib.sha256(first + f"{rank}".encode()).digest()[:7], "big")
    torch.manual_seed(seed)
    if store.rng_key("cpu", rank) in manifest.tensors:
        torch.set_rng_state(fetch(store.rng_key("cpu", rank)))
    if training.plan.graph.device == "cuda" and store.rng_key("cuda", rank) in manifest.tensors:
        torch.cuda.set_rng_state(fetch(store.rng_key("cuda", rank)))
