"""TrainStep: a compiled training step that owns the parameters and the optimizer's state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zplan.errors import SpecError, StateError, StepError
from zplan.graph.compat import pytree
from zplan.graph.trace import Trace
from zplan.planner.auto import accept
from zplan.planner.plan import Plan, Schedule, program_of
from zplan.planner.program import Position, Program, Update
from zplan.progress import Progress, quiet
from zplan.runtime import agree
from zplan.runtime.comm import Comm
from zplan.runtime.evaluation import Evaluation, make_evaluation
from zplan.runtime.failure import explain
from zplan.runtime.optim import NO_CLIPPING, Clipping, LossScale, Shards
from zplan.runtime.rewrite import Ready, carried, inputs, rewrite
from zplan.runtime.state import State

if TYPE_CHECKING:
    from zplan.runtime.background import Saving
    from zplan.runtime.checkpoint import Training


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
        clipping: Clipping = NO_CLIPPING,
        owns_group: bool = False,
    ) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.trace = trace
        self._state = state
        self._comm = comm
        self._loss_fn = loss_fn
        self._owns_group = owns_group
        self._closed = False
        self._failed = ""
        updates = [x.buckets for x in plan.program.instructions if isinstance(x, Update)]
        scaling = plan.spec.precision
        self._loss_scale = (
            None
            if trace.loss_scale is None or scaling is None
            else LossScale(trace.loss_scale, start=scaling.loss_scale, interval=scaling.growth_interval)
        )
        self._shards = Shards(
            optimizer,
            plan.ownership,
            state.held,
            comm=comm,
            buckets=updates[0] if updates else (),
            clipping=clipping,
            loss_scale=self._loss_scale,
        )
        self._fixed = {**state.residents(), **trace.constants}
        self._ready: dict[Position, Ready] = {}
        for program in plan.programs:
            self._ready[program.position] = self._prepare(program)
        # Micro-batches that wait for their update, and what they left.
        self._pending = 0
        self._carried: dict[str, torch.Tensor] = {}
        self._evaluations: dict[Any, Evaluation] = {}
        self._evaluated: Evaluation | None = None
        self._steps = 0
        self._saving: Saving | None = None

    def __call__(self, *batches: Any) -> Any:
        """Trains on a batch, or on several micro-batches with one update; returns this rank's loss, detached.

        As `loss_fn` returned it: alone or with its aux; of several, the mean loss, and a list of the aux of each.
        Gradients are averaged over ranks and micro-batches, those of `accumulate` before included. A list or a dict is
        one batch.
        """
        self._usable("step")
        if not batches:
            raise SpecError("step takes a batch, or several micro-batches, and got none")
        # All of them are looked at before the first one runs.
        *before, last = [bind(self.trace, batch) for batch in batches]
        results = [self._accumulate(batch) for batch in before]
        ready = self._at(Position.LAST if self._pending else Position.ONLY)
        results.append(self._train(ready, last))
        self._pending = 0
        self._steps += 1
        return results[0] if len(results) == 1 else _together(results)

    def accumulate(self, batch: Any) -> Any:
        """A micro-batch without the update; the next `step(batch)` finishes. Returns its loss as `step` does.

        Between the two, parameters at stages 1 and 2 stay whole, and gradients are added up in fp32.
        """
        self._usable("accumulate")
        return self._accumulate(bind(self.trace, batch))

    def _accumulate(self, batch: dict[str, torch.Tensor]) -> Any:
        ready = self._at(Position.MIDDLE if self._pending else Position.FIRST)
        result = self._train(ready, batch)
        self._pending += 1
        return result

    def _at(self, position: Position) -> Ready:
        """What runs a micro-batch at a position; one that was not planned for is lowered now, within the budget."""
        if position not in self._ready:
            plan = self.plan
            program = program_of(plan.graph, plan.ownership, plan.spec, position)
            accept(replace(plan, programs=(program,)))
            self._ready[position] = self._prepare(program)
        return self._ready[position]

    def _prepare(self, program: Program) -> Ready:
        module = rewrite(self.trace, program, self._comm, self._shards, lambda: self._pending + 1)
        return Ready(program, module, inputs(program), carried(program))

    def _train(self, ready: Ready, batch: dict[str, torch.Tensor]) -> Any:
        values = {**self._fixed, **self._carried, **batch}
        self._carried = {}
        return self._run(ready, self.trace, values, grad=True)

    @property
    def module(self) -> torch.fx.GraphModule:
        """What runs the micro-batch with the update."""
        return self._ready[self.plan.program.position].module

    def evaluate(self, batch: Any) -> Any:
        """This rank's loss on `batch` without gradients, in evaluation mode, as `loss_fn` returned it; a collective.

        A program of its own at the plan's stages: parameters are gathered, nothing is kept or updated, and what the
        model does to its buffers is as in its own `eval()`. Batches of another structure or shape than before are
        traced once; ranks may hold different shapes in one call. Communicates one number besides.
        """
        self._whole_step("evaluate")
        found = self._evaluation(batch)
        self._evaluated = found
        values = {**self._state.residents(), **found.trace.constants, **bind(found.trace, batch)}
        return self._run(found.ready, found.trace, values, grad=False)

    @property
    def evaluation(self) -> Schedule:
        """The schedule of the last evaluation."""
        if self._evaluated is None:
            raise StateError("evaluation: nothing has been evaluated yet")
        return Schedule((self._evaluated.ready.program,))

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

    def _run(self, ready: Ready, trace: Trace, values: dict[str, torch.Tensor], *, grad: bool) -> Any:
        """`values` is emptied, so that nothing here holds what the program frees."""
        residents = [values[name] for name in ready.inputs]
        values.clear()
        # Nothing here needs a gradient, but some kernels keep what their backward reads only where one could be asked
        # for; and the casts of an autocast are in the graph already.
        with torch.set_grad_enabled(grad), torch.autocast(self.plan.graph.device, enabled=False):
            try:
                outputs = ready.module(residents)
            except Exception as error:
                self._failed = explain(ready.module, ready.program, error)
                raise StepError(self._failed) from error
        own = len(outputs) - len(ready.carried)
        self._carried = dict(zip(ready.carried, outputs[own:], strict=True))
        return trace.unflatten(outputs[:own])

    @property
    def grad_norm(self) -> torch.Tensor:
        """The norm of all gradients of the last step before they were clipped, fp64, the same on every rank."""
        if self._shards.norm is None:
            measures = self._shards.clipping or self._loss_scale
            asked = "no step has been made yet" if measures else "it is measured where clip= is given"
            raise StateError(f"grad_norm: {asked}")
        return self._shards.norm

    @property
    def skipped(self) -> bool:
        """Whether the last step updated nothing, because its gradients were not finite (`skip_nonfinite=True`).

        In fp16 such steps are always skipped, and `loss_scale` is halved.
        """
        return self._shards.skipped

    @property
    def loss_scale(self) -> float:
        """What the loss of the next step is multiplied by before its backward: in fp16, 1 else. Gradients are not."""
        return 1.0 if self._loss_scale is None else float(self._loss_scale.value)

    @property
    def steps(self) -> int:
        """Optimizer steps done, skipped ones and those before a `load` included."""
        return self._steps

    def residents(self) -> dict[str, torch.Tensor]:
        """What this rank holds of parameters, buffers and constants between steps, by value name."""
        return dict(self._fixed)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers under the model's own names, copied, on every rank; a collective."""
        self._whole_step("full_state_dict")
        return self._state.full()

    @contextmanager
    def whole_parameters(self) -> Iterator[torch.nn.Module]:
        """The user's model with its weights in place, on every rank; a collective at entry.

        What is done to parameters inside is dropped at the end. Memory: the whole model.
        """
        self._whole_step("whole_parameters")
        with self._state.whole() as model:
            yield model

    def save(
        self,
        path: str | Path,
        *,
        scheduler: Any = None,
        extra: Any = None,
        blocking: bool = True,
        progress: Progress = quiet,
    ) -> "Saving | None":
        """Writes all that training needs to go on, into the folder `path`; a collective.

        Parameters, the optimizer's states and group options, `scheduler` (one or several), rank 0's buffers, the
        number of steps, each rank's random state, and `extra`: numbers, strings, tensors, and dicts, lists and tuples
        of them, the same on every rank. Each rank writes its own share. What `path` held before stays until the new
        save is whole; then it is removed. `path` is on a file system that every rank sees. Raises `StateError` where
        it cannot be written.

        With `blocking=False` a copy is made and written while steps go on: returns a handle whose `wait()`, on every
        rank, waits for the end and raises what went wrong, as do the next `save`, `load` and `close`. Memory: the copy,
        on the host.
        """
        self._whole_step("save")
        self._settle()
        from zplan.runtime import checkpoint

        options = {"scheduler": scheduler, "extra": extra, "blocking": blocking, "progress": progress}
        self._saving = checkpoint.save(self._training(), path, **options)
        return self._saving

    def load(self, path: str | Path, *, scheduler: Any = None, progress: Progress = quiet) -> Any:
        """Takes over what `save` wrote at `path`, at any number of ranks, stages and bucket sizes; returns `extra`.

        A collective. First it looks whether the save is of this model and optimizer and whether its files are what was
        written: `SpecError` says what is not, and then nothing was changed. Options of the optimizer's groups become
        the saved ones, as with torch's `load_state_dict`. Buffers become the saved ones on every rank. A rank that was
        not there when it was saved gets a random state of its own, the same in every load. `scheduler`: as many as were
        saved, of the same classes; () leaves them out.
        """
        self._whole_step("load")
        self._settle()
        from zplan.runtime import checkpoint

        loading = checkpoint.load(self._training(), path, scheduler=scheduler, progress=progress)
        try:
            extra = loading.finish()
        except BaseException as error:
            self._failed = f"load of {path} broke off: {error}"
            raise
        self._steps = loading.manifest.contents.steps
        return extra

    def _training(self) -> "Training":
        from zplan.runtime.checkpoint import Training

        return Training(self.plan, self._state, self.optimizer, self._comm, self._steps, self._loss_scale)

    def _settle(self) -> None:
        """Waits for a save under way."""
        saving, self._saving = self._saving, None
        if saving is not None and not saving.waited:
            saving.wait()

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
        try:
            self._settle()
        finally:
            self._comm.leave()
            if self._owns_group:
                dist.destroy_process_group()

    def __enter__(self) -> "TrainStep":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            if self._saving is not None:
                self._saving.cancel()
            # The others may never come to a barrier: leave without one.
            self._closed = self._state.closed = True

    def _whole_step(self, what: str) -> None:
        """Refuses what would see an optimizer step half done."""
        self._usable(what)
        if self._pending:
            several = f"{self._pending} micro-batches wait for their"
            waits = several if self._pending > 1 else "1 micro-batch waits for its"
            raise StateError(f"{what}: {waits} update: finish with step(batch) first")

    def _usable(self, what: str) -> None:
        if self._closed:
            raise StateError(f"{what}: this step is closed")
        if self._failed:
            raise StateError(f"{what}: an earlier step failed, and what it left may be torn: {self._failed}")
        if self._state.whole_is_out:
            raise StateError(f"{what}: whole_parameters() is open, leave it first")


def _together(results: Sequence[Any]) -> Any:
    """The mean loss of several micro-batches; with aux, it and a list of theirs."""
    if isinstance(results[0], tuple):
        return torch.stack([loss for loss, _ in results]).mean(), [aux for _, aux in results]
    return torch.stack(list(results)).mean()


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
