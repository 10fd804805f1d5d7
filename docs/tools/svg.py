"""Shapes of the pictures of docs/images: SVG files of one width, for light and dark pages."""

from __future__ import annotations

from pathlib import Path

WIDTH = 760
INK, FAINT, EMPTY = "#1f2328", "#59636e", "#eaeef2"
RANKS = ("#0969da", "#bf8700", "#1a7f37", "#8250df")
MEMORY = {  # parts of a rank's: label, colour
    "shards": ("parameters: this rank's shards", "#0969da"),
    "kept": ("a full copy that stays", "#54aeff"),
    "grads": ("gradients", "#bf8700"),
    "optimizer": ("optimizer state", "#8250df"),
    "slots": ("gathered parameters", "#1a7f37"),
    "buckets": ("gradients on their way", "#e16f24"),
    "transport": ("the transport's buffers", "#afb8c1"),
    "activations": ("activations", "#d1242f"),
}
LINES = {  # kind of an arrow: colour, how it is drawn
    "copied": (FAINT, 'stroke-width="1.5"'),
    "sent": ("#cf222e", 'stroke-width="2"'),
    "read": (FAINT, 'stroke-width="1.2" stroke-dasharray="5 3"'),
    "mapped": (FAINT, 'stroke-width="1.5" stroke-dasharray="1.5 3"'),
}


class Svg:
    """Shapes in the order in which they are drawn."""

    def __init__(self, height: int, title: str) -> None:
        size = f'width="{WIDTH}" height="{height}"'
        view = f'viewBox="0 0 {WIDTH} {height}"'
        font = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif"'
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {font}>',
            f"<title>{title}</title>",
            f'<rect {size} fill="#fff"/>',
        ]
        self.tips: set[str] = set()

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = "none") -> None:
        """A rectangle, to a tenth of a pixel: a few bytes more in a model are no other picture."""
        x, y, w, h = (round(each, 1) for each in (x, y, w, h))
        place = f'x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"'
        self.lines.append(f'<rect {place} fill="{fill}" stroke="{line}"/>')

    def text(
        self, x: float, y: float, what: str, size: int = 12, fill: str = INK, anchor: str = "middle"
    ) -> None:
        how = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        self.lines.append(f'<text x="{round(x, 1):g}" y="{y:g}" {how}>{what}</text>')

    def arrow(self, x: float, y: float, to: tuple[float, float], kind: str = "copied") -> None:
        colour, how = LINES[kind]
        if kind not in self.tips:
            self.tips.add(kind)
            tip = f'<path d="M0 0L6 3L0 6z" fill="{colour}"/>'
            place = 'viewBox="0 0 6 6" refX="5" refY="3" markerWidth="9" markerHeight="9"'
            turn = 'markerUnits="userSpaceOnUse" orient="auto"'
            self.lines.append(f'<marker id="{kind}" {place} {turn}>{tip}</marker>')
        path = f'd="M{x:g} {y:g}L{to[0]:g} {to[1]:g}" stroke="{colour}" {how}'
        self.lines.append(f'<path {path} marker-end="url(#{kind})"/>')

    def sign(self, x: float, y: float, what: str) -> None:
        """A circle with a sign, such as that of a sum."""
        self.lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="#fff" stroke="{INK}"/>')
        self.text(x, y + 4, what)

    def write(self, path: Path) -> None:
        path.write_text("\n".join([*self.lines, "</svg>", ""]))
