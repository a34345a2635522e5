"""Record, describe and plan define-by-run computations; knows no device and no framework.

Covers the recorder, liveness, the cost model, the planner with its forecast, and the seed's
strategies over a plain description of layer networks. Everything here is integers, enums and frozen
values and is tested without a GPU.
"""

from dynamemo.graph.cost_model import CostModel, Link
from dynamemo.graph.errors import GraphError, InternalError, TraceError
from dynamemo.graph.explain import Explanation
from dynamemo.graph.forecast import Forecast
from dynamemo.graph.liveness import MANAGED_KINDS, FreeRule, Liveness, StepMemory
from dynamemo.graph.planner import BudgetError, Planner, Schedule, plan
from dynamemo.graph.problem import LinkRate, Problem, ProblemError, Technique
from dynamemo.graph.problem_of_trace import problem_of
from dynamemo.graph.recorder import Recorder
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

__all__ = [
    "MANAGED_KINDS",
    "BudgetError",
    "CostModel",
    "Explanation",
    "Forecast",
    "FreeRule",
    "GraphError",
    "InternalError",
    "Link",
    "LinkRate",
    "Liveness",
    "Operation",
    "Phase",
    "Planner",
    "Problem",
    "ProblemError",
    "Recorder",
    "Schedule",
    "StepMemory",
    "Storage",
    "StorageKind",
    "Technique",
    "Trace",
    "TraceError",
    "plan",
    "problem_of",
]
