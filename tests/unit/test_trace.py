"""The traced graph is eager PyTorch, bit for bit; the model is left untouched; what cannot be traced is refused."""

import copy
import functools
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import zplan
from tests.bitwise import Storages, assert_aliases, assert_bitwise, inputs, snapshot
from tests.models import GPT, Block, OddMLP
from zplan.errors import TraceError
from zplan.graph import compat
from zplan.graph.ir import OpKind, Phase
from zplan.graph.trace import trace

MODELS = {
    "gpt": lambda: GPT(),
    "gpt dropout": lambda: GPT(dropout=0.1),
    "odd": lambda: OddMLP(),
    "odd eval": lambda: OddMLP().eval(),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def make(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_graph_is_eager_bit_for_bit(name: str) -> None:
    model = make(name)
    batch = model.make_batch(1)
    assert_bitwise(trace(model, model.loss_fn, batch), model, model.loss_fn, batch)


@pytest.mark.parametrize("name", MODELS)
def test_every_op_has_its_place(name: str) -> None:
    model = make(name)
    graph = trace(model, model.loss_fn, model.make_batch(0)).graph
    phases = [op.phase for op in graph.ops]
    assert phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)
    modules = dict(model.named_modules())
    for op in graph.ops:
        assert op.module in modules
        assert op.line.startswith("models.py:") or (op.line == "" and op.target == "aten.ones_like.default"), op
    for leaf in ("linear", "norm", "embed"):
        for module, instance in modules.items():
            if leaf in type(instance).__name__.lower() and "frozen" not in module and "nothing" not in module:
                assert {op.phase for op in graph.ops if op.module == module} == set(Phase), module


@pytest.mark.parametrize("name", MODELS)
def test_storages_alias_as_they_really_do(name: str) -> None:
    model = make(name)
    batch = model.make_batch(0)
    assert_aliases(trace(model, model.loss_fn, batch), model, batch)


@pytest.mark.parametrize("name", MODELS)
def test_storage_bytes_are_the_real_ones(name: str) -> None:
    model = make(name)
    batch = model.make_batch(0)
    traced = trace(model, model.loss_fn, batch)
    real = Storages(traced.module)
    with torch.no_grad():
        real.run(*inputs(copy.deepcopy(model), batch))
    nbytes = {}
    for result in real.kept:
        for x in compat.pytree.tree_leaves(result):
            if isinstance(x, Tensor):
                nbytes[compat.storage_key(x)] = x.untyped_storage().nbytes()
    for name, size in traced.graph.storages.items():
        (key,) = real.where[traced.node[name].name]
        assert nbytes[key] == size, name


@pytest.mark.parametrize(
    "loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss", "huber_loss"]
)
def test_losses_keep_the_memory_that_they_really_keep(loss: str) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = getattr(F, loss)(model(x).sigmoid(), x.sigmoid())
        return out

    graph = trace(Tiny(), loss_fn, X).graph
    real = getattr(F, loss)(X.sigmoid(), X.sigmoid()).untyped_storage().nbytes()
    assert graph.storages[graph.outputs[0]] == real == (4 if loss == "huber_loss" else 24)


