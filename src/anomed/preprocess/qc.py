"""Quality control of preprocessed volumes: one picture a volume, one page a domain, the odd ones named."""

import io
import math
import os
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from anomed import records, volumes

PANEL = 160  # pixels, height and width of a panel
QUANTILES = 0.5, 99.5  # percentiles of a volume that become black and white
FOUND, TEMPLATE, LESION = (230, 159, 0), (86, 180, 233), (213, 94, 0)  # Okabe and Ito: told apart by the colour-blind
GREYS = 126  # levels: twice that (plain, tinted as lesion) and the three contours fit a palette, a third of an RGB file
TINT = 0.4  # share of the lesion's colour in a lesion's inside, so that the anatomy below is still seen
LIMIT = 3  # deviations from the cohort's median beyond which a number is an outlier
COHORT = 8  # numbers below which a median and its deviation say little
MEANINGS = {  # of what the steps measure
    "organ_ml": "volume of the brain or organ found",
    "dice_to_given_organ": "overlap of it with the organ file of the source, 1 is equal",
    "lesion_ml": "volume of the lesion as given",
    "lesion_outside_percent": "share of it outside the organ, which becomes black",
    "bias_percent": "how much the bias field varies within the organ (standard deviation over mean)",
    "metric": "mutual information with the template, negative: the lower the better, for images of one contrast",
    "scale_min": "least stretch of the registration along any direction, template to scan",
    "scale_max": "largest stretch",
    "template_dice": "overlap with the template's brain; it cannot judge a registration",
}
_COLOURS = (FOUND, TEMPLATE, LESION)


def picture(
    before: np.ndarray,
    mask: np.ndarray | None,
    spacing: Sequence[float],
    after: np.ndarray | None,
    outline: np.ndarray | None,
    after_spacing: Sequence[float],
    lesion: np.ndarray | None = None,
) -> bytes:
    """One volume at a glance: a PNG of 320 x 480 pixels, or 160 x 480 without `after`; deterministic.

    before: X x Y x Z in RAS order as scanned, any real type; mask: bool, same grid, the brain found. after: X x Y x Z,
    RAS, registered; outline: bool, same grid, the template's brain; lesion: bool, same grid. spacing,
    after_spacing: mm a voxel.

    Upper row: axial, coronal and sagittal slice of `before` through the centre of gravity of `mask` (without one, the
    middle of the volume), contour of `mask` in orange. Lower row: those of `after` through the centre of `outline`,
    its contour in sky blue, lesions tinted with their contour in vermillion. Each as a radiologist looks at it: the
    patient's right is left, front and top are up; in the sagittal slice the front is left. Pixels are square in mm
    and a row has one scale; 0.5 to 99.5 percent of the volume's finite values go from black to white.
    Raises ValueError when a mask is not on the grid of its volume.
    """
    rows = [_row(before, spacing, mask, FOUND, None)]
    if after is not None:
        rows.append(_row(after, after_spacing, outline, TEMPLATE, lesion))
    image = Image.fromarray(np.vstack(rows))
    image.putpalette(_palette())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _palette() -> bytes:
    """RGB of every index: greys, the same greys tinted, the contours."""
    grey = np.linspace(0, 255, GREYS)[:, None].repeat(3, axis=1)
    tinted = (1 - TINT) * grey + TINT * np.array(LESION)
    return np.vstack([grey, tinted, _COLOURS]).round().astype(np.uint8).tobytes()


