"""What a notebook shows of a result: tables and small pictures in HTML, from text that nobody has vetted."""

from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup, escape

_CELL = "text-align:left;vertical-align:top;padding:1px 12px 1px 0"
_WIDTH, _HEIGHT, _LEFT, _BELOW = 360, 150, 34, 38
"""Of a picture of curves, in pixels, and the room that it leaves for the numbers on its axes."""


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values, both escaped.

    >>> "&lt;b&gt;" in table([("name", "<b>")])
    True
    """
    cells = "".join(f"<tr><th style='{_CELL}'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def staircases(x: Sequence[float], shares: Mapping[str, tuple[Sequence[float], str, str]], label: str) -> str:
    """Return a picture of shares, from 0 to 1, against x: for each title its heights, a colour and a side.

    A curve with the side "at least" takes the next point's height between two points, one "at most" the last one's:
    neither says more than is known.
    """
    most = max(max(x), 1e-300)
    lines = []
    for k, (title, (heights, colour, side)) in enumerate(shares.items()):
        points = [(float(_LEFT), _high(heights[0]))]
        for at, before, now in zip(x[1:], heights, heights[1:], strict=False):
            between = now if side == "at least" else before
            points += [(points[-1][0], _high(between)), (_LEFT + _WIDTH * at / most, _high(between))]
        points.append((points[-1][0], _high(heights[-1])))
        drawn = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        lines.append(f"<polyline points='{drawn}' fill='none' stroke='{colour}' stroke-width='1.8'/>")
        lines.append(_text(_LEFT + _WIDTH - 4, 14 + 14 * k, title, "end", colour))
    axes = [
        f"<path d='M{_LEFT},4 V{_high(0)} H{_LEFT + _WIDTH}' fill='none' stroke='#808080'/>",
        _text(_LEFT - 4, _high(1) + 8, "100%", "end"),
        _text(_LEFT - 4, _high(0), "0", "end"),
        _text(_LEFT, _high(0) + 14, "0", "middle"),
        _text(_LEFT + _WIDTH, _high(0) + 14, f"{most:.3g}", "end"),
        _text(_LEFT + _WIDTH / 2, _high(0) + 26, label, "middle"),
    ]
    return _svg(_LEFT + _WIDTH + 8, _HEIGHT + _BELOW, [*axes, *lines])


def graph(places: Sequence[tuple[int, int]], names: Sequence[str], edges: Iterable[tuple[int, int]]) -> str:
    """Return a picture of a graph, from left to right: the column and the row, and the name, of every node."""
    wide = 20 + 7 * max(map(len, names))
    middle = [(10 + wide / 2 + column * (wide + 24), 20 + 34 * row) for column, row in places]
    drawn = []
    for source, target in edges:
        (a, b), (c, d) = middle[source], middle[target]
        # A line that would run through the nodes between is bent.
        lift = 0.0 if c - a < 1.5 * (wide + 24) else 56.0
        drawn.append(
            f"<path d='M{a + wide / 2:.0f},{b:.0f} Q{(a + c) / 2:.0f},{(b + d) / 2 + lift:.0f} "
            f"{c - wide / 2:.0f},{d:.0f}' fill='none' stroke='#808080'/>"
        )
    for (x, y), name in zip(middle, names, strict=True):
        box = f"<rect x='{x - wide / 2:.0f}' y='{y - 11:.0f}' width='{wide}' height='22' rx='4'"
        drawn.append(f"{box} fill='#3B8FCB' fill-opacity='0.15' stroke='#3B8FCB'/>")
        drawn.append(_text(x, y + 4, name, "middle"))
    width = max(x for x, _ in middle) + wide / 2 + 10
    return f"<div style='overflow-x:auto'>{_svg(width, max(y for _, y in middle) + 44, drawn)}</div>"


def _high(share: float) -> float:
    return 4 + _HEIGHT * (1 - share)


def _text(x: float, y: float, words: str, anchor: str, colour: str = "currentColor") -> Markup:
    style = f"fill='{colour}' font-size='11' font-family='sans-serif' text-anchor='{anchor}'"
    return Markup(f"<text x='{x:.0f}' y='{y:.0f}' {style}>{escape(words)}</text>")


def _svg(width: float, height: float, drawn: Iterable[str]) -> str:
    size = f"width='{width:.0f}' height='{height:.0f}' viewBox='0 0 {width:.0f} {height:.0f}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{''.join(drawn)}</svg>"
