"""What scripts/peers has measured, as tables for a terminal and for pages, and as a plot."""

import html
import math

from tables import markdown, middle, number, terminal

# What uwarp aims at, with both ends in the guest and two processors: row, its column, the other one, the
# bound of the ratio (of times: at most; of rates: at least), of the medians or of the 99th percentiles.
TARGETS = [
    *[(row, "tcp", "spins", 1.1, "median") for row in ("send", "write", "read")],
    *[(row, "tcp", "siw", 1.2, "median") for row in ("send", "write", "read")],
    ("events", "tcp", "siw", 1.1, "median"),
    ("ud", "tcp", "spins", 1.1, "median"), ("ud", "tcp", "rxe", 1.6, "median"),
    *[(row, "tcp", "siw", 1.0, "p99") for row in ("send", "write", "read", "events")],
    *[(row, "tcp", "siw", 1.0, "median") for row in ("write-64k", "write-1m")],
    ("lists", "tcp", "siw", 2.0, "median"),
    *[(row, "memory", "siw", 0.2, "median") for row in ("send", "write", "read")],
    *[(row, "memory", "rxe", 0.35, "median") for row in ("send", "write", "read")],
    ("write-1m", "memory", "siw", 2.0, "median"),
]
# A ratio beyond which uwarp is far behind.
FAR = 1.5
PLACES = {"guest": "Both ends in the guest", "across": "Between host and guest"}
MEASURED = "Measured by `make peers` "


class Report:
    """The rounds of one run, by place, number of processors, row and column."""

    def __init__(self, report):
        self.all = report
        self.rows = report["rows"]
        self.cells = {}
        for one in report["measurements"]:
            key = one["place"], one["processors"], one["row"], one["column"]
            self.cells.setdefault(key, []).append(one)
        self.parts = list(dict.fromkeys((one["place"], one["processors"]) for one in report["measurements"]))

    def columns(self, place):
        return self.all["columns"][place]

    def rounds(self, *key):
        return self.cells.get(key, [])

    def figure(self, key, name):
        return middle(one.get(name) for one in self.rounds(*key))

    def ratio(self, part, row, one, other, name="median"):
        """Of the figures of one round: the median of the rounds, the least and the most."""
        sides = [{each["round"]: each.get(name) for each in self.rounds(*part, row, column)}
                 for column in (one, other)]
        ratios = [sides[0][turn] / sides[1][turn] for turn in sides[0]
                  if sides[0][turn] and sides[1].get(turn)]
        return (middle(ratios), min(ratios), max(ratios)) if ratios else None


def titles(report, place):
    return [column["title"] for column in report.columns(place)]


class Notes:
    """Why cells have no figure: numbered, below their table."""

    def __init__(self):
        self.texts = []

    def mark(self, text):
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def lines(self):
        return [f"[{number}] {text}" for number, text in enumerate(self.texts, 1)]


def cell(report, part, row, column, notes):
    rounds = report.rounds(*part, row["name"], column["name"])
    failed = [one["failure"] for one in rounds if "failure" in one]
    lacks = {column["kind"], column["server_kind"]} & set(row["cannot"])
    if lacks:
        return row["cannot"][lacks.pop()]
    if not rounds:
        return "-"
    if len(failed) == len(rounds):
        return "fails " + notes.mark(failed[0])
    key = *part, row["name"], column["name"]
    text = number(report.figure(key, "median"))
    if (tail := report.figure(key, "p99")) is not None:
        text += f" ({number(tail)})"
    if failed:
        text += " " + notes.mark(f"{len(failed)} of {len(rounds)} rounds failed: {failed[0]}")
    return text


def figures(report, part, notes):
    """Medians, and 99th percentiles in brackets."""
    place = part[0]
    return [["", *titles(report, place)]] + [
        [f"{row['title']}, {row['unit']}",
         *(cell(report, part, row, column, notes) for column in report.columns(place))]
        for row in report.rows]


def processor(report, part):
    """Of the guest, for each operation."""
    place = part[0]

    def of(row, column):
        value = report.figure((*part, row["name"], column["name"]), "processor_us")
        return "-" if value is None or value <= 0 else number(value)
    return [["processor time of the guest, µs", *titles(report, place)]] + [
        [row["title"], *(of(row, column) for column in report.columns(place))] for row in report.rows]


BESIDE = [("TCP with CRC : siw", "tcp-crc", "siw", "median"), ("TCP : siw", "tcp", "siw", "median"),
          ("99th percentiles, TCP : siw", "tcp", "siw", "p99"), ("memory : siw", "memory", "siw", "median"),
          ("TCP : rxe", "tcp", "rxe", "median"), ("memory : rxe", "memory", "rxe", "median"),
          ("TCP : raw that spins", "tcp", "spins", "median"),
          ("TCP : raw that blocks", "tcp", "blocks", "median")]


