"""Small graphs made by hand, without torch: a chain of layers, and any graph at all."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from zplan.graph.ir import Graph, Group, Op, OpKind, Optimizer, Phase, Tensor, Value
from zplan.planner.buckets import make_buckets
from zplan.planner.choices import Choice
from zplan.planner.ownership import Ownership
from zplan.planner.program import Program
from zplan.units import ITEMSIZE

ADAM = Optimizer("AdamW", tuple(Group(i, d, "lr=1", 8.0, 4.0, 8.0, 0.0) for i in range(3) for d in ("fp32", "bf16")))


@dataclass
class Builder:
    """Collects values and ops; shapes are one-dimensional."""

    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def value(self, name: str, numel: int, *, dtype: str = "fp32", storage: str | None = None) -> str:
        self.values[name] = Value(name, (numel,), dtype, storage or name)
        if storage is None:
            self.storages[name] = numel * ITEMSIZE[dtype]
        return name

    def op(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        phase: Phase,
        module: str,
        kind: OpKind,
        workspace: int = 0,
    ) -> None:
        inputs = tuple(dict.fromkeys(inputs))
        self.ops.append(Op(name, f"test.{kind.value}", inputs, tuple(outputs), phase, module, kind, workspace))


@dataclass(frozen=True)
class Layer:
    """A layer y = f(x, view(w)). `tied` reads the weight of an earlier layer instead of its own."""

    numel: int = 256
    width: int = 64
    dtype: str = "fp32"
    group: int = 0
    frozen: bool = False
    random: bool = False
    cast: bool = False
    tied: int | None = None


def chain_graph(layers: Sequence[Layer], *, buffer: bool = False) -> Graph:
    """x -> layer 0 -> layer 1 -> ... -> loss, with a backward that reads the forward view of each weight."""
    build = Builder()
    x = build.value("batch.0", 64)
    tensors: list[Tensor] = []
    weight: list[str] = []
    names = [x]
    for i, layer in enumerate(layers):
        own = layer.tied is None
        w = f"layers.{i}.weight" if own else weight[layer.tied]
        if own:
            build.value(w, layer.numel, dtype=layer.dtype)
        weight.append(w)
        kind = OpKind.CAST if layer.cast else OpKind.VIEW
        build.value(f"t{i}", layer.numel, dtype=layer.dtype, storage=None if layer.cast else w)
        build.op(f"t{i}", [w], [f"t{i}"], Phase.FORWARD, f"layers.{i}", kind)
        build.value(f"y{i}", layer.width)
        run = OpKind.RANDOM if layer.random else OpKind.COMPUTE
        build.op(f"f{i}", [names[-1], f"t{i}"], [f"y{i}"], Phase.FORWARD, f"layers.{i}", run)
        names.append(f"y{i}")
    buffers: tuple[str, ...] = ()
    if buffer:
        buffers = (build.value("count", 1, dtype="int64"),)
        build.value("count_new", 1, dtype="int64")
        build.op("count_add", ["count"], ["count_new"], Phase.FORWARD, "", OpKind.COMPUTE)
        build.op("count_write", ["count_new", "count"], [], Phase.FORWARD, "", OpKind.WRITE)
    build.value("loss", 1)
    build.op("loss", [names[-1]], ["loss"], Phase.FORWARD, "", OpKind.COMPUTE)
    build.value("d", layers[-1].width)
    build.op("d", ["loss"], ["d"], Phase.BACKWARD, "", OpKind.COMPUTE)
    upstream = "d"
    grads: dict[str, list[str]] = {}
    for i in reversed(range(len(layers))):
        layer = layers[i]
        if not layers[i if layer.tied is None else layer.tied].frozen:
            build.value(f"dw{i}", layers[i if layer.tied is None else layer.tied].numel, dtype=layer.dtype)
            build.op(f"dw{i}", [upstream, names[i]], [f"dw{i}"], Phase.BACKWARD, f"layers.{i}", OpKind.COMPUTE)
            grads.setdefault(weight[i], []).append(f"dw{i}")
        build.value(f"dx{i}", layer.width)
        build.op(f"dx{i}", [upstream, f"t{i}"], [f"dx{i}"], Phase.BACKWARD, f"layers.{i}", OpKind.COMPUTE)
        upstream = f"dx{i}"
    final: dict[str, str] = {}
    for w, parts in grads.items():
        final[w] = parts[0]
        for j, other in enumerate(parts[1:]):
            total = build.value(f"sum_{w.replace('.', '_')}_{j}", build.values[w].shape[0], dtype=build.values[w].dtype)
            build.op(total, [final[w], other], [total], Phase.BACKWARD, "", OpKind.COMPUTE)
            final[w] = total
    for i, layer in enumerate(layers):
        if layer.tied is None:
            w = weight[i]
            group = None if layer.frozen else layer.group
            tensors.append(
                Tensor(w, (w,), (layer.numel,), layer.dtype, f"layers.{i}", not layer.frozen, final.get(w), group)
            )
    return Graph(
        tensors=tuple(tensors),
        values=build.values,
        storages=build.storages,
        ops=tuple(build.ops),
        outputs=("loss",),
        buffers=buffers,
        batch=(x,),
        optimizer=ADAM,
    )


@dataclass(frozen=True)
class Param:
    """A parameter of a `dag_graph`; several may lie in one `unit`."""

    numel: int = 256
    dtype: str = "fp32"
    group: int = 0
    frozen: bool = False
    unit: int = 0


@dataclass(frozen=True)
class Node:
    """One forward op of a `dag_graph`, and the backward op that belongs to it.

    `inputs` and `weights` count through the activations so far and the parameters, around the end. `through` is how
    a weight is read: itself, its view, its cast, or a cast of its view. `forward`, `backward`: whether that phase
    reads the weights. `outputs` of the forward op; the second is read by nobody unless a later node picks it.
    """

    inputs: tuple[int, ...] = (0,)
    weights: tuple[int, ...] = (0,)
    through: str = "view"
    width: int = 64
    outputs: int = 1
    forward: bool = True
    backward: bool = True
    random: bool = False
    view: bool = False
    saved: bool = True
    buffer: int | None = None
    workspace: int = 0


THROUGH = {"itself": (), "view": (OpKind.VIEW,), "cast": (OpKind.CAST,), "view cast": (OpKind.VIEW, OpKind.CAST)}


def dag_graph(params: Sequence[Param], nodes: Sequence[Node], *, buffers: int = 0, aux: bool = False) -> Graph:
    """Any graph: skips, ops with several outputs, weights used in many places, in one phase alone, or nowhere."""
    build = Builder()
    x = build.value("batch.0", 64)
    constant = build.value("constant", 3)
    names = [f"units.{param.unit}.p{i}" for i, param in enumerate(params)]
    for name, param in zip(names, params, strict=True):
        build.value(name, param.numel, dtype=param.dtype)
    held = tuple(build.value(f"buffer{i}", 2, dtype="int64") for i in range(buffers))
    read: dict[tuple[str, str], str] = {}

    def weight(index: int, node: Node, phase: Phase) -> str:
        name = names[index % len(names)]
        for kind in THROUGH[node.through]:
            step = (name, kind.value)
            if step not in read:
                base = build.values[name]
                made = f"{kind.value}{len(read)}"
                dtype = {"fp32": "bf16", "bf16": "fp32"}[base.dtype] if kind is OpKind.CAST else base.dtype
                storage = None if kind is OpKind.CAST else base.storage
                read[step] = build.value(made, base.shape[0], dtype=dtype, storage=storage)
                build.op(made, [name], [made], phase, "", kind)
            name = read[step]
        return name

    activations = [x]
    for i, node in enumerate(nodes):
        inputs = [activations[j % len(activations)] for j in node.inputs] or [x]
        module = f"units.{i}"
        if node.view:
            base = build.values[inputs[0]]
            activations.append(build.value(f"v{i}", base.shape[0], dtype=base.dtype, storage=base.storage))
            build.op(f"v{i}", inputs[:1], [f"v{i}"], Phase.FORWARD, module, OpKind.VIEW)
        if node.forward:
            inputs += [weight(j, node, Phase.FORWARD) for j in node.weights]
        if node.buffer is not None and held:
            inputs.append(held[node.buffer % buffers])
        outputs = [build.value(f"y{i}_{j}", node.width) for j in range(node.outputs)]
        kind = OpKind.RANDOM if node.random else OpKind.COMPUTE
        build.op(f"f{i}", inputs, outputs, Phase.FORWARD, module, kind, node.workspace)
        activations += outputs
        if node.buffer is not None and held:
            build.value(f"new{i}", 2, dtype="int64")
            build.op(f"new{i}", [held[node.buffer % buffers]], [f"new{i}"], Phase.FORWARD, module, OpKind.COMPUTE)
            build.op(f"write{i}", [f"new{i}", held[node.buffer % buffers]], [], Phase.FORWARD, module, OpKind.WRITE)
    build.op("loss", [activations[-1], constant], [build.value("loss", 1)], Phase.FORWARD, "", OpKind.COMPUTE)
    build.op("d", ["loss"], [build.value("d", 64)], Phase.BACKWARD, "", OpKind.COMPUTE)
    upstream = "d"
    parts: dict[int, list[str]] = {}
    for i, node in reversed(tuple(enumerate(nodes))):
        used = sorted({j % len(params) for j in node.weights})
        made = []
        for j in used:
            if not params[j].frozen:
                made.append(build.value(f"g{i}_{j}", params[j].numel, dtype=params[j].dtype))
                parts.setdefault(j, []).append(made[-1])
        inputs = [upstream]
        if node.saved:
            inputs += [activations[j % len(activations)] for j in node.inputs]
        if node.backward:
            inputs += [weight(j, node, Phase.BACKWARD) for j in node.weights]
        upstream = build.value(f"d{i}", node.width)
        build.op(f"b{i}", inputs, [*made, upstream], Phase.BACKWARD, f"units.{i}", OpKind.COMPUTE, node.workspace)
    tensors = []
    for j, param in enumerate(params):
        grad = None
        for k, piece in enumerate(parts.get(j, ())):
            if grad is None:
                grad = piece
                continue
            total = build.value(f"s{j}_{k}", param.numel, dtype=param.dtype)
            build.op(total, [grad, piece], [total], Phase.BACKWARD, "", OpKind.COMPUTE)
            grad = total
        group = None if param.frozen else param.group
        module = f"units.{param.unit}"
        tensors.append(
            Tensor(names[j], (names[j],), (param.numel,), param.dtype, module, not param.frozen, grad, group)
        )
    return Graph(
        tensors=tuple(tensors),
        values=build.values,
        storages=build.storages,
        ops=tuple(build.ops),
        outputs=("loss", *activations[1:2]) if aux else ("loss",),
        buffers=held,
        batch=(x,),
        constants=(constant,),
        optimizer=ADAM,
    )


def lines(program: Program) -> str:
    """A program as text, one instruction a line: what goldens hold."""
    caps = program.caps
    head = [f"entry {' '.join(program.entry)}", f"exit {' '.join(program.exit)}"]
    head += [f"caps {caps.gathers} gathers, {caps.reductions} reductions"]
    body = [f"{index:3d} {instruction!r}" for index, instruction in enumerate(program.instructions)]
    return "\n".join([*head, *body]) + "\n"


def with_masters(graph: Graph, *, frozen: bool = False) -> Graph:
    """The same graph with fp32 masters of its bf16 parameters; `frozen`: of those that are not trained too."""
    tensors = (
        replace(t, master="fp32") if t.dtype == "bf16" and (frozen or t.grad is not None) else t for t in graph.tensors
    )
    return replace(graph, tensors=tuple(tensors))


def own(
    graph: Graph, *, world: int, stage: int | Sequence[int] = 3, bucket_nbytes: int = 1, reduce: str = ""
) -> Ownership:
    """Ownership with one stage, or with stages dealt out to the tensors in turn."""
    stages = [stage] if isinstance(stage, int) else list(stage)
    choices = {t.name: Choice(stages[i % len(stages)], "test") for i, t in enumerate(graph.tensors)}
    buckets = make_buckets(graph, choices, world=world, bucket_nbytes=bucket_nbytes, reduce=reduce)
    return Ownership(buckets, world)
