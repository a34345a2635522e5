"""What all tests share: dynamemo before Chainer, Hypothesis profiles, and the rule for GPU tests.

A test marked ``gpu`` is skipped where no CUDA device is seen. Under ``DYNAMEMO_REQUIRE_GPU=1`` it
fails there instead, so that a run meant for a GPU cannot pass without one.
"""

import functools
import os

import hypothesis
import pytest

import dynamemo  # noqa: F401  before any test module imports Chainer

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10)
hypothesis.settings.load_profile(os.environ.get("DYNAMEMO_HYPOTHESIS_PROFILE", "default"))


@functools.cache
def missing_device() -> str | None:
    """Return why no CUDA device can be used, or None where one can; create no context."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA gives no device: {error}"
    return None if count else "CUDA sees no device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or (reason := missing_device()) is None:
        return
    if os.environ.get("DYNAMEMO_REQUIRE_GPU") == "1":
        pytest.fail(f"DYNAMEMO_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def cupy():
    """Give CuPy to a test marked ``gpu``; a test module cannot import it where it is absent."""
    import cupy

    return cupy
