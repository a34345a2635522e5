"""Estimate seconds from measurements: of functions by signature, of links by bytes.

Covers what a function costs to run again and what a copy costs. It does not measure: the runtime
does, on the device's clock, when `CostModel.wants_sample` says that a sample is worth having.

Invariants
----------
1. An estimate is finite and never negative.
2. Bounded: at most `MAX_SIGNATURES` signatures, a few numbers each; the oldest is dropped first.
3. One outlier moves a settled estimate by at most `_MAX_STEP` of itself.

Source: none of the seed's (Wang et al., PPoPP 2018, judge a layer by its type); measured cost is
what replaces that.
"""

from collections.abc import Hashable
from statistics import median

#: Samples whose median is the first settled estimate.
FIRST_SAMPLES = 5
#: Calls between two samples once an estimate is settled.
SAMPLE_PERIOD = 64
#: Signatures remembered.
MAX_SIGNATURES = 65_536
#: Share of the difference that a settled estimate moves towards a new sample.
_DRIFT_RATE = 0.25
#: Largest relative change of a settled estimate by one sample.
_MAX_STEP = 0.25
#: Relative difference from which a sample counts as a sign of drift.
_DRIFT_SIGN = 0.5
#: Signs of drift in a row after which a signature is measured anew.
_DRIFT_SIGNS = 3
#: Bytes below which a copy tells of latency rather than of bandwidth.
_SMALL_COPY_BYTES = 256 * 1024
#: Weight that a link keeps of its past at each observation.
_LINK_MEMORY = 0.9


class _Samples:
    """Hold what is known of one signature; mutable, private to the model."""

    __slots__ = ("calls", "drift_signs", "estimate_s", "first_s")

    def __init__(self) -> None:
        #: Times `wants_sample` was asked since the estimate settled.
        self.calls = 0
        self.drift_signs = 0
        self.estimate_s = 0.0
        #: The samples before the estimate settled; empty afterwards.
        self.first_s: list[float] = []


class CostModel:
    """Estimate the seconds of functions.

    Parameters
    ----------
    assumed_bytes_per_s
        Bandwidth assumed for a signature never measured.
    assumed_latency_s
        Seconds assumed for such a call beside its bytes.
    """

    def __init__(
        self, *, assumed_bytes_per_s: float = 10e9, assumed_latency_s: float = 10e-6
    ) -> None:
        if assumed_bytes_per_s <= 0 or assumed_latency_s < 0:
            raise ValueError(
                f"assumed {assumed_bytes_per_s} bytes/s and {assumed_latency_s} s latency; "
                "expected a positive bandwidth and a latency of 0 or more"
            )
        self._assumed_bytes_per_s = assumed_bytes_per_s
        self._assumed_latency_s = assumed_latency_s
        self._samples: dict[Hashable, _Samples] = {}

    def __len__(self) -> int:
        """Count the signatures remembered."""
        return len(self._samples)

    def observe(self, signature: Hashable, elapsed_s: float) -> None:
        """Take in one measurement.

        The first `FIRST_SAMPLES` are kept and their median is the estimate, so a slow first call
        (compilation, autotuning) does not count. After that the estimate follows slowly. Several
        samples in a row far from it make the signature new again.

        Parameters
        ----------
        signature
            Whatever tells two calls of different cost apart (label, shapes, dtypes).
        elapsed_s
            Measured seconds; negative or not finite ones are ignored (a clock that jumped).
        """
        if not 0.0 <= elapsed_s < float("inf"):
            return
        samples = self._of(signature)
        if samples.first_s or samples.estimate_s == 0.0:
            _settle(samples, elapsed_s)
        else:
            _follow(samples, elapsed_s)

    def estimate(self, signature: Hashable, *, nbytes: int) -> float:
        """Estimate the seconds of one call.

        Parameters
        ----------
        signature
            As in `observe`.
        nbytes
            Bytes it reads and writes; used only while nothing has been measured.

        Returns
        -------
        float
            Seconds, 0 or more.
        """
        samples = self._samples.get(signature)
        if samples is None or (samples.estimate_s == 0.0 and not samples.first_s):
            return self._assumed_latency_s + nbytes / self._assumed_bytes_per_s
        return samples.estimate_s

    def is_measured(self, signature: Hashable) -> bool:
        """Tell whether at least one measurement of the signature is known."""
        samples = self._samples.get(signature)
        return samples is not None and (bool(samples.first_s) or samples.estimate_s > 0.0)

    def is_settled(self, signature: Hashable) -> bool:
        """Tell whether the estimate rests on enough samples, and no drift made it new again."""
        samples = self._samples.get(signature)
        return samples is not None and not samples.first_s and samples.estimate_s > 0.0

    def wants_sample(self, signature: Hashable) -> bool:
        """Tell whether the coming call should be measured; counts as one call.

        Yes until `FIRST_SAMPLES` have been observed, then once in `SAMPLE_PERIOD` calls, and
        densely again when drift was seen.
        """
        samples = self._samples.get(signature)
        if samples is None or samples.first_s or samples.estimate_s == 0.0:
            return True
        samples.calls += 1
        return samples.drift_signs > 0 or samples.calls % SAMPLE_PERIOD == 0

    def _of(self, signature: Hashable) -> _Samples:
        """Return the signature's samples, made if new; drops the oldest signature when full."""
        samples = self._samples.get(signature)
        if samples is None:
            if len(self._samples) >= MAX_SIGNATURES:
                del self._samples[next(iter(self._samples))]
            samples = self._samples[signature] = _Samples()
        return samples


