"""Name what can go wrong in the graph part.

Three classes: a malformed description from outside, a question that cannot be answered yet, and a
fault of our own. None of them ever signals that memory ran out; that is the allocator's to say.
"""


class GraphError(Exception):
    """Report a failure of the graph part; the base of its small family."""


class TraceError(GraphError, ValueError):
    """Report a trace or a network that is not well formed."""


class InternalError(GraphError):
    """Report a broken invariant: a fault of dynamemo itself, never of its user."""