def ratios(report, part):
    """uwarp's figure over the other's, in one round."""
    def of(row, one, other, name):
        found = report.ratio(part, row["name"], one, other, name)
        return "{:.2f} ({:.2f} to {:.2f})".format(*found) if found else "-"
    return [["ratio in one round (least to most)", *(title for title, *_ in BESIDE)]] + [
        [f"{row['title']}, {row['unit']}", *(of(row, one, other, name) for _, one, other, name in BESIDE)]
        for row in report.rows]


def is_time(row):
    return row["unit"] == "µs"


def targets(report):
    """Each target with what was measured, and whether that reaches it."""
    part, known = ("guest", 2), {row["name"]: row for row in report.rows}
    names = {column["name"]: column["title"] for column in report.all["columns"].get("guest", [])}
    lines = [["target", "wanted", "measured", ""]]
    for row, one, other, bound, name in TARGETS:
        if row not in known:
            continue
        found = report.ratio(part, row, one, other, name)
        if not found:
            continue
        less = is_time(known[row])
        reached = found[0] <= bound if less else found[0] >= bound
        tail = ", 99th percentile" if name == "p99" else ""
        lines.append([f"{known[row]['title']}{tail}: {names[one]} to {names[other]}",
                      f"at {'most' if less else 'least'} {bound}", f"{found[0]:.2f}",
                      "reached" if reached else "missed"])
    return lines if len(lines) > 1 else []


def behind(report):
    """Where uwarp is far behind siw."""
    lines = []
    for place, processors in report.parts:
        if place != "guest":
            continue
        for row in report.rows:
            for column in ("tcp-crc", "tcp", "memory"):
                found = report.ratio((place, processors), row["name"], column, "siw")
                if not found:
                    continue
                worse = found[0] if is_time(row) else 1 / found[0]
                if worse > FAR:
                    title = next(c["title"] for c in report.columns(place) if c["name"] == column)
                    lines.append((worse, f"{worse:.1f} times worse than siw: {row['title']}, {title}, "
                                         f"{processors} processor{'s' * (processors > 1)}"))
    return [text for _, text in sorted(lines, reverse=True)]


def heading(report, part):
    place, processors = part
    rounds = len({one["round"] for one in report.all["measurements"]
                  if (one["place"], one["processors"]) == part})
    return (f"{PLACES[place]}, {processors} processor{'s' * (processors > 1)}, {rounds} "
            f"round{'s' * (rounds > 1)}")


def run_on(report):
    machine = report.all["machine"]
    loads = [one["load"] for one in report.all["measurements"] if "load" in one]
    load = f"; its load was {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    return (f"on {machine['date']}, uwarp {machine['uwarp']}; guest: Linux {machine['guest_kernel']} under "
            f"QEMU {machine['qemu']} (TCG, emulated); host: {machine['processors']} processors of an "
            f"{machine['processor']}, Linux {machine['kernel']}{load}; perftest {machine['perftest']}, qperf "
            f"{machine['qperf']}, sockperf {machine['sockperf']}")


def terminal_text(data):
    report = Report(data)
    lines = ["", f"Measured {run_on(report)}."]
    for part in report.parts:
        notes = Notes()
        lines += ["", f"{heading(report, part)}: median (99th percentile)", "",
                  *terminal(figures(report, part, notes)), *notes.lines(), "",
                  *terminal(processor(report, part))]
        if part[0] == "guest":
            lines += ["", *terminal(ratios(report, part))]
    if wanted := targets(report):
        lines += ["", *terminal(wanted)]
    if far := behind(report):
        lines += ["", *far]
    return lines


def markdown_text(data):
    report = Report(data)
    lines = [f"{MEASURED}{run_on(report)}."]
    for part in report.parts:
        lines += ["", *page_part(report, part)]
    if wanted := targets(report):
        lines += ["", *markdown(wanted)]
    return lines


def page_part(report, part):
    notes = Notes()
    lines = [f"{heading(report, part)}: median (99th percentile)", "",
             *markdown(figures(report, part, notes))]
    if notes.texts:
        lines += ["", *(f"* {line}" for line in notes.lines())]
    lines += ["", f"{heading(report, part)}: processor time of the guest for each operation", "",
              *markdown(processor(report, part))]
    if part[0] == "guest":
        lines += ["", f"{heading(report, part)}: uwarp's figure over the other's", "",
                  *markdown(ratios(report, part))]
    return lines


# In docs/performance.md and docs/compare.md, what stands between these lines is made.
BEGIN, END = "<!-- peers: made by scripts/peers --write -->", "<!-- peers: end -->"