class Link:
    """Estimate the seconds of copies in one direction; one object per direction.

    Parameters
    ----------
    bytes_per_s
        Bandwidth assumed before the first observation.
    latency_s
        Seconds assumed for an empty copy before the first small one was observed.
    """

    def __init__(self, *, bytes_per_s: float = 10e9, latency_s: float = 10e-6) -> None:
        if bytes_per_s <= 0 or latency_s < 0:
            raise ValueError(
                f"a link of {bytes_per_s} bytes/s and {latency_s} s latency; "
                "expected a positive bandwidth and a latency of 0 or more"
            )
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        # Decayed sums over the copies seen; bandwidth is their quotient, so large ones weigh more.
        self._sum_bytes = 0.0
        self._sum_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth as known now."""
        return self._bytes_per_s

    @property
    def latency_s(self) -> float:
        """Seconds of an empty copy as known now."""
        return self._latency_s

    def observe(self, nbytes: int, elapsed_s: float) -> None:
        """Take in one copy's measured seconds; ones not above 0 or not finite are ignored."""
        if not 0.0 < elapsed_s < float("inf") or nbytes < 0:
            return
        if nbytes < _SMALL_COPY_BYTES:
            beside_s = max(0.0, elapsed_s - nbytes / self._bytes_per_s)
            self._latency_s += (1.0 - _LINK_MEMORY) * (beside_s - self._latency_s)
            return
        # Latency is never taken for more than half of a large copy, however wrong it is so far.
        moving_s = max(elapsed_s - self._latency_s, 0.5 * elapsed_s)
        self._sum_bytes = _LINK_MEMORY * self._sum_bytes + nbytes
        self._sum_s = _LINK_MEMORY * self._sum_s + moving_s
        self._bytes_per_s = self._sum_bytes / self._sum_s

    def seconds(self, nbytes: int) -> float:
        """Estimate the seconds of a copy of `nbytes` bytes."""
        return self._latency_s + nbytes / self._bytes_per_s


def _settle(samples: _Samples, elapsed_s: float) -> None:
    """Add one of the first samples; the estimate is their median."""
    samples.first_s.append(elapsed_s)
    samples.estimate_s = median(samples.first_s)
    if len(samples.first_s) >= FIRST_SAMPLES and samples.estimate_s > 0.0:
        samples.first_s = []
        samples.calls = 0
        samples.drift_signs = 0
    del samples.first_s[:-FIRST_SAMPLES]


def _follow(samples: _Samples, elapsed_s: float) -> None:
    """Let a settled estimate follow a new sample, slowly and by a bounded step."""
    estimate_s = samples.estimate_s
    difference_s = elapsed_s - estimate_s
    if abs(difference_s) > _DRIFT_SIGN * estimate_s:
        samples.drift_signs += 1
        if samples.drift_signs >= _DRIFT_SIGNS:
            samples.first_s = [elapsed_s]
            samples.estimate_s = elapsed_s
            samples.drift_signs = 0
            return
    else:
        samples.drift_signs = 0
    limit_s = _MAX_STEP * estimate_s
    samples.estimate_s += max(-limit_s, min(limit_s, _DRIFT_RATE * difference_s))
