"""Clean: a captured graph becomes the one that runs: no no-ops, nothing dead, buffers written back, gradients apart.

Every function edits one `Draft` and keeps what it computes, bit for bit.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zplan.graph import compat
from zplan.graph.capture import Place
from zplan.graph.draft import Draft, aten, call_end, same_tensor, storages, tensors
from zplan.graph.ir import OpKind, Phase

# Says again at run time what shapes and dtypes the trace has checked already.
_CHECKED_ALREADY = frozenset({"aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default"})
_COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy",
        "clone",
        "contiguous",
        "lift_fresh_copy",
        "alias_copy",
        "detach_copy",
        "expand_copy",
        "permute_copy",
        "select_copy",
        "slice_copy",
        "squeeze_copy",
        "t_copy",
        "transpose_copy",
        "unsqueeze_copy",
        "view_copy",
    )
)


def clean(draft: Draft) -> None:
    join_constants(draft)
    drop_noops(draft)
    keep_outputs_apart(draft)
    keep_gradients_apart(draft)
    write_buffers(draft)
    finish(draft)
    drop_dead(draft)


def join_constants(draft: Draft) -> None:
    """get_attr c; f(c); get_attr c; g(c)  ->  get_attr c; f(c); g(c), before the first op."""
    first: dict[Any, fx.Node] = {}
    for node in [node for node in draft.graph.nodes if node.op == "get_attr"]:
        known = first.setdefault(node.target, node)
        if known is not node:
            node.replace_all_uses_with(known)
            draft.graph.erase_node(node)
    start = next((node for node in draft.graph.nodes if node.op not in ("placeholder", "get_attr")), None)
    for node in first.values():
        if start is not None:
            start.prepend(node)


def drop_noops(draft: Draft) -> None:
    """y = detach(x); z = t(t(x))  ->  x, wherever a view of a view is the very tensor it came from."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    became: dict[fx.Node, fx.Node] = {}
    for node in [node for node in draft.graph.nodes if node.op == "call_function"]:
        base = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if base is None or not is_view(node):
            continue
        chain = (*roots.get(base, ()), base)
        same = next((earlier for earlier in chain if same_tensor(node, earlier)), None)
        if same is None:
            roots[node] = chain[-8:]
        else:
            became[node] = same
            node.replace_all_uses_with(same)
            draft.graph.erase_node(node)
            draft.places.pop(node)
    draft.become(became)


def keep_outputs_apart(draft: Draft) -> None:
    """An output that is a parameter, or a buffer about to be written, is handed out as a copy."""
    buffers = [draft.buffers[name] for name in draft.written]
    held = {key for node in (*draft.parameters.values(), *buffers) for key in storages(node)}
    clones: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(draft.outputs):
        if storages(node) & held:
            if node not in clones:
                after = node if node.op == "call_function" else _first_forward_user(draft, node)
                clones[node] = draft.copy(node, after, Phase.FORWARD, OpKind.COMPUTE)
            draft.outputs[i] = clones[node]


def keep_gradients_apart(draft: Draft) -> None:
    """Each gradient has memory of its own: not an input's, an activation's, an output's or another gradient's."""
    taken = {key for node in draft.inputs.values() for key in storages(node)}
    taken |= {key for node, place in draft.places.items() if place.phase is Phase.FORWARD for key in storages(node)}
    last_forward = _last_forward(draft)
    for name, node in draft.gradients.items():
        if storages(node) & taken:
            backward = node in draft.places and draft.places[node].phase is Phase.BACKWARD
            draft.gradients[name] = draft.copy(node, node if backward else last_forward, Phase.BACKWARD, OpKind.CAST)
        taken |= storages(draft.gradients[name])


