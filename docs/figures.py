"""Draws the pictures of docs/tour.md as SVG, with colors that light and dark pages can show.

python docs/figures.py
"""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
COLORS = ["#3b7dd8", "#2a9d67", "#c77d1e", "#b0489b"]
GRAY = "#848d97"


def box(x: float, y: float, width: float, color: str, text: str = "") -> str:
    label = f'<text x="{x + width / 2}" y="{y + 15}" fill="white">{text}</text>'
    return f'<rect x="{x}" y="{y}" width="{width}" height="22" rx="3" fill="{color}"/>{label}'


def label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y + 15}" fill="{GRAY}" style="text-anchor: start">{text}</text>'


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{GRAY}" stroke-width="1.5" marker-end="url(#head)"/>'


def write(name: str, width: int, height: int, shapes: Sequence[str]) -> None:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text { font: 12px sans-serif; text-anchor: middle }</style>",
        '<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">',
        f'<path d="M0 0 L6 3 L0 6 z" fill="{GRAY}"/></marker>',
        *shapes,
        "</svg>",
    ]
    (FOLDER / name).write_text("\n".join(lines) + "\n")


def overlap() -> None:
    """Backward and all-reduce over time, with two buckets of two blocks each."""
    shapes = [label(0, 10, "backward"), label(0, 50, "all-reduce")]
    for i in range(4):
        shapes.append(box(90 + 80 * i, 10, 76, COLORS[i // 2], f"block {3 - i}"))
    for i, start in enumerate((250, 410)):
        shapes.append(arrow(f"M {start - 2} 34 L {start + 8} 48"))
        shapes.append(box(start, 50, 120, COLORS[i], f"bucket {i}"))
    shapes.append(label(90, 78, "time"))
    shapes.append(arrow("M 125 89 H 530"))
    write("overlap.svg", 540, 102, shapes)


def ring() -> None:
    """The first step of a ring all-reduce: each rank sends one of its three parts to the next rank."""
    shapes = []
    for rank in range(3):
        x = 150 * rank
        shapes.append(label(x, 0, f"rank {rank}"))
        for part in range(3):
            is_sent = part == rank
            shapes.append(box(x + 24 * part, 24, 22, COLORS[part] if is_sent else GRAY, f"{part}"))
        if rank < 2:
            shapes.append(arrow(f"M {x + 76} 35 H {x + 145}"))
    shapes.append(arrow("M 336 50 V 66 H 36 V 52"))
    write("ring.svg", 380, 76, shapes)


def collectives() -> None:
    """The parts of three ranks before and after collectives: a box per part, in the color of its first rank."""
    ranks = range(3)
    summed = GRAY
    panels = {
        "before": [[(COLORS[rank], part) for part in ranks] for rank in ranks],
        "all_reduce": [[(summed, part) for part in ranks] for _ in ranks],
        "reduce_scatter": [[(summed, rank)] for rank in ranks],
        "all_gather of part r": [[(COLORS[source], source) for source in ranks] for _ in ranks],
        "all_to_all": [[(COLORS[source], rank) for source in ranks] for rank in ranks],
    }
    shapes = [label(0, 24 + 26 * rank, f"rank {rank}") for rank in ranks]
    for column, (title, rows) in enumerate(panels.items()):
        x = 60 + 130 * column
        shapes.append(label(x, 0, title))
        for rank, row in enumerate(rows):
            for i, (color, part) in enumerate(row):
                shapes.append(box(x + 24 * i, 24 + 26 * rank, 22, color, f"{part}"))
    shapes.append(label(60, 106, "color: the rank that a part comes from; gray: the sum over ranks; number: the part"))
    write("collectives.svg", 710, 128, shapes)


def timetable(ahead: Sequence[int], batches: int) -> list[list[str]]:
    """Returns a row per pipeline stage: its pass in each slot of time, such as F0, if a pass takes one slot.

    Args:
        ahead: Number of forward passes of each stage before its first backward pass.
        batches: Number of micro-batches.
    """
    orders = []
    for number in ahead:
        order = [f"F{batch}" for batch in range(number)]
        for batch in range(batches):
            order.append(f"B{batch}")
            if number + batch < batches:
                order.append(f"F{number + batch}")
        orders.append(order)
    rows: list[list[str]] = [[] for _ in orders]
    while any(orders):
        slot = len(rows[0])
        for stage, order in enumerate(orders):
            name = ""
            if order:
                source = stage - 1 if order[0][0] == "F" else stage + 1
                if source in (-1, len(orders)) or order[0] in rows[source][:slot]:
                    name = order.pop(0)
            rows[stage].append(name)
    return rows


def pipeline() -> None:
    """GPipe and 1F1B with three stages and four micro-batches over time, which is idle where there is no box."""
    shapes = []
    for i, (title, ahead) in enumerate({"GPipe": [4, 4, 4], "1F1B": [3, 2, 1]}.items()):
        top = 110 * i
        shapes.append(label(60, top, title))
        for stage, row in enumerate(timetable(ahead, 4)):
            y = top + 24 + 26 * stage
            shapes.append(label(0, y, f"stage {stage}"))
            for slot, name in enumerate(row):
                if name:
                    shapes.append(box(60 + 38 * slot, y, 36, COLORS[0] if name[0] == "F" else COLORS[1], name))
    shapes.append(label(60, 216, "time"))
    shapes.append(arrow("M 95 227 H 514"))
    write("pipeline.svg", 520, 238, shapes)


if __name__ == "__main__":
    overlap()
    pipeline()
    ring()
    collectives()
