"""Convolutions over fake plans: what is run, built and measured, and with how much memory."""

import numpy
import pytest

from dynamemo import cudnn
from dynamemo.cudnn import convolution, running, settings
from dynamemo.cudnn.errors import CudnnError, NoPlanError
from tests.cudnn.fakes import FakeArray

REFUSED = CudnnError("not supported", function="cudnnBackendExecute", status=3000)
BROKEN = CudnnError("execution failed", function="cudnnBackendExecute", status=5000)


class FakePlan:
    """Writes its number into the array that its direction computes."""

    def __init__(self, number, workspace_bytes, *, milliseconds=1.0, cupy=None):
        self.tag = f"plan {number}"
        self.number = number
        self.workspace_bytes = workspace_bytes
        self.milliseconds = milliseconds
        self.cupy = cupy
        self.builds = 0
        self.runs = []
        self.build_error = None
        self.run_error = None

    def build(self, handle):
        self.builds += 1
        if self.build_error is not None:
            raise self.build_error

    def execute(self, handle, x, w, y, workspace):
        assert bool(workspace) == bool(self.workspace_bytes)
        if self.run_error is not None:
            raise self.run_error
        self.runs.append((x, w, y))
        self.cupy.clock_ms += self.milliseconds


class FakeSource:
    """Proposes given plans, and notes for what."""

    def __init__(self, plans):
        self.plans = plans
        self.asked = []

    def propose(self, wanted, handle):
        self.asked.append(wanted)
        return self.plans


@pytest.fixture
def planned(fakes, monkeypatch):
    """Give a function that sets the plans, by (workspace bytes, milliseconds)."""
    cupy, _ = fakes

    def plan(*figures):
        plans = [
            FakePlan(i, nbytes, milliseconds=milliseconds, cupy=cupy)
            for i, (nbytes, milliseconds) in enumerate(figures)
        ]
        source = FakeSource(plans)
        monkeypatch.setattr(running, "_sources", lambda: (source,))
        return plans, source

    return plan


def array(*shape, dtype="f"):
    return numpy.zeros(shape, dtype).view(FakeArray)


def forward(x=None, w=None, b=None, y=None, *, tune=False, tensor_core="auto"):
    x = array(2, 3, 5, 5) if x is None else x
    w = array(4, 3, 3, 3) if w is None else w
    y = array(2, 4, 5, 5) if y is None else y
    convolution.convolution_forward(
        x, w, b, y, (1, 1), (1, 1), (1, 1), 1, auto_tune=tune, tensor_core=tensor_core
    )
    return x, w, y


def backward_filter(deterministic=False, tune=False):
    convolution.convolution_backward_filter(
        *(array(2, 3, 5, 5), array(2, 4, 5, 5), array(4, 3, 3, 3)),
        *((1, 1), (1, 1), (1, 1), 1),
        deterministic=deterministic,
        auto_tune=tune,
        tensor_core="auto",
    )


def runs(plans):
    return [len(plan.runs) for plan in plans]


def test_the_first_plan_within_chainers_limit_runs(planned):
    plans, _ = planned((9 << 20, 1), (8 << 20, 1), (0, 1))
    settings.set_max_workspace_size(8 << 20)

    forward()

    assert runs(plans) == [0, 1, 0]


def test_every_call_after_the_first_prepares_and_builds_nothing(planned, fakes):
    plans, source = planned((0, 1), (0, 1))
    forward()
    before = running.counters.builds, running.counters.prepared, fakes[0].waits

    for _ in range(5):
        forward()

    assert (running.counters.builds, running.counters.prepared, fakes[0].waits) == before
    assert len(source.asked) == 1
    assert plans[0].builds == 1
    assert running.counters.runs == 6


def test_autotune_takes_the_fastest_and_runs_it_last(planned):
    plans, _ = planned((0, 3), (0, 1), (0, 2))

    forward(tune=True)

    assert min(runs(plans)) > 0
    assert runs(plans)[1] == max(runs(plans)), "the chosen one runs once more"
    before = runs(plans)
    forward(tune=True)
    assert [now - then for now, then in zip(runs(plans), before, strict=True)] == [0, 1, 0]


