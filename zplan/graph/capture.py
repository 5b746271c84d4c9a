"""Capture: runs a model's forward and backward once on fake tensors and keeps what happened as one fx graph."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from zplan.errors import TraceError
from zplan.graph import compat, refuse
from zplan.graph.borrow import Changes, borrowed
from zplan.graph.compat import pytree
from zplan.graph.ir import Phase
from zplan.graph.sites import Site, Sites
from zplan.progress import Progress, quiet

LossFn = Callable[[Any, Any], Any]
# Progress is told once in so many ops.
OFTEN = 250


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node comes from: `module` is "" for the loss itself, `line` is "" where it is not known."""

    phase: Phase
    module: str
    line: str


@dataclass(frozen=True)
class Leaves:
    """A pytree taken apart: `tensors` by key path, `fixed` what is no tensor, by position among all leaves."""

    spec: Any
    paths: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]
    fixed: Mapping[int, Any]

    @classmethod
    def of(cls, tree: Any, prefix: str) -> "Leaves":
        keyed, spec = pytree.tree_flatten_with_path(tree)
        paths = tuple(".".join([prefix, *map(_key, path)]) for path, _ in keyed)
        tensors = {path: leaf for path, (_, leaf) in zip(paths, keyed, strict=True) if isinstance(leaf, torch.Tensor)}
        fixed = {i: leaf for i, (_, leaf) in enumerate(keyed) if not isinstance(leaf, torch.Tensor)}
        return cls(spec, paths, tensors, fixed)

    def fill(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """All leaves, with these tensors in the places of its own."""
        source = iter(tensors)
        return tuple(self.fixed[i] if i in self.fixed else next(source) for i in range(len(self.paths)))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        return pytree.tree_unflatten(list(self.fill(tensors)), self.spec)


@dataclass(frozen=True)
class Capture:
    """`module` returns [loss, *aux, *gradients of `wanted`, *buffers, *parameters, *batch], the last three as they are
    after the step: an unchanged one is its own placeholder. Placeholders: parameters, buffers, batch.

    `outputs` holds no tensors; `memory`: which of the real inputs share theirs, a key for each name;
    `changes`: what the forward left on modules; it is gone from there.
    """

    module: fx.GraphModule
    places: dict[fx.Node, Place]
    outputs: Leaves
    wanted: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    batch: Leaves
    device: torch.device
    memory: Mapping[str, int]
    changes: Changes
    checkpointed: tuple[str, ...]


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Leaves,
    *,
    wanted: Sequence[str],
    device: torch.device | None,
    evaluate: bool = False,
    dtypes: Mapping[str, torch.dtype] | None = None,
    casts: Callable[[], AbstractContextManager[None]] = nullcontext,
    loss_scale: torch.Tensor | None = None,
    progress: Progress = quiet,
) -> Capture:
    """`wanted`: the parameters whose gradients are asked for. `device`: where everything is to live; None: as it is.

    `evaluate`: the model is in evaluation mode, and nothing is kept for a backward. `dtypes`: of parameters, where that
    is not their own. `casts`: entered around the loss. `loss_scale`: a constant, the gradient of the loss.
    """
    dtypes = {} if dtypes is None else dtypes
    mode = compat.fake_mode()
    recorder = _Recorder(model, mode, progress)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tied = names_of(model.named_buffers(remove_duplicate=False))
    found: list[Leaves] = []
    noting = ExitStack()

    def micro_batch(ps: list[torch.Tensor], bs: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[Any]:
        noting.enter_context(compat.on_new_node(recorder.note))
        # Leaves of autograd, as parameters are: autocast's cache and the user's own code may ask.
        own = [p.detach().requires_grad_(p.requires_grad) for p in ps]
        held = {**dict(zip(parameters, own, strict=True)), **dict(zip(buffers, bs, strict=True))}
        with ExitStack() as stack:
            stack.enter_context(compat.reparametrize(model, dict(held)))
            stack.enter_context(recorder.watch())
            stack.enter_context(compat.straight_through_checkpoint(recorder.checkpoint))
            stack.enter_context(compat.autocast_cache())
            stack.enter_context(torch.set_grad_enabled(not evaluate))
            stack.enter_context(casts())
            result = loss_fn(model, batch.rebuild(leaves))
            loss = refuse.loss(result, trains=not evaluate)
            outputs = Leaves.of(result, "output")
            refuse.leaves(outputs.fixed, outputs.paths, "loss_fn returned")
            found.append(outputs)
            # Functionalization puts off what writes do to views until somebody looks: look now, while it is forward.
            detached = [leaf.detach() for leaf in (*outputs.tensors.values(), *_buffers_after(model, tied))]
            del detached[len(outputs.tensors) :]
            grads: Sequence[torch.Tensor | None] = ()
            if not evaluate:
                recorder.backward(loss, known=[*own, *bs, *leaves], loss_fn=loss_fn)
                seed = None if loss_scale is None else loss_scale.to(loss.dtype).expand_as(loss)
                grads = torch.autograd.grad(loss, [held[name] for name in wanted], seed, allow_unused=True)
                recorder.end()
            after = _buffers_after(model, tied)
        return [*detached, *grads, *after, *ps, *leaves]

    recorder.root = micro_batch.__code__
    fakes = (
        [_fake(p, device, mode, contiguous=True, dtype=dtypes.get(name)) for name, p in parameters.items()],
        [_fake(b, device, mode) for b in buffers.values()],
        [_fake(leaf, device, mode) for leaf in batch.tensors.values()],
    )
    with _mode(model, evaluate), borrowed(model) as changes, refuse.draws_outside_torch(), noting:
        try:
            module = compat.capture(micro_batch, fakes, mode)
        except TraceError as error:
            raise recorder.located(error) from error.__cause__
        except Exception as error:
            raise refuse.explain(error, recorder.site_of(error), recorder.phase) from error
    return Capture(
        module=module,
        places=recorder.places,
        outputs=replace(found[0], tensors=dict.fromkeys(found[0].tensors, torch.empty(0, device="meta"))),
        wanted=tuple(wanted),
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        batch=batch,
        device=next((fake.device for fake in fakes[0]), torch.device("cpu")),
        memory={
            name: compat.storage_key(tensor)
            for held in (parameters, buffers, batch.tensors)
            for name, tensor in held.items()
        },
        changes=changes,
        checkpointed=tuple(dict.fromkeys(recorder.checkpointed)),
    )


class _Recorder:
    """Notes for each new node the module and line that made it.

    Autograd numbers its nodes as forward makes them: the numbers between a module's entry and exit are that module's,
    and in backward the running `grad_fn` tells its own.
    """

    def __init__(self, model: nn.Module, mode: Any, progress: Progress) -> None:
        self.mode = mode
        self.progress = progress
        self.constants: dict[int, torch.Tensor] = {}
        self.sites = Sites()
        self.places: dict[fx.Node, Place] = {}
        self.phase = Phase.FORWARD
        self.checkpointed: list[str] = []
        self.root: Any = None
        self._modules = {module: name for name, module in model.named_modules()}
        self._stack = [""]
        self._numbers = [-1]
        self._owners = [""]
        self._lines: dict[int, str] = {}
        self._running: tuple[str, str] = ("", "")
        self._last: Site | None = None

    def note(self, node: fx.Node, constant: torch.Tensor | None) -> None:
        if constant is not None:
            # Held here, or each use would be given a fake of its own, with memory of its own.
            node.meta["val"] = self.constants.setdefault(id(constant), self.mode.from_tensor(constant))
        if node.op != "call_function":
            return
        if len(self.places) % OFTEN == 0:
            self.progress(self.phase.value, len(self.places))
        if self.phase is Phase.BACKWARD:
            self.places[node] = Place(self.phase, *self._running)
            return
        site = self.sites.of_frame(sys._getframe(1), self.root)
        self._last = site or self._last
        line = str(site) if site else ""
        # The autograd node of an op is made just before the op itself.
        self._lines.setdefault(compat.sequence_number() - 1, line)
        self.places[node] = Place(self.phase, self._stack[-1], line)

    def checkpoint(self, fn: Any) -> None:
        while isinstance(fn, partial):
            fn = fn.func
        module = self._modules.get(fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None))
        self.checkpointed.append(self._stack[-1] if module is None else module)

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module, name in self._modules.items():
                enter, leave = self._hooks(name)
                stack.enter_context(_handle(module.register_forward_pre_hook(enter, prepend=True)))
                stack.enter_context(_handle(module.register_forward_hook(leave, always_call=True)))
            yield

    def _hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._mark()

        def leave(*_: Any) -> None:
            self._stack.pop()
            self._mark()

        return enter, leave

    def _mark(self) -> None:
        self._numbers.append(compat.sequence_number())
        self._owners.append(self._stack[-1])

    def backward(self, loss: torch.Tensor, *, known: Sequence[torch.Tensor], loss_fn: LossFn) -> None:
        """From here on nodes are of backward. Refuses parameters that are not the model's."""
        inside = {id(tensor) for tensor in known}
        seen = {loss.grad_fn}
        left: list[Any] = [loss.grad_fn]
        while left:
            grad_fn = left.pop()
            leaf = getattr(grad_fn, "variable", None)
            if isinstance(leaf, torch.Tensor) and id(leaf) not in inside:
                refuse.outside(leaf, loss_fn)
            number = compat.sequence_number_of(grad_fn)
            owner = self._owners[bisect_right(self._numbers, number) - 1]
            grad_fn.register_prehook(self._prehook((owner, self._lines.get(number, ""))))
            for following, _ in grad_fn.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    left.append(following)
        self.phase = Phase.BACKWARD
        self.progress(self.phase.value, len(self.places))

    def _prehook(self, place: tuple[str, str]) -> Callable[..., None]:
        def hook(_: Any) -> None:
            self._running = place

        return hook

    def end(self) -> None:
        """Autograd is done: what follows belongs to no module."""
        self._running = ("", "")

    def site_of(self, error: BaseException) -> Site | None:
        site = self.sites.of_error(error)
        return site or self._last

    def located(self, error: TraceError) -> TraceError:
        """The same error, with the line it came from where a frame of the user's tells."""
        site = self.sites.of_error(error)
        return TraceError(f"{error}\n{refuse.arrow(site)}") if site else error