def _row(
    volume: np.ndarray,
    spacing: Sequence[float],
    brain: np.ndarray | None,
    colour: tuple[int, int, int],
    lesions: np.ndarray | None,
) -> np.ndarray:
    """Three panels side by side: palette indices, uint8, PANEL x 3 PANEL."""
    for name, mask in (("brain", brain), ("lesions", lesions)):
        if mask is not None and mask.shape != volume.shape:
            raise ValueError(f"the mask of the {name} has shape {mask.shape}, its volume {volume.shape}")
    low, high = _window(volume)
    centre = [count // 2 for count in volume.shape] if brain is None or not brain.any() else _centre(brain)
    extent = [count * step for count, step in zip(volume.shape, spacing, strict=True)]
    row = np.zeros((PANEL, 3 * PANEL), np.uint8)
    for place, (plane, across) in enumerate(volumes.PLANES.items()):
        width, height = (max(1, round(PANEL * extent[axis] / max(extent))) for axis in range(3) if axis != across)
        values = volumes.cut(volume, plane, centre[across]).astype(np.float32)
        grey = np.nan_to_num(np.clip((values - low) / (high - low), 0, 1), nan=0.0)
        panel = np.array(Image.fromarray(grey).resize((width, height), Image.Resampling.BILINEAR))
        panel = (panel * (GREYS - 1)).round().astype(np.uint8)
        for mask, drawn in ((brain, colour), (lesions, LESION)):
            if mask is not None:
                cut = Image.fromarray(volumes.cut(mask, plane, centre[across]).astype(np.uint8))
                shown = np.array(cut.resize((width, height), Image.Resampling.NEAREST)) > 0
                if drawn == LESION:
                    panel[shown & (panel < GREYS)] += GREYS
                panel[_boundary(shown)] = 2 * GREYS + _COLOURS.index(drawn)
        top, left = (PANEL - height) // 2, place * PANEL + (PANEL - width) // 2
        row[top : top + height, left : left + width] = panel
    return row


def _window(volume: np.ndarray) -> tuple[float, float]:
    """The values that become black and white, never one and the same."""
    values = volume[np.isfinite(volume)].astype(np.float32)
    if not values.size:
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(values, QUANTILES))
    return low, high if high > low else low + 1


def _centre(mask: np.ndarray) -> list[int]:
    """The voxel nearest to the centre of gravity, by exact sums."""
    centre = []
    for axis in range(3):
        counts = mask.sum(axis=tuple({0, 1, 2} - {axis}))
        centre.append(round(int(counts @ np.arange(len(counts))) / int(counts.sum())))
    return centre


def _boundary(mask: np.ndarray) -> np.ndarray:
    """Pixels of a mask with one of their four neighbours outside; the panel's edge is outside."""
    around = np.pad(mask, 1)
    inner = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    return mask & ~inner


def page(
    title: str, rows: list[dict[str, Any]], failures: list[dict[str, str]], out: Path, facts: dict[str, str]
) -> None:
    """Write the page `out`: summary, failures, outliers, a mosaic of all volumes and a table of their numbers.

    rows: one a volume, with subject, split, kind ("normal" or "abnormal"), picture (path of what `picture` gave; the
    page links it relative to itself) and facts (name to number or text). failures: rows of CaseProblem. facts: what
    is to be known of the whole domain. No script, no request; every text is escaped. Same input, same bytes.

    A volume is an outlier where one of its numbers lies more than 3 scaled median absolute deviations from the median
    of at least 8 volumes, or is not finite: Leys et al., J. Exp. Soc. Psychol. 49 (2013) 764.
    """
    import jinja2

    names = list(dict.fromkeys(name for row in rows for name in row["facts"]))
    outliers = {name: _outliers([row["facts"].get(name) for row in rows]) for name in names}
    far = [[name for name in names if at in outliers[name]] for at in range(len(rows))]
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    engine.filters |= {"shown": _shown, "link": lambda path: quote(Path(os.path.relpath(path, out.parent)).as_posix())}
    text = engine.from_string(_TEMPLATE).render(
        title=title,
        rows=rows,
        failures=failures,
        summary={"volumes": len(rows), "failures": len(failures), **facts},
        names=names,
        meanings=MEANINGS,
        far=far,
        odd=[(at + 1, row["subject"], far[at]) for at, row in enumerate(rows) if far[at]],
        colours={"the brain or organ found": FOUND, "the template's brain": TEMPLATE, "lesions": LESION},
        limit=LIMIT,
        cohort=COHORT,
    )
    records.write_text(out, text)


