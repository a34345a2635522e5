"""Say in plain values and as text what a plan does, what it costs, and how good it is.

Covers one budget. Waits for the link are shared out among the tensors that are moved, by bytes, so
that the seconds of all decisions add up to the seconds that the budget costs.
"""

from dataclasses import dataclass

from dynamemo.graph.planner import Planner, Schedule
from dynamemo.graph.problem import Problem, Technique

#: Lines of the table; the rest is summed up in one.
_MOST_LINES = 20
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Decision:
    """Tell what happens to one tensor that is not kept.

    Attributes
    ----------
    tensor
        Its index.
    label
        The step that makes it.
    technique
        RECOMPUTE or OFFLOAD.
    nbytes
        Its bytes.
    added_s
        Seconds that it costs.
    """

    tensor: int
    label: str
    technique: Technique
    nbytes: int
    added_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Tell what a budget means; `str` gives a table.

    Attributes
    ----------
    budget_bytes
        The budget.
    smallest_bytes
        The smallest budget for which a plan was found.
    kept_peak_bytes
        The peak without a budget.
    schedule
        The plan.
    decisions
        What is not kept, in the order of `Problem.tensors`.
    """

    budget_bytes: int
    smallest_bytes: int
    kept_peak_bytes: int
    schedule: Schedule
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        forecast = self.schedule.forecast
        loss = forecast.elapsed_s / forecast.compute_s - 1.0 if forecast.compute_s else 0.0
        seconds = f"{_ms(forecast.elapsed_s)}  {loss:+.1%}"
        bound = f"{_ms(self.schedule.bound_s)}  gap {self.schedule.gap:.1%}"
        lines = [
            f"budget            {_mib(self.budget_bytes)}",
            f"smallest feasible {_mib(self.smallest_bytes)}",
            f"without a budget  {_mib(self.kept_peak_bytes)}  {_ms(forecast.compute_s)}",
            f"predicted         {_mib(forecast.peak_bytes)}  {seconds}",
            f"lower bound       {'':>13}  {bound}",
        ]
        if self.decisions:
            lines += ["", f"{'made by':28}{'technique':11}{'tensors':>8}{'MiB':>10}{'ms':>10}"]
        return "\n".join([*lines, *self._table()])

    def _table(self) -> list[str]:
        """Sum decisions up by the maker's label and technique, the dearest first."""
        sums: dict[tuple[str, str], tuple[int, int, float]] = {}
        for decision in self.decisions:
            key = (decision.label, decision.technique.name.lower())
            count, nbytes, added_s = sums.get(key, (0, 0, 0.0))
            sums[key] = (count + 1, nbytes + decision.nbytes, added_s + decision.added_s)
        rows = sorted(sums.items(), key=lambda row: (-row[1][2], -row[1][1], row[0]))
        lines = [_row(label, technique, *figures) for (label, technique), figures in rows]
        if len(lines) > _MOST_LINES:
            rest = [figures for _, figures in rows[_MOST_LINES:]]
            totals = [sum(column) for column in zip(*rest, strict=True)]
            lines[_MOST_LINES:] = [_row(f"{len(rest)} more", "", *totals)]
        return lines


def explain(problem: Problem, budget_bytes: int) -> Explanation:
    """Plan a problem and say what comes of it.

    Parameters
    ----------
    problem
        A well-formed problem.
    budget_bytes
        What memory must not exceed.

    Returns
    -------
    Explanation
        Of the first plan.

    Raises
    ------
    BudgetError
        If no plan fits into the budget.
    """
    planner = Planner(problem)
    schedule = planner.plan(budget_bytes)
    return Explanation(
        budget_bytes,
        planner.smallest_feasible_budget(),
        planner.kept_peak_bytes(),
        schedule,
        tuple(_decisions(problem, schedule)),
    )


def _decisions(problem: Problem, schedule: Schedule) -> list[Decision]:
    """List what is not kept and what each costs."""
    forecast = schedule.forecast
    waits_s = forecast.stalled_out_s + forecast.stalled_in_s
    decisions = []
    for index, (tensor, technique) in enumerate(
        zip(problem.tensors, schedule.techniques, strict=True)
    ):
        if technique is Technique.KEEP or not tensor.uses:
            continue
        if technique is Technique.RECOMPUTE and tensor.rebuild is not None:
            added_s = tensor.rebuild.elapsed_s
        else:
            added_s = waits_s * tensor.nbytes / max(1, forecast.moved_bytes)
        label = problem.steps[tensor.made_at].label
        decisions.append(Decision(index, label, technique, tensor.nbytes, added_s))
    return decisions


def _row(label: str, technique: str, count: int, nbytes: int, added_s: float) -> str:
    """Write one line of the table."""
    name = label if len(label) <= 27 else f"{label[:26]}…"
    return f"{name:28}{technique:11}{count:8}{nbytes / _MIB:10.1f}{added_s * 1e3:10.3f}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:9.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:10.3f} ms"
