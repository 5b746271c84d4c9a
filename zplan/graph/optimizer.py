"""Optimizer: which parameters a user's optimizer trains, and what a step of it keeps and takes, measured not assumed.

An optimizer that works element by element does the same on slices of flat buffers as on whole parameters.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from zplan.errors import SpecError
from zplan.graph import compat
from zplan.graph.capture import names_of
from zplan.graph.ir import Group, Optimizer
from zplan.graph.lift import dtype_name
from zplan.graph.optimizers import Optimizers, assign

Factory = Callable[[list[tuple[str, nn.Parameter]]], optim.Optimizer]
# One for all parameters, or for each pattern of names one.
Factories = Factory | Mapping[str, Factory]

ELEMENT_WISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
# Elements of a synthetic slice. Large on meta, where they cost nothing, so that scalars of a step vanish in rounding.
_ON_META = 1 << 20
_ON_CPU = 1 << 12


Held = Mapping[str, torch.dtype]


def groups_of(
    factory: Factories | None, model: nn.Module, *, held: Held | None = None
) -> tuple[optim.Optimizer, dict[str, int]]:
    """Calls the factory with the model's trainable parameters, on meta, by name. Returns it and name -> group index.

    A mapping makes one `Optimizers`, whose groups are those of all factories, in the order of their patterns. `held`:
    the dtypes in which parameters are updated, where these are not the model's.
    """
    held = {} if held is None else held
    given = {
        name: nn.Parameter(torch.empty(parameter.shape, dtype=held.get(name, parameter.dtype), device="meta"))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not given:
        raise SpecError("the model has no trainable parameter: nothing for an optimizer to do")
    optimizer: optim.Optimizer
    if isinstance(factory, Mapping):
        named = assign(factory, names_of(model.named_parameters(remove_duplicate=False)), list(given))
        optimizer = Optimizers(
            [_made(factory[p], [(n, given[n]) for n in own], f" for {p!r}") for p, own in named.items()]
        )
    else:
        optimizer = _made(optim.AdamW if factory is None else factory, list(given.items()))
    names = {id(parameter): name for name, parameter in given.items()}
    groups: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise SpecError(
                    f"optimizer group {index} holds a parameter of shape {tuple(parameter.shape)} that is not the "
                    "model's\n"
                    "build the groups from the (name, parameter) pairs the factory is called with"
                )
            groups[names[id(parameter)]] = index
    return optimizer, groups


def _made(make: Any, given: list[tuple[str, nn.Parameter]], of: str = "") -> optim.Optimizer:
    """What the factory makes of these; `of` says in errors which one it is."""
    if isinstance(make, optim.Optimizer):
        raise SpecError(
            f"the optimizer{of} is a {type(make).__name__} that is built already: give what builds it, as "
            f"functools.partial(torch.optim.{type(make).__name__}, lr=3e-4), since each rank steps on its own shards"
        )
    if not callable(make):
        raise SpecError(f"the optimizer{of} is a {type(make).__name__}, not a function of [(name, parameter), ...]")
    try:
        optimizer = make(given)
    except Exception as error:
        raise SpecError(
            f"the optimizer factory{of} raised {type(error).__name__}: {error}\n"
            "it is called with [(name, parameter), ...], as functools.partial(torch.optim.AdamW, lr=3e-4) takes it"
        ) from error
    if not isinstance(optimizer, optim.Optimizer):
        kind = type(optimizer).__name__
        raise SpecError(f"the optimizer factory{of} returned a {kind}, not a torch.optim.Optimizer")
    if type(optimizer) not in ELEMENT_WISE:
        known = ", ".join(kind.__name__ for kind in ELEMENT_WISE)
        where = of and f"{of[1:]}: "
        raise SpecError(
            f"{where}{type(optimizer).__name__} is not known to work element by element, and each rank owns slices of "
            f"parameters: it would be silently wrong\nwhole-matrix ownership does not exist yet; try one of {known}"
        )
    return optimizer


def _each(optimizer: optim.Optimizer) -> tuple[optim.Optimizer, ...]:
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)


def rebind(optimizer: optim.Optimizer, slices: Sequence[Sequence[torch.Tensor]]) -> None:
    """Gives group i `slices[i]` in place of its parameters; groups, their order and options stay. State starts anew."""
    if len(slices) != len(optimizer.param_groups):
        raise SpecError(f"{len(slices)} groups of slices for an optimizer with {len(optimizer.param_groups)} groups")
    given = iter(slices)
    for each in _each(optimizer):
        each.state.clear()
        for group in each.param_groups:
            group["params"] = list(next(given))
            group.pop("param_names", None)
            if isinstance(each, optim.Adagrad):  # the one that makes its state when it is built
                for parameter in group["params"]:
                    start = group["initial_accumulator_value"]
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")
                    each.state[parameter] = {"step": step, "sum": torch.full_like(parameter, start)}


def measure(factory: Factories | None, model: nn.Module, *, device: str = "cpu", held: Held | None = None) -> Optimizer:
    """Facts of each (group, dtype), by real steps on synthetic slices. On CUDA torch's default is `foreach`."""
    optimizer, groups = groups_of(factory, model)
    dtypes: dict[int, dict[torch.dtype, None]] = {}
    for name, parameter in model.named_parameters():
        if name in groups:
            dtypes.setdefault(groups[name], {})[(held or {}).get(name, parameter.dtype)] = None
    facts, first = [], 0
    for each in _each(optimizer):
        for index in range(len(each.param_groups)):
            options = _options(each.param_groups[index])
            if isinstance(optimizer, Optimizers):  # a group says whose it is
                options = f"{type(each).__name__}: {options}"
            for dtype in dtypes.get(first + index, ()):
                facts.append(_facts(each, index, first + index, dtype, options, device))
        first += len(each.param_groups)
    name = " + ".join(type(each).__name__ for each in _each(optimizer))
    return Optimizer(name, tuple(facts), assumed=factory is None)


