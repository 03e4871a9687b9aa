"""The nova source: joined by file name whatever the order, boxes turned exactly, every fault named."""

import csv
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from anomed import images, plugins, prepare
from anomed.errors import AnomedError, CaseProblem

HEIGHT, WIDTH = 40, 64  # not square, so that a swap of x and y shows
NAMES = [f"case{case:04d}_{number:03d}.png" for case, number in ((0, 1), (0, 2), (1, 1), (2, 1))]


def box(source: str, x: Any, y: Any, width: Any, height: Any) -> dict[str, Any]:
    return {"source": source, "x": x, "y": y, "width": width, "height": height}


BOXES: dict[str, Any] = {
    NAMES[0]: [
        box("gold", 50.0, 3.0, 12.0, 6.5),
        box("rater2", 49.0, 2.0, 12.0, 7.0),
        box("gold", 1.0, 30.0, 2.0, 9.0),
    ],
    NAMES[1]: None,
    NAMES[2]: [box("rater1", 60.0, 30.0, 9.0, 4.0), box("gold", 0.0, 0.0, 64.0, 40.0)],
    NAMES[3]: [box("gold", 7.25, 8.0, 1.5, 2.0)],
}


def picture(name: str) -> np.ndarray:
    return np.full((HEIGHT, WIDTH), 10 + NAMES.index(name), np.uint8)


def rows() -> list[dict[str, Any]]:
    return [
        {
            "filename": name,
            "case_id": name[:8],
            "scan_id": f"{name[:8]}_s1",
            "caption_text": f"Axial FLAIR, “tumour”, image {name}",
            "image_path": f"images/{name}",
            "meta": {"clinical_history": f"History of {name[:8]}.", "final_diagnosis": f"Rarity {name[:8]}", "age": 3},
            "bboxes": BOXES[name],
        }
        for name in NAMES
    ]


def put_images(root: Path, names: list[str] = NAMES, folder: str = "images") -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / folder / name).write_bytes(images.encode_png(picture(name)))


def put_parquet(root: Path, table: list[dict[str, Any]] | None = None, name: str = "data/nova-v1.parquet") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(table if table is not None else [rows()[i] for i in (2, 0, 3, 1)]).to_parquet(root / name)


