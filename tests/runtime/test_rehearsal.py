"""A whole step of ResNet-50 with its true sizes, without a GPU and without the memory."""

import ast
import pathlib
import re

import chainer
import chainer.functions as F
import numpy
import pytest

import dynamemo
from benchmarks.rehearsing import machine
from benchmarks.rehearsing.networks import NETWORKS, Options
from benchmarks.rehearsing.phantom import NotRehearsedError, Phantom, new
from benchmarks.rehearsing.rehearse import rehearse
from benchmarks.rehearsing.standing_in import standing_in

#: On an H200 the peak was 26.4 GB, of which about 2 GB were workspaces of convolutions that are
#: chosen differently there; without them:
MEASURED_PEAK_BYTES = 24.4e9
#: And a step took so long.
MEASURED_STEP_S = 98.6e-3


def resident_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) << 10


def rehearse_resnet(budget, **options):
    def make():
        return NETWORKS["resnet50"](Options(batch=256))

    return rehearse(make, lambda training: training.step(), budget, **options)


def test_resnet50_takes_what_it_took_on_the_gpu_and_no_memory_here():
    before_bytes, grown_bytes = resident_bytes(), []

    def step(training):
        training.step()
        grown_bytes.append(resident_bytes() - before_bytes)

    result = rehearse(
        lambda: NETWORKS["resnet50"](Options(batch=256)), step, "130GB", steps=2, policy="none"
    )
    assert result.error is None
    assert result.peak_bytes == pytest.approx(MEASURED_PEAK_BYTES, rel=0.15)
    assert result.steps[-1].elapsed_s == pytest.approx(MEASURED_STEP_S, rel=0.05)
    assert max(grown_bytes) < 1 << 30


def test_functions_that_are_applied_again_let_the_clock_go_on():
    plain = rehearse_resnet("130GB", policy="none", steps=1).steps[-1]
    result = rehearse_resnet("16GB", policy="recompute", steps=2)
    assert result.error is None
    last = result.steps[-1]
    assert last.recomputed_bytes > 5e9
    # At least what it takes to write it.
    assert last.elapsed_s > plain.elapsed_s + last.recomputed_bytes / 4.8e12


def test_what_is_copied_moves_no_bytes_and_takes_its_time():
    device = machine.RehearsedDevice()
    result = rehearse_resnet("20GB", policy="offload", steps=2, device=device)
    last = result.steps[-1]
    assert last.offloaded_bytes > 2e9
    assert device.clock.now_s > last.offloaded_bytes / machine.LINK_BYTES_PER_S


def test_an_error_says_what_lay_where():
    result = rehearse_resnet("2GB", explains=True, steps=1)
    assert "cannot allocate" in result.error
    places = result.arena_map.places
    assert sum(place.nbytes for place in places) > 1e9
    ends = [place.offset + place.nbytes for place in places]
    assert all(end <= place.offset for end, place in zip(ends, places[1:], strict=False))
    assert (256, 3, 224, 224) in {place.shape for place in places}
    assert "dynamemo." in str(result.arena_map)


def test_chainer_is_as_before_afterwards():
    modules = (chainer.backends.cuda, F.activation.relu, F.normalization.batch_normalization)
    before = [dict(vars(module)) for module in modules]
    with standing_in(machine.RehearsedDevice().gpu):
        assert chainer.backends.cuda.available
    assert [dict(vars(module)) for module in modules] == before


def test_what_would_touch_large_arrays_is_refused_by_its_name():
    with standing_in(machine.RehearsedDevice().gpu):
        assert type(numpy.cumsum(new((8, 8), "f"))) is Phantom
        large = new((1 << 23,), "f")
        with pytest.raises(NotRehearsedError, match="cumsum"):
            numpy.cumsum(large)


@pytest.mark.parametrize("name", ["_SIDE_SHARE", "_MOST_SIDE_BYTES", "_PINNED_PER_SIDE_BYTE"])
def test_as_much_is_set_aside_as_on_a_cuda_device(name):
    path = pathlib.Path(dynamemo.__file__).with_name("cuda_device.py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            assert eval(ast.unparse(node.value)) == getattr(machine, name)
            return
    pytest.fail(f"{name} is gone")


@pytest.mark.parametrize(("network", "size"), [("densenet121", 64), ("transformer", 64)])
def test_other_networks_run_too(network, size):
    result = rehearse(
        lambda: NETWORKS[network](Options(batch=8, size=size)),
        lambda training: training.step(),
        "20GB",
        steps=1,
    )
    assert result.error is None
