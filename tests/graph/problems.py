"""Make random problems: chains with skips, tensors of several uses, chains of rebuilds.

They follow a `random.Random`, so a seed names one, and Hypothesis can drive it.
"""

from dataclasses import replace
from random import Random

from dynamemo.graph.problem import LinkRate, Problem, Rebuild, Step, Technique, Tensor

MIB = 1 << 20


def random_problem(random: Random, functions: int, *, rate: float = 2e9) -> Problem:
    """Make a problem of `functions` forward and as many backward steps."""
    total = 2 * functions
    steps = [
        *(
            Step(f"f{i}", random.choice((1, 2, 4)) * 1e-3, random.randrange(9) * MIB)
            for i in range(functions)
        ),
        *(
            Step(f"b{i}", random.choice((2, 4, 8)) * 1e-3, random.randrange(17) * MIB)
            for i in reversed(range(functions))
        ),
    ]
    tensors: list[Tensor] = []
    for maker in range(functions - 1):
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            tensors.append(_random_tensor(random, maker, functions, total, tensors, steps))
    latency_s = random.choice((0.0, 1e-4, 1e-3))
    link = LinkRate(rate * random.choice((0.5, 1, 2)), latency_s)
    return Problem(tuple(steps), tuple(tensors), functions, link, link, 0)


def _random_tensor(
    random: Random,
    maker: int,
    functions: int,
    total: int,
    before: list[Tensor],
    steps: list[Step],
) -> Tensor:
    """Make a tensor that one or two later functions read, in forward and mostly in backward."""
    readers = {min(functions - 1, maker + 1)}
    if random.random() < 0.3:
        readers.add(random.randrange(maker + 1, functions))
    users = {reader for reader in readers if random.random() < 0.8}
    if random.random() < 0.4:
        users.add(maker)
    earlier = [i for i, tensor in enumerate(before) if tensor.made_at < maker and tensor.uses]
    rebuild = None
    if random.random() < 0.8:
        sources = random.sample(earlier[-3:], min(len(earlier), random.choice((0, 1, 1, 2))))
        rebuild = Rebuild(
            steps[maker].elapsed_s, tuple(sorted(sources)), random.choice((0, 0, MIB, 4 * MIB))
        )
    return Tensor(
        random.choice((1, 2, 4, 8, 16)) * MIB,
        maker,
        max(readers),
        tuple(sorted(total - 1 - user for user in users)),
        rebuild,
        random.random() < 0.8,
        len(before),
    )


def joined(first: Problem, second: Problem) -> Problem:
    """Run one problem behind another, as two losses in one iteration do."""
    steps, index = len(first.steps), len(first.tensors)
    later = tuple(
        replace(
            tensor,
            made_at=tensor.made_at + steps,
            last_forward_use=tensor.last_forward_use + steps,
            uses=tuple(use + steps for use in tensor.uses),
            rebuild=tensor.rebuild
            and replace(tensor.rebuild, sources=tuple(s + index for s in tensor.rebuild.sources)),
        )
        for tensor in second.tensors
    )
    # Some of the first pass's tensors are read again by the second.
    read_again = tuple(
        replace(tensor, uses=(*tensor.uses, steps + place % len(second.steps)))
        if tensor.uses and place % 3 == 0
        else tensor
        for place, tensor in enumerate(first.tensors)
    )
    return replace(first, steps=first.steps + second.steps, tensors=read_again + later)


def random_techniques(random: Random, problem: Problem) -> tuple[Technique, ...]:
    """Choose a technique that it allows for each tensor."""
    return tuple(random.choice(allowed(tensor)) for tensor in problem.tensors)


def allowed(tensor: Tensor) -> list[Technique]:
    """List the techniques that a tensor allows."""
    techniques = [Technique.KEEP]
    if tensor.uses and tensor.rebuild is not None:
        techniques.append(Technique.RECOMPUTE)
    if tensor.uses and tensor.is_movable:
        techniques.append(Technique.OFFLOAD)
    return techniques
