"""Read and write byte counts as people do: ``"4GiB"``, ``"512 MB"``, ``"60%"``.

Covers budgets and limits given by a user. Does not ask any device: whoever knows the free bytes
passes a callable.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import index

__all__ = ["format_bytes", "parse_budget"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|([kmgt]?)(i?)(b?))\s*", re.IGNORECASE)


def parse_budget(value: int | str, *, free_bytes: Callable[[], int], reserve_bytes: int = 0) -> int:
    """Turn a budget into bytes.

    Parameters
    ----------
    value : int or str
        Bytes; or a number with a unit, where ``GiB``, ``Gi`` and ``g`` are powers of 1024 and
        ``GB`` powers of 1000; or a percentage of what is free.
    free_bytes : callable
        Gives the free bytes of the device; called for a percentage only.
    reserve_bytes : int
        Bytes taken off the free bytes before the percentage is formed (what libraries take for
        themselves).

    Returns
    -------
    int
        Bytes, at least 1.

    Raises
    ------
    ValueError
        If `value` is not such a size, or comes out below one byte.

    Examples
    --------
    >>> parse_budget("1.5g", free_bytes=lambda: 0)
    1610612736
    >>> parse_budget("60%", free_bytes=lambda: 1000)
    600
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, free_bytes, reserve_bytes)
    elif isinstance(value, bool):
        raise _not_a_size(value)
    else:
        try:
            nbytes = index(value)
        except TypeError:
            raise _not_a_size(value) from None
    if nbytes < 1:
        raise _not_a_size(value)
    return nbytes


def format_bytes(nbytes: int) -> str:
    """Write bytes with a binary unit and at most one decimal.

    Examples
    --------
    >>> format_bytes(1610612736), format_bytes(512), format_bytes(2 << 20)
    ('1.5 GiB', '512 B', '2 MiB')
    """
    sign = "-" if nbytes < 0 else ""
    amount = abs(nbytes)
    for letter in ("t", "g", "m", "k"):
        if amount >= _UNITS[letter]:
            text = f"{amount / _UNITS[letter]:.1f}".removesuffix(".0")
            return f"{sign}{text} {'K' if letter == 'k' else letter.upper()}iB"
    return f"{sign}{amount} B"


def _parse_text(text: str, free_bytes: Callable[[], int], reserve_bytes: int) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise _not_a_size(text)
    number, unit, letter, binary, suffix = match.groups()
    if unit == "%":
        if float(number) > 100:
            raise _not_a_size(text)
        return int(max(0, free_bytes() - reserve_bytes) * float(number) / 100)
    if not letter and binary:
        raise _not_a_size(text)
    is_decimal = bool(letter) and bool(suffix) and not binary
    factor = _DECIMAL_UNITS[letter.lower()] if is_decimal else _UNITS[letter.lower()]
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def _not_a_size(value: object) -> ValueError:
    return ValueError(
        f"{value!r} is not a budget: give bytes (4294967296), a size ('4GiB', '512 MB', '1.5g') "
        "or a percentage of the free memory ('60%'), at least one byte and at most 100%"
    )