def _outliers(facts: list[Any]) -> set[int]:
    """Places of the numbers far from the others; `facts`: one fact of every volume, None where it lacks it."""
    numbers = {at: float(fact) for at, fact in enumerate(facts) if _is_number(fact)}
    cohort = np.array([number for number in numbers.values() if math.isfinite(number)])
    if len(cohort) < COHORT:
        return {at for at, number in numbers.items() if not math.isfinite(number)}
    median = float(np.median(cohort))
    distance = np.abs(cohort - median)
    # Factors that make either deviation the standard deviation of normal values. The median one is 0 when more than
    # half of the values are equal; then the mean one says whether the others are few.
    spread = 1.4826 * float(np.median(distance)) or 1.2533 * float(distance.mean())
    return {at for at, number in numbers.items() if not abs(number - median) <= LIMIT * spread}  # NaN is far


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """Four digits of a number; thousands whole. Nothing for a fact that this volume lacks."""
    if not _is_number(value):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src 'self' file:; style-src 'unsafe-inline'">
<title>{{ title }}: quality control</title><style>
body { margin: 0; padding: 2rem 1.25rem 4rem; color: #1c1e21; background: #fff;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 1px solid #d9dde2; }
p { max-width: 46rem; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #d9dde2; }
.num { text-align: right; white-space: nowrap; } .scroll { overflow-x: auto; }
.mosaic { display: flex; flex-wrap: wrap; gap: 1.25rem; } figure { margin: 0; width: 480px; max-width: 100%; }
figure img { display: block; max-width: 100%; }
figcaption { font-size: .8125rem; line-height: 1.4; overflow-wrap: anywhere; }
.odd { color: #8a5a00; background: #fff7e6; font-weight: 600; } a { color: inherit; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
</style></head><body>
<h1>{{ title }}: quality control</h1>
<table>
{% for name, value in summary.items() %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
<p>Look at these first:
{% for at, subject, names in odd %}
<a href="#v{{ at }}">{{ subject }}</a> ({{ names|join(", ") }}){{ "." if loop.last else ";" }}
{% else %}none; no number lies far from the others.{% endfor %}</p>
<p>Far is more than {{ limit }} scaled median absolute deviations from the median, if {{ cohort }} volumes or more have
the number.</p>
{% if failures %}<h2>Failures</h2><div class="scroll"><table>
<tr><th>case</th><th>code</th><th>found</th><th>expected</th><th>what to do</th></tr>
{% for row in failures %}
<tr>{% for key in ("case", "code", "found", "expected", "hint") %}<td>{{ row[key] }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
<h2>Pictures</h2>
<p>Above the volume as scanned, below as the next steps get it: masked and, where the chain does, registered.
The patient's right is on the left; in the sagittal slices the front is on the left. Contours:
{% for name, colour in colours.items() %}
<span class="key" style="background: rgb{{ colour }}"></span>{{ name }}{{ "." if loop.last else "," }}
{% endfor %}</p>
<div class="mosaic">
{% for row in rows %}{% set marked = far[loop.index0] %}
<figure id="v{{ loop.index }}"><img loading="lazy" src="{{ row.picture|link }}" alt="slices of {{ row.subject }}">
<figcaption><strong>{{ row.subject }}</strong>, {{ row.split }}, {{ row.kind }}
{% if marked %}<span class="odd">look at this one</span>{% endif %}<br>
{% for name, value in row.facts.items() %}
<span{% if name in marked %} class="odd"{% endif %}>{{ name }} {{ value|shown }}</span>{{ "" if loop.last else ";" }}
{% endfor %}</figcaption></figure>
{% endfor %}</div>
<h2>All volumes</h2>
<ul>{% for name in names if name in meanings %}<li>{{ name }}: {{ meanings[name] }}</li>{% endfor %}</ul>
<div class="scroll"><table>
<tr><th>subject</th><th>split</th><th>label</th>{% for name in names %}<th class="num">{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}{% set marked = far[loop.index0] %}
<tr><td><a href="#v{{ loop.index }}">{{ row.subject }}</a></td><td>{{ row.split }}</td><td>{{ row.kind }}</td>
{% for name in names %}
<td class="num{{ " odd" if name in marked }}">{{ row.facts.get(name)|shown }}</td>
{% endfor %}</tr>
{% endfor %}</table></div>
</body></html>
"""