def between_marks(text, made, name):
    lines = text.split("\n")
    if BEGIN not in lines or END not in lines:
        raise ValueError(f"{name} needs these two lines where the tables are to stand: {BEGIN} {END}")
    begin, end = lines.index(BEGIN), lines.index(END)
    return "\n".join(lines[:begin + 1] + ["", *made, ""] + lines[end:])


def short_text(data):
    """For docs/compare.md: two processors, without CRC, and memory."""
    report, notes = Report(data), Notes()
    part = ("guest", 2)
    wanted = [c for c in report.columns("guest") if c["name"] in ("siw", "rxe", "tcp", "memory")]
    lines = [["", *(column["title"] for column in wanted)]] + [
        [f"{row['title']}, {row['unit']}", *(cell(report, part, row, column, notes) for column in wanted)]
        for row in report.rows]
    return [f"{MEASURED}{run_on(report)}.", "", *markdown(lines), *(f"* {line}" for line in notes.lines())]


def write_pages(data, root):
    for name, made in (("performance", markdown_text(data)), ("compare", short_text(data))):
        file = f"{root}/docs/{name}.md"
        with open(file, encoding="utf-8") as page:
            text = between_marks(page.read(), made, file)
        with open(file, "w", encoding="utf-8") as page:
            page.write(text)
    plot(data, f"{root}/docs/peers.svg")


# The plot: for each part a panel of times and panels of rates; a line for each row, on it a point for each
# column, and from the point to the 99th percentile a rule. Colours as in `uwarp bench --plot`.
COLOURS = ("#000000", "#888888", "#0072b2", "#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#e69f00")
WIDTH, LEFT, RIGHT, LINE, HEAD = 900.0, 250.0, 30.0, 26.0, 40.0


def plot(data, file):
    report = Report(data)
    panels = [(part, unit, [row for row in report.rows if row["unit"] == unit])
              for part in report.parts for unit in dict.fromkeys(row["unit"] for row in report.rows)]
    body, top = [], HEAD
    for part, unit, rows in panels:
        drawn, height = panel(report, part, unit, rows, top)
        body += drawn
        top += height
    with open(file, "w", encoding="utf-8") as out:
        out.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
                  'font-family="sans-serif" font-size="12">\n'
                  f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n')
        title = "uwarp beside siw and rxe in one virtual machine"
        out.write(words(WIDTH / 2, 24, "middle", title, ' font-size="18"'))
        out.write("".join(body) + "</svg>\n")


def panel(report, part, unit, rows, top):
    columns = report.columns(part[0])
    points = {(row["name"], column["name"]): (report.figure((*part, row["name"], column["name"]), "median"),
                                              report.figure((*part, row["name"], column["name"]), "p99"))
              for row in rows for column in columns}
    values = [value for point in points.values() for value in point if value]
    if not values:
        return [], 0
    least, most = min(values) * 0.9, max(values) * 1.1

    def across(value):
        share = math.log(value / least) / math.log(most / least)
        return LEFT + share * (WIDTH - LEFT - RIGHT)
    bottom = top + 30 + len(rows) * LINE
    tail = "; the rule goes to the 99th percentile" if unit == "µs" else ""
    out = [words(20, top + 14, "start", f"{heading(report, part)}: {unit}{tail}", ' font-weight="bold"')]
    for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1):
        for mark in (10 ** power * digit for digit in (1, 2, 5)):
            if least <= mark <= most:
                out.append(rule(across(mark), top + 24, across(mark), bottom, "#dddddd"))
                out.append(words(across(mark), bottom + 14, "middle", f"{mark:g}"))
    for index, row in enumerate(rows):
        y = top + 30 + (index + 0.5) * LINE
        out.append(words(LEFT - 8, y + 4, "end", row["title"].replace("`", "")))
        for at, column in enumerate(columns):
            median, p99 = points[row["name"], column["name"]]
            if not median:
                continue
            # Side by side, so that none hides another.
            place = y + (at - (len(columns) - 1) / 2) * 2.6
            colour = COLOURS[at % len(COLOURS)]
            if p99:
                out.append(rule(across(median), place, across(p99), place, colour))
            out.append(f'<circle cx="{across(median):.1f}" cy="{place:.1f}" r="3" fill="{colour}"/>\n')
    for at, column in enumerate(columns):
        x, y = 40 + at % 4 * 215, bottom + 34 + at // 4 * 18
        out.append(f'<circle cx="{x}" cy="{y - 4:.1f}" r="4" fill="{COLOURS[at % len(COLOURS)]}"/>\n')
        out.append(words(x + 10, y, "start", column["title"]))
    return out, bottom + 34 + (len(columns) + 3) // 4 * 18 + 14 - top


def rule(x1, y1, x2, y2, colour):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>\n'


def words(x, y, anchor, text, more=""):
    text = html.escape(text, quote=False)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>\n'