@contextmanager
def _handle(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _mode(model: nn.Module, evaluate: bool) -> Iterator[None]:
    """Evaluation mode inside, if asked for; each module's own mode comes back."""
    before = {module: module.training for module in model.modules()}
    try:
        if evaluate:
            model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _buffers_after(model: nn.Module, tied: Mapping[str, Sequence[str]]) -> list[Any]:
    """The buffers as a step left them, in the order of their names; tied ones must still be tied."""
    after = []
    for name, aliases in tied.items():
        values = [_buffer(model, alias) for alias in aliases]
        apart = next((alias for alias, value in zip(aliases, values, strict=True) if value is not values[0]), None)
        if apart is not None:
            raise TraceError(
                f"the forward re-assigns one of two tied buffers: {name} and {apart} were one tensor before it\n"
                "try: write in place (`buffer.copy_(new)`), which both names see"
            )
        after.append(values[0])
    return after


def _buffer(model: nn.Module, name: str) -> torch.Tensor:
    try:
        return model.get_buffer(name)
    except AttributeError:
        raise TraceError(f"the forward removes buffer {name}\ntry: keep it registered, and write into it") from None


def names_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Takes (name, tensor) pairs with duplicates; returns first name -> every name of the same tensor."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in named:
        aliases.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in aliases.values()}


def _fake(
    tensor: torch.Tensor,
    device: torch.device | None,
    mode: Any,
    *,
    contiguous: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    place = device or (torch.device("cpu") if tensor.device.type == "meta" else tensor.device)
    strides = None if contiguous else tensor.stride()
    with mode:
        if strides is None:
            fake = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=place)
        else:
            fake = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=place)
    return fake.requires_grad_(tensor.requires_grad)


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
