"""Numbers as people read them; bytes are `osdp.cluster.format_bytes`."""

from __future__ import annotations


def format_count(count: float) -> str:
    """'2.52 B', '50.4 M', '867 k', '64': three digits and a power of a thousand."""
    return _scaled(count, ("", "k", "M", "B", "T"))


def format_flops(flops: float) -> str:
    """'1.21 TFLOP'."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_rate(rate: float) -> str:
    """'34.1', '0.0512', '12,345': three digits or more, never an exponent."""
    if rate >= 999.5:
        return f"{rate:,.0f}"
    if rate <= 0:
        return "0"
    value = _three_digits(rate)
    decimals = 2
    while value < 1 and value * 10 ** (decimals - 2) < 1:
        decimals += 1
    return f"{value:.{decimals if value < 10 else 1 if value < 100 else 0}f}"


def format_seconds(seconds: float) -> str:
    """'1.24 s', '812 ms', '35.0 µs'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if _three_digits(seconds / size) >= 1:
            return f"{format_rate(seconds / size)} {unit}"
    return f"{format_rate(seconds / 1e-6)} µs"


def format_share(share: float) -> str:
    """'71 %', '<1 %'."""
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = 0
    value = _three_digits(value)
    while value >= 1000 and power + 1 < len(units):
        value /= 1000
        power += 1
    number = f"{value:.0f}" if power == 0 else format_rate(value)
    return f"{number} {units[power]}".rstrip()


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
