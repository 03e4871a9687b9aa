"""Quality control: pictures show each side where a radiologist expects it, the page names what to look at."""

import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

from anomed.preprocess import qc

SHAPE = (40, 50, 30)  # 40 x 50 x 60 mm: no two sides alike, and the slices are thick
SPACING = (1.0, 1.0, 2.0)
PANEL = qc.PANEL


def decoded(png: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.array(image.convert("RGB"))


def panels(png: bytes) -> list[list[np.ndarray]]:
    """Rows of three panels, each 160 x 160 x 3."""
    pixels = decoded(png)
    assert pixels.shape[0] % PANEL == 0
    assert pixels.shape[1:] == (3 * PANEL, 3)
    return [np.split(row, 3, axis=1) for row in np.split(pixels, len(pixels) // PANEL)]


def has(pixels: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    return (pixels == colour).all(axis=-1)


def extent(pixels: np.ndarray) -> tuple[int, int]:
    """Height and width of the box around what is not black."""
    rows, columns = np.nonzero(pixels.any(axis=-1))
    return int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1


def box(low: tuple[int, int, int], high: tuple[int, int, int]) -> np.ndarray:
    mask = np.zeros(SHAPE, bool)
    mask[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = True
    return mask


BRAIN = box((8, 10, 6), (32, 40, 24))


@pytest.mark.parametrize(
    ("side", "panel", "expected"),
    [
        # The bright end of a ramp along one patient axis: in which half (rows, columns) of which panel it lies.
        ("right", 0, "left"),
        ("right", 1, "left"),
        ("front", 0, "top"),
        ("front", 2, "left"),
        ("top", 1, "top"),
        ("top", 2, "top"),
    ],
)
@pytest.mark.parametrize("row", [0, 1])
def test_each_side_of_the_patient_is_where_a_radiologist_expects_it(
    side: str, panel: int, expected: str, row: int
) -> None:
    axis = {"right": 0, "front": 1, "top": 2}[side]
    ramp = np.broadcast_to(np.arange(SHAPE[axis]).reshape([-1 if a == axis else 1 for a in range(3)]), SHAPE)
    other = np.ones(SHAPE)
    volumes = (ramp, other) if row == 0 else (other, ramp)
    png = qc.picture(volumes[0], None, SPACING, volumes[1], None, SPACING)
    grey = panels(png)[row][panel][..., 0].astype(int)
    # Padding is black on both sides alike, so that halves can be compared.
    first, second = np.array_split(grey, 2, axis=0 if expected == "top" else 1)
    assert first.sum() > 1.5 * second.sum()


def test_one_bright_voxel_lies_at_its_place_in_all_three_panels() -> None:
    volume = np.zeros(SHAPE, np.int16)
    at = tuple(count // 2 for count in SHAPE)
    volume[at] = 1000
    mm = 60 / PANEL  # of a pixel: the longest side fills the panel
    for panel, (across, down) in zip(
        panels(qc.picture(volume, None, SPACING, None, None, SPACING))[0], [(0, 1), (0, 2), (1, 2)], strict=True
    ):
        rows, columns = np.nonzero(panel[..., 0] > 128)
        # Both axes run against RAS; voxel centres are half a voxel from the edge, and the shape is centred in the panel.
        expected = [PANEL / 2 - ((at[axis] + 0.5) - SHAPE[axis] / 2) * SPACING[axis] / mm for axis in (down, across)]
        assert [rows.mean() + 0.5, columns.mean() + 0.5] == pytest.approx(expected, abs=1)


def test_slices_go_through_the_centre_of_the_mask_and_of_the_template() -> None:
    volume = np.zeros(SHAPE)
    volume[:, :, 7] = 1
    low, high = box((8, 10, 5), (32, 40, 10)), box((8, 10, 20), (32, 40, 25))
    found = panels(qc.picture(volume, low, SPACING, volume, high, SPACING))
    assert np.median(found[0][0][50:110, 50:110]) == 255
    assert np.median(found[1][0][50:110, 50:110]) == 0
    swapped = panels(qc.picture(volume, high, SPACING, volume, low, SPACING))
    assert np.median(swapped[0][0][50:110, 50:110]) == 0
    assert np.median(swapped[1][0][50:110, 50:110]) == 255


def test_pixels_are_square_in_millimetres_and_a_row_has_one_scale() -> None:
    thick = np.ones((40, 50, 10), np.uint8)
    row = panels(qc.picture(thick, None, (1.0, 0.5, 5.5), None, None, SPACING))[0]  # 40 x 25 x 55 mm
    scale = PANEL / 55
    expected = [(25 * scale, 40 * scale), (PANEL, 40 * scale), (PANEL, 25 * scale)]
    # A volume of one value is black: its edge is drawn as the contour of a mask that fills it.
    assert not any(panel.any() for panel in row)
    filled = panels(qc.picture(thick, thick > 0, (1.0, 0.5, 5.5), None, None, SPACING))[0]
    for panel, size in zip(filled, expected, strict=True):
        assert extent(panel) == pytest.approx(size, abs=1)


def test_contours_are_one_pixel_wide_and_only_on_their_own_row() -> None:
    lesion = box((18, 20, 13), (26, 34, 18))
    volume = np.random.default_rng(0).random(SHAPE)
    upper, lower = panels(qc.picture(volume, BRAIN, SPACING, volume, BRAIN, SPACING, lesion))
    for row, colour, others in ((upper, qc.FOUND, (qc.TEMPLATE, qc.LESION)), (lower, qc.TEMPLATE, (qc.FOUND,))):
        for panel, (across, down) in zip(row, [(0, 1), (0, 2), (1, 2)], strict=True):
            drawn = has(panel, colour)
            rows, columns = np.nonzero(drawn)
            height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
            sides = [
                (BRAIN.any(axis=tuple({0, 1, 2} - {axis})).sum() * SPACING[axis]) * PANEL / 60
                for axis in (down, across)
            ]
            assert [height, width] == pytest.approx(sides, abs=2)
            assert drawn.sum() == 2 * (height + width) - 4  # the border of a box, one pixel wide
            assert not any(has(panel, other).any() for other in others)
    assert all(has(panel, qc.LESION).any() for panel in lower)


def test_the_inside_of_a_lesion_is_tinted_and_nothing_else_has_a_colour() -> None:
    lesion = box((22, 14, 13), (28, 20, 18))  # right and behind the middle: lower left of the axial panel
    volume = np.random.default_rng(0).random(SHAPE)
    axial = panels(qc.picture(volume, None, SPACING, volume, BRAIN, SPACING, lesion))[1][0].astype(int)
    coloured = np.ptp(axial, axis=-1) > 0
    contour = has(axial, qc.TEMPLATE) | has(axial, qc.LESION)
    tinted = coloured & ~contour
    rows, columns = np.nonzero(tinted)
    assert tinted.sum() > 50
    assert rows.min() > 80 > columns.max()
    assert (axial[tinted][:, 0] > axial[tinted][:, 2]).all()  # towards vermillion
    plain = panels(qc.picture(volume, None, SPACING, volume, BRAIN, SPACING))[1][0].astype(int)
    assert len(np.unique(axial[tinted][:, 0])) > 10  # the anatomy is still seen
    assert (plain[~coloured] == axial[~coloured]).all()


def test_a_lesion_over_the_contour_of_the_template_leaves_it_visible() -> None:
    lesion = box((20, 20, 13), (40, 34, 18))  # over the template's right border, to the edge of the volume
    axial = panels(qc.picture(BRAIN, None, SPACING, BRAIN, BRAIN, SPACING, lesion))[1][0]
    plain = panels(qc.picture(BRAIN, None, SPACING, BRAIN, BRAIN, SPACING))[1][0]
    inside, over = has(axial, qc.TEMPLATE), has(axial, qc.LESION)
    assert (inside == has(plain, qc.TEMPLATE) & ~over).all()
    assert inside[70:90, :60].any()


def test_without_mask_or_registered_volume_the_picture_is_grey_and_one_row_high() -> None:
    volume = np.random.default_rng(0).integers(-1000, 1000, SHAPE).astype(np.int16)
    pixels = decoded(qc.picture(volume, None, SPACING, None, None, SPACING))
    assert pixels.shape == (PANEL, 3 * PANEL, 3)
    assert np.ptp(pixels, axis=-1).max() == 0
    empty = decoded(qc.picture(volume, np.zeros(SHAPE, bool), SPACING, None, None, SPACING))
    assert (empty == pixels).all()


def test_values_that_are_not_finite_are_black_and_leave_the_window_alone() -> None:
    volume = np.random.default_rng(0).random(SHAPE).astype(np.float32) + 1
    before = decoded(qc.picture(volume, None, SPACING, None, None, SPACING))
    volume[20, 25, 15] = np.nan
    volume[0, 0, 0] = np.inf
    after = decoded(qc.picture(volume, None, SPACING, None, None, SPACING))
    changed = (before != after).any(axis=-1)
    assert 0 < changed.sum() < 0.02 * changed.size
    everything = qc.picture(np.full(SHAPE, np.nan), None, SPACING, None, None, SPACING)
    assert not decoded(everything).any()


def test_a_few_extreme_voxels_do_not_darken_the_rest() -> None:
    volume = np.random.default_rng(0).random(SHAPE)
    volume[:2, :2, :2] = 1e6
    assert decoded(qc.picture(volume, None, SPACING, None, None, SPACING)).mean() > 40


def test_pictures_are_the_same_bytes_whatever_the_layout_in_memory_and_small() -> None:
    volume = np.random.default_rng(0).random(SHAPE)
    first = qc.picture(volume, BRAIN, SPACING, volume, BRAIN, SPACING, BRAIN)
    again = np.asfortranarray(volume)
    assert qc.picture(again, np.asfortranarray(BRAIN), SPACING, again, BRAIN, SPACING, BRAIN) == first
    assert len(first) < 100_000  # of noise, the worst there is


def test_a_mask_of_another_grid_is_refused() -> None:
    volume = np.ones(SHAPE)
    with pytest.raises(ValueError, match=r"mask of the brain has shape \(50, 40, 30\), its volume \(40, 50, 30\)"):
        qc.picture(volume, np.ones((50, 40, 30), bool), SPACING, None, None, SPACING)


class Page(HTMLParser):
    """Attributes of every tag, and the texts by the tag around them."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(path.read_text("utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    def within(self, tag: str) -> list[str]:
        return [text for around, text in self.texts if around == tag]


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Volumes whose pictures lie in a folder beside that of the page, with a name that a link must quote."""
    found = []
    for k in range(count):
        path = folder / "pictures" / f"sub {k}#&.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"png")
        facts = {"brain volume (ml)": 1400.0 + 10 * (k % 5), "backend": "deepbet"}
        found.append({"subject": f"sub-{k}", "split": "test", "kind": "normal", "picture": path, "facts": facts})
    return found


def test_the_page_links_every_picture_relative_to_itself(tmp_path: Path) -> None:
    out = tmp_path / "pages" / "qc.html"
    qc.page("brain", rows(tmp_path, 3), [], out, {})
    pictures = [attributes for tag, attributes in Page(out).tags if tag == "img"]
    assert len(pictures) == 3
    for attributes in pictures:
        source = urlsplit(attributes["src"] or "")
        assert not source.scheme
        assert not source.path.startswith("/")
        assert not source.fragment
        assert (out.parent / unquote(source.path)).is_file()
        assert attributes["loading"] == "lazy"


def test_every_link_inside_the_page_has_its_target(tmp_path: Path) -> None:
    qc.page("brain", rows(tmp_path, 3), [], tmp_path / "qc.html", {})
    tags = Page(tmp_path / "qc.html").tags
    targets = [attributes["href"] for tag, attributes in tags if tag == "a"]
    assert targets == [f"#{attributes['id']}" for tag, attributes in tags if tag == "figure"]


def test_nothing_from_data_becomes_markup(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script>\"&"
    row = rows(tmp_path, 1)[0] | {"subject": bad, "split": bad, "kind": bad, "facts": {bad: bad}}
    failure = dict.fromkeys(("case", "code", "found", "expected", "hint"), bad)
    qc.page(bad, [row], [failure], tmp_path / "qc.html", {bad: bad})
    page = Page(tmp_path / "qc.html")
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.within("td").count(bad) == 5 + 1 + 3  # failure, fact of the domain, split, label and fact of the row


def test_failures_and_facts_are_listed(tmp_path: Path) -> None:
    failure = {"case": "sub-9", "code": "no_brain", "found": "3 ml", "expected": "500 to 2500 ml", "hint": "look at it"}
    qc.page("brain", rows(tmp_path, 2), [failure], tmp_path / "qc.html", {"template": "MNI152"})
    cells = Page(tmp_path / "qc.html").within("td")
    assert cells[:3] == ["2", "1", "MNI152"]
    assert cells[3:8] == list(failure.values())
    qc.page("brain", rows(tmp_path, 2), [], tmp_path / "qc.html", {})
    assert "Failures" not in Page(tmp_path / "qc.html").within("h2")


def marked(tmp_path: Path, volumes: list[dict[str, Any]]) -> list[str]:
    """Subjects in the line of links; checks that the same ones carry the mark."""
    qc.page("brain", volumes, [], tmp_path / "qc.html", {})
    page = Page(tmp_path / "qc.html")
    links = page.within("a")[: -len(volumes)]  # the table of all volumes links each of them
    assert page.within("span").count("look at this one") == len(links)
    assert ("none; no number" in (tmp_path / "qc.html").read_text("utf-8")) == (not links)
    return links


def test_a_number_far_from_the_cohort_is_named_first(tmp_path: Path) -> None:
    volumes = rows(tmp_path, 20)
    assert marked(tmp_path, volumes) == []
    volumes[13]["facts"]["brain volume (ml)"] = 700
    assert marked(tmp_path, volumes) == ["sub-13"]
    text = (tmp_path / "qc.html").read_text("utf-8")
    assert '<a href="#v14">sub-13</a> (brain volume (ml)).' in text
    assert '<span class="odd">brain volume (ml) 700</span>' in text
    assert text.index('<a href="#v14">') < text.index("<figure")


def test_few_volumes_have_no_outliers_but_what_is_not_finite_is_always_one(tmp_path: Path) -> None:
    volumes = rows(tmp_path, 7)
    volumes[2]["facts"]["brain volume (ml)"] = 700
    assert marked(tmp_path, volumes) == []
    volumes[4]["facts"]["brain volume (ml)"] = float("nan")
    assert marked(tmp_path, volumes) == ["sub-4"]
    many = rows(tmp_path, 12)
    many[4]["facts"]["brain volume (ml)"], many[8]["facts"]["brain volume (ml)"] = float("nan"), float("inf")
    assert marked(tmp_path, many) == ["sub-4", "sub-8"]


def test_several_outliers_do_not_hide_each_other(tmp_path: Path) -> None:
    volumes = rows(tmp_path, 20)
    for row in volumes[:6]:
        row["facts"]["brain volume (ml)"] = 700
    assert marked(tmp_path, volumes) == [f"sub-{k}" for k in range(6)]


def test_one_exception_among_equal_numbers_is_an_outlier_and_half_of_them_are_not(tmp_path: Path) -> None:
    volumes = rows(tmp_path, 10)
    for k, row in enumerate(volumes):
        row["facts"] = {"scale": 1.5 if k == 3 else 1.0}
    assert marked(tmp_path, volumes) == ["sub-3"]
    for k, row in enumerate(volumes):
        row["facts"] = {"scale": 1.5 if k > 5 else 1.0, "same": 0.1}
    assert marked(tmp_path, volumes) == []


def test_a_fact_that_only_some_volumes_have_leaves_an_empty_cell(tmp_path: Path) -> None:
    volumes = rows(tmp_path, 2)
    volumes[1]["facts"] = {"Dice": 0.94321, "left out": None, "flipped": True}
    qc.page("brain", volumes, [], tmp_path / "qc.html", {})
    page = Page(tmp_path / "qc.html")
    heads = page.within("th")
    assert heads[-8:] == ["subject", "split", "label", "brain volume (ml)", "backend", "Dice", "left out", "flipped"]
    assert page.within("td")[-6:] == ["1,400", "deepbet", "test", "normal", "0.9432", "True"]


def test_the_page_is_the_same_bytes_again_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    out = tmp_path / "qc.html"
    qc.page("brain", rows(tmp_path, 9), [], out, {"template": "MNI152"})
    first = out.read_bytes()
    qc.page("brain", rows(tmp_path, 9), [], out, {"template": "MNI152"})
    assert out.read_bytes() == first
    assert b"http:" not in first
    assert b"https:" not in first
    assert not list(tmp_path.glob(".*.partial"))
