"""What the scripts that write figures into pages have in common."""

import statistics


def number(value, digits=None):
    """Three figures, or this many after the point."""
    if digits is None:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def middle(values):
    """The median of those that are there."""
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def markdown(lines):
    """A table; the first line is its head."""
    head, *rest = lines
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
            *("| " + " | ".join(line) + " |" for line in rest)]


def terminal(lines):
    """The same for a terminal: names to the left, figures to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines]
    return [text[0], "-" * max(map(len, text)), *text[1:]]


def without_tables(lines, also=()):
    """What follows the tables at the begin of these lines, and the paragraphs among them that begin so."""
    at = 0
    while at < len(lines) and (not lines[at] or lines[at].startswith(("|", *also))):
        at += 1
    return lines[at:]
