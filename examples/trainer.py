"""Train with Chainer's Trainer inside a budget: one `with` line around unchanged code.

Shows: `dynamemo.Runtime` around a Trainer with a StandardUpdater, an Evaluator and a LogReport.
Prints: the report of each epoch, then the budget and the most that was taken of it, in bytes.
Without a budget the same training takes 10 MiB.
"""

import tempfile

import dynamemo  # before Chainer, which then works on NumPy 2 as well

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import training
from chainer.training import extensions
from sklearn.datasets import load_digits

BATCH = 64


def digits():
    """Return handwritten digits to train with and to test with."""
    data = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    pairs = chainer.datasets.TupleDataset(images, data.target.astype(np.int32))
    return chainer.datasets.split_dataset_random(pairs, 1500, seed=0)


def main():
    """Train two epochs."""
    np.random.seed(0)
    layers = [L.Convolution2D(1, 32, 3, pad=1), F.relu]
    for _ in range(6):
        layers += [L.Convolution2D(32, 32, 1), L.BatchNormalization(32), F.relu]
    network = chainer.Sequential(*layers, lambda h: F.max_pooling_2d(h, 2), L.Linear(None, 10))
    model = L.Classifier(network)
    optimizer = chainer.optimizers.Adam().setup(model)
    train, test = digits()
    batches = chainer.iterators.SerialIterator(train, BATCH)
    updater = training.StandardUpdater(batches, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        trainer = training.Trainer(updater, (2, "epoch"), out=folder)
        test_batches = chainer.iterators.SerialIterator(test, BATCH, repeat=False, shuffle=False)
        trainer.extend(extensions.Evaluator(test_batches, model))
        trainer.extend(extensions.LogReport())
        entries = ["epoch", "main/loss", "main/accuracy", "validation/main/accuracy"]
        trainer.extend(extensions.PrintReport(entries))
        trainer.run()


if __name__ == "__main__":
    with dynamemo.Runtime(budget="6MiB", device="cpu") as runtime:
        main()
    statistics = runtime.statistics()
    print(f"budget {statistics.budget_bytes:,} bytes, peak {statistics.peak_bytes:,}")
