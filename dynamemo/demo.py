"""`dynamemo demo`: one network, several budgets, the same results.

Trains a convolutional Chainer network on scikit-learn's bundled handwritten digits: once without
dynamemo, once accounting only (to learn the peak), then within 50 %, 30 % and the smallest feasible
share of that peak. The smallest is found by trying: an attempt that does not fit says what would.
Prints a table and whether losses and parameters are bit-equal; the exit code is 1 if any differs or
a budget was exceeded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dynamemo.allocator import OutOfMemoryError, format_bytes
from dynamemo.runtime import Runtime
from dynamemo.statistics import Statistics

EPOCHS = 3
BATCH = 256
SEED = 0


class DigitNet(chainer.Chain):  # type: ignore[misc]
    """Three convolution blocks with BatchNormalization, dropout and a linear classifier.

    Takes images (n, 1, 8, 8) in float32, gives scores (n, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 32, 64, 64)
        with self.init_scope():
            self.convolutions = chainer.ChainList(
                *[L.Convolution2D(i, o, 3, pad=1) for i, o in zip(widths, widths[1:], strict=False)]
            )
            self.norms = chainer.ChainList(*[L.BatchNormalization(o) for o in widths[1:]])
            self.hidden = L.Linear(64 * 4, 128)
            self.out = L.Linear(128, 10)

    def forward(self, x: Any) -> Any:
        """Return the scores."""
        h = x
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            h = F.relu(norm(convolution(h)))
            if number % 2:
                h = F.max_pooling_2d(h, 2)
        h = F.dropout(F.relu(self.hidden(h)), 0.3)
        return self.out(h)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one training run gave."""

    losses: tuple[float, ...]
    #: Hash of all parameters and persistent values after training.
    digest: str
    accuracy: float
    seconds_per_iteration: float


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

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


def _digits() -> tuple[Any, Any, Any, Any]:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images[:, None] / 16).astype(numpy.float32)
    labels = data.target.astype(numpy.int32)
    return images[:1536], labels[:1536], images[1536:], labels[1536:]


def _train(gpu: bool, advance: Callable[[], None]) -> Outcome:
    """Train from the same seed, on whatever allocator is current."""
    x_train, t_train, x_test, t_test = _digits()
    numpy.random.seed(SEED)
    model = DigitNet()
    if gpu:
        import cupy

        cupy.random.seed(SEED)
        model.to_device("@cupy:0")
    optimizer = chainer.optimizers.Adam(1e-3).setup(model)
    place = model.device.send
    losses, elapsed = [], []
    for _ in range(EPOCHS):
        order = numpy.random.permutation(len(x_train))
        for start in range(0, len(order), BATCH):
            index = order[start : start + BATCH]
            started = time.perf_counter()
            loss = F.softmax_cross_entropy(model(place(x_train[index])), place(t_train[index]))
            model.cleargrads()
            loss.backward()
            optimizer.update()
            losses.append(float(loss.array))
            elapsed.append(time.perf_counter() - started)
            del loss
            advance()
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        accuracy = float(F.accuracy(model(place(x_test)), place(t_test)).array)
    elapsed.sort()
    return Outcome(tuple(losses), _digest(model), accuracy, elapsed[len(elapsed) // 2])


def _digest(model: Any) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for _, param in sorted(model.namedparams()):
        hashed.update(chainer.backends.cuda.to_cpu(param.array).tobytes())
    for link in model.links():
        for name in sorted(link._persistent):
            hashed.update(
                numpy.asarray(chainer.backends.cuda.to_cpu(getattr(link, name))).tobytes()
            )
    return hashed.hexdigest()


@contextlib.contextmanager
def _bar(progress: Progress, name: str) -> Iterator[Callable[[], None]]:
    task = progress.add_task(name, total=EPOCHS * -(-1536 // BATCH))
    yield lambda: progress.advance(task)
    progress.remove_task(task)


class _Demo:
    def __init__(self, device: str, progress: Progress) -> None:
        self._device = device
        self._gpu = _uses_gpu(device)
        self._progress = progress
        self.rows: list[Row] = []

    def run(self) -> None:
        with _bar(self._progress, "without dynamemo") as advance:
            reference = _train(self._gpu, advance)
        self._add("without dynamemo", reference, reference, None)
        outcome, figures = self._within(None, "accounting only", policy="none")
        self._add("accounting only", outcome, reference, figures)
        peak_bytes = figures.peak_bytes
        for share in (50, 30):
            name = f"{share} % of the peak"
            outcome, figures = self._within(peak_bytes * share // 100, name)
            self._add(name, outcome, reference, figures)
        outcome, figures = self._smallest(peak_bytes // 20)
        self._add("smallest feasible", outcome, reference, figures)

    def _within(
        self, budget_bytes: int | None, name: str, *, policy: str = "cost-aware"
    ) -> tuple[Outcome, Statistics]:
        with _bar(self._progress, name) as advance:
            budget = "50%" if budget_bytes is None else budget_bytes
            with Runtime(budget, device=self._device, policy=policy) as runtime:
                outcome = _train(self._gpu, advance)
        return outcome, runtime.statistics()

    def _smallest(self, budget_bytes: int) -> tuple[Outcome, Statistics]:
        """Try; where it does not fit, try what the error says, until it does."""
        while True:
            try:
                return self._within(budget_bytes, f"trying {format_bytes(budget_bytes)}")
            except OutOfMemoryError as error:
                budget_bytes = max(error.feasible_bytes, budget_bytes + budget_bytes // 100)

    def _add(
        self, name: str, outcome: Outcome, reference: Outcome, figures: Statistics | None
    ) -> None:
        is_equal = outcome.losses == reference.losses and outcome.digest == reference.digest
        accounting = figures is None or figures.policy == "none"
        self.rows.append(
            Row(
                name=name,
                budget_bytes=None if figures is None or accounting else figures.budget_bytes,
                peak_bytes=None if figures is None else figures.peak_bytes,
                seconds_per_iteration=outcome.seconds_per_iteration,
                dropped_bytes=0 if figures is None else figures.dropped_bytes,
                recomputed_bytes=0 if figures is None else figures.recomputed_bytes,
                offloaded_bytes=0 if figures is None else figures.offloaded_bytes,
                accuracy=outcome.accuracy,
                is_equal=is_equal,
                is_within_budget=figures is None or figures.peak_bytes <= figures.budget_bytes,
            )
        )


def _uses_gpu(device: str) -> bool:
    if device == "cpu" or not chainer.backends.cuda.available:
        return False
    from dynamemo.cuda_device import device_count

    return device_count() > 0


def _table(rows: list[Row]) -> Table:
    table = Table(title="dynamemo demo: handwritten digits, one network, several budgets")
    for name in ("run", "budget", "peak", "s/iteration", "dropped", "recomputed", "offloaded"):
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_column("accuracy", justify="right")
    table.add_column("bit-equal", justify="center")
    for row in rows:
        table.add_row(
            row.name,
            "-" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            f"{row.seconds_per_iteration:.3f}",
            format_bytes(row.dropped_bytes),
            format_bytes(row.recomputed_bytes),
            format_bytes(row.offloaded_bytes),
            f"{row.accuracy:.1%}",
            "yes" if row.is_equal else "NO",
        )
    return table


def run_demo(*, device: str = "auto", json_path: str | None = None) -> int:
    """Train, print the table, and tell whether all was as promised.

    Parameters
    ----------
    device : str
        As for `Runtime`.
    json_path : str, optional
        File that gets the rows.

    Returns
    -------
    int
        0, or 1 where a result differs or a budget was exceeded.
    """
    console = Console()
    with Progress(console=console, transient=True) as progress:
        demo = _Demo(device, progress)
        demo.run()
    console.print(_table(demo.rows))
    if json_path is not None:
        with open(json_path, "w") as file:
            json.dump([asdict(row) for row in demo.rows], file, indent=2)
    failed = [row.name for row in demo.rows if not (row.is_equal and row.is_within_budget)]
    if failed:
        console.print(f"[bold red]different or over budget:[/] {', '.join(failed)}")
        return 1
    console.print("Losses, parameters and BatchNormalization statistics are bit-equal in all runs.")
    return 0
