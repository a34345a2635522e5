"""`dynamemo demo`: one network, several budgets, the same results.

Trains a convolutional Chainer network on scikit-learn's bundled handwritten digits: once without
dynamemo, once accounting only (to learn the peak), then within 50 %, 30 % and the smallest feasible
share of that peak. The smallest is found by trying: an attempt that does not fit says what would.
Prints a table and whether losses and parameters are bit-equal; the exit code is 1 if any differs or
a budget was exceeded.

The network is deep and its 3 × 3 convolutions are narrow: on a CPU one of those needs its input 18
times over for as long as it runs, and that has to stay small beside the sum of all activations.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
import threadpoolctl  # type: ignore[import-untyped]  # scikit-learn brings it
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dynamemo.allocator import OutOfMemoryError, format_bytes
from dynamemo.report import write_json
from dynamemo.runtime import Runtime
from dynamemo.statistics import Statistics

EPOCHS = 2
BATCH = 96
TRAINING_IMAGES = 1536
SEED = 0
WIDTH = 32
NARROW_WIDTH = 4
BLOCKS = 10

#: Columns of the table where the output is no terminal and has no width.
_COLUMNS = 100


class Block(chainer.Chain):
    """A residual block that convolves in few channels; keeps the shape (n, WIDTH, h, w)."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.reduce = L.Convolution2D(WIDTH, NARROW_WIDTH, 1, nobias=True)
            self.reduce_norm = L.BatchNormalization(NARROW_WIDTH)
            self.convolve = L.Convolution2D(NARROW_WIDTH, NARROW_WIDTH, 3, pad=1, nobias=True)
            self.convolve_norm = L.BatchNormalization(NARROW_WIDTH)
            self.expand = L.Convolution2D(NARROW_WIDTH, WIDTH, 1, nobias=True)
            # From zero: the block is the identity at first, which trains faster.
            self.expand_norm = L.BatchNormalization(WIDTH, initial_gamma=0)

    def forward(self, x: Any) -> Any:
        """Return the images, refined."""
        h = F.relu(self.reduce_norm(self.reduce(x)))
        h = F.relu(self.convolve_norm(self.convolve(h)))
        return F.relu(x + self.expand_norm(self.expand(h)))


class DigitNet(chainer.Chain):
    """A residual network with BatchNormalization and dropout.

    Takes images (n, 1, h, w) in float32, their sides multiples of 4; gives scores (n, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.stem = L.Convolution2D(1, WIDTH, 3, pad=1, nobias=True)
            self.stem_norm = L.BatchNormalization(WIDTH)
            self.blocks = chainer.ChainList(*[Block() for _ in range(BLOCKS)])
            self.scores = L.Linear(WIDTH * 16, 10)

    def forward(self, x: Any) -> Any:
        """Return the scores."""
        h = F.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            h = block(h)
        h = F.average_pooling_2d(h, h.shape[2] // 4)
        return self.scores(F.dropout(h, 0.3))


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (n, 1, h, w) and labels (n,) to train with and to test with, on the host."""

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one training run gave."""

    losses: tuple[float, ...]
    #: Hash of all parameters and persistent values after training.
    digest: str
    #: Share of the test images that were recognised.
    accuracy: float
    #: The median.
    seconds_per_iteration: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; bytes unless the name says otherwise, None where there is none."""

    name: str
    budget_bytes: int | None
    peak_bytes: int | None
    seconds_per_iteration: float
    dropped_bytes: int
    recomputed_bytes: int
    offloaded_bytes: int
    accuracy: float
    is_equal: bool
    is_within_budget: bool


def find_device(device: str | int) -> str:
    """Return the name of the device that a runtime would take: "cpu" or "cuda:0".

    Raises
    ------
    ValueError, DynamemoError
        As `Runtime` does.
    """
    with Runtime("1MiB", device=device, policy="none") as runtime:
        return runtime.statistics().device


