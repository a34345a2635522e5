"""The timeline of copies stays with the device, however little of its work is measured."""

import chainer
import chainer.functions as F
import numpy

from dynamemo import Runtime
from dynamemo.transfers import Timeline
from tests.runtime.late import LateDevice


def test_a_copy_waits_for_the_one_before_it():
    timeline = Timeline()
    assert timeline.begin_out(2.0) == 2.0
    assert timeline.begin_out(1.0) == 3.0
    assert timeline.begin_in(1.0, after_s=3.0) == 4.0
    assert timeline.wait(3.0)
    assert not timeline.wait(2.5)
    assert timeline.now_s == 3.0


def test_what_has_ended_is_no_longer_ahead():
    timeline = Timeline()
    timeline.begin_out(2.0)
    timeline.begin_in(5.0)
    timeline.now_s = 1.0
    timeline.end_out()
    timeline.end_in()
    assert timeline.begin_out(1.0) == timeline.begin_in(1.0) == 2.0


def test_copies_that_were_seen_to_end_put_it_right():
    """It leaves out what nobody measures, so it may lag; a copy that has ended shows it."""
    x = numpy.ones((64, 1024), "f")
    with Runtime("1200KiB", device=LateDevice(), policy="offload") as runtime:
        transfers = runtime._manager.transfers
        loss = F.sum(F.tanh(F.tanh(F.tanh(F.tanh(F.tanh(chainer.Variable(x)))))))
        timeline = transfers.timeline
        assert runtime.statistics().offloaded_bytes > 0
        loss.backward()
        transfers.finish()
        timeline.out_free_s = timeline.in_free_s = timeline.now_s + 5.0
        transfers.reap()
    assert timeline.out_free_s <= timeline.now_s
    assert timeline.in_free_s <= timeline.now_s


def test_what_comes_first_is_not_kept_from_the_end_by_the_probe_of_the_link():
    with Runtime("1MiB", device=LateDevice()) as runtime:
        x = numpy.empty(300 << 10, "u1")
        assert runtime._manager.device.block_of(x).offset == 0
