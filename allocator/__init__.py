"""The unified tensor pool: a budgeted arena per device, and the tiers behind it.

Knows NumPy and CuPy, and no graph. CuPy is imported by `cupy_memory` alone, which is imported only
where a GPU is asked for.
"""

from dynamemo.allocator.arena import Arena, HostArena
from dynamemo.allocator.block import Block, LateFree
from dynamemo.allocator.copier import DONE, Copier, CopyTime, HostCopier, Mark
from dynamemo.allocator.errors import (
    AllocatorError,
    InternalError,
    NestedUseError,
    OutOfMemoryError,
    SpillError,
)
from dynamemo.allocator.file_tier import FileTier
from dynamemo.allocator.heap import BlockHeap, End
from dynamemo.allocator.host_tier import HostTier
from dynamemo.allocator.numpy_memory import root_array, using_numpy_pool
from dynamemo.allocator.pool import Pool
from dynamemo.allocator.pool_statistics import PoolStatistics
from dynamemo.allocator.reclaimer import Reclaimer
from dynamemo.allocator.sizes import format_bytes, parse_budget
from dynamemo.allocator.tier import Ticket, Tier, TierStatistics
from dynamemo.allocator.tiers import TierStack
from dynamemo.allocator.using_pool import using_pool
from dynamemo.allocator.window import HeapBlock

__all__ = [
    "DONE",
    "AllocatorError",
    "Arena",
    "Block",
    "BlockHeap",
    "Copier",
    "CopyTime",
    "End",
    "FileTier",
    "HeapBlock",
    "HostArena",
    "HostCopier",
    "HostTier",
    "InternalError",
    "LateFree",
    "Mark",
    "NestedUseError",
    "OutOfMemoryError",
    "Pool",
    "PoolStatistics",
    "Reclaimer",
    "SpillError",
    "Ticket",
    "Tier",
    "TierStack",
    "TierStatistics",
    "format_bytes",
    "parse_budget",
    "root_array",
    "using_numpy_pool",
    "using_pool",
]