def _facts(optimizer: optim.Optimizer, index: int, number: int, dtype: torch.dtype, options: str, device: str) -> Group:
    """Of its group `index`, which is `number` among the groups of all optimizers."""
    group = optimizer.param_groups[index]
    if device == "cuda" and all(group.get(key) is None for key in ("foreach", "fused")):
        group["foreach"] = True

    def run(where: str, *numels: int) -> "_Cost":
        return _two_steps(optimizer, index, [nn.Parameter(torch.zeros(n, dtype=dtype, device=where)) for n in numels])

    try:
        n, where = _ON_META, "meta"
        one, twice, two, three = run(where, n), run(where, 2 * n), run(where, n, n), run(where, n, n, n)
    except Exception:  # fused and a few others read values: a step of little slices on the CPU takes the same
        n, where = _ON_CPU, "cpu"
        try:
            one, twice, two, three = run(where, n), run(where, 2 * n), run(where, n, n), run(where, n, n, n)
        except Exception as error:
            raise SpecError(f"a step of optimizer group {number} ({options}) raised {error}") from error
    per_element = (twice.state - one.state) / n
    # A loop over slices still holds the last slice's scratch when it makes the next one's: two slices against three
    # tell that from scratch that grows with all of them. With a single slice this is an upper bound.
    every = round((three.scratch - two.scratch) / n, 2)
    return Group(
        index=number,
        dtype=dtype_name(dtype),
        options=options,
        state_per_element=per_element,
        state_per_slice=one.state - n * per_element,
        scratch_largest=round(two.scratch / n - 2 * every, 2),
        scratch_all=every,
    )


@dataclass(frozen=True)
class _Cost:
    state: int
    scratch: int


def _two_steps(optimizer: optim.Optimizer, index: int, slices: list[nn.Parameter]) -> _Cost:
    """State after the steps, and the scratch of the second one, when the state is there."""
    rebind(optimizer, [slices if i == index else [] for i in range(len(optimizer.param_groups))])
    for parameter in slices:
        parameter.grad = torch.zeros_like(parameter)
    # Some optimizers make scalars on the default device, and read them: that fails where a user who plans from meta has
    # set it to that. On every torch NAdam, RAdam, Adamax and ASGD do; on 2.11 Adam and AdamW too.
    with torch.enable_grad(), torch.device("cpu"):
        optimizer.step()
        kept = {id(storage): storage.nbytes() for storage in _state(optimizer)}
        with _Peak() as peak:
            optimizer.step()
    grown = sum(storage.nbytes() for storage in _state(optimizer)) - sum(kept.values())
    return _Cost(sum(kept.values()) + grown, peak.nbytes - grown)


def _state(optimizer: optim.Optimizer) -> Iterator[torch.UntypedStorage]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value.untyped_storage()


class _Peak(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that were alive at once of storages made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._alive = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {compat.storage_key(x) for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = compat.storage_key(tensor)
            if key not in known and key not in self._seen:
                self._seen[key] = storage.nbytes()
                self._alive += storage.nbytes()
                weakref.finalize(storage, self._gone, key)
        self.nbytes = max(self.nbytes, self._alive)
        return result

    def _gone(self, key: int) -> None:
        self._alive -= self._seen.pop(key)


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return [leaf for leaf in compat.pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _options(group: Mapping[str, Any]) -> str:
    shown = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return ", ".join(f"{key}={value}" for key, value in shown.items() if value is not None and value is not False)