def test_where_every_run_has_to_choose_alike_nothing_is_timed(planned, fakes, monkeypatch):
    monkeypatch.setattr(settings, "must_repeat", lambda: True)
    plans, _ = planned((0, 3), (0, 1))

    forward(tune=True)

    assert runs(plans) == [1, 0]
    assert fakes[0].waits == 0


def test_with_more_room_what_was_not_timed_yet_is_timed(planned):
    plans, _ = planned((100 << 20, 1), (0, 2))
    with cudnn.using_settings(workspace="none"):
        forward(tune=True)
    cudnn.reconsider()

    with cudnn.using_settings(workspace="fastest"):
        forward(tune=True)
        before = runs(plans)
        forward(tune=True)

    assert [now - then for now, then in zip(runs(plans), before, strict=True)] == [1, 0]


@pytest.mark.parametrize(("error", "expected"), [(REFUSED, [0, 1]), (BROKEN, None)])
def test_while_timing_only_refusals_are_passed_over(planned, error, expected):
    plans, _ = planned((0, 1), (0, 1))
    plans[0].run_error = error

    if expected is None:
        with pytest.raises(CudnnError, match="execution failed"):
            forward(tune=True)
    else:
        forward(tune=True)
        assert [bool(count) for count in runs(plans)] == [bool(count) for count in expected]


def test_without_autotune_nothing_is_timed_and_the_host_never_waits(planned, fakes):
    planned((0, 3), (0, 1))

    forward()

    assert fakes[0].waits == 0


def test_a_plan_that_cannot_be_built_is_left_out(planned):
    plans, _ = planned((0, 1), (0, 1))
    plans[0].build_error = CudnnError("no kernel")

    forward()
    forward()

    assert runs(plans) == [0, 2]
    assert plans[0].builds == 1


def test_a_plan_that_cudnn_refuses_to_run_is_left_out(planned):
    plans, _ = planned((0, 1), (0, 1))
    plans[0].run_error = REFUSED

    forward()

    assert runs(plans) == [0, 1]


def test_a_failure_of_the_device_is_raised_and_not_hidden_by_another_plan(planned):
    plans, _ = planned((0, 1), (0, 1))
    plans[0].run_error = BROKEN

    with pytest.raises(CudnnError, match="execution failed"):
        forward()

    assert runs(plans) == [0, 0]


@pytest.mark.parametrize("tune", [False, True])
def test_when_no_plan_can_be_built_there_is_none(planned, tune):
    plans, _ = planned((0, 1), (0, 1))
    for plan in plans:
        plan.build_error = CudnnError("no kernel")

    with pytest.raises(NoPlanError, match="use_cudnn='never'"):
        forward(tune=tune)


def test_where_cudnn_has_no_plan_it_is_asked_once_only(planned):
    _, source = planned()

    for _ in range(3):
        with pytest.raises(NoPlanError):
            forward()

    assert len(source.asked) == 1


def test_a_workspace_that_cannot_be_had_gives_way_to_a_leaner_plan(planned, fakes):
    plans, _ = planned((4096, 1), (1024, 1), (0, 1))
    fakes[0].limit_bytes = 2000

    forward()

    assert runs(plans) == [0, 1, 0]


def test_within_a_budget_room_is_made_and_the_plan_stays(planned, fakes, monkeypatch):
    plans, _ = planned((4096, 1), (0, 1))
    fakes[0].limit_bytes = 2000

    def make_room():
        fakes[0].limit_bytes = 8192
        return True

    monkeypatch.setattr(settings, "make_room", make_room)
    forward()

    assert runs(plans) == [1, 0]


def test_within_a_budget_no_other_plan_takes_over(planned, fakes, monkeypatch):
    """It would round differently, and results must not depend on the budget."""
    plans, _ = planned((4096, 1), (0, 1))
    fakes[0].limit_bytes = 2000
    monkeypatch.setattr(settings, "make_room", lambda: True)

    with pytest.raises(MemoryError):
        forward()

    assert runs(plans) == [0, 0]


