"""State: what a rank holds between steps, and the way between it and the user's model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zplan.errors import StateError
from zplan.graph.lift import dtype_of
from zplan.planner.buckets import Bucket, Slot
from zplan.planner.ownership import Ownership
from zplan.planner.program import held
from zplan.runtime.comm import Comm
from zplan.runtime.failure import memory_for
from zplan.units import ITEMSIZE, format_bytes

USE = "open `with step.whole_parameters() as model:` around it"
SAVE = "take step.full_state_dict()"
LOAD = "load it before compile"
KEEP = "take step.full_state_dict() before close(), and load it into a model of your own"


@dataclass(frozen=True, slots=True)
class Names:
    """Of a buffer: all its names, those of them in a state_dict, and its shape."""

    names: tuple[str, ...]
    persistent: tuple[str, ...]
    shape: tuple[int, ...]


class State:
    """Flat parameters: [part] of a bucket that is sharded, [world * part] of one that is whole at rest.

    Takes the parameters out of the model, one bucket at a time, and leaves `meta` ones in their places. The model's
    buffers stay in the model; every step reads and writes them there.
    """

    def __init__(self, model: torch.nn.Module, ownership: Ownership, comm: Comm, *, sync: bool) -> None:
        self.model = model
        self.ownership = ownership
        self.comm = comm
        self.held: dict[str, torch.Tensor] = {}
        self._requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self._dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self._aliases = _aliases(model)
        self._buffers = dict(model.named_buffers())
        self._guards: list[torch.utils.hooks.RemovableHandle] = []
        self.whole_is_out = False
        self.closed = False
        parameters = dict(model.named_parameters())
        for bucket in ownership.buckets:
            with memory_for(f"{bucket.name} of {len(ownership.buckets)} buckets was laid out, {_size(bucket)}"):
                flat = _flatten(bucket, parameters)
            if sync:
                comm.broadcast(flat)
            if not bucket.whole_at_rest:
                whole_flat, flat = flat, flat[comm.rank * bucket.part : (comm.rank + 1) * bucket.part].clone()
                comm.retire(whole_flat)
            self.held[bucket.name] = flat
            for slot in bucket.slots:
                del parameters[slot.tensor]
                self._leave_meta(slot)
        if sync:
            for buffer in model.buffers():
                comm.broadcast(buffer)
        self._guard()

    def residents(self) -> dict[str, torch.Tensor]:
        """Every flat part, every tensor of a bucket that is whole at rest, and every buffer, by value name."""
        found = dict(self._buffers)
        for bucket in self.ownership.buckets:
            flat = self.held[bucket.name]
            found[held(bucket)] = flat
            if bucket.at_hand:
                found |= {slot.tensor: _view(flat, slot) for slot in bucket.slots}
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """This rank's own, under the first name of each; every step reads and writes these very tensors."""
        return dict(self._buffers)

    def buffer_names(self) -> dict[str, Names]:
        """For each of `buffers()`: every name it has, and those of them in the model's own state_dict."""
        with self.unguarded() as model:
            listed = set(model.state_dict())
        names: dict[int, list[str]] = {}
        for name, buffer in self.model.named_buffers(remove_duplicate=False):
            names.setdefault(id(buffer), []).append(name)
        return {
            name: Names(tuple(names[id(b)]), tuple(n for n in names[id(b)] if n in listed), tuple(b.shape))
            for name, b in self._buffers.items()
        }

    def full(self) -> dict[str, torch.Tensor]:
        """Whole parameters and persistent buffers under every name of the model, copied; a collective.

        Parameters are as they are held: of those with masters, these. Buffers are rank 0's. Memory: the whole model,
        and one bucket besides.
        """
        tensors: dict[str, torch.Tensor] = {}
        for bucket in self.ownership.buckets:
            with memory_for(f"full_state_dict made {bucket.name} whole, {_size(bucket)}"):
                flat = self._gather(bucket)
                for slot in bucket.slots:
                    copy = _view(flat, slot).clone()
                    tensors |= dict.fromkeys(self._aliases[slot.tensor], copy)
        with self.unguarded() as model:
            names = model.state_dict()
        for name, buffer in names.items():
            if name not in tensors:
                sent = buffer.detach().clone()
                self.comm.broadcast(sent)
                tensors[name] = sent.clone()
                self.comm.retire(sent)
        return {name: tensors[name] for name in names}

    @contextmanager
    def whole(self) -> Iterator[torch.nn.Module]:
        """The model with its weights in place, in its own dtypes, on every rank; what is changed inside is dropped."""
        if self.whole_is_out:
            raise StateError("whole_parameters() is open already: leave it before you enter it again")
        self.whole_is_out = True
        self._unguard()
        try:
            for bucket in self.ownership.buckets:
                flat = self._gather(bucket)
                flat = flat.clone() if bucket.whole_at_rest else flat
                for slot in bucket.slots:
                    self._place(slot.tensor, _view(flat, slot).to(self._dtypes[slot.tensor]))
                del flat
            yield self.model
        finally:
            for bucket in self.ownership.buckets:
                for slot in bucket.slots:
                    self._leave_meta(slot)
            self._take_buffers_back()
            self._guard()
            self.whole_is_out = False

    @contextmanager
    def unguarded(self) -> Iterator[torch.nn.Module]:
        """The model as it is, with its `meta` parameters, free to be traced."""
        self._unguard()
        try:
            yield self.model
        finally:
            self._guard()

    def _gather(self, bucket: Bucket) -> torch.Tensor:
        held = self.held[bucket.name]
        return held if bucket.whole_at_rest else self.comm.gather(held)

    def _leave_meta(self, slot: Slot) -> None:
        self._place(slot.tensor, torch.empty(slot.shape, dtype=self._dtypes[slot.tensor], device="meta"))

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        """Puts one new parameter wherever the model holds `name` or a name tied to it."""
        parameter = torch.nn.Parameter(tensor, requires_grad=self._requires_grad[name])
        for alias in self._aliases[name]:
            module, _, leaf = alias.rpartition(".")
            self.model.get_submodule(module).register_parameter(leaf, parameter)

    def _take_buffers_back(self) -> None:
        """A forward may have put new tensors in the places of buffers: their values go into the ones that steps use."""
        for name, buffer in self._buffers.items():
            module, _, leaf = name.rpartition(".")
            holder = self.model.get_submodule(module)
            now = getattr(holder, leaf)
            if now is not buffer:
                buffer.copy_(now)
                setattr(holder, leaf, buffer)

    def _guard(self) -> None:
        for name, module in self.model.named_modules():
            self._guards += [
                module.register_forward_pre_hook(self._refuse(name, "was called", USE)),
                module.register_state_dict_pre_hook(self._refuse(name, "was asked for its state_dict", SAVE)),
                module.register_load_state_dict_pre_hook(self._refuse(name, "was to load a state_dict", LOAD)),
            ]

    def _refuse(self, name: str, what: str, help: str) -> Callable[..., None]:
        def refuse(module: torch.nn.Module, *_: Any) -> None:
            who = f"{name} ({type(module).__name__})" if name else type(module).__name__
            if self.closed:
                raise StateError(f"{who} {what}, but the step that held its weights is closed: {KEEP}")
            raise StateError(f"{who} {what}, but zplan holds its weights in shards: {help}")

        return refuse

    def _unguard(self) -> None:
        for handle in self._guards:
            handle.remove()
        self._guards.clear()


def _aliases(model: torch.nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Parameter name -> every name it has, the first one first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def _flatten(bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    first = parameters[bucket.slots[0].tensor]
    flat = torch.zeros(bucket.numel, dtype=dtype_of(bucket.held), device=first.device)
    for slot in bucket.slots:
        _view(flat, slot).copy_(parameters[slot.tensor].detach())
    return flat


def _size(bucket: Bucket) -> str:
    return format_bytes(bucket.numel * ITEMSIZE[bucket.held])


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return flat[slot.offset : slot.end].view(slot.shape)
