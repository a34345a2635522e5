"""Write a trace as JSON and read it back; never pickle.

Covers the trace and, where they are known, the rates of the link it would be moved over. Fields at
their defaults are left out. Text that is not such a trace is refused with one sentence that says
where.

Invariants
----------
1. `loads(dumps(trace, ...))` gives the same values.
2. What `loads` returns is validated.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import isfinite
from typing import Any, NoReturn, TypeVar

from dynamemo.graph.errors import TraceError
from dynamemo.graph.problem import LinkRate
from dynamemo.graph.types import Operation, Phase, Storage, StorageKind, Trace

#: What a file says of itself.
FORMAT = "dynamemo trace"
#: Raised whenever an older reader would misread what is written.
VERSION = 1

_Record = TypeVar("_Record", Storage, Operation, LinkRate)

#: The type of a field that holds storage ids.
_IDS = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """Hold what a file says.

    Attributes
    ----------
    trace
        Validated.
    outward, inward
        The link's rates, where the file has them.
    """

    trace: Trace
    outward: LinkRate | None = None
    inward: LinkRate | None = None


def dumps(trace: Trace, *, outward: LinkRate | None = None, inward: LinkRate | None = None) -> str:
    """Write a trace.

    Parameters
    ----------
    trace
        A well-formed trace.
    outward, inward
        The link's rates, if known.

    Returns
    -------
    str
        One JSON object.

    Raises
    ------
    ValueError
        If a number is not finite.
    """
    value: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    if outward is not None:
        value["outward"] = _written(outward)
    if inward is not None:
        value["inward"] = _written(inward)
    value["storages"] = [_written(storage) for storage in trace.storages]
    value["operations"] = [_written(operation) for operation in trace.operations]
    return json.dumps(value, allow_nan=False)


def loads(text: str | bytes) -> Recording:
    """Read a trace.

    Parameters
    ----------
    text
        What `dumps` wrote.

    Returns
    -------
    Recording
        The trace and the link's rates.

    Raises
    ------
    TraceError
        If it is not JSON, not such a trace, of another version, or not well formed.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise TraceError(f'not a trace: no object with "format": "{FORMAT}"')
    if value.get("version") != VERSION:
        raise TraceError(
            f"version {value.get('version')!r} of the trace format is not known, only {VERSION}"
        )
    trace = Trace(
        tuple(_read_all(Storage, value, "storages")),
        tuple(_read_all(Operation, value, "operations")),
    )
    trace.validate()
    return Recording(trace, _read_link(value, "outward"), _read_link(value, "inward"))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number here")


def _written(record: Storage | Operation | LinkRate) -> dict[str, Any]:
    """Turn a record into a JSON object without the fields that have their defaults."""
    written = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if field.default is MISSING or value != field.default:
            written[field.name] = value.value if isinstance(value, Phase | StorageKind) else value
    return written


def _read_all(cls: type[_Record], value: Mapping[str, Any], name: str) -> list[_Record]:
    """Read a list of records."""
    rows = value.get(name)
    if not isinstance(rows, list):
        raise TraceError(f"{name} is missing or not a list")
    return [_read(cls, row, f"{name}[{index}]") for index, row in enumerate(rows)]


def _read_link(value: Mapping[str, Any], name: str) -> LinkRate | None:
    """Read one direction of the link, if it is there."""
    if name not in value:
        return None
    link = _read(LinkRate, value[name], name)
    if not link.bytes_per_s > 0.0 or not link.latency_s >= 0.0:
        raise TraceError(f"{name}: expected a bandwidth above 0 and a latency of 0 or more")
    return link


def _read(cls: type[_Record], row: Any, where: str) -> _Record:
    """Read one record; every field has to be of its type."""
    if not isinstance(row, dict):
        raise TraceError(f"{where} is not an object")
    known = {field.name: field for field in fields(cls)}
    unknown = sorted(row.keys() - known.keys())
    if unknown:
        raise TraceError(f"{where} has unknown fields {unknown}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        if name in row:
            values[name] = _checked(row[name], field.type, f"{where}.{name}")
        elif field.default is MISSING:
            raise TraceError(f"{where} has no {name}")
    return cls(**values)


def _checked(value: Any, expected: Any, where: str) -> Any:
    """Return a value in the type that its field has."""
    if expected in (Phase, StorageKind):
        try:
            return expected(value)
        except ValueError:
            raise TraceError(f"{where} is {value!r}, expected a {expected.__name__}") from None
    if expected == _IDS:
        if isinstance(value, list) and all(type(id) is int for id in value):
            return tuple(value)
    elif expected in (int, bool, str):
        if type(value) is expected:
            return value
    elif expected == int | None:
        if value is None or type(value) is int:
            return value
    elif value is None and expected == float | None:
        return None
    elif type(value) in (int, float) and isfinite(value):
        return float(value)
    raise TraceError(f"{where} is {value!r}, which it cannot be")