@pytest.mark.parametrize(
    ("touched_bytes", "expected"),
    [(1 << 10, 32 << 20), (100 << 20, 200 << 20), (10 << 30, 2 << 30)],
)
def test_until_it_is_set_the_limit_grows_with_the_convolution(fakes, touched_bytes, expected):
    assert settings.current.limit_bytes(touched_bytes) == expected
    settings.set_max_workspace_size(123)
    assert settings.current.limit_bytes(touched_bytes) == 123


def test_out_of_memory_is_raised_where_no_plan_is_leaner(planned, fakes):
    planned((4096, 1), (4096, 1))
    fakes[0].limit_bytes = 0

    with pytest.raises(MemoryError):
        forward()


def test_the_workspace_is_taken_from_the_current_allocator(planned, fakes):
    planned((4096, 1))

    forward()

    assert fakes[0].allocated == [4096]


@pytest.mark.parametrize(
    ("policy", "expected"), [("none", 2), ("fastest", 0), ("chainer", 1), ("free", 1)]
)
def test_policies(planned, policy, expected):
    plans, _ = planned((50 << 20, 1), (5 << 20, 1), (0, 1))
    settings.set_max_workspace_size(8 << 20)

    with cudnn.using_settings(workspace=policy, available_bytes=lambda: 6 << 20):
        forward()

    assert runs(plans).index(1) == expected


@pytest.mark.parametrize("policy", ["none", "free"])
def test_a_negligible_workspace_is_had_under_any_policy_but_chainers(planned, policy):
    plans, _ = planned((1 << 20, 1), (400, 1), (0, 1))
    settings.set_max_workspace_size(0)

    with cudnn.using_settings(workspace=policy, available_bytes=lambda: 0):
        forward()
    cudnn.reconsider()
    forward()

    assert runs(plans) == [0, 1, 1]


def test_a_choice_stays_while_admitted_and_falls_with_what_is_free(planned):
    plans, _ = planned((100 << 20, 1), (10 << 20, 1), (0, 1))
    free = 1000 << 20

    with cudnn.using_settings(workspace="free", available_bytes=lambda: free):
        forward()
        free = 100 << 20
        forward()
        free = 20 << 20
        forward()
        free = 1000 << 20
        forward()
        assert runs(plans) == [2, 2, 0], "back to more only when asked"
        cudnn.reconsider()
        forward()

    assert runs(plans) == [3, 2, 0]


def test_plans_of_a_moment_are_run_again_whatever_is_free(planned):
    plans, _ = planned((100 << 20, 1), (10 << 20, 1), (0, 1))
    free = [1000 << 20]
    moments = []

    with cudnn.using_settings(workspace="free", available_bytes=lambda: free[0]):
        for free[0] in (1000 << 20, 100 << 20, 50 << 20, 0):
            forward()
            moments.append(cudnn.moment())
        assert runs(plans) == [2, 1, 1]
        for when in reversed(moments):
            with cudnn.as_of(when):
                forward()
        forward()

    assert runs(plans) == [4, 2, 3]


def test_where_no_plan_was_changed_the_moment_is_the_same_and_nothing_else_is_needed(planned):
    plans, _ = planned((10 << 20, 1), (0, 1))

    forward()
    when = cudnn.moment()
    for _ in range(3):
        forward()
    cudnn.reconsider()
    forward()

    assert cudnn.moment() == when
    assert runs(plans) == [5, 0]


def test_a_moment_before_its_first_plan_stands_for_that_plan(planned):
    plans, _ = planned((10 << 20, 1), (0, 1))
    when = cudnn.moment()
    forward()

    with cudnn.using_settings(workspace="none"), cudnn.as_of(when):
        forward()

    assert runs(plans) == [2, 0]


def test_as_of_a_moment_a_convolution_that_never_ran_is_chosen_as_ever(planned):
    plans, _ = planned((10 << 20, 1), (0, 1))

    with cudnn.as_of(cudnn.moment()), cudnn.using_settings(workspace="none"):
        forward()

    assert runs(plans) == [0, 1]