def test_graph_describes_itself() -> None:
    model = make("odd")
    graph = trace(model, model.loss_fn, model.make_batch(0)).graph
    assert graph.tensor["first.weight"].aliases == ("first.weight", "tied.weight")
    assert graph.tensor["first.weight"].module == "first"
    assert graph.tensor["scale"].shape == ()
    assert graph.tensor["low.weight"].dtype == "bf16"
    assert graph.tensor["frozen.weight"].grad is None
    assert not graph.tensor["frozen.weight"].trainable
    assert graph.tensor["unused"].grad is None
    assert graph.tensor["unused"].group == 0
    assert graph.notes == (
        "unused gets no gradient",
        "each rank writes buffers of its own, and full_state_dict() gives rank 0's: calls, average, norm.running_mean, "
        "norm.running_var, norm.num_batches_tracked",
    )
    assert graph.batch == ("batch.0", "batch.1")
    assert "norm.running_mean" in graph.buffers
    assert len(graph.outputs) == 4
    assert graph.optimizer.assumed
    grads = [graph.values[t.grad].storage for t in graph.tensors if t.grad]
    assert len(grads) == len(set(grads))
    writes = [op for op in graph.ops if op.kind is OpKind.WRITE]
    assert [op.inputs[1] for op in writes] == [
        "calls",
        "average",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    assert {(op.phase, op.outputs) for op in writes} == {(Phase.FORWARD, ())}
    assert graph.derived["t"] == {"first.weight"}


@pytest.mark.parametrize("permute", [(1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_dropout_of_permuted_tensors(permute: tuple[int, ...]) -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        return F.dropout(model.linear(x).unflatten(0, (2, -1)).permute(permute), 0.4)

    model = Tiny(body)
    x = torch.arange(36.0).reshape(12, 3)
    traced = trace(model, mean_loss, x)
    assert_bitwise(traced, model, mean_loss, x)
    assert_aliases(traced, model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 1.0])
def test_dropout_is_that_of_eager(dtype: torch.dtype, p: float) -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        return F.dropout(model.linear(x), p)

    model, x = Tiny(body).to(dtype), torch.arange(36.0).reshape(12, 3).to(dtype)
    kernels = dict(torch.ops.aten.dropout.default.py_kernels)
    traced = trace(model, mean_loss, x)
    assert torch.ops.aten.dropout.default.py_kernels == kernels
    assert_bitwise(traced, model, mean_loss, x)
    assert_aliases(traced, model, x)
    random = "aten.native_dropout.default" if dtype is torch.float32 else "aten.bernoulli.p"
    assert [op.target for op in traced.graph.ops if op.kind is OpKind.RANDOM] == [random] * (0 < p < 1)


def test_autocast_casts_a_shared_weight_once() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(model.linear(x))

    model = Tiny(body)
    traced = trace(model, mean_loss, X)
    assert_bitwise(traced, model, mean_loss, X)
    casts = [op for op in traced.graph.ops if op.kind is OpKind.CAST and op.inputs == ("linear.weight",)]
    assert len(casts) == 1
    with torch.autocast("cpu", torch.bfloat16):
        outer = trace(Tiny(), mean_loss, X)
    assert [op for op in outer.graph.ops if op.kind is OpKind.CAST and op.inputs == ("linear.weight",)]


def test_random_ops_are_known() -> None:
    model = GPT(dropout=0.1)
    graph = trace(model, model.loss_fn, model.make_batch(0)).graph
    assert [op.target for op in graph.ops if op.kind is OpKind.RANDOM] == ["aten.native_dropout.default"] * 4
    without = GPT()
    graph = trace(without, without.loss_fn, without.make_batch(0)).graph
    assert OpKind.RANDOM not in {op.kind for op in graph.ops}


@pytest.mark.parametrize("name", MODELS)
def test_two_traces_have_one_hash(name: str) -> None:
    model = make(name)
    first = trace(model, model.loss_fn, model.make_batch(0)).graph
    other = make(name)
    second = trace(other, other.loss_fn, other.make_batch(5)).graph
    assert first.hash == second.hash
    assert first.ops == second.ops


def test_meta_model_traces_as_a_real_one() -> None:
    with torch.device("meta"):
        model = GPT()
    real = GPT()
    assert (
        trace(model, model.loss_fn, real.make_batch(0)).graph.hash
        == trace(real, real.loss_fn, real.make_batch(0)).graph.hash
    )


# The user's model is as it was


@pytest.mark.parametrize("name", MODELS)
def test_model_is_untouched(name: str) -> None:
    model = make(name)
    batch = model.make_batch(0)
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before = snapshot(model)
    trace(model, model.loss_fn, batch)
    assert snapshot(model) == before
    assert not torch.compiler.is_compiling()


def test_model_is_untouched_by_an_error() -> None:
    model = make("odd")
    before = snapshot(model)

    def broken(model: OddMLP, batch: list[Tensor]) -> Tensor:
        model.train(False)
        model.extra = model(batch[0])
        model.register_buffer("another", torch.ones(3))
        torch.manual_seed(77)
        return torch.ones(3) @ torch.ones(4)

    apply = CheckpointFunction.apply
    with pytest.raises(TraceError, match="the forward raised RuntimeError"):
        trace(model, broken, model.make_batch(0))
    assert snapshot(model) == before
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert CheckpointFunction.apply == apply


# Corners


class Tiny(nn.Module):
    """y = body(self, x) over one linear; for a case in a line."""

    def __init__(self, body: Callable[["Tiny", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.body is None else self.body(self, x)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


X = torch.arange(6.0).reshape(2, 3) / 7


def test_gradients_have_memory_of_their_own() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(2, 3) * i) for i in (1, 2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.a + self.b + x).sum() + (self.c * x).sum()

    model = Sum()
    traced = trace(model, lambda m, x: m(x), X)
    storages = [traced.graph.values[str(t.grad)].storage for t in traced.graph.tensors]
    assert len(set(storages)) == 3
    assert not set(storages) & {"batch", "a", "b", "c"}
    assert_bitwise(traced, model, lambda m, x: m(x), X)
    assert_aliases(traced, model, X)


def test_batch_of_one_tensor_is_named_batch() -> None:
    assert trace(Tiny(), mean_loss, X).graph.batch == ("batch",)


def test_names_of_parameters_win_over_names_of_nodes() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mul = nn.Parameter(torch.ones(3))
            self.register_buffer("sum_1", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.mul * x * self.sum_1).sum()

    model = Named()
    traced = trace(model, lambda m, x: m(x), X)
    assert len(set(traced.node.values())) == len(traced.node) == len(traced.graph.values)
    assert traced.node["mul"].op == traced.node["sum_1"].op == "placeholder"
    assert_bitwise(traced, model, lambda m, x: m(x), X)


class Buffers(nn.Module):
    """Buffers that swap, alias, tie, and are read before and after they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.full((3,), 2.0))
        self.register_buffer("c", torch.zeros(2, 3))
        self.register_buffer("tied_1", torch.zeros(3))
        self.register_buffer("tied_2", self.tied_1)
        self.register_buffer("seen", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        old = self.a
        self.a, self.b = self.b, self.a
        self.c[0] += 1
        self.c[:, 1].mul_(3)
        self.tied_1.add_(self.tied_2 + 1)
        self.seen = x
        y = self.linear(x * self.a + self.b * self.c + self.tied_2)
        return y.square().mean() * old.sum(), [old, self.a, self.c[0], self.linear.weight]


def test_buffers_are_written_as_eager_writes_them() -> None:
    model = Buffers()
    traced = trace(model, lambda m, x: m(x), X)
    assert_bitwise(traced, model, lambda m, x: m(x), X)
    written = [op.inputs[1] for op in traced.graph.ops if op.kind is OpKind.WRITE]
    assert sorted(written) == ["a", "b", "c", "seen", "tied_1"]


def test_constants_are_reported() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])

    class Masked(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.mask.view(1, 3) + torch.tensor([0.5])

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * weights * weights).mean()

    model = Masked()
    traced = trace(model, loss_fn, X)
    assert traced.graph.constants == ("constant.0", "constant.1", "constant.2")
    assert traced.constants["constant.2"] is weights
    assert traced.graph.notes == (
        "constant.0 is mask, closed over: it stays as it is now",
        "constant.2 is weights, closed over: it stays as it is now",
    )
    assert_bitwise(traced, model, loss_fn, X)
    assert_aliases(traced, model, X)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_called_straight_through(reentrant: bool) -> None:
    class Checkpointed(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model = Checkpointed(dropout=0.2)
    batch = model.make_batch(0)
    traced = trace(model, model.loss_fn, batch)
    assert "recomputed: blocks.0, blocks.1" in traced.graph.notes[-1]
    assert traced.graph.regions == ("blocks.0", "blocks.1")
    assert_bitwise(traced, model, model.loss_fn, batch)


@pytest.mark.skipif(
    inspect.signature(checkpoint).parameters["function"].default is inspect.Parameter.empty,
    reason="the `checkpoint` of this torch (before 2.14) is no decorator",
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_method_decorated_with_checkpoint_is_called_straight_through(reentrant: bool) -> None:
    class Decorated(Block):
        forward = checkpoint(use_reentrant=reentrant)(Block.forward)

    torch.manual_seed(0)
    model = GPT(dropout=0.2)
    for block in model.blocks:
        block.__class__ = Decorated
    batch = model.make_batch(0)
    traced = trace(model, model.loss_fn, batch)
    assert traced.graph.regions == ("blocks.0", "blocks.1")
    assert_bitwise(traced, model, model.loss_fn, batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_is_a_region_of_the_module_that_calls_it(reentrant: bool) -> None:
    class Checkpointed(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(functools.partial(block.forward), x, use_reentrant=reentrant)
            return checkpoint(lambda x: self.head(self.norm(x)), x, use_reentrant=reentrant)

    def loss_fn(model: GPT, batch: Any) -> Tensor:
        return checkpoint(lambda: GPT.loss_fn(model, batch), use_reentrant=False)

    torch.manual_seed(0)
    model = Checkpointed(dropout=0.2)
    batch = model.make_batch(0)
    traced = trace(model, model.loss_fn, batch)
    assert traced.graph.regions == ("blocks.0", "blocks.1", "")
    assert_bitwise(traced, model, model.loss_fn, batch)
    assert trace(model, loss_fn, batch).graph.regions[0] == ""
    assert trace(GPT(), GPT.loss_fn, batch).graph.regions == ()


class Counting(nn.Module):
    """Leaves something of every kind on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.mode, self.rate = 0, None, (1, 2)
        self.seen: list[Any] = [X]
        self.same, self._ready, self._calls = 3, False, 0
        self.last = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._calls += 1
        self.mode = 2.5
        self.rate = (3, 4)
        self.seen.append(x)
        self.same = int("3")
        self._ready = self._cache = True
        self.aux = x.mean()
        self.last = x
        if not hasattr(self, "extra"):
            self.register_buffer("extra", torch.ones(3))
        self.register_forward_hook(lambda *_: None)
        out: Tensor = self.linear(x)
        return out


def test_what_the_forward_leaves_on_modules_is_put_back_and_told() -> None:
    model = nn.Sequential(Counting(), Counting())
    before = snapshot(model)
    graph = trace(model, mean_loss, X).graph
    assert snapshot(model) == before
    as_it_was = "every step sees it as it was, the change is dropped"
    told = (
        "0.extra is set by the forward: the change is dropped",
        f"0.seen is changed by the forward: {as_it_was}",
        "0.calls is changed by the forward (0 -> 1): every step sees 0, the change is dropped",
        "0.mode is changed by the forward (None -> 2.5): every step sees None, the change is dropped",
        f"0.rate is changed by the forward: {as_it_was}",
        "0._calls is changed by the forward (0 -> 1): every step sees 0, the change is dropped",
        f"0.last is changed by the forward: {as_it_was}",
        "0.aux is set by the forward: the change is dropped",
    )
    assert graph.notes == (*told, *(note.replace("0.", "1.", 1) for note in told))


def test_notes_on_many_equal_blocks_print_as_one_line() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        model.calls += 1
        return model.linear(x)

    model = nn.Sequential(*(Tiny(body) for _ in range(12)))
    for block in model:
        block.calls = 0
    printed = str(zplan.plan(model, mean_loss, X, stage=3)).splitlines()
    told = "calls is changed by the forward (0 -> 1): every step sees 0, the change is dropped"
    assert [line for line in printed if line.startswith("note:")] == [f"note: 0..11.{told} x12"]


def test_annotated_stages_are_found() -> None:
    model = GPT()
    model.blocks[1]._zplan_stage = 3
    assert trace(model, model.loss_fn, model.make_batch(0)).graph.stages == {"blocks.1": 3}


def test_parameters_outside_every_group() -> None:
    model = GPT()

    def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [{"params": [p for n, p in named if "norm" in n]}, {"params": [p for n, p in named if "up" in n]}]
        )

    graph = trace(model, model.loss_fn, model.make_batch(0), optimizer=factory).graph
    assert graph.tensor["norm.weight"].group == 0
    assert graph.tensor["blocks.0.up.bias"].group == 1
    assert graph.tensor["embed.weight"].group is None
    assert graph.tensor["embed.weight"].grad is None
    assert "embed.weight is in no optimizer group: it gets no gradient and never changes" in graph.notes


def test_plain_leaves_are_kept() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Any:
        return mean_loss(model, batch["x"]) * batch["weight"], {"n": 3, "none": None, "name": "a"}

    model = Tiny()
    traced = trace(model, loss_fn, {"x": X, "weight": 2.0})
    assert traced.batch_names == ("batch.x", "batch.weight")
    assert traced.batch_leaves[1] == 2.0
    assert traced.batch_leaves[0].shape == X.shape
    assert traced.unflatten([torch.ones(())])[1] == {"n": 3, "none": None, "name": "a"}
    assert_bitwise(traced, model, loss_fn, {"x": X, "weight": 2.0})


def test_frozen_teacher_outside_is_a_constant() -> None:
    teacher = nn.Linear(3, 3)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return F.mse_loss(model(x), target)

    model = Tiny()
    traced = trace(model, loss_fn, X)
    assert traced.graph.notes[0] == "constant.0 is teacher.weight, closed over: it stays as it is now"
    assert_bitwise(traced, model, loss_fn, X)


def test_caller_under_no_grad() -> None:
    with torch.no_grad():
        assert trace(Tiny(), mean_loss, X).graph.tensors[0].grad is not None


# Refused


def refused(match: str, model: Any, loss_fn: Any = mean_loss, batch: Any = X, **options: Any) -> None:
    with pytest.raises(TraceError, match=match):
        trace(model, loss_fn, batch, **options)


def here(body: str) -> str:
    return rf"--> test_trace.py:\d+: {body}"


def test_item_is_refused() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            x = x + 1
        return model.linear(x)

    refused(here(r"if x.sum\(\).item\(\) > 0:"), Tiny(body))
    refused("reads a value out of a tensor\ntry: torch.where in place of a branch", Tiny(body))


def test_branch_on_a_value_is_refused() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        return model.linear(x) if x.sum() > 0 else x

    refused("values that exist only when a step runs", Tiny(body))


def test_nonzero_is_refused() -> None:
    refused(
        r"aten.nonzero.default makes a tensor whose shape depends on values",
        Tiny(lambda m, x: m.linear(x)[x[:, 0] > 0]),
    )


def test_experts_chosen_by_values_are_refused() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        chosen = model.linear(x).argmax(-1)
        out = x
        for expert in range(3):
            mask = chosen == expert
            if mask.any():
                out = out + mask[:, None] * model.linear(x)
        return out

    refused(here(r"if mask.any\(\):"), Tiny(body))
    refused("reads a value out of a tensor\ntry: torch.where in place of a branch", Tiny(body))


def test_loops_as_long_as_a_value_are_refused() -> None:
    def while_it_is_large(model: Tiny, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = model.linear(x)
        return x

    def as_often_as_it_says(model: Tiny, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 1] * 7)):
            x = model.linear(x)
        return x

    def over_its_list(model: Tiny, x: Tensor) -> Tensor:
        return model.linear(x) * sum(x[0].tolist())

    refused(here(r"while x.norm\(\) > 1:"), Tiny(while_it_is_large))
    refused(here(r"for _ in range\(int\(x\[0, 1\] \* 7\)\):"), Tiny(as_often_as_it_says))
    refused(here(r"return model.linear\(x\) \* sum\(x\[0\].tolist\(\)\)"), Tiny(over_its_list))


def test_boolean_masks_that_index_are_refused() -> None:
    def picked(model: Tiny, x: Tensor) -> Tensor:
        y = model.linear(x)
        return y[y > 0]

    def filled(model: Tiny, x: Tensor) -> Tensor:
        y = model.linear(x)
        y[y > 0] = 1.0
        return y

    help = "\ntry: torch.where\\(mask, x, 0\\), or weights times a mask"
    refused(
        here(r"return y\[y > 0\]") + f"\n.*nonzero.* makes a tensor whose shape depends on values{help}", Tiny(picked)
    )
    refused(r"aten.masked_select", Tiny(lambda m, x: m.linear(x).masked_select(x > 0)))
    refused(r"_unique2?", Tiny(lambda m, x: m.linear(x) * x.unique().sum()))
    model = Tiny(filled)
    assert_bitwise(trace(model, mean_loss, X), model, mean_loss, X)


def test_error_of_the_model_keeps_its_words_and_line() -> None:
    def body(model: Tiny, x: Tensor) -> Tensor:
        raise ValueError("x is too small")

    refused("the forward raised ValueError: x is too small", Tiny(body))
    refused(here(r'raise ValueError\("x is too small"\)'), Tiny(body))
    refused(here(r"refused\("), Tiny(lambda m, x: m.linear(x.T)))


def test_error_in_backward_is_told() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("no way back")

    refused("the backward raised ValueError: no way back", Tiny(lambda m, x: Broken.apply(m.linear(x))))


def test_own_backward_is_refused() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = mean_loss(model, x)
        loss.backward()
        return loss

    refused("leave backward\\(\\) to zplan", Tiny(), loss_fn)


def test_loss_must_be_a_loss() -> None:
    refused(r"a loss of shape \(2, 3\)\ntry: its mean\(\) or sum\(\)", Tiny(), lambda m, x: m(x))
    refused("loss_fn returned a float", Tiny(), lambda m, x: 1.0)
    refused("loss_fn returned a loss of torch.int64", Tiny(), lambda m, x: m(x).argmax())
    refused("depends on no trainable parameter", Tiny(), lambda m, x: mean_loss(m, x).detach())
    refused("depends on no trainable parameter", Tiny(), lambda m, x: x.mean())
    refused("loss_fn is a int", Tiny(), 3)
    refused("loss_fn returned output.1.a, a object: neither", Tiny(), lambda m, x: (mean_loss(m, x), {"a": object()}))


def test_parameter_outside_the_model_is_refused() -> None:
    outside = nn.Linear(3, 3)
    refused(r"a parameter outside the model: outside.weight, shape \(3, 3\)", Tiny(), lambda m, x: outside(m(x)).mean())


def test_no_parameter_is_refused() -> None:
    from zplan.errors import SpecError

    model = Tiny()
    model.requires_grad_(False)
    with pytest.raises(SpecError, match="no trainable parameter"):
        trace(model, mean_loss, X)


def test_unreached_groups_are_refused() -> None:
    class Two(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(1, 1)

    def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in named if "other" in n])

    refused("the loss reaches no parameter of any optimizer group", Two(), optimizer=factory)


def test_kinds_of_modules_are_refused() -> None:
    refused("model is a int, not a torch.nn.Module", 3)
    refused(
        r"0.weight gets a sparse gradient.*\ntry: Embedding\(..., sparse=False\)",
        nn.Sequential(nn.Embedding(3, 3, sparse=True)),
    )
    refused("parameter 0.weight has no shape yet", nn.Sequential(nn.LazyLinear(3)))
    hooked = Tiny()
    hooked.linear.register_full_backward_hook(lambda *_: None)
    refused(r"linear \(Linear\) has backward hooks", hooked)
    tensor = Tiny()
    tensor.linear.weight.register_hook(lambda grad: grad * 2)
    refused("parameter linear.weight has gradient hooks", tensor)
    refused("the model is wrapped in DataParallel", nn.DataParallel(Tiny()))
    refused("is compiled already", torch.compile(Tiny(), backend="eager"))


def test_dropout_inside_recurrent_modules_is_refused() -> None:
    model = nn.LSTM(3, 3, 2, dropout=0.1)
    refused(r"the model \(LSTM\) has dropout between its layers, which torch loses", model)
    assert trace(model.eval(), lambda m, x: m(x)[0].mean(), X).graph.ops
    assert trace(nn.LSTM(3, 3, 2), lambda m, x: m(x)[0].mean(), X).graph.ops


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm_is_refused() -> None:
    refused("0.weight is set by torch.nn.utils.weight_norm.*\ntry: torch.nn.utils.parametrizations.weight_norm",
            nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3))))  # fmt: skip
    refused("0.weight is set by torch.nn.utils.spectral_norm", nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3))))
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    assert_bitwise(trace(model, mean_loss, X), model, mean_loss, X)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kinds_of_parameters_are_refused() -> None:
    class Strange(Tensor):
        pass

    model = Tiny()
    model.linear.weight = nn.Parameter(torch.ones(3, 3).as_subclass(Strange))
    refused("parameter linear.weight is a .*Strange, not a plain tensor", model)
    model = Tiny()
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    refused("parameter phase is trainable and torch.complex64", model)
    model = Tiny()
    model.part = nn.Parameter(model.linear.weight.data[1])
    refused("parameters linear.weight and part share memory", model)
    model = Tiny()
    model.register_buffer("quantised", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    refused("buffer quantised is quantised", model)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Tiny()
        mesh = dist.init_device_mesh("cpu", (1,))
        model.linear.weight = nn.Parameter(distribute_tensor(model.linear.weight.detach(), mesh, [Shard(0)]))
        refused(r"parameter linear.weight is a .*DTensor, not a plain tensor\ntry: full_tensor\(\)", model)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_parameters_are_refused() -> None:
    model = Tiny()
    weight = torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8)
    model.linear.weight = nn.Parameter(weight, requires_grad=False)
    refused(r"parameter linear.weight is quantised \(torch.qint8\)\ntry: plan the model before", model)
    part = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})
    refused(r"1.0 \(Linear\) is quantised\ntry: plan the model before it is", nn.Sequential(nn.Linear(3, 3), part))


