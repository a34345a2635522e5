"""Running convolutions: each is prepared once, its plan chosen once, and then only enqueued.

A convolution (shapes, types, direction, switches) is prepared at its first call: plans are listed
and one is chosen (`workspace`). Afterwards a call looks it up, takes its workspace, and enqueues.

1. What a call leaves in its output is the work of one plan, chosen before: it does not depend on
   what was timed when. Candidates that are timed write the same output before that.
2. In a steady loop nothing is prepared, built or measured.
3. The workspace is CuPy memory of the current allocator, so it counts in a budget; it is given back
   when the work is enqueued.
4. Plans that do not always give the same bits are used only where the settings say so, or where
   cuDNN has no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynamemo.cudnn import context, settings
from dynamemo.cudnn.errors import CudnnError, NoPlanError
from dynamemo.cudnn.graph_plans import GraphPlans
from dynamemo.cudnn.legacy_plans import LegacyPlans
from dynamemo.cudnn.plans import Convolution, Direction, Plan, PlanSource
from dynamemo.cudnn.records import Assignment, Counters
from dynamemo.cudnn.workspace import Candidate, Chooser

__all__ = ["as_of", "counters", "forget", "moment", "reconsider", "report", "run"]

#: Convolutions that stay prepared; the one prepared first goes first.
PREPARED_AT_MOST = 1024
#: Changes of plan that a convolution remembers for `as_of`; in one iteration there are one or two.
REMEMBERED_CHOICES = 64

#: How often what was done, in this process.
counters = Counters()


class _Prepared:
    """A convolution's plans, and which is in force."""

    __slots__ = ("calls", "chooser", "convolution", "history", "plans", "ready", "touched_bytes")

    def __init__(self, convolution: Convolution, plans: Sequence[Plan]) -> None:
        self.convolution = convolution
        self.touched_bytes = convolution.touched_bytes
        self.plans = plans
        self.chooser = Chooser([Candidate(plan.tag, plan.workspace_bytes) for plan in plans])
        #: Indices of the plans that were built.
        self.ready: set[int] = set()
        self.calls = 0
        #: What was put in force when: (moment, index), in that order.
        self.history: list[tuple[int, int]] = []

    def index_as_of(self, when: int) -> int | None:
        """Return the plan in force at a moment, or the first one after it; None for neither."""
        earlier = [index for since, index in self.history if since <= when]
        if earlier:
            return earlier[-1]
        return self.history[0][1] if self.history else None


class _Call(NamedTuple):
    """What a plan is run with. Made at every call: a tuple costs a quarter of a dataclass."""

    handle: int
    #: Device addresses of x, w and y.
    addresses: tuple[int, int, int]
    limit_bytes: float
    #: Whether candidates are timed before the first choice.
    is_tuned: bool


class _Prescription(threading.local):
    def __init__(self) -> None:
        #: The moment whose plans this thread runs, None for those in force.
        self.moment: int | None = None


_prepared: dict[Any, _Prepared] = {}
#: Convolutions for which cuDNN has no plan.
_hopeless: set[Any] = set()
_lock = threading.RLock()
_prescription = _Prescription()
#: How often a plan was put in force.
_moment = 0