def run_demo(*, device: str = "cpu", json_path: str | None = None) -> int:
    """Train, print the table, and tell whether all was as promised.

    Parameters
    ----------
    device : str
        From `find_device`.
    json_path : str, optional
        File that gets the rows.

    Returns
    -------
    int
        0, or 1 where a result differs or a budget was exceeded.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_COLUMNS)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        demo = _Demo(device, progress)
        # One thread: the matrices are small, and the time then depends less on the machine's load.
        with threadpoolctl.threadpool_limits(1):
            demo.run()
    console.print(table(demo.rows, device))
    if json_path is not None:
        write_json(json_path, [asdict(row) for row in demo.rows])
    failures = verdict(demo.rows)
    for failure in failures:
        console.print(f"[bold red]{failure}[/]", soft_wrap=True)
    if not failures:
        console.print(
            "Losses, parameters and BatchNormalization statistics: bit-equal in all runs."
        )
    return 1 if failures else 0


def verdict(rows: list[Row]) -> list[str]:
    """Return what was not as promised, a line each."""
    lines = [f"{row.name}: the results differ" for row in rows if not row.is_equal]
    for row in rows:
        if not row.is_within_budget:
            lines.append(f"{row.name}: {row.peak_bytes:,} bytes, above {row.budget_bytes:,}")
    return lines


def table(rows: list[Row], device: str) -> Table:
    """Lay the rows out, with a line on what they mean; fits 100 columns."""
    result = Table(
        title=f"{DigitNet.__name__} on handwritten digits, {device}: one training, several budgets",
        caption="budget, peak: all array memory at once; dropped, recomputed, offloaded: in all",
        box=SIMPLE_HEAD,
        padding=0,
        caption_justify="left",
    )
    result.add_column("run", no_wrap=True)
    for name in ("budget", "peak", "s/iter", "dropped", "recomputed", "offloaded", "accuracy"):
        result.add_column(name, justify="right", overflow="fold")
    result.add_column("bit-equal", justify="center", overflow="fold")
    for row in rows:
        figures = (row.budget_bytes, row.peak_bytes)
        moved = (row.dropped_bytes, row.recomputed_bytes, row.offloaded_bytes)
        result.add_row(
            row.name,
            *("-" if nbytes is None else format_bytes(nbytes) for nbytes in figures),
            f"{row.seconds_per_iteration:.3f}",
            *(format_bytes(nbytes) for nbytes in moved),
            f"{row.accuracy:.1%}",
            "yes" if row.is_equal else "[bold red]NO[/]",
        )
    return result


class _Demo:
    def __init__(self, device: str, progress: Progress) -> None:
        self._device = device
        self._place = chainer.get_device("@numpy" if device == "cpu" else f"@cupy:{device[5:]}")
        # On a GPU 8 × 8 pixels would be nothing.
        self._digits = _load_digits(enlarged=1 if device == "cpu" else 8)
        self._progress = progress
        self.rows: list[Row] = []

    def run(self) -> None:
        with self._bar("without dynamemo") as advance:
            reference = self._train(advance)
        self._add("without dynamemo", reference, reference)
        outcome, figures = self._within(None)
        # Without what a GPU's runtime sets aside of its budget, which follows the budget's size.
        peak_bytes = figures.pool.peak_bytes
        self._add("accounting only", outcome, reference, peak_bytes=peak_bytes)
        for share in (50, 30):
            outcome, figures = self._within(peak_bytes * share // 100)
            self._add(f"{share} % of the peak", outcome, reference, figures)
        outcome, figures = self._smallest(peak_bytes // 6)
        name = f"smallest: {figures.budget_bytes / peak_bytes:.0%}".replace("%", " %")
        self._add(name, outcome, reference, figures)

    def _within(self, budget_bytes: int | None) -> tuple[Outcome, Statistics]:
        """Train within the budget; None accounts only."""
        if budget_bytes is None:
            name, runtime = "accounting", Runtime("50%", device=self._device, policy="none")
        else:
            name = f"within {format_bytes(budget_bytes)}"
            runtime = Runtime(budget_bytes + self._foreign_bytes(), device=self._device)
        with self._bar(name) as advance, runtime:
            outcome = self._train(advance)
        return outcome, runtime.statistics()

    def _smallest(self, budget_bytes: int) -> tuple[Outcome, Statistics]:
        """Try; where it does not fit, try what the error says, and at least 3 % more."""
        while True:
            try:
                return self._within(budget_bytes)
            except OutOfMemoryError as error:
                feasible_bytes = error.feasible_bytes - self._foreign_bytes()
                budget_bytes = max(feasible_bytes, budget_bytes * 103 // 100)

    def _foreign_bytes(self) -> int:
        """Return what CuPy's own pool still holds of the runs before: it counts in a budget."""
        if self._place.xp is numpy:
            return 0
        gc.collect()
        pool = self._place.xp.get_default_memory_pool()
        pool.free_all_blocks()
        return int(pool.total_bytes())

    def _train(self, advance: Callable[[], None]) -> Outcome:
        """Train from the same seed, on whatever allocator is current."""
        digits, place = self._digits, self._place
        with chainer.using_device(place), chainer.using_config("cudnn_deterministic", True):
            numpy.random.seed(SEED)
            place.xp.random.seed(SEED)
            model = DigitNet()
            model.to_device(place)
            optimizer = chainer.optimizers.Adam(1e-2).setup(model)
            losses, elapsed = [], []
            for index in _batches():
                x, t = place.send((digits.images[index], digits.labels[index]))
                started = time.perf_counter()
                losses.append(_step(model, optimizer, x, t))
                elapsed.append(time.perf_counter() - started)
                advance()
            seconds = sorted(elapsed)[len(elapsed) // 2]
            return Outcome(tuple(losses), _digest(model), _accuracy(model, digits, place), seconds)

    @contextlib.contextmanager
    def _bar(self, name: str) -> Iterator[Callable[[], None]]:
        task = self._progress.add_task(name, total=EPOCHS * TRAINING_IMAGES // BATCH)
        try:
            yield lambda: self._progress.advance(task)
        finally:
            self._progress.remove_task(task)

    def _add(
        self,
        name: str,
        outcome: Outcome,
        reference: Outcome,
        figures: Statistics | None = None,
        *,
        peak_bytes: int | None = None,
    ) -> None:
        is_equal = outcome.losses == reference.losses and outcome.digest == reference.digest
        self.rows.append(
            Row(
                name=name,
                budget_bytes=None if figures is None else figures.budget_bytes,
                peak_bytes=peak_bytes if figures is None else figures.peak_bytes,
                seconds_per_iteration=outcome.seconds_per_iteration,
                dropped_bytes=0 if figures is None else figures.dropped_bytes,
                recomputed_bytes=0 if figures is None else figures.recomputed_bytes,
                offloaded_bytes=0 if figures is None else figures.offloaded_bytes,
                accuracy=outcome.accuracy,
                is_equal=is_equal,
                is_within_budget=figures is None or figures.peak_bytes <= figures.budget_bytes,
            )
        )


def _load_digits(*, enlarged: int) -> Digits:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:, None] / 16).astype(numpy.float32)
    images = images.repeat(enlarged, axis=2).repeat(enlarged, axis=3)
    labels = data.target.astype(numpy.int32)
    split = TRAINING_IMAGES
    return Digits(images[:split], labels[:split], images[split:], labels[split:])