def put_csv(root: Path, raters: bool = True) -> None:
    table = rows()
    cases = {row["case_id"]: row["meta"] for row in table}
    lines = {
        "captions.csv": [["filename", "case_id", "scan_id", "caption"]]
        + [[row["filename"], row["case_id"], row["scan_id"], row["caption_text"]] for row in table[::-1]],
        "case_metadata.csv": [["case_id", "clinical_history", "final_diagnosis"]]
        + [[case, meta["clinical_history"], meta["final_diagnosis"]] for case, meta in cases.items()],
        "bboxes_gold.csv": [["filename", "x", "y", "width", "height"]],
        "bboxes_raters.csv": [["filename", "rater", "x", "y", "width", "height"]],
    }
    for name, boxes in BOXES.items():
        for entry in boxes or []:
            numbers = [entry[key] for key in ("x", "y", "width", "height")]
            gold = entry["source"] == "gold"
            lines["bboxes_gold.csv" if gold else "bboxes_raters.csv"].append(
                [name, *numbers] if gold else [name, entry["source"], *numbers]
            )
    if not raters:
        del lines["bboxes_raters.csv"]
    for name, content in lines.items():
        with (root / name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(content)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "nova"
    put_images(folder)
    return folder


def nova(root: Path | None) -> Any:
    cls = plugins.load("domains", "nova")
    return cls("nova", cls.Options(), root, (root or Path()).parent / "work")


def read(root: Path) -> tuple[Any, dict[str, Any]]:
    source = nova(root)
    return source, {case.image_id: case for case in source.cases()}


def codes(source: Any) -> list[tuple[str, str]]:
    return sorted((problem.row["code"], problem.row["case"]) for problem in source.problems)


def facts(case: Any) -> tuple[Any, ...]:
    return (*(getattr(case, key) for key in ("image_id", "subject_id", "split", "label", "source_file")), case.boxes,
            case.pathology, dict(case.clinical))  # fmt: skip


def test_shuffled_rows_meet_their_images_and_boxes_are_corners(root: Path) -> None:
    put_parquet(root)
    source, cases = read(root)
    assert source.problems == []
    assert sorted(cases) == [name[:-4] for name in NAMES]
    for name in NAMES:
        case = cases[name[:-4]]
        pixels = case.load()
        assert (pixels.image == picture(name)).all()
        assert pixels.image.shape == (HEIGHT, WIDTH)
        assert pixels.mask is None
        assert len(pixels.sha256) == 64
        assert facts(case)[:5] == (name[:-4], name[:8], "test", 1, f"images/{name}")
        assert case.pathology == case.clinical["diagnosis"] == f"Rarity {name[:8]}"
        assert case.clinical["caption"].endswith(name)
        assert case.clinical["history"] == f"History of {name[:8]}."
        assert case.clinical["scan_id"] == f"{name[:8]}_s1"
    first = cases["case0000_001"]
    assert first.boxes == ((50.0, 3.0, 62.0, 9.5), (1.0, 30.0, 3.0, 39.0)), "x from the left, y from the top"
    assert first.clinical["rater_boxes"] == {"rater2": [[49.0, 2.0, 61.0, 9.0]]}
    assert cases["case0000_002"].boxes == ()
    assert [cases[name[:-4]].clinical["boxes_known"] for name in NAMES] == [True, False, True, True]
    assert cases["case0001_001"].clinical["rater_boxes"] == {"rater1": [[60.0, 30.0, 69.0, 34.0]]}, "kept as drawn"
    json.dumps([dict(case.clinical) for case in cases.values()], allow_nan=False)


def test_it_is_grey_evaluation_only_and_without_masks(root: Path) -> None:
    source = nova(root)
    assert (source.trains, source.has_masks, source.colour, source.volumetric) == (False, False, False, False)


@pytest.mark.parametrize("raters", [True, False])
def test_the_older_csv_form_says_the_same(root: Path, tmp_path: Path, raters: bool) -> None:
    put_parquet(root)
    old = tmp_path / "old"
    put_images(old)
    put_csv(old, raters)
    _, new_cases = read(root)
    source, old_cases = read(old)
    assert source.problems == []
    for image_id, case in new_cases.items():
        expected = facts(case)
        if not raters:
            expected[-1]["rater_boxes"] = {}
        assert facts(old_cases[image_id]) == expected


def test_structures_as_json_text_are_read_as_well(root: Path, tmp_path: Path) -> None:
    put_parquet(root)
    texts = tmp_path / "texts"
    put_images(texts)
    put_parquet(
        texts, [{**row, "meta": json.dumps(row["meta"]), "bboxes": json.dumps(row["bboxes"])} for row in rows()]
    )
    assert {k: facts(v) for k, v in read(root)[1].items()} == {k: facts(v) for k, v in read(texts)[1].items()}


def test_an_empty_list_of_boxes_is_known_to_hold_none(root: Path) -> None:
    table = rows()
    table[3]["bboxes"] = []
    put_parquet(root, table)
    case = read(root)[1]["case0002_001"]
    assert (case.boxes, case.clinical["boxes_known"]) == ((), True)


def test_the_place_of_table_and_images_is_free_and_a_zip_does(root: Path, tmp_path: Path) -> None:
    put_parquet(root)
    moved = tmp_path / "moved"
    put_images(moved, NAMES[:2], "release/a")
    put_images(moved, NAMES[2:], "release/b")
    put_parquet(moved, name="elsewhere/table.parquet")
    source, cases = read(moved)
    assert source.problems == []
    assert cases["case0001_001"].source_file == "release/b/case0001_001.png"
    expected = {k: facts(v)[5:] for k, v in read(root)[1].items()}
    assert {k: facts(v)[5:] for k, v in cases.items()} == expected
    with zipfile.ZipFile(tmp_path / "nova.zip", "w") as packed:
        for path in root.rglob("*.*"):
            packed.write(path, path.relative_to(root).as_posix())
    _, zipped = read(tmp_path / "nova.zip")
    assert {k: facts(v)[5:] for k, v in zipped.items()} == expected
    assert (zipped["case0002_001"].load().image == picture(NAMES[3])).all()


def test_strays_and_pictures_beside_the_images_folder_are_counted_not_read(root: Path) -> None:
    put_parquet(root)
    put_csv(root)  # with a parquet, not used
    before = nova(root).fingerprint()
    for name in (
        "images/Thumbs.db",
        "images/.hidden.png",
        ".cache/x.parquet",
        "README.md",
        "images/._case0000_001.png",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"?")
    assert nova(root).fingerprint() == before
    (root / "logo.png").write_bytes(b"no image of the table is in this folder")
    source, cases = read(root)
    assert (len(cases), source.problems, source.ignored) == (4, [], 5 + 4 + 1)


def test_the_fingerprint_is_that_of_annotations_and_pixels_not_of_their_place(root: Path, tmp_path: Path) -> None:
    put_parquet(root)
    before = nova(root).fingerprint()
    copy = tmp_path / "copy"
    put_images(copy)
    put_parquet(copy)
    assert nova(copy).fingerprint() == before
    (copy / "images" / NAMES[0]).write_bytes(images.encode_png(picture(NAMES[1])))
    assert nova(copy).fingerprint() != before
    put_parquet(root, rows()[:3])
    assert nova(root).fingerprint() != before


def change(row: int, **values: Any) -> Any:
    def edit(table: list[dict[str, Any]]) -> None:
        table[row].update(values)

    return edit


ONE = "case0002_001.png"
FAULTS = {
    "row_without_image": (change(3, filename="other.png", image_path="images/other.png"), "other.png"),
    "duplicate_row": (lambda table: table.append(table[3]), ONE),
    "other_image_path": (change(3, image_path=f"images/{NAMES[0]}"), ONE),
    "two_diagnoses": (change(1, meta={"clinical_history": "History of case0000.", "final_diagnosis": "B"}), "case0000"),
    "two_histories": (change(1, meta={"clinical_history": "B", "final_diagnosis": "Rarity case0000"}), "case0000"),
    "box_without_area": (change(3, bboxes=[box("gold", 5.0, 5.0, 0.0, 3.0)]), ONE),
    "box_not_a_number": (change(3, bboxes=[box("gold", float("nan"), 5.0, 1.0, 3.0)]), ONE),
    "box_without_source": (change(3, bboxes=[box("", 5.0, 5.0, 1.0, 3.0)]), ONE),
    "missing_value": (change(3, caption_text=None), ONE),
}


@pytest.mark.parametrize("code", FAULTS)
def test_a_faulty_row_is_named_and_not_used(root: Path, code: str) -> None:
    edit, case = FAULTS[code]
    table = rows()
    edit(table)
    put_parquet(root, table)
    source, cases = read(root)
    assert (code, case) in codes(source)
    assert {found for found, _ in codes(source)} <= {code, "image_without_row"}
    assert sorted(cases) == [name[:-4] for name in NAMES if not name.startswith(case.removesuffix("_001.png"))] or (
        code == "row_without_image" and len(cases) == 3
    )


@pytest.mark.parametrize(
    "numbers",
    [(5.0, 5.0, -2.0, 3.0), (5.0, 5.0, 3.0, -2.0), (5.0, 5.0, float("inf"), 1.0), (1e308, 5.0, 1e308, 1.0)],
)
def test_boxes_must_be_finite_and_have_an_area_those_of_raters_too(root: Path, numbers: tuple[float, ...]) -> None:
    for source_name in ("gold", "rater1"):
        table = rows()
        table[3]["bboxes"] = [box(source_name, *numbers)]
        put_parquet(root, table)
        source, cases = read(root)
        assert [case for _, case in codes(source)] == [ONE]
        assert codes(source)[0][0].startswith("box_")
        assert len(cases) == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (json.dumps([box("gold", 10**400, 1, 2, 2)]), "box_not_a_number"),
        (json.dumps([box("Gold", 1, 1, 2, 2)]), "box_without_source"),  # as a rater's box it would be lost
        (json.dumps([box("\ud800", 1, 1, 2, 2)]), "unreadable_boxes"),
        ("[" * 100_000, "unreadable_boxes"),
    ],
)
def test_boxes_that_no_program_wrote_are_named(root: Path, text: str, code: str) -> None:
    table = rows()
    for row in table:
        row["bboxes"] = json.dumps(row["bboxes"])
    table[3]["bboxes"] = text
    put_parquet(root, table)
    source, cases = read(root)
    assert codes(source) == [(code, ONE)]
    assert len(cases) == 3


