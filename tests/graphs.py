"""Small graphs made by hand, without torch: a chain of linear layers, and whatever hypothesis draws."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zplan.graph.ir import Graph, Group, Op, OpKind, Optimizer, Phase, Tensor, Value
from zplan.planner.buckets import make_buckets
from zplan.planner.ownership import Ownership
from zplan.planner.stages import Choice

ADAM = Optimizer(
    "AdamW", tuple(Group(i, d, "lr=1", 8.0, 4.0, 8.0, 0.0) for i in range(3) for d in ("fp32", "bf16"))
)


@dataclass
class Builder:
    """Collects values and ops; shapes are one-dimensional."""

    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)

    def value(self, name: str, numel: int, *, dtype: str = "fp32", storage: str | None = None) -> str:
        self.values[name] = Value(name, (numel,), dtype, storage or name)
        if storage is None:
            self.storages[name] = numel * (2 if dtype == "bf16" else 4)
        return name

    def op(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], phase: Phase, module: str, kind: OpKind
    ) -> None:
        self.ops.append(Op(name, f"test.{kind.value}", tuple(dict.fromkeys(inputs)), tuple(outputs), phase, module, kind))


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


def own(graph: Graph, *, world: int, stage: int | Sequence[int] = 3, bucket_nbytes: int = 1) -> Ownership:
    """Ownership with one stage, or with stages dealt out to the tensors in turn."""
    stages = [stage] if isinstance(stage, int) else list(stage)
    choices = {t.name: Choice(stages[i % len(stages)], "test") for i, t in enumerate(graph.tensors)}
    return Ownership(make_buckets(graph, choices, world=world, bucket_nbytes=bucket_nbytes), world)