def _batches() -> Iterator[Any]:
    """Yield the indexes of each batch's images."""
    for _ in range(EPOCHS):
        order = numpy.random.permutation(TRAINING_IMAGES)
        for start in range(0, TRAINING_IMAGES, BATCH):
            yield order[start : start + BATCH]


def _step(model: Any, optimizer: Any, x: Any, t: Any) -> float:
    """Train with one batch; return the loss. Synchronises."""
    loss = F.softmax_cross_entropy(model(x), t)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    return float(loss.array)


def _accuracy(model: Any, digits: Digits, place: Any) -> float:
    """Return the share of the test images that the model recognises."""
    recognised = 0
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        for start in range(0, len(digits.test_labels), BATCH):
            x = place.send(digits.test_images[start : start + BATCH])
            found = chainer.backends.cuda.to_cpu(model(x).array.argmax(axis=1))
            recognised += int((found == digits.test_labels[start : start + BATCH]).sum())
    return recognised / len(digits.test_labels)


def _digest(model: Any) -> str:
    """Hash all parameters and persistent values."""
    hashed = hashlib.blake2b(digest_size=16)
    values = [param.array for _, param in sorted(model.namedparams())]
    for _, link in sorted(model.namedlinks()):
        values += [getattr(link, name) for name in sorted(link._persistent)]
    for value in values:
        hashed.update(numpy.ascontiguousarray(chainer.backends.cuda.to_cpu(value)).tobytes())
    return hashed.hexdigest()
