"""Fakes in place of CuPy and cuDNN, for the time of a test."""

import pytest

from dynamemo.cudnn import (
    context,
    convolution,
    dropout,
    elementwise,
    max_pooling_gradient,
    resident_normalization,
    running,
    settings,
)
from tests.cudnn.fakes import attach_fakes


@pytest.fixture
def fakes(monkeypatch):
    """Give (cupy, functions); what a test prepared or set is gone after it."""
    before = context.cupy, context.library
    monkeypatch.setattr(running, "_prepared", {})
    monkeypatch.setattr(running, "_hopeless", set())
    monkeypatch.setattr(running, "counters", running.Counters())
    monkeypatch.setattr(convolution, "_bias_kernels", {})
    monkeypatch.setattr(dropout, "_kernels", {})
    monkeypatch.setattr(elementwise, "_kernels", {})
    monkeypatch.setattr(max_pooling_gradient, "_kernels", [])
    monkeypatch.setattr(resident_normalization, "_kernels", {})
    monkeypatch.setattr(resident_normalization, "_launches", {})
    monkeypatch.setattr(settings, "current", settings.Settings())
    monkeypatch.setattr(settings, "must_repeat", bool)
    monkeypatch.setattr(settings, "_max_workspace_bytes", None)
    yield attach_fakes()
    context.attach(*before)