def test_sparse_gradient_of_a_function_is_refused() -> None:
    model = Tiny()
    refused(
        "linear.weight gets a sparse gradient",
        model,
        lambda m, x: F.embedding(x.long(), m.linear.weight, sparse=True).mean(),
    )


def test_writes_that_would_be_lost_are_refused() -> None:
    def into_weight(model: Tiny, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.linear.weight.mul_(0.9)
        return model.linear(x)

    refused("the forward writes into parameter linear.weight", Tiny(into_weight))
    count = torch.zeros(3)

    def into_closure(model: Tiny, x: Tensor) -> Tensor:
        count.add_(1)
        return model.linear(x) * count

    refused(
        "the step writes into count, which is neither a parameter nor a buffer",
        Tiny(into_closure),
        lambda m, x: m(x + 0 * count).mean(),
    )

    def replaced(model: Tiny, x: Tensor) -> Tensor:
        model.count = model.count + 1
        return model.linear(x) * model.count

    model = Tiny(replaced)
    model.count = torch.zeros(3)
    refused("the forward reads count and replaces it, but it is no buffer", model)


def test_buffers_that_change_shape_are_refused() -> None:
    def grow(model: Tiny, x: Tensor) -> Tensor:
        model.cache = torch.cat([model.cache, x])
        return model.linear(x)

    model = Tiny(grow)
    model.register_buffer("cache", torch.zeros(1, 3))
    refused(r"the forward makes cache torch.float32\[3, 3\] where it was torch.float32\[1, 3\]", model)


def test_tied_buffers_that_come_apart_are_refused() -> None:
    def apart(model: Tiny, x: Tensor) -> Tensor:
        model.a = model.a + 1
        return model.linear(x)

    model = Tiny(apart)
    model.register_buffer("a", torch.zeros(3))
    model.register_buffer("b", model.a)
    refused("re-assigns one of two tied buffers: a and b", model)


def test_draws_outside_torch_are_refused() -> None:
    state = random.getstate()
    refused("draws from Python's `random`", Tiny(lambda m, x: m.linear(x) * random.random()))
    assert random.getstate() == state


def test_strange_batches_are_refused() -> None:
    class Batch:
        x = X

    refused(
        "the batch holds batch.0, a .*Batch: neither a tensor nor a plain value",
        Tiny(),
        lambda m, b: mean_loss(m, b[0].x),
        [Batch()],
    )

    refused(r"batch.0 is sparse \(torch.sparse_coo\)", Tiny(), mean_loss, [X.to_sparse()])


def test_writes_into_the_batch_stay_inside() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["y"][0] = 0.0
        return F.mse_loss(model(batch["x"]), batch["y"])

    model = Tiny()
    traced = trace(model, loss_fn, {"x": X, "y": X.clone()})
    assert traced.graph.notes == ("the step writes into batch.y; the write stays inside the step",)
    assert_bitwise(traced, model, loss_fn, {"x": X, "y": X.clone()})
    refused("writes into batch.y, which shares its memory with batch.x", model, loss_fn, {"x": X, "y": X})


def test_partial_loss_functions_trace() -> None:
    def scaled(model: nn.Module, x: Tensor, *, by: float) -> Tensor:
        return mean_loss(model, x) * by

    model = Tiny()
    loss_fn = functools.partial(scaled, by=3.0)
    assert_bitwise(trace(model, loss_fn, X), model, loss_fn, X)
