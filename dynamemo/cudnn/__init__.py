"""cuDNN 9 under Chainer on CuPy 14, which has no cuDNN of its own.

`import dynamemo` before Chainer puts it in place where CuPy 14 and cuDNN are installed; Chainer's
own switches then mean what they always did. Here is what they have no name for: TF32, what limits
a convolution's workspace, and a table of what each was given (`report`, `format_table`).
`DYNAMEMO_CUDNN=0` or `CHAINER_CUDNN=0` in the environment leaves it out.
"""

from __future__ import annotations

from dynamemo.cudnn.errors import CudnnError, NoPlanError
from dynamemo.cudnn.records import Assignment, Counters, format_table
from dynamemo.cudnn.running import as_of, counters, forget, moment, reconsider, report
from dynamemo.cudnn.settings import Settings, Source, configure, using_settings
from dynamemo.cudnn.workspace import WorkspacePolicy

__all__ = [
    "Assignment",
    "Counters",
    "CudnnError",
    "NoPlanError",
    "Settings",
    "Source",
    "WorkspacePolicy",
    "as_of",
    "configure",
    "counters",
    "forget",
    "format_table",
    "moment",
    "reconsider",
    "report",
    "using_settings",
]
