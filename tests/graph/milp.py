"""Bound what any plan of a small problem needs, by a mixed-integer program.

It is a relaxation of the forecast: every plan that fits is a solution of the program with the same
seconds, so the program's bound is a true one. What it keeps: the bytes resident at each step and at
each rebuild, one copy at a time each way, copies out in the order of last use in forward, blocks
taken where a copy in begins, waits. What it relaxes: copies in may begin whenever there is room, in
any order; a rebuild may come before its demand; what a rebuild reads has to be begun, not to have
arrived; a copy out may end while a rebuild in front of the same step runs.

Problems are of one forward and one backward pass.
"""

from collections import defaultdict

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from dynamemo.graph.problem import Problem

#: A linear expression: coefficients by variable, and a constant under None.
Linear = dict[int | None, float]


class Program:
    """Build and solve the program of one problem within a budget."""

    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem = problem
        self.budget = budget
        self.steps = range(len(problem.steps))
        self.backward = range(problem.first_backward, len(problem.steps))
        self.used = [i for i, tensor in enumerate(problem.tensors) if tensor.uses]
        self._count = 0
        self._is_integer: list[bool] = []
        self._most: list[float] = []
        self._rows: list[Linear] = []
        self._make_variables()
        self._state_choices()
        self._state_memory()
        self._state_time()

    def bound_s(self, *, time_limit_s: float) -> float:
        """Return seconds that no plan can beat."""
        rows, columns, values, most = [], [], [], []
        for row, linear in enumerate(self._rows):
            most.append(-linear.pop(None, 0.0))
            rows += [row] * len(linear)
            columns += list(linear)
            values += list(linear.values())
        matrix = csr_array((values, (rows, columns)), shape=(len(most), self._count))
        cost = np.zeros(self._count)
        cost[self.run[-1]] = 1.0
        result = milp(
            cost,
            integrality=np.array(self._is_integer, int),
            bounds=Bounds(np.zeros(self._count), np.array(self._most)),
            constraints=LinearConstraint(matrix, -np.inf, np.array(most)),
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-3},
        )
        if result.mip_dual_bound is None:
            raise AssertionError(f"no bound: {result.message}")
        return float(result.mip_dual_bound) + self.problem.steps[-1].elapsed_s

    def _variable(self, most: float = 1.0, *, is_integer: bool = True) -> int:
        self._count += 1
        self._is_integer.append(is_integer)
        self._most.append(most)
        return self._count - 1

    def _at_most_0(self, *parts: tuple[float, Linear]) -> None:
        """State that a sum of scaled expressions is at most 0."""
        total: defaultdict[int | None, float] = defaultdict(float)
        for factor, linear in parts:
            for variable, value in linear.items():
                total[variable] += factor * value
        self._rows.append(dict(total))

    def _make_variables(self) -> None:
        tensors = self.problem.tensors
        self.drop = {i: self._variable(1.0 * (tensors[i].rebuild is not None)) for i in self.used}
        self.move = {i: self._variable(1.0 * tensors[i].is_movable) for i in self.used}
        #: By (tensor, step): the copy out has ended, the copy in has begun, the rebuild has run.
        self.out: dict[tuple[int, int], int] = {}
        self.into: dict[tuple[int, int], int] = {}
        self.rebuilt: dict[tuple[int, int], int] = {}
        #: By (tensor, step): kept as a source beyond its last use.
        self.held: dict[tuple[int, int], int] = {}
        for i in self.used:
            tensor = tensors[i]
            for step in range(tensor.last_forward_use + 1, tensor.uses[0] + 1):
                self.out[i, step] = self._variable()
                if step in self.backward:
                    self.into[i, step] = self._variable()
                    self.rebuilt[i, step] = self._variable()
            for step in range(tensor.uses[-1] + 1, len(self.steps)):
                self.held[i, step] = self._variable(is_integer=False)
        self.issue = [self._variable(np.inf, is_integer=False) for _ in self.steps]
        self.run = [self._variable(np.inf, is_integer=False) for _ in self.steps]

    @staticmethod
    def _value(variables: dict[tuple[int, int], int], key: tuple[int, int]) -> Linear:
        return {variables[key]: 1.0} if key in variables else {}

    def _rebuilds(self, i: int, step: int) -> Linear:
        """1 where tensor i is rebuilt in front of the step."""
        now, before = self.rebuilt.get((i, step)), self.rebuilt.get((i, step - 1))
        linear: Linear = {} if now is None else {now: 1.0}
        return linear if now is None or before is None else {**linear, before: -1.0}

    def _state_choices(self) -> None:
        one: Linear = {None: 1.0}
        for i in self.used:
            drop, move, first = {self.drop[i]: 1.0}, {self.move[i]: 1.0}, self._first(i)
            self._at_most_0((1, drop), (1, move), (-1, one))
            self._at_most_0((1, drop), (-1, {self.rebuilt[i, first]: 1.0}))
            self._at_most_0((1, move), (-1, {self.into[i, first]: 1.0}))
        for variables, chosen in (
            (self.out, self.move), (self.into, self.move), (self.rebuilt, self.drop)
        ):  # fmt: skip
            for (i, step), variable in variables.items():
                self._at_most_0((1, {variable: 1.0}), (-1, {chosen[i]: 1.0}))
                if (i, step - 1) in variables:
                    self._at_most_0((1, {variables[i, step - 1]: 1.0}), (-1, {variable: 1.0}))
        for key, variable in self.into.items():
            self._at_most_0((1, {variable: 1.0}), (-1, {self.out[key]: 1.0}))
        for (i, step), variable in self.held.items():
            if (i, step + 1) in self.held:
                self._at_most_0((1, {self.held[i, step + 1]: 1.0}), (-1, {variable: 1.0}))
        for i in self.used:
            rebuild = self.problem.tensors[i].rebuild
            for source in rebuild.sources if rebuild else ():
                for step in self.backward:
                    here = self._resident(source, step)
                    self._at_most_0((1, self._rebuilds(i, step)), (-1, here))

    def _first(self, i: int) -> int:
        return self.problem.tensors[i].uses[0]

    def _resident(self, i: int, step: int, *, into_at: int = 0, rebuilt_at: int = 0) -> Linear:
        """1 where tensor i is resident at the step (by copies in and rebuilds up to some steps)."""
        tensor = self.problem.tensors[i]
        is_whole_step = not into_at
        if step < tensor.made_at:
            return {}
        if step <= tensor.last_forward_use:
            return {None: 1.0}
        if not tensor.uses or step > tensor.uses[-1]:
            return self._value(self.held, (i, step))
        if step > tensor.uses[0] or (is_whole_step and step == tensor.uses[0]):
            return {None: 1.0}
        linear: Linear = {None: 1.0, self.drop[i]: -1.0, self.out[i, step]: -1.0}
        linear |= self._value(self.into, (i, into_at or step))
        return linear | self._value(self.rebuilt, (i, rebuilt_at or step))

    def _state_memory(self) -> None:
        tensors = self.problem.tensors
        for step in self.steps:
            own = self.problem.steps[step].own_bytes
            parts = [(1.0 * t.nbytes, self._resident(i, step)) for i, t in enumerate(tensors)]
            self._at_most_0(*parts, (1, {None: 1.0 * (own - self.budget)}))
        for i in self.used:
            rebuild = tensors[i].rebuild
            if rebuild is None:
                continue
            for step in self.backward:
                if (i, step) in self.rebuilt:
                    self._state_rebuild(i, step, rebuild.transient_bytes, rebuild.sources)

    def _state_rebuild(self, i: int, step: int, transient: int, sources: tuple[int, ...]) -> None:
        """State what is there while a rebuild runs; without force where it does not run."""
        tensors = self.problem.tensors
        fixed = self.problem.steps[step].own_bytes + transient + tensors[i].nbytes
        most = fixed + sum(tensor.nbytes for tensor in tensors) - self.budget
        parts: list[tuple[float, Linear]] = [(1, {None: 1.0 * (fixed - self.budget)})]
        for other, tensor in enumerate(tensors):
            if other != i:
                is_source = other in sources
                here = self._resident(
                    other,
                    step,
                    into_at=step if is_source else step - 1,
                    rebuilt_at=step if is_source or other < i else step - 1,
                )
                parts.append((1.0 * tensor.nbytes, here))
        if most > 0:
            parts += [(1.0 * most, self._rebuilds(i, step)), (1, {None: -1.0 * most})]
        self._at_most_0(*parts)

    def _state_time(self) -> None:
        problem = self.problem
        for step in self.steps:
            self._at_most_0((1, self._end(step - 1)), (-1, {self.issue[step]: 1.0}))
            rebuilds = [
                (tensor.rebuild.elapsed_s, self._rebuilds(i, step))
                for i, tensor in enumerate(problem.tensors)
                if tensor.rebuild and i in self.used
            ]
            run = (-1.0, {self.run[step]: 1.0})
            self._at_most_0((1, {self.issue[step]: 1.0}), *rebuilds, run)
            self._state_out(step)
            self._state_in(step)
        order = sorted(self.used, key=lambda i: (problem.tensors[i].last_forward_use, i))
        for place, later in enumerate(order):
            for earlier in order[:place]:
                for step in self.steps:
                    if (later, step) in self.out and (earlier, step) in self.out:
                        self._at_most_0(
                            (1, {self.out[later, step]: 1.0, self.move[earlier]: 1.0, None: -1.0}),
                            (-1, {self.out[earlier, step]: 1.0}),
                        )

    def _end(self, step: int) -> Linear:
        if step < 0:
            return {}
        return {self.run[step]: 1.0, None: self.problem.steps[step].elapsed_s}

    def _state_out(self, step: int) -> None:
        """What has left by a step left one by one behind its last uses."""
        tensors = self.problem.tensors
        total_s = sum(self.problem.outward.seconds(tensor.nbytes) for tensor in tensors)
        any_rebuild = [(total_s, self._rebuilds(i, step)) for i in self.used]
        for since in range(step):
            left = [
                (self.problem.outward.seconds(tensors[i].nbytes), self._value(self.out, (i, step)))
                for i in self.used
                if tensors[i].last_forward_use >= since and (i, step) in self.out
            ]
            if left:
                self._at_most_0(*left, (1, self._end(since)), (-1, {self.run[step]: 1.0}))
                self._at_most_0(
                    *left, (1, self._end(since)), (-1, {self.issue[step]: 1.0}),
                    *((-factor, linear) for factor, linear in any_rebuild),
                )  # fmt: skip

    def _state_in(self, step: int) -> None:
        """What is used by a step has come in one by one."""
        tensors = self.problem.tensors
        for since in range(self.problem.first_backward, step + 1):
            come: list[tuple[float, Linear]] = []
            for i in self.used:
                if since <= tensors[i].uses[0] <= step:
                    before = self._value(self.into, (i, since - 1))
                    seconds = self.problem.inward.seconds(tensors[i].nbytes)
                    come += [(seconds, {self.move[i]: 1.0}), (-seconds, before)]
            if come:
                self._at_most_0(
                    *come, (1, {self.issue[since]: 1.0}), (-1, {self.run[step]: 1.0})
                )  # fmt: skip


def bound_s(problem: Problem, budget: int, *, time_limit_s: float = 30.0) -> float:
    """Return seconds that no plan within a budget can beat."""
    return Program(problem, budget).bound_s(time_limit_s=time_limit_s)