def run(
    direction: str, arrays: tuple[Any, Any, Any], shape: tuple[Any, ...], flags: tuple[Any, ...]
) -> None:
    """Enqueue a convolution in one direction.

    Parameters
    ----------
    direction : str
        Value of a `Direction`.
    arrays : tuple of cupy.ndarray
        ``x``, ``w`` and ``y`` of the forward convolution, C-contiguous; one of them is written.
    shape : tuple
        Pads, strides, dilations, groups, and the layouts of x and y, and of w.
    flags : tuple
        Whether it has to be deterministic, whether candidates are timed, and Chainer's
        `use_cudnn_tensor_core`.

    Raises
    ------
    NoPlanError
        If cuDNN has no plan; nothing was written.
    """
    handle = context.get_handle()
    x, w, y = arrays
    addresses = (x.data.ptr, w.data.ptr, y.data.ptr)
    is_aligned = not (addresses[0] | addresses[1] | addresses[2]) & 15
    device = x.data.device_id
    key = (
        *(direction, x.dtype.char, x.shape, w.shape, y.shape, shape, flags, is_aligned, device),
        settings.plan_key(),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(key, handle)
    prepared.calls += 1
    limit_bytes = settings.current.limit_bytes(prepared.touched_bytes)
    call = _Call(handle, addresses, limit_bytes, flags[1])
    index = None
    if _prescription.moment is not None:
        index = prepared.index_as_of(_prescription.moment)
    if index is None:
        _run_chosen(prepared, call)
    else:
        _build(prepared, index, handle)
        _enqueue(prepared.plans[index], call)
    counters.runs += 1


def _run_chosen(prepared: _Prepared, call: _Call) -> None:
    """Enqueue the plan in force, choosing it first where need be."""
    chooser = prepared.chooser
    while True:
        index = chooser.assigned
        if index is None or chooser.candidates[index].workspace_bytes > call.limit_bytes:
            index = _settle(prepared, call)
        try:
            _enqueue(prepared.plans[index], call)
        except MemoryError:
            if settings.make_room():
                _enqueue(prepared.plans[index], call)
                return
            # Lean plans remain to be tried, under a limit that this one does not meet.
            call = call._replace(limit_bytes=chooser.candidates[index].workspace_bytes - 1)
            if chooser.best(call.limit_bytes) == index:
                raise
        except CudnnError as error:
            if not error.is_refusal:
                raise
            chooser.reject(index)
        else:
            return


def _settle(prepared: _Prepared, call: _Call) -> int:
    """Choose a plan and build it; return its index."""
    chooser = prepared.chooser
    with _lock:
        if call.is_tuned:
            _measure(prepared, call)
        while True:
            try:
                index = chooser.choose(call.limit_bytes)
            except LookupError:
                raise _no_plan(prepared.convolution) from None
            if index in prepared.ready:
                _note(prepared, index)
                return index
            try:
                # What is built may need more than cuDNN said before: hence another round.
                _build(prepared, index, call.handle)
            except CudnnError:
                chooser.reject(index)


def _note(prepared: _Prepared, index: int) -> None:
    """Take note of the moment since which a plan is in force."""
    global _moment
    history = prepared.history
    if not history or history[-1][1] != index:
        _moment += 1
        history.append((_moment, index))
        del history[:-REMEMBERED_CHOICES]


def _build(prepared: _Prepared, index: int, handle: int) -> None:
    if index in prepared.ready:
        return
    plan = prepared.plans[index]
    plan.build(handle)
    prepared.chooser.note_workspace(index, plan.workspace_bytes)
    prepared.ready.add(index)
    counters.builds += 1


def _enqueue(plan: Plan, call: _Call) -> None:
    """Run a plan over memory for its workspace, which is free again once it is enqueued."""
    workspace = context.allocate(plan.workspace_bytes)
    plan.execute(call.handle, *call.addresses, context.address(workspace))


def _measure(prepared: _Prepared, call: _Call) -> None:
    """Time candidates on the arrays of the call; the chosen plan writes them once more after."""
    chooser = prepared.chooser
    for index in chooser.to_measure(call.limit_bytes):
        try:
            _build(prepared, index, call.handle)
        except CudnnError:
            chooser.reject(index)
            continue
        if chooser.candidates[index].workspace_bytes > call.limit_bytes:
            continue
        try:
            chooser.note_seconds(index, _seconds(prepared.plans[index], call))
            counters.measured += 1
        except MemoryError:
            continue
        except CudnnError as error:
            if not error.is_refusal:
                raise
            chooser.reject(index)


def _seconds(plan: Plan, call: _Call, *, repeats: int = 3) -> float:
    """Return the device time of a plan. Waits for the device."""
    cuda = context.cupy.cuda
    _enqueue(plan, call)
    start, stop = cuda.Event(), cuda.Event()
    start.record()
    for _ in range(repeats):
        _enqueue(plan, call)
    stop.record()
    stop.synchronize()
    return float(cuda.get_elapsed_time(start, stop)) / 1e3 / repeats


def _prepare(key: Any, handle: int) -> _Prepared:
    """List the plans of a convolution."""
    with _lock:
        if (found := _prepared.get(key)) is not None:
            return found
        wanted = _convolution_of(key)
        if key in _hopeless:
            raise _no_plan(wanted)
        for convolution in _relaxations(wanted, is_deterministic=key[6][0]):
            for source in _sources():
                if plans := source.propose(convolution, handle):
                    return _keep(key, _Prepared(convolution, plans))
        _hopeless.add(key)
        raise _no_plan(wanted)


def _keep(key: Any, prepared: _Prepared) -> _Prepared:
    if len(_prepared) >= PREPARED_AT_MOST:
        del _prepared[next(iter(_prepared))]
    _prepared[key] = prepared
    counters.prepared += 1
    return prepared


def _convolution_of(key: Any) -> Convolution:
    direction, char, x_shape, w_shape, y_shape, shape, flags, is_aligned, *_ = key
    pad, stride, dilation, groups, x_layout, w_layout = shape
    return Convolution(
        direction=Direction(direction),
        dtype_char=char,
        x_shape=x_shape,
        w_shape=w_shape,
        y_shape=y_shape,
        pad=tuple(pad),
        stride=tuple(stride),
        dilation=tuple(dilation),
        groups=groups,
        x_layout=x_layout,
        w_layout=w_layout,
        allow_tensor_core=settings.tensor_core_is_allowed(char, flags[2]),
        is_deterministic=flags[0] or not settings.current.nondeterministic,
        alignment_bytes=16 if is_aligned else {"e": 2, "f": 4, "d": 8}[char],
    )


def _relaxations(convolution: Convolution, *, is_deterministic: bool) -> Iterator[Convolution]:
    """Yield the convolution as wanted, then with what nobody insists on given up."""
    yield convolution
    if convolution.is_deterministic and not is_deterministic:
        convolution = replace(convolution, is_deterministic=False)
        yield convolution
    if convolution.dtype_char == "e" and not convolution.allow_tensor_core:
        yield replace(convolution, allow_tensor_core=True)


def _sources() -> tuple[PlanSource, PlanSource]:
    graph, legacy = GraphPlans(context.library), LegacyPlans(context.library)
    if settings.current.source is settings.Source.GRAPH:
        return graph, legacy
    return legacy, graph


def _no_plan(convolution: Convolution) -> NoPlanError:
    return NoPlanError(
        f"cuDNN has no plan for the convolution {convolution.label()}, "
        f"direction {convolution.direction.value}; use_cudnn='never' takes Chainer's own path"
    )


def report() -> tuple[Assignment, ...]:
    """Return the plan in force of every convolution that ran, beside its fastest known one."""
    with _lock:
        return tuple(_assignment(item) for item in _prepared.values() if item.chooser.usable())


def _assignment(prepared: _Prepared) -> Assignment:
    chooser = prepared.chooser
    fastest = chooser.best(float("inf"))
    index = fastest if chooser.assigned is None else chooser.assigned
    assigned = chooser.candidates[index]
    return Assignment(
        label=prepared.convolution.label(),
        direction=prepared.convolution.direction.value,
        calls=prepared.calls,
        tag=assigned.tag,
        workspace_bytes=assigned.workspace_bytes,
        elapsed_s=chooser.seconds(index),
        fastest_tag=chooser.candidates[fastest].tag,
        fastest_workspace_bytes=chooser.candidates[fastest].workspace_bytes,
        least_workspace_bytes=chooser.candidates[chooser.best(-1)].workspace_bytes,
        fastest_s=chooser.seconds(fastest),
        choices=chooser.choices,
    )


def forget() -> None:
    """Drop all plans and choices."""
    with _lock:
        _prepared.clear()
        _hopeless.clear()


def reconsider() -> None:
    """Let the next call of every convolution choose anew, under the limit of that moment."""
    with _lock:
        for prepared in _prepared.values():
            prepared.chooser.reconsider()


def moment() -> int:
    """Return a number that stands for the plans now in force, for `as_of`. Costs next to nothing.

    Read it after a function was applied, and keep it with whatever can apply it again.
    """
    return _moment


@contextlib.contextmanager
def as_of(when: int) -> Iterator[None]:
    """Run in this thread the plans that were in force at a `moment`, whatever is now or is free.

    A function that is applied again to rebuild its outputs gives the same bits under it. Where no
    plan was changed since, which is so in any steady loop, the plans are the same without it. The
    workspace is asked of the allocator like any other memory.

    Holds for convolutions that are still prepared: not after `forget`, and not where
    `PREPARED_AT_MOST` others were prepared since.
    """
    before, _prescription.moment = _prescription.moment, when
    try:
        yield
    finally:
        _prescription.moment = before
