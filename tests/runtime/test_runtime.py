"""What a user meets: entering, leaving, errors, statistics, names."""

import os
import pickle
import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import pytest

import dynamemo
from dynamemo import DynamemoError, OutOfMemoryError, Runtime
from tests.runtime.training import PLENTY, to_bytes


def deep_loss(depth=12, width=256, rows=64, activation=F.tanh):
    """Make a chain of elementwise functions that retains `depth` arrays of 64 KiB."""
    x = chainer.Variable(numpy.random.standard_normal((rows, width)).astype("f"))
    h = x * 1
    for _ in range(depth):
        h = activation(h) * 1.5
    return x, F.sum(h)


def seams():
    """Collect what Chainer, NumPy and this thread look like."""
    return (
        chainer.FunctionNode.apply,
        chainer.optimizer.UpdateRule.update,
        chainer.optimizer.Optimizer.call_hooks,
        dict(chainer.get_function_hooks()),
        numpy._core.multiarray.get_handler_name(),
    )


class TestLeaving:
    def test_puts_everything_back(self):
        before = seams()
        with Runtime(PLENTY, device="cpu"):
            assert seams() != before
        assert seams() == before

    def test_puts_everything_back_after_an_exception(self):
        before = seams()
        with pytest.raises(KeyError), Runtime(PLENTY, device="cpu"):
            raise KeyError
        assert seams() == before

    def test_arrays_made_inside_stay_valid(self):
        with Runtime(PLENTY, device="cpu"):
            array = numpy.arange(100_000)
        assert int(array.sum()) == 4999950000

    def test_backward_works_on_a_graph_that_is_still_alive(self):
        numpy.random.seed(0)
        x, loss = deep_loss()
        loss.backward()
        expected = to_bytes(x.grad)
        numpy.random.seed(0)
        with Runtime(PLENTY, device="cpu", policy="torture") as runtime:
            x, loss = deep_loss()
        assert runtime.statistics().dropped_bytes > 0
        loss.backward()
        assert to_bytes(x.grad) == expected

    def test_variables_and_nodes_have_their_own_classes_again(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            link = L.Linear(64, 64)
            y = link(numpy.ones((64, 64), "f"))
            F.sum(F.relu(y)).backward()
        assert type(link.W._data) is list
        assert y.array.shape == (64, 64)
        assert type(y.node) is chainer.variable.VariableNode

    def test_interrupt_in_the_middle_of_backward(self):
        class Interrupting(chainer.FunctionNode):
            def forward(self, inputs):
                return (inputs[0] + 0,)

            def backward(self, indexes, grad_outputs):
                raise KeyboardInterrupt

        with Runtime(PLENTY, device="cpu", policy="torture"):
            x = chainer.Variable(numpy.ones((64, 64), "f"))
            loss = F.sum(F.tanh(Interrupting().apply((F.tanh(x),))[0]))
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
            x, loss = deep_loss()
            loss.backward()
            assert numpy.isfinite(x.grad).all()


class TestOutOfMemory:
    def test_names_function_bytes_and_feasible_budget(self):
        with pytest.raises(OutOfMemoryError) as caught, Runtime("1MiB", device="cpu"):
            x = chainer.Variable(numpy.ones((256, 256), "f"))
            F.tanh(F.broadcast_to(F.reshape(x, (1, 256, 256)), (64, 256, 256)))
        error = caught.value
        assert error.budget_bytes == 1 << 20
        assert error.requested_bytes >= 64 * 256 * 256 * 4
        assert error.feasible_bytes >= error.requested_bytes
        assert error.function is not None
        assert "Tanh" in error.function
        assert "Tanh" in str(error)
        assert isinstance(error, MemoryError)

    def test_the_feasible_budget_is_feasible(self):
        def training():
            numpy.random.seed(0)
            x, loss = deep_loss()
            loss.backward()
            return to_bytes(x.grad)

        expected = training()
        budget, attempts = 200_000, 0
        while True:
            attempts += 1
            assert attempts < 40
            try:
                with Runtime(budget, device="cpu"):
                    assert training() == expected
                break
            except OutOfMemoryError as error:
                assert error.feasible_bytes > budget
                budget = error.feasible_bytes
        assert budget < 12 * 2 * 65_536

    def test_model_and_runtime_are_usable_afterwards(self):
        with Runtime("1MiB", device="cpu"):
            link = L.Linear(64, 64)
            with pytest.raises(MemoryError):
                numpy.ones((1024, 1024), "f")
            y = link(numpy.ones((8, 64), "f"))
            F.sum(y).backward()
            assert link.W.grad is not None

    def test_survives_pickling(self):
        with pytest.raises(OutOfMemoryError) as caught, Runtime("1MiB", device="cpu"):
            numpy.ones((1024, 1024), "f")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert str(copy) == str(caught.value)


class TestArguments:
    @pytest.mark.parametrize("budget", ["four", "4 XB", "-1", -1, 0, "0%", "120%", 2.5])
    def test_a_budget_that_is_no_size(self, budget):
        with pytest.raises(ValueError, match="budget"):
            Runtime(budget)

    def test_a_percentage_is_of_what_is_free(self):
        with Runtime("1%", device="cpu") as runtime:
            budget = runtime.statistics().budget_bytes
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert 0 < budget <= total // 100

    def test_an_unknown_policy_lists_the_known(self):
        with pytest.raises(ValueError, match="cost-aware"):
            Runtime("1MiB", policy="greedy")

    @pytest.mark.parametrize("device", ["gpu7", "tpu", 1.5, None, True])
    def test_an_unknown_device(self, device):
        with pytest.raises(ValueError, match="device"), Runtime("1MiB", device=device):
            pass

    def test_a_gpu_without_cupy(self):
        if chainer.backends.cuda.available:
            pytest.skip("CuPy is here")
        with pytest.raises(DynamemoError, match="CuPy"), Runtime("1MiB", device="cuda"):
            pass

    def test_nested_runtimes(self):
        before = seams()
        with Runtime(PLENTY, device="cpu"):
            with pytest.raises(DynamemoError, match="already active"), Runtime("1MiB"):
                pass
            inside = seams()
            assert inside != before
        assert seams() == before

    def test_a_runtime_is_entered_once(self):
        runtime = Runtime(PLENTY, device="cpu")
        with runtime:
            pass
        with pytest.raises(DynamemoError, match="once"), runtime:
            pass

    def test_statistics_before_entering(self):
        with pytest.raises(DynamemoError, match="not entered"):
            Runtime(PLENTY).statistics()

    def test_a_spill_folder_that_is_not_there(self, tmp_path):
        before = seams()
        missing = tmp_path / "nowhere"
        with (
            pytest.raises(dynamemo.SpillError, match="nowhere"),
            Runtime("1MiB", device="cpu", spill_dir=missing),
        ):
            pass
        assert seams() == before

    def test_host_budget_exhausted_falls_back_to_recompute(self):
        numpy.random.seed(0)
        x, loss = deep_loss()
        loss.backward()
        expected = to_bytes(x.grad)
        numpy.random.seed(0)
        with Runtime("700KiB", device="cpu", host_budget=70_000) as runtime:
            x, loss = deep_loss()
            loss.backward()
            assert to_bytes(x.grad) == expected
        assert runtime.statistics().dropped_bytes > 0

    def test_host_budget_exhausted_and_nothing_to_recompute_is_one_error(self):
        with (
            pytest.raises(OutOfMemoryError),
            Runtime("500KiB", device="cpu", host_budget=70_000, policy="offload"),
        ):
            _, loss = deep_loss()
            loss.backward()


class TestStatistics:
    def test_counts_what_happened(self):
        with Runtime("800KiB", device="cpu") as runtime:
            for _ in range(3):
                _, loss = deep_loss()
                loss.backward()
        figures = runtime.statistics()
        assert figures.budget_bytes == 800 << 10
        assert 0 < figures.peak_bytes <= figures.budget_bytes
        assert figures.dropped_bytes + figures.offloaded_bytes > 0
        assert figures.recomputed_bytes <= figures.dropped_bytes
        assert figures.fetched_bytes <= figures.offloaded_bytes
        assert figures.iterations == 3
        assert figures.pool.current_bytes == figures.current_bytes

    def test_stays_after_leaving(self):
        with Runtime(PLENTY, device="cpu") as runtime:
            numpy.ones(100_000)
        assert runtime.statistics() is runtime.statistics()

    def test_the_trace_describes_the_last_iteration(self):
        with Runtime(PLENTY, device="cpu") as runtime:
            for _ in range(3):
                _, loss = deep_loss(depth=2)
                loss.backward()
        labels = [operation.label for operation in runtime.trace().operations]
        assert labels.count("Tanh") == 4


class TestMemory:
    def test_user_arrays_count(self):
        with Runtime("1MiB", device="cpu") as runtime:
            held = numpy.ones(100_000, numpy.uint8)
            assert runtime.statistics().current_bytes >= held.nbytes

    def test_resident_arrays_of_a_user_are_never_moved(self):
        with Runtime("1MiB", device="cpu", policy="torture"):
            y = F.tanh(chainer.Variable(numpy.ones((64, 64), "f")))
            array = y.array
            address = array.ctypes.data
            F.sum(F.exp(y)).backward()
            assert y.array is array
            assert y.array.ctypes.data == address

    def test_a_variable_kept_by_the_user_is_evicted_and_comes_back(self):
        with Runtime(PLENTY, device="cpu", policy="torture") as runtime:
            kept = [F.tanh(chainer.Variable(numpy.full((64, 64), i, "f"))) for i in range(4)]
            F.sum(kept[-1])
            assert runtime.statistics().current_bytes < 4 * 16384
            for i, variable in enumerate(kept):
                assert (variable.array == numpy.tanh(numpy.full((64, 64), i, "f"))).all()

    def test_strides_of_an_evicted_array_come_back(self):
        with Runtime(PLENTY, device="cpu", policy="torture"):
            y = F.transpose(F.tanh(chainer.Variable(numpy.ones((32, 64), "f"))))
            strides = y.array.strides
            del y
            y = F.transpose(F.tanh(chainer.Variable(numpy.ones((32, 64), "f"))))
            F.sum(y)
            assert y.array.strides == strides

    def test_another_thread_is_left_alone(self):
        results = []

        def work():
            numpy.random.seed(0)
            x, loss = deep_loss()
            loss.backward()
            results.append(to_bytes(x.grad))

        work()
        with Runtime("256KiB", device="cpu"):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert results[0] == results[1]


class TestVerify:
    def test_a_function_that_differs_is_named(self):
        @dynamemo.register_recomputable
        class Counting(chainer.FunctionNode):
            calls = 0

            def forward(self, inputs):
                Counting.calls += 1
                self.retain_outputs((0,))
                return (inputs[0] * Counting.calls,)

            def backward(self, indexes, grad_outputs):
                return (grad_outputs[0] * self.get_retained_outputs()[0],)

        with (
            pytest.raises(dynamemo.RecomputeError, match="Counting"),
            Runtime(PLENTY, device="cpu", policy="torture", verify=True),
        ):
            x = chainer.Variable(numpy.ones((64, 64), "f"))
            F.sum(Counting().apply((F.tanh(x),))[0]).backward()


def test_using_pool_gives_the_allocator_alone():
    with dynamemo.using_pool("1MiB", device="cpu") as pool:
        array = numpy.ones(500_000, numpy.uint8)
        assert pool.current_bytes >= array.nbytes
        with pytest.raises(MemoryError):
            numpy.ones(700_000, numpy.uint8)
    assert array.sum() == 500_000
