"""Train with a loop of one's own, and read what the budget cost.

Shows: `runtime.statistics()` inside and after the context, `runtime.reset_peak()`, and that the
losses are the same to the last bit as without a budget.
Prints: each step's loss with the peak of that step, then the totals, then "bit-equal: True".
"""

import dynamemo  # before Chainer, which then works on NumPy 2 as well

# isort: split
import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

STEPS = 4


def train(after_step):
    """Train a deep perceptron; return its losses."""
    np.random.seed(0)
    layers = [f for _ in range(12) for f in (L.Linear(256, 256), F.tanh)]
    model = chainer.Sequential(*layers, L.Linear(256, 10))
    optimizer = chainer.optimizers.MomentumSGD(0.05).setup(model)
    x = np.random.standard_normal((1024, 256)).astype(np.float32)
    t = np.random.randint(10, size=1024).astype(np.int32)
    losses = []
    for _ in range(STEPS):
        loss = F.softmax_cross_entropy(model(x), t)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        losses.append(float(loss.array))
        after_step(losses[-1])
    return losses


def main():
    """Train without and with a budget."""
    expected = train(lambda loss: None)
    with dynamemo.Runtime(budget="20MiB", device="cpu") as runtime:

        def after_step(loss):
            print(f"loss {loss:.6f}, peak {dynamemo.format_bytes(runtime.statistics().peak_bytes)}")
            runtime.reset_peak()

        losses = train(after_step)
    totals = runtime.statistics()
    print(f"iterations {totals.iterations}, budget {dynamemo.format_bytes(totals.budget_bytes)}")
    print(f"dropped {dynamemo.format_bytes(totals.dropped_bytes)}")
    print(f"recomputed {dynamemo.format_bytes(totals.recomputed_bytes)}")
    print(f"offloaded {dynamemo.format_bytes(totals.offloaded_bytes)}")
    print("bit-equal:", losses == expected)


if __name__ == "__main__":
    main()
