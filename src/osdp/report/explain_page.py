"""Prints why a plan is as it is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod

from osdp.cluster import format_bytes
from osdp.report.explanation import Alternative, Explained, Explanation, Price
from osdp.report.numbers import format_rate, format_seconds, format_share
from osdp.report.printing import EMPTY, indented, make_table, print_heading, print_line

MOST_SHOWN = 8  # alternatives that fit, and that do not


def print_explanation(found: Explanation, out: Console) -> None:
    print_heading(out, f"{found.model} on {found.cluster}")
    print_line(
        out, f"{format_rate(found.samples_per_second)} samples/s, a step of {format_seconds(found.step_seconds)}"
    )
    for each in found.explained:
        _print_explained(each, found, out)
    _print_memory(found, out)
    _print_time(found, out)
    if found.prices:
        print_heading(out, "What more would be worth")
        for price in found.prices:
            print_line(out, price_sentence(price))


def price_sentence(price: Price) -> str:
    return f"{price.what}: {format_rate(price.samples_per_second)} samples/s, {100 * price.gain:+.2f} % ({price.how})"


def _print_explained(each: Explained, found: Explanation, out: Console) -> None:
    print_heading(out, each.name)
    print_line(out, f"{each.sentence}, with all else as planned")
    deep = any(way.prefetch > 1 for way in each.alternatives)
    ahead: list[tuple[str, JustifyMethod]] = [("prefetch", "right")] if deep else []
    table = make_table(
        *(("mode", "left"), ("gathered", "left"), *ahead, ("recompute", "left")),
        *(("step", "right"), ("peak", "right"), ("fits", "left")),
    )
    shown = _shown(each.alternatives)
    for way in shown:
        slower = way.step_seconds - each.chosen.step_seconds
        more = way.peak_bytes - each.chosen.peak_bytes
        seconds = format_seconds(way.step_seconds) if way.chosen else f"{_sign(slower)}{format_seconds(abs(slower))}"
        peak = format_bytes(way.peak_bytes) if way.chosen else f"{_sign(more)}{format_bytes(abs(more))}"
        gathered = f"{way.slices} slices" if way.slices > 1 else way.granularity
        recompute = way.recompute.value if way.recompute else EMPTY
        depth = [str(way.prefetch)] if deep else []
        fits = "chosen" if way.chosen else "yes" if way.fits else "no"
        table.add_row(way.mode, gathered, *depth, recompute, seconds, peak, fits)
    out.print(indented(table))
    if len(shown) < len(each.alternatives):
        print_line(out, f"{len(each.alternatives) - len(shown)} slower ones are in --json")


def _shown(ways: Sequence[Alternative]) -> list[Alternative]:
    """The chosen one, and the fastest of those that fit and of those that do not; `ways` are in that order."""
    chosen, others = ways[:1], ways[1:]
    return [*chosen, *(way for fits in (True, False) for way in [w for w in others if w.fits == fits][:MOST_SHOWN])]


def _sign(value: float) -> str:
    return "-" if value < 0 else "+"


def _print_memory(found: Explanation, out: Console) -> None:
    print_heading(out, "Memory")
    spare = found.limit_bytes - found.peak_bytes
    print_line(out, f"the peak is {format_bytes(spare)} below the limit of {format_bytes(found.limit_bytes)}")
    if not found.binding:
        print_line(out, "the limit binds nowhere: no stage comes within 1 % of it")
    for each in found.binding:
        print_line(out, f"the limit binds in {each.phase}, with {format_bytes(each.spare_bytes)} left, at {each.label}")


def _print_time(found: Explanation, out: Console) -> None:
    print_heading(out, "Time")
    print_line(out, f"the devices compute, copy and update in {format_share(found.compute_share)} of the step")
    if found.stalls:
        waits = ", ".join(f"{each.name} {format_seconds(each.seconds)}" for each in found.stalls)
        print_line(out, f"computation waits longest for: {waits}")
    else:
        print_line(out, "computation waits for no collective")
