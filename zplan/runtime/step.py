"""TrainStep: a compiled training step that owns the parameters and the optimizer's state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zplan.errors import SpecError, StateError, StepError
from zplan.graph.compat import pytree
from zplan.graph.trace import Trace
from zplan.planner.memory import Memory
from zplan.planner.plan import Plan, Schedule
from zplan.planner.program import Program, Update
from zplan.planner.traffic import Traffic
from zplan.runtime import agree
from zplan.runtime.comm import Comm
from zplan.runtime.evaluation import Evaluation, make_evaluation
from zplan.runtime.failure import explain
from zplan.runtime.optim import Shards
from zplan.runtime.rewrite import inputs, rewrite
from zplan.runtime.state import State


class TrainStep:
    """Forward, backward, collectives and update of one batch, exactly as `plan` says.

    >>> # loss = step(batch)

    Ends with `close()` or as a context manager: a barrier, then the process group if zplan made it.
    """

    def __init__(
        self,
        plan: Plan,
        trace: Trace,
        state: State,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        owns_group: bool = False,
    ) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.trace = trace
        self._state = state
        self._comm = comm
        self._loss_fn = loss_fn
        self._evaluations: dict[Any, Evaluation] = {}
        self._owns_group = owns_group
        self._closed = False
        self._failed = ""
        program = plan.program
        updates = [x.buckets for x in program.instructions if isinstance(x, Update)]
        self._shards = Shards(
            optimizer, plan.ownership, state.held, rank=comm.rank, buckets=updates[0] if updates else ()
        )
        self.module = rewrite(trace, program, comm, self._shards)
        self._inputs = inputs(program)
        self._fixed = {**state.residents(), **trace.constants}
        self._evaluated: Evaluation | None = None

    def __call__(self, *batches: Any) -> Any:
        """Trains on one batch; returns this rank's loss, detached, as `loss_fn` returned it: alone or with its aux."""
        self._usable("step")
        if len(batches) != 1:
            raise SpecError(f"step takes one batch, and got {len(batches)}: several micro-batches are not there yet")
        return self._run(self.module, self.plan.program, self.trace, self._inputs, self._fixed, batches[0], grad=True)

    def evaluate(self, batch: Any) -> Any:
        """This rank's loss on `batch` without gradients, in evaluation mode, as `loss_fn` returned it; a collective.

        A program of its own at the plan's stages: parameters are gathered, nothing is kept or updated, and what the
        model does to its buffers is as in its own `eval()`. Batches of another structure or shape than before are
        traced once; ranks may hold different shapes in one call. Communicates one number besides.
        """
        self._usable("evaluate")
        found = self._evaluation(batch)
        self._evaluated = found
        fixed = {**self._state.residents(), **found.trace.constants}
        return self._run(found.module, found.program, found.trace, found.inputs, fixed, batch, grad=False)

    @property
    def evaluation(self) -> Schedule:
        """The schedule of the last evaluation."""
        if self._evaluated is None:
            raise StateError("evaluation: nothing has been evaluated yet")
        program = self._evaluated.program
        return Schedule(program, Memory(program), Traffic(program))

    def _evaluation(self, batch: Any) -> Evaluation:
        """What runs a batch like this one; where any rank has none, all ranks see that they agree on collectives."""
        key = shapes(batch)
        known = self._evaluations.get(key)
        missing = torch.tensor(float(known is None), device=self.plan.graph.device)
        if self._comm.mean(missing) == 0 and known is not None:
            return known
        loss_fn = self._loss_fn
        if loss_fn is None:
            raise StateError("evaluate: this step was made without its loss function")

        def make() -> Evaluation:
            if known is not None:
                return known
            with self._state.unguarded() as model:
                return make_evaluation(self.plan, model, loss_fn, batch, self._comm)

        made = agree.attempt(self._comm, make, Evaluation.report)
        self._evaluations[key] = made
        while len(self._evaluations) > SHAPES:
            del self._evaluations[next(iter(self._evaluations))]
        return made

    def _run(
        self,
        module: torch.fx.GraphModule,
        program: Program,
        trace: Trace,
        inputs: Sequence[str],
        fixed: Mapping[str, torch.Tensor],
        batch: Any,
        *,
        grad: bool,
    ) -> Any:
        values = {**fixed, **bind(trace, batch)}
        residents = [values[name] for name in inputs]
        del values
        # Nothing here needs a gradient, but some kernels keep what their backward reads only where one could be asked
        # for; and the casts of an autocast are in the graph already.
        with torch.set_grad_enabled(grad), torch.autocast(self.plan.graph.device, enabled=False):
            try:
                outputs = module(residents)
            except Exception as error:
                self._failed = explain(module, program, error)
                raise StepError(self._failed) from error
        return trace.unflatten(outputs)

    def residents(self) -> dict[str, torch.Tensor]:
        """What this rank holds of parameters, buffers and constants between steps, by value name."""
        return dict(self._fixed)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers under the model's own names, copied, on every rank; a collective."""
        self._usable("full_state_dict")
        return self._state.full()

    @contextmanager
    def whole_parameters(self) -> Iterator[torch.nn.Module]:
        """The user's model with its weights in place, on every rank; a collective at entry.

        What is done to parameters inside is dropped at the end. Memory: the whole model.
        """
        self._usable("whole_parameters")
        with self._state.whole() as model:
            yield model

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over ranks of a tensor of the same shape on each, summed in rank order; a collective."""
        self._usable("mean")
        return self._comm.mean(value)

    def close(self) -> None:
        """Waits for every rank, then gives up the process group if zplan made it. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._state.closed = True
        self._comm.barrier()
        if self._owns_group:
            dist.destroy_process_group()

    def __enter__(self) -> "TrainStep":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            # The others may never come to a barrier: leave without one.
            self._closed = self._state.closed = True

    def _usable(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}: this step is closed")
        if self._failed:
            raise StateError(f"{what}: an earlier step failed, and what it left may be torn: {self._failed}")
        if self._state.whole_is_out:
            raise StateError(f"{what}: whole_parameters() is open, leave it first")


# Evaluations of different shapes that are kept; the oldest goes first.
SHAPES = 8


def shapes(batch: Any) -> Any:
    """What a trace of a batch depends on: its structure, the shapes of its tensors, and everything else in it."""
    leaves, spec = pytree.tree_flatten(batch)
    facts = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
    return spec, facts


def bind(trace: Trace, batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by value name. Refuses what differs from the traced batch in structure, shape or dtype."""
    leaves, spec = pytree.tree_flatten(batch)
    if spec != trace.batch_spec:
        raise SpecError(f"the batch has another structure than the traced one: {spec} instead of {trace.batch_spec}")
    graph = trace.graph
    tensors: dict[str, torch.Tensor] = {}
    for name, leaf, traced in zip(trace.batch_names, leaves, trace.batch_leaves, strict=True):
        if not isinstance(traced, torch.Tensor):
            if leaf != traced:
                raise SpecError(f"{name} is {leaf!r}, but {traced!r} was traced into the step: compile again for it")
            continue
        if not isinstance(leaf, torch.Tensor):
            raise SpecError(f"{name} is a {type(leaf).__name__}, but a tensor was traced")
        if leaf.shape != traced.shape or leaf.dtype != traced.dtype or leaf.device.type != graph.device:
            raise SpecError(
                f"{name} is {leaf.dtype}{list(leaf.shape)} on {leaf.device.type}, but {traced.dtype}"
                f"{list(traced.shape)} on {graph.device} was traced: compile again for it, or pad the batch"
            )
        tensors[name] = leaf.detach()
    return tensors