@pytest.mark.parametrize("line", ['x,"case,', "x" * 200_000])
def test_a_csv_file_that_is_none_is_named_with_its_line(root: Path, line: str) -> None:
    put_csv(root)
    path = root / "captions.csv"
    path.write_text(path.read_text("utf-8") + line, encoding="utf-8")
    with pytest.raises(AnomedError, match=r"captions\.csv: line \d+: not CSV \(.*; save it again"):
        nova(root).cases()


@pytest.mark.parametrize(
    ("numbers", "fits"),
    [
        ((0, 0, WIDTH, HEIGHT), True),
        ((WIDTH - 5, 0, 5 + 1e-9, 5), True),  # what adding floats makes of the edge
        ((WIDTH - 5, 0, 6, 5), False),
        ((0, HEIGHT - 5, 5, 5.5), False),
        ((-0.5, 0, 5, 5), False),
        ((0, -1, 5, 5), False),
        ((HEIGHT - 5, 0, 20, 5), True),  # beyond the height, within the width
    ],
)
def test_a_box_outside_its_image_is_a_problem_of_that_image(root: Path, numbers: Any, fits: bool) -> None:
    table = rows()
    table[3]["bboxes"] = [box("gold", *map(float, numbers))]
    put_parquet(root, table)
    source, cases = read(root)
    assert source.problems == [], "sizes are known when the image is read"
    if fits:
        cases["case0002_001"].load()
    else:
        with pytest.raises(CaseProblem, match=rf"images/{ONE}: box_outside_image: .* {WIDTH} x {HEIGHT} pixels"):
            cases["case0002_001"].load()


