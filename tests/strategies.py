"""What hypothesis draws: graphs, worlds, stages, bucket sizes, passes. The same examples in every run."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.graphs import Layer, Node, Param, chain_graph, dag_graph, lines, own, with_masters
from zplan.graph.ir import Graph
from zplan.planner.keep import keep
from zplan.planner.lower import lower
from zplan.planner.ownership import Ownership
from zplan.planner.prefetch import prefetch
from zplan.planner.program import Program
from zplan.planner.sink_waits import sink_waits

EXAMPLES = settings(
    derandomize=True, deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow], database=None
)


@dataclass(frozen=True)
class Pass:
    """A pass and its parameter; `keep` has none."""

    name: str
    value: int

    def __call__(self, program: Program) -> Program:
        match self.name:
            case "prefetch":
                return prefetch(program, distance=self.value)
            case "sink_waits":
                return sink_waits(program, depth=max(1, self.value))
        return keep(program)


NUMELS = (0, 1, 63, 64, 65, 130, 256, 1000)


@dataclass(frozen=True)
class Case:
    """A graph and how it is cut: everything that `lower` needs."""

    graph: Graph
    ownership: Ownership
    native: bool

    def __repr__(self) -> str:
        return f"world {self.ownership.world}\n{lines(self.lower())}"

    def lower(self) -> Program:
        return lower(self.graph, self.ownership, native=self.native)


@st.composite
def chains(draw: st.DrawFn, *, trained: bool = False) -> Graph:
    """A chain of layers, some of them frozen, tied, random, cast, in bf16 or in another optimizer group."""
    layers: list[Layer] = []
    for i in range(draw(st.integers(1, 5))):
        tied = draw(st.sampled_from([None, None, *range(i)])) if i else None
        while tied is not None and layers[tied].tied is not None:
            tied = layers[tied].tied
        like = Layer() if tied is None else layers[tied]
        layers.append(
            Layer(
                numel=draw(st.sampled_from(NUMELS)) if tied is None else like.numel,
                width=draw(st.sampled_from((1, 64, 100))),
                dtype=draw(st.sampled_from(("fp32", "bf16"))) if tied is None else like.dtype,
                group=draw(st.integers(0, 2)),
                frozen=not trained and draw(st.integers(0, 3)) == 0,
                random=draw(st.booleans()),
                cast=draw(st.booleans()),
                tied=tied,
            )
        )
    return chain_graph(layers, buffer=draw(st.booleans()))


@st.composite
def dags(draw: st.DrawFn) -> Graph:
    """Skips, several inputs and outputs, weights in several places, in one phase alone, or unused."""
    params = draw(
        st.lists(
            st.builds(
                Param,
                numel=st.sampled_from(NUMELS),
                dtype=st.sampled_from(("fp32", "bf16")),
                group=st.integers(0, 2),
                frozen=st.integers(0, 4).map(lambda x: x == 0),
                unit=st.integers(0, 3),
            ),
            min_size=1,
            max_size=6,
        )
    )
    some = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    nodes = draw(
        st.lists(
            st.builds(
                Node,
                inputs=some,
                weights=some,
                through=st.sampled_from(("itself", "view", "cast", "view cast")),
                width=st.sampled_from((0, 1, 64, 100)),
                outputs=st.integers(1, 2),
                forward=st.booleans(),
                backward=st.booleans(),
                random=st.booleans(),
                view=st.booleans(),
                saved=st.booleans(),
                buffer=st.sampled_from((None, None, 0, 1)),
                workspace=st.sampled_from((0, 0, 4096)),
            ),
            min_size=1,
            max_size=6,
        )
    )
    return dag_graph(params, nodes, buffers=draw(st.integers(0, 2)), aux=draw(st.booleans()))


graphs = st.one_of(chains(), dags())
worlds = st.integers(1, 7)
stages = st.integers(0, 3)
bucket_sizes = st.sampled_from((1, 600, 3000, 1 << 20))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any graph, with or without masters, stages dealt out to its tensors."""
    graph = draw(graphs)
    if draw(st.booleans()):
        graph = with_masters(graph, frozen=draw(st.booleans()))
    ownership = own(
        graph,
        world=draw(worlds),
        stage=draw(st.lists(stages, min_size=1, max_size=3)),
        bucket_nbytes=draw(bucket_sizes),
        reduce=draw(st.sampled_from(("", "fp32"))),
    )
    return Case(graph, ownership, draw(st.booleans()))


# Any passes in any order, some of them twice.
pass_lists = st.lists(
    st.builds(Pass, st.sampled_from(("keep", "prefetch", "sink_waits")), st.integers(0, 4)), max_size=5
)