def write_buffers(draft: Draft) -> None:
    """Appends copy_(buffer, new) after the new value is there and the old one is read for the last time."""
    old = {key for name in draft.written for key in storages(draft.buffers[name])}
    for name, new in draft.written.items():
        if storages(new) & old:
            after = new if new.op == "call_function" else _first_forward_user(draft, new)
            phase = draft.places[after].phase if after in draft.places else Phase.FORWARD
            draft.written[name] = draft.copy(new, after, phase, OpKind.COMPUTE)
    order = {node: i for i, node in enumerate(draft.graph.nodes)}
    last: dict[int, fx.Node] = {}
    for node in order:
        if node.op == "call_function":
            for read in node.all_input_nodes:
                last.update(dict.fromkeys(storages(read) & old, node))
    start = [node for node in order if node.op in ("placeholder", "get_attr")][-1]
    for name, new in draft.written.items():
        buffer = draft.buffers[name]
        reads = [last[key] for key in storages(buffer) if key in last]
        after = call_end(max([new, start, *reads], key=order.__getitem__))
        while (following := after.next).target is aten.copy_.default:
            after = following
        with draft.graph.inserting_after(after):
            write = draft.graph.call_function(aten.copy_.default, (buffer, new))
        order[write] = order[after]
        reader, maker = draft.places.get(after), draft.places.get(new)
        place = maker or reader or Place(Phase.FORWARD, "", "")
        phase = Phase.BACKWARD if any(p and p.phase is Phase.BACKWARD for p in (reader, maker)) else Phase.FORWARD
        draft.places[write] = Place(phase, place.module, place.line)
        draft.kinds[write] = OpKind.WRITE


def finish(draft: Draft) -> None:
    """The graph takes its placeholders one by one and returns (loss, *aux, *gradients)."""
    draft.graph.set_codegen(fx.graph.CodeGen())
    output = next(iter(reversed(draft.graph.nodes)))
    output.args = ((*draft.outputs, *draft.gradients.values()),)


def drop_dead(draft: Draft) -> None:
    """Removes ops that nobody reads. Random ops stay (the next draw depends on them), and so do writes and asserts."""
    for node in reversed(list(draft.graph.nodes)):
        if node.op not in ("call_function", "get_attr") or node.users:
            continue
        if node.op == "call_function" and str(node.target) not in _CHECKED_ALREADY and has_effect(node):
            continue
        draft.graph.erase_node(node)
        draft.places.pop(node, None)


def is_view(node: fx.Node) -> bool:
    """Whether all of a node's results live in the memory of its first tensor."""
    sources = [source for source in node.all_input_nodes if tensors(source)]
    return bool(sources and tensors(node)) and storages(node) <= storages(sources[0])


def is_random(node: fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    return compat.dropout_of(target, node.args, node.kwargs) != 0.0


def has_effect(node: fx.Node) -> bool:
    return node.target is not operator.getitem and (
        is_random(node) or compat.is_mutable(node.target) or not tensors(node)
    )


def kind_of(node: fx.Node) -> OpKind:
    if is_random(node):
        return OpKind.RANDOM
    if is_view(node):
        return OpKind.VIEW
    packet = str(getattr(node.target, "overloadpacket", node.target))
    return OpKind.CAST if packet in _COPIES and len(node.all_input_nodes) == 1 else OpKind.COMPUTE


def getitems(node: fx.Node) -> list[fx.Node]:
    """The nodes that take one result each out of a call, by index."""
    users = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    return sorted(users, key=lambda user: int(user.args[1]))  # type: ignore[arg-type]


def _forward(draft: Draft) -> Iterator[fx.Node]:
    for node in draft.graph.nodes:
        if node in draft.places and draft.places[node].phase is Phase.FORWARD:
            yield node


def _last_forward(draft: Draft) -> fx.Node:
    return list(_forward(draft))[-1]


def _first_forward_user(draft: Draft, node: fx.Node) -> fx.Node:
    users: Sequence[fx.Node] = [user for user in _forward(draft) if node in user.all_input_nodes]
    return users[0] if users else _last_forward(draft)
