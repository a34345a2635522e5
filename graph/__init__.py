"""Record, describe and plan define-by-run computations; knows no device and no framework.

Covers the recorder, liveness, the cost model and the seed's strategies over a plain description of
layer networks. Everything here is integers, enums and frozen values and is tested without a GPU.
"""

from dynamemo.graph.cost_model import CostModel, Link
from dynamemo.graph.errors import GraphError, InternalError, TraceError
from dynamemo.graph.liveness import MANAGED_KINDS, FreeRule, Liveness, StepMemory
from dynamemo.graph.recorder import Recorder
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

__all__ = [
    "MANAGED_KINDS",
    "CostModel",
    "FreeRule",
    "GraphError",
    "InternalError",
    "Link",
    "Liveness",
    "Operation",
    "Phase",
    "Recorder",
    "StepMemory",
    "Storage",
    "StorageKind",
    "Trace",
    "TraceError",
]
