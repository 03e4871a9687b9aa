"""Real images of all six sets, laid out as BMAD lies on a user's disk, through the whole pipeline."""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from project import Project, table

from anomed.manifest import Prepared

SETS = {
    "brain_mri": ("Brain", True),
    "liver_ct": ("Liver", True),
    "retina_resc": ("Retina_RESC", True),
    "retina_oct2017": ("Retina_OCT2017", False),
    "chest_xray": ("Chest", False),
    "histopathology": ("Histopathology", False),
}


BUILDERS = ("brain", "liver", "resc", "oct2017", "chest", "histology")


SYSTEMS = ("constant", "intensity", "patchcore")


def project(folder: Path, lay_out: Callable[..., Path], quirks: bool) -> Project:
    """A project on laid-out real images, nothing made yet."""
    raw = folder / "raw"
    shutil.copytree(lay_out(*BUILDERS, quirks=quirks) / "bmad", raw / "bmad")
    made = Project(folder / "project")
    blocks = {name: {"source": "bmad", "root": str(raw / "bmad"), "size": 64} for name in SETS}
    run = {"domains": list(SETS), "systems": list(SYSTEMS), "seeds": [0]}
    made.edit(lambda params: params.update(domains=blocks, run=run))
    return made


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, lay_out: Callable[..., Path]) -> Project:
    """With the faults of the real releases, its table made."""
    made = project(tmp_path_factory.mktemp("quirks"), lay_out, quirks=True)
    made.snakemake()
    return made


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, lay_out: Callable[..., Path]) -> Project:
    """Without them, its images prepared."""
    made = project(tmp_path_factory.mktemp("plain"), lay_out, quirks=False)
    made.snakemake(*(f"data/prepared/{name}/card.json" for name in SETS))
    return made


def test_every_applicable_cell_is_a_number_and_every_other_has_its_reason(released: Project) -> None:
    rows = table(released)
    assert list(rows) == list(SYSTEMS)
    for name, (_, masks) in SETS.items():
        assert rows["constant"][f"{name}.image_auroc"] == "0.500000"
        for row in rows.values():
            assert 0 <= float(row[f"{name}.image_auroc"]) <= 1
            assert bool(row[f"{name}.pixel_aupro"]) == masks
    with (released.folder / "results/scores.csv").open(newline="") as file:
        for record in csv.DictReader(file):
            assert bool(record["value"]) != bool(record["reason"]), record
    text = (released.folder / "results/table.md").read_text()
    assert text.count("not the released data") >= 6
    assert "no pixel truth" in text


def test_counts_equal_the_files_on_disk(released: Project, plain: Project) -> None:
    for made in (released, plain):
        for name, (folder, _) in SETS.items():
            prepared = Prepared(made.folder / "data/prepared" / name)
            root = made.folder.parent / "raw/bmad" / folder
            files = [p for p in root.rglob("*.png") if p.parent.name not in ("label", "anomaly_mask")]
            assert len(prepared.table) == len(files)
            abnormal = [p for p in files if "Ungood" in p.parts]
            assert int(prepared.table.label.sum()) == len(abnormal)
            assert len(prepared.table) > 20


def test_both_layouts_give_the_same_images_labels_and_masks(released: Project, plain: Project) -> None:
    for name, (_, masks) in SETS.items():
        a, b = (Prepared(made.folder / "data/prepared" / name) for made in (released, plain))
        columns = ["image_id", "subject_id", "split", "label", "mask_row", "native_h", "native_w"]
        assert a.table[columns].equals(b.table[columns])
        assert np.abs(a.images.astype(int) - b.images.astype(int)).max() <= 1
        assert a.table.mask_row.notna().any() == masks
        for row in a.table.mask_row.dropna():
            assert np.array_equal(a.mask(row), b.mask(row))
        for row in a.evaluated().iloc[::9].itertuples():
            difference = a.native(row.image_id).astype(int) - b.native(row.image_id).astype(int)
            assert np.abs(difference).max() <= 1
            assert difference.shape[:2] == (row.native_h, row.native_w)