def test_images_that_do_not_join_are_named(root: Path) -> None:
    put_parquet(root, [{**row, "image_path": f"gone/{row['filename']}"} for row in rows()[:3]])
    put_images(root, NAMES[:1], "again")
    source, cases = read(root)
    assert codes(source) == [("image_without_row", f"images/{ONE}"), ("two_images", NAMES[0])]
    assert sorted(cases) == ["case0000_002", "case0001_001"]


def test_a_damaged_or_coloured_image_is_named_when_read(root: Path) -> None:
    put_parquet(root)
    (root / "images" / NAMES[0]).write_bytes(images.encode_png(picture(NAMES[0]))[:-20])
    coloured = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    coloured[5, 5] = (255, 0, 0)
    (root / "images" / NAMES[2]).write_bytes(images.encode_png(coloured))
    _, cases = read(root)
    with pytest.raises(CaseProblem, match=f"images/{NAMES[0]}"):
        cases["case0000_001"].load()
    with pytest.raises(CaseProblem, match="not_grey"):
        cases["case0001_001"].load()
    cases["case0000_002"].load()


def test_lines_of_the_csv_form_that_belong_to_nothing_are_named(root: Path) -> None:
    put_csv(root)
    for name, line in (
        ("bboxes_gold.csv", "unknown.png,1,2,3,4"),
        ("case_metadata.csv", "case0009,History,Diagnosis\ncase0002,History of case0002.,Rarity case0002"),
    ):
        with (root / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    source, cases = read(root)
    expected = [
        ("boxes_without_row", "unknown.png"),
        ("case_without_image", "case0009"),
        ("duplicate_case", "case0002"),
    ]
    assert codes(source) == expected
    assert "case0002_001" not in cases
    assert len(cases) == 3


def write(name: str, content: bytes | str) -> Any:
    def edit(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def without(column: str) -> Any:
    return lambda root: put_parquet(root, [{k: v for k, v in row.items() if k != column} for row in rows()])


def each(*edits: Any) -> Any:
    def run(root: Path) -> None:
        for edit in edits:
            edit(root)

    return run


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (each(), "no parquet and no captions.csv"),
        (each(put_parquet, lambda root: put_parquet(root, name="b.parquet")), "b.parquet and data/nova-v1.parquet"),
        (write("data/nova-v1.parquet", b"PAR1 cut off"), "nova-v1.parquet: not a whole parquet file"),
        (without("bboxes"), "column 'bboxes' is missing"),
        (
            lambda root: put_parquet(root, [{**row, "meta": {"clinical_history": "h"}} for row in rows()]),
            r"column 'meta\.final_diagnosis' is missing",
        ),
        (
            lambda root: put_parquet(root, [{**rows()[0], "filename": "x.png", "image_path": ""}]),
            "no image of the 1 rows of data/nova-v1.parquet among 4 PNGs",
        ),
        (each(put_csv, lambda root: (root / "case_metadata.csv").unlink()), "case_metadata.csv: not found beside"),
        (each(put_csv, write("captions.csv", "filename,case_id\n")), "column 'scan_id' is missing"),
        (
            each(put_csv, write("bboxes_gold.csv", "filename,x,y,width,height\na.png,1,2\n")),
            "bboxes_gold.csv: line 2: wrong number of fields",
        ),
        (each(put_csv, write("captions.csv", b"\xff\xfe")), "captions.csv: not UTF-8"),
    ],
)
def test_annotations_that_cannot_be_trusted_stop_all(root: Path, edit: Any, message: str) -> None:
    edit(root)
    with pytest.raises(AnomedError, match=message):
        nova(root).cases()