def test_the_report_sets_the_assigned_beside_the_fastest(planned):
    planned((100 << 20, 1), (0, 2))

    with cudnn.using_settings(workspace="fastest"):
        forward(tune=True)
    with cudnn.using_settings(workspace="none"):
        forward(tune=True)
    (line,) = cudnn.report()

    assert (line.direction, line.calls, line.choices) == ("forward", 2, 2)
    assert (line.workspace_bytes, line.fastest_workspace_bytes) == (0, 100 << 20)
    assert (line.elapsed_s, line.fastest_s) == pytest.approx((2e-3, 1e-3))
    assert "2×3×5 * 4×3×3×3" not in line.label
    assert "100 MiB" in cudnn.format_table([line])


def test_each_direction_hands_over_the_arrays_of_the_forward_convolution(planned):
    plans, source = planned((0, 1))
    x, w, y = array(2, 3, 5, 5), array(4, 3, 3, 3), array(2, 4, 5, 5)
    shape = ((1, 1), (1, 1), (1, 1), 1)
    flags = {"auto_tune": False, "tensor_core": "auto"}

    convolution.convolution_forward(x, w, None, y, *shape, **flags)
    convolution.convolution_backward_filter(x, y, w, *shape, deterministic=True, **flags)
    convolution.convolution_backward_data(w, y, None, x, *shape, deterministic=True, **flags)

    assert plans[0].runs == [(x.data.ptr, w.data.ptr, y.data.ptr)] * 3
    assert [item.direction.value for item in source.asked] == ["forward", "filter", "data"]
    assert {(item.x_shape, item.w_shape, item.y_shape) for item in source.asked} == {
        (x.shape, w.shape, y.shape)
    }


def test_the_bias_is_added_to_every_pixel(planned):
    planned((0, 1))
    bias = numpy.arange(4, dtype="f").view(FakeArray)

    _, _, y = forward(b=bias)
    last = array(2, 5, 5, 4)
    convolution.convolution_forward(
        *(array(2, 5, 5, 3), array(4, 3, 3, 3), bias, last, (1, 1), (1, 1), (1, 1), 1),
        auto_tune=False,
        tensor_core="auto",
        d_layout=1,
        w_layout=1,
    )

    assert (y == numpy.arange(4).reshape(4, 1, 1)).all()
    assert (last == numpy.arange(4)).all()


def test_arrays_that_are_not_contiguous_are_copied(planned):
    plans, _ = planned((0, 1))
    x = array(2, 5, 5, 3).transpose(0, 3, 1, 2)

    forward(x=x)

    assert plans[0].runs[0][0] != x.data.ptr


def test_the_forward_direction_is_always_deterministic(planned):
    _, source = planned((0, 1))

    with cudnn.using_settings(nondeterministic=True):
        forward()
        backward_filter()
        backward_filter(deterministic=True)

    assert [item.is_deterministic for item in source.asked] == [True, False, True]


def test_determinism_is_given_up_only_where_there_is_no_other_plan(planned):
    _, source = planned()

    with pytest.raises(NoPlanError):
        backward_filter()
    assert [item.is_deterministic for item in source.asked] == [True, False]
    source.asked.clear()
    with pytest.raises(NoPlanError):
        backward_filter(deterministic=True)
    assert [item.is_deterministic for item in source.asked] == [True]


@pytest.mark.parametrize(
    ("dtype", "asked", "tf32", "environment", "expected"),
    [
        ("f", "auto", None, "0", False),
        ("f", "auto", None, "1", True),
        ("f", "auto", False, "1", False),
        ("f", "auto", True, "0", True),
        ("f", "always", None, "0", True),
        ("f", "never", True, "1", False),
        ("f", False, None, "1", False),
        ("e", "auto", None, "0", True),
        ("e", "never", None, "0", False),
        ("d", "never", None, "0", True),
    ],
)
def test_tensor_cores(monkeypatch, dtype, asked, tf32, environment, expected):
    monkeypatch.setenv("CUPY_TF32", environment)

    with cudnn.using_settings(tf32=tf32):
        assert settings.tensor_core_is_allowed(dtype, asked) is expected


def test_the_number_of_prepared_convolutions_is_bounded(planned, monkeypatch):
    planned((0, 1))
    monkeypatch.setattr(running, "PREPARED_AT_MOST", 3)

    for batch in range(1, 8):
        forward(x=array(batch, 3, 5, 5), y=array(batch, 4, 5, 5))

    assert len(running._prepared) == 3
