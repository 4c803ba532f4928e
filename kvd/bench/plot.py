"""Throughput and TTFT over concurrency as an SVG: a few lines of text, for which no plotting library has to be installed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from kvd.bench.plan import METRICS
from kvd.bench.results import Result

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 310, 62, 16, 50, 44
_COLOURS = ("#1b6ca8", "#c8553d", "#3c8d53", "#8a5fa8", "#b8860b", "#5c6670")
_RATES = ("prefill_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s")
_TIMES = ("ttft_s", "second_turn_ttft_s")

Curve = Mapping[int, float]
"""A figure's medians by concurrency."""


def plot(result: Result) -> str:
    """One row of two panels for each scenario that was run at two or more concurrencies: rate on the left, TTFT on the right.

    Raises:
        ValueError: there is no such scenario.
    """
    rows = []
    for title, samples in _series(result).items():
        panels = [found for names in (_RATES, _TIMES) if (found := _curves(samples, names))]
        if panels:
            rows.append((title, panels))
    if not rows:
        raise ValueError("a plot needs a scenario at two or more concurrencies")
    names = list(result.targets)
    width, height = 2 * _WIDTH, len(rows) * _HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (title, panels) in enumerate(rows):
        parts.append(f'<text x="{_LEFT}" y="{number * _HEIGHT + 20}" font-size="13" font-weight="bold">{escape(title)}</text>')
        for column, (metric, curves) in enumerate(panels):
            parts.append(f'<g transform="translate({column * _WIDTH},{number * _HEIGHT})">')
            parts += _panel(metric.removesuffix("_s").removesuffix("_per").replace("_", " "), METRICS[metric].unit, curves, names)
            parts.append("</g>")
    for number, name in enumerate(names):
        x, y = _LEFT + 150 * number, height - 12
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{_colour(number)}"/><text x="{x + 24}" y="{y - 3}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _series(result: Result) -> dict[str, list[Mapping[str, object]]]:
    """Samples by what they share but for the concurrency and the number of requests."""
    found: dict[str, list[Mapping[str, object]]] = {}
    for sample in result.samples:
        rest = {key: value for key, value in sample["point"].items() if key not in {"concurrency", "requests"}}
        title = ", ".join(str(value) if key == "scenario" else f"{key.replace('_', ' ')} {value}" for key, value in rest.items())
        found.setdefault(title, []).append(sample)
    return found


def _curves(samples: Sequence[Mapping[str, object]], names: Sequence[str]) -> tuple[str, dict[str, Curve]] | None:
    """The first of the figures that the samples have, by target and concurrency; None where there is nothing to draw a line through."""
    for name in names:
        values: dict[str, dict[int, list[float]]] = {}
        for sample in samples:
            metrics, point = sample["metrics"], sample["point"]
            assert isinstance(metrics, dict)
            assert isinstance(point, dict)
            if name in metrics:
                values.setdefault(str(sample["target"]), {}).setdefault(point.get("concurrency", 1), []).append(metrics[name])
        curves: dict[str, Curve] = {
            target: {width: statistics.median(each) for width, each in by_width.items()} for target, by_width in values.items()
        }
        if any(len(curve) > 1 for curve in curves.values()):
            return name, curves
    return None


def _panel(title: str, unit: str, curves: Mapping[str, Curve], names: Sequence[str]) -> list[str]:
    """Axes (concurrency in powers of two, the figure from zero) and a line for each target."""
    widths = sorted({width for curve in curves.values() for width in curve})
    top = _round_up(max(value for curve in curves.values() for value in curve.values()))
    low, high = math.log2(widths[0]), max(math.log2(widths[-1]), math.log2(widths[0]) + 1e-9)

    def x(width: int) -> float:
        return round(_LEFT + (math.log2(width) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<text x="{_LEFT}" y="38">{escape(title)}, {escape(unit)}</text>']
    for step in range(5):
        value = top * step / 4
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    parts += [f'<text x="{x(width)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{width}</text>' for width in widths]
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">requests at once</text>')
    for target, curve in curves.items():
        colour = _colour(names.index(target) if target in names else 0)
        points = [(x(width), y(curve[width])) for width in sorted(curve)]
        line = " ".join(f"{across},{down}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across}" cy="{down}" r="3" fill="{colour}"/>' for across, down in points]
    return parts


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * (1 - 1e-9))


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
