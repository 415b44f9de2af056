"""Training in lockstep: the worst error of each quantity in every step, on a log scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpt_parity.html.markup import details, svg, table, text
from gpt_parity.oracle.lockstep import Outcome

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 102.0, 10.0, 36.0
# Points of a line, and rows of a table.
MOST_POINTS, MOST_ROWS = 200, 20
LABEL = 14.0
DASHES = ("", "8 3", "2 3", "12 3 2 3", "5 2", "1 2")
# Below this nothing is drawn: it is exact, or as good as that.
LEAST = 1e-6


def curves(ident: str, outcome: Outcome) -> str:
    """A chart and a table for each candidate of a run in lockstep."""
    return "\n".join(
        _chart(f"{ident}-{i}", f"{candidate} {outcome.dtype}", series)
        for i, (candidate, series) in enumerate(outcome.series.items())
    )


def thinned(series: Sequence[float], most: int) -> list[tuple[int, int, float]]:
    """First step, last step and largest value of at most `most` ranges of steps."""
    stride = max(1, math.ceil(len(series) / most))
    starts = range(0, len(series), stride)
    return [
        (start, min(start + stride, len(series)) - 1, max(series[start : start + stride]))
        for start in starts
    ]


def _chart(ident: str, title: str, series: Mapping[str, Sequence[float]]) -> str:
    drawn = {name: values for name, values in series.items() if max(values, default=0.0) > 0.0}
    exact = [name for name in series if name not in drawn]
    steps = max((len(values) for values in series.values()), default=0)
    said = f"Worst error of each quantity in {steps} steps, in units of tolerance (dashed: 1)."
    if steps > MOST_POINTS:
        said += f" Each point is the worst of {math.ceil(steps / MOST_POINTS)} steps."
    if exact:
        said += f" Exactly equal in every step: {', '.join(exact)}."
    finite = [v for values in drawn.values() for v in values if LEAST <= v < math.inf]
    low = math.floor(math.log10(min([0.1, *finite])))
    high = math.ceil(math.log10(max([1.0, *finite])))
    if any(v < 10.0**low for values in drawn.values() for v in values):
        said += " What is smaller lies on the lower edge."
    if any(math.isinf(v) for values in drawn.values() for v in values):
        said += " What is not finite lies on the upper edge."

    def y(value: float) -> float:
        share = (math.log10(min(max(value, 10.0**low), 10.0**high)) - low) / (high - low)
        return TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)

    def x(step: float) -> float:
        return LEFT + step / max(1, steps - 1) * (WIDTH - LEFT - RIGHT)

    body = [*_axes(low, high, steps, x, y)]
    ends: list[tuple[float, str, int]] = []
    order = list(series)
    for name, values in drawn.items():
        points = thinned(values, MOST_POINTS)
        line = "".join(
            f"{'L' if i else 'M'}{x(last):.1f} {y(value):.1f}"
            for i, (_, last, value) in enumerate(points)
        )
        colour = order.index(name) % len(DASHES)
        dash = DASHES[colour]
        body.append(
            f'<path class="line" style="stroke:var(--q{colour});stroke-dasharray:'
            f'{dash or "none"}" d="{line}"/>'
        )
        ends.append((y(points[-1][2]), name, colour))
    body += _labels(ends, x(max(0, steps - 1)))
    picture = svg(
        ident, f"{title}: error by step", said, (WIDTH, HEIGHT), "\n".join(body), style="curve",
        scale=1.5,
    )  # fmt: skip
    return (
        f"<h3>{text(title)}</h3>\n<figure>\n{picture}\n<figcaption>{text(said)}</figcaption>\n"
        f"</figure>\n{_figures(title, series)}"
    )


def _axes(low: int, high: int, steps: int, x, y) -> list[str]:
    """Decades, the tolerance, and steps."""
    body = []
    right = WIDTH - RIGHT
    for power in range(low, high + 1):
        at = y(10.0**power)
        limit = "limit" if power == 0 else "grid"
        body.append(f'<path class="{limit}" d="M{LEFT} {at:.1f}H{right}"/>')
        label = f"{10.0**power:g}"
        body.append(f'<text text-anchor="end" x="{LEFT - 6}" y="{at + 4:.1f}">{label}</text>')
    base = HEIGHT - BOTTOM
    for step in sorted({0, (steps - 1) // 2, steps - 1}) if steps else []:
        body.append(f'<text text-anchor="middle" x="{x(step):.1f}" y="{base + 18}">{step}</text>')
    middle = (LEFT + right) / 2
    body.append(f'<text class="soft" text-anchor="middle" x="{middle}" y="{base + 32}">step</text>')
    return body


def _labels(ends: list[tuple[float, str, int]], x: float) -> list[str]:
    """Names at the ends of the lines, pushed apart, with a thin line to where they belong."""
    places: list[float] = []
    ends = sorted(ends)
    for end, _, _ in ends:
        places.append(max(end, places[-1] + LABEL) if places else end)
    over = max(0.0, places[-1] - (HEIGHT - BOTTOM)) if places else 0.0
    for i in reversed(range(len(places))):  # what was pushed off the lower edge goes up again
        limit = HEIGHT - BOTTOM if i == len(places) - 1 else places[i + 1] - LABEL
        places[i] = min(places[i], limit) if over else places[i]
    return [
        f'<path class="lead" style="stroke:var(--q{colour})" '
        f'd="M{x:.1f} {end:.1f}L{x + 10:.1f} {place:.1f}"/>'
        f'<text style="fill:var(--q{colour})" x="{x + 13:.1f}" y="{place + 4:.1f}">'
        f"{text(name)}</text>"
        for (end, name, colour), place in zip(ends, places, strict=True)
    ]


def _figures(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """The numbers behind the lines: the worst of each range of steps."""
    columns = {name: thinned(values, MOST_ROWS) for name, values in series.items()}
    ranges = max(columns.values(), key=len, default=[])
    rows = [
        [f"{first} to {last}" if last > first else str(first)]
        + [f"{column[i][2]:.3g}" if i < len(column) else "" for column in columns.values()]
        for i, (first, last, _) in enumerate(ranges)
    ]
    content = table(
        f"{title}: worst error in units of tolerance", ["step", *columns], rows,
        numbers=range(1, len(columns) + 1), names=False,
    )  # fmt: skip
    return details(f"Figures of {title}", content)