@pytest.mark.parametrize("where", [None, Path("nowhere/at/all")])
def test_a_missing_root_is_named(where: Path | None) -> None:
    with pytest.raises(AnomedError, match=r"domains\.nova\.root|nowhere/at/all: not found"):
        nova(where).cases()


def test_real_images_in_the_layout_of_the_release(real_data: Path, lay_out: Callable[..., Path]) -> None:
    source, cases = read(lay_out("nova") / "nova")
    written = json.loads((real_data / "nova_like" / "annotations.json").read_text())
    assert source.problems == []
    assert len(cases) == len(written)
    assert len({case.subject_id for case in cases.values()}) == len({entry["case"] for entry in written})
    number: dict[str, int] = {}
    subjects = {name: f"case{i:04d}" for i, name in enumerate(sorted({entry["case"] for entry in written}))}
    for place, entry in enumerate(written):
        subject = subjects[entry["case"]]
        number[subject] = number.get(subject, 0) + 1
        case = cases[f"{subject}_{number[subject]:03d}"]
        assert (case.clinical["caption"], case.pathology) == (entry["caption"], entry["diagnosis"])
        assert case.clinical["boxes_known"] == (place != 5)
        assert case.load().image.shape == (480, 480)
        if case.boxes:
            width, height = entry["size"]
            corners = np.array([(x, y, x + w, y + h) for x, y, w, h in entry["boxes_xywh"]])
            np.testing.assert_allclose(case.boxes, corners * 480 / np.array([width, height, width, height]))


def test_prepared_rows_keep_boxes_and_texts(root: Path, tmp_path: Path) -> None:
    from anomed.manifest import Prepared

    put_parquet(root)
    parameters = {"source": "nova", "size": 32, "release": None, "fingerprint": "x"}
    prepare.prepare("nova", parameters, root, tmp_path / "work", tmp_path / "out", tmp_path / "problems.csv")
    prepared = Prepared(tmp_path / "out")
    row = prepared.table.set_index("image_id").loc["case0000_001"]
    assert json.loads(row.boxes) == [[50.0, 3.0, 62.0, 9.5], [1.0, 30.0, 3.0, 39.0]]
    assert (row.split, row.label, row.native_h, row.native_w) == ("test", 1, HEIGHT, WIDTH)
    assert prepared.clinical["case0000_002"]["boxes_known"] is False
    assert prepared.clinical["case0000_001"]["caption"] == "Axial FLAIR, “tumour”, image case0000_001.png"
