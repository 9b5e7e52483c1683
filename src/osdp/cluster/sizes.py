"""Memory sizes as people write them, and back.

GB and GiB differ by 7 % at this size, more than the reserve a plan keeps, so a bare 'G' is refused
instead of guessed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from osdp.cluster.schema import MOST_MEMORY_BYTES
from osdp.errors import UsageError

_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_SIZE = re.compile(
    r"\s*([-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[-+]?\d{1,2})?)\s*([a-z]*)\s*",
    re.IGNORECASE | re.ASCII,
)
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_bytes(text: str | int) -> int:
    """The number of bytes in '8GiB', '80 GB', '512MiB', '1.5TiB', '1024' or a plain int.

    Computed exactly and rounded down, so that a size never promises a byte that is not there.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise UsageError(f"memory size {text!r} is not a size; write an integer of bytes or a text such as '40GiB'")
    if isinstance(text, int):
        number, unit = Fraction(text), "b"
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise UsageError(f"memory size {text!r} is not a number with a unit; write it as '40GiB' or '80GB'")
        number, unit = Fraction(match[1]), match[2].lower() or "b"
    if unit not in _UNITS:
        raise UsageError(
            f"memory size {text!r} has an unknown unit; use B, KiB, MiB, GiB, TiB (powers of 1024)"
            " or KB, MB, GB, TB (powers of 1000)"
        )
    size = int(number * _UNITS[unit])
    if size < 1:
        raise UsageError(f"memory size {text!r} is less than one byte; give a positive size such as '40GiB'")
    if size > MOST_MEMORY_BYTES:
        raise UsageError(
            f"memory size {text!r} is above {format_bytes(MOST_MEMORY_BYTES)}; give a size such as '40GiB'"
        )
    return size


_RATE = re.compile(r"\s*(\d{1,15}(?:\.\d{0,15})?)\s*([kmgt])(bit|b)(?:/s|ps)?\s*", re.IGNORECASE | re.ASCII)


def parse_rate(text: str) -> float:
    """Bytes per second of '200Gbit', '200 Gbit/s', '25GB/s': what a data sheet says of a link, in powers of 1000."""
    match = _RATE.fullmatch(text)
    bits = match is not None and (match[3].lower() == "bit" or match[3] == "b")
    rate = float(match[1]) * 1000.0 ** ("kmgt".index(match[2].lower()) + 1) / (8 if bits else 1) if match else 0.0
    if not 0 < rate <= 1e15:
        raise UsageError(f"rate {text[:40]!r} is not a link's; write it as '200Gbit' (bits) or '25GB/s' (bytes)")
    return rate


def format_bytes(count: int | float) -> str:
    """'41.2 GiB': one decimal in the largest binary unit that keeps the number at least 1.

    A negative count is a saving and prints as '-9.1 GiB'.
    """
    sign, size = ("-", -float(count)) if count < 0 else ("", float(count))
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in _BINARY[1:-1]:
        size /= 1024
        if round(size, 1) < 1024:
            return f"{sign}{size:.1f} {unit}"
    return f"{sign}{size / 1024:.1f} {_BINARY[-1]}"
