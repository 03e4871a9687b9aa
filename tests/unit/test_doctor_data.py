"""`anomed doctor data`: it names what is missing, and nothing else."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shipped
import yaml
from PIL import Image

from anomed import prepare, records
from anomed.doctor import doctor
from anomed.doctor_data import doctor_data
from anomed.errors import AnomedError
from anomed.params import read
from anomed.plan import Plan

CARD = {
    "title": "Brain",
    "description": "d",
    "sources": {
        "bmad": {
            "licence": "L", "citation": "C", "obtain": "Ask BMAD.",
            "counts": {"train": {"normal": 3}, "valid": {"total": 2}, "test": {"normal": 1, "abnormal": 2}},
            "faults": ["masks have three levels"],
            "downloads": [{"name": "b.zip", "url": "https://example.org/b.zip", "sha256": "0" * 64}],
        }
    },
}  # fmt: skip
Findings = list[tuple[str, str]]


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Findings]:
    """Runs the doctor on the given blocks in an empty project; gives (state, text) of each line."""
    monkeypatch.chdir(tmp_path)
    Path("data/cards").mkdir(parents=True)

    def run(**domains: dict[str, Any]) -> Findings:
        params = shipped.params()
        params["domains"], params["run"]["domains"] = domains, list(domains)
        Path("params.yaml").write_text(yaml.safe_dump(params))
        faults = doctor_data(Path("params.yaml"))
        found = re.findall(r"^  (ok|note|missing|fault) (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert faults == len(bad(found))
        return found

    return run


def bad(findings: Findings) -> list[str]:
    return [text for state, text in findings if state in ("missing", "fault")]


def brain(root: Path) -> None:
    """Brain as BMAD lays it out: 3 + 0 train, 1 + 1 valid, 1 + 2 test."""
    generator = np.random.default_rng(0)
    for place in ("train/good/a_1", "train/good/a_2", "train/good/b_1", "valid/good/c_1", "valid/Ungood/d_1",
                  "test/good/e_1", "test/Ungood/f_1", "test/Ungood/f_2"):  # fmt: skip
        folder, name = place.rsplit("/", 1)
        image = generator.integers(1, 256, (32, 40), dtype=np.uint8)
        image[:4] = 0
        save(root / folder / "img" / f"{name}.png", image)
        if "Ungood" in folder:
            save(root / folder / "label" / f"{name}.png", (np.arange(32 * 40).reshape(32, 40) > 900) * np.uint8(255))


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def prepared(name: str = "brain_mri") -> None:
    """Prepare a domain of params.yaml as its rule does."""
    plan = Plan(read(Path("params.yaml")))
    block = yaml.safe_load(plan.prepare_params(name))
    prepare.prepare(name, block, Path(plan.root(name)), Path("work"), Path("data/prepared") / name, Path("p.csv"))


BMAD = {"source": "bmad", "root": "raw/Brain"}


def test_a_complete_copy_is_clean(project: Callable[..., Findings]) -> None:
    Path("data/cards/brain_mri.yaml").write_text(yaml.safe_dump(CARD))
    brain(Path("raw/Brain"))
    Path("raw/Brain/train/good/img/Thumbs.db").write_bytes(b"")
    assert project(brain_mri=BMAD) == [
        ("ok", "train: 3 normal images"),
        ("ok", "valid: 1 normal + 1 abnormal images"),
        ("ok", "test: 1 normal + 2 abnormal images"),
        ("note", "1 files are not used (stray, or not needed by this source)"),
        ("note", "known of this release: masks have three levels"),
    ]
    prepared()
    assert bad(project(brain_mri=BMAD)) == []


def test_what_was_deleted_is_named_and_nothing_else(project: Callable[..., Findings]) -> None:
    Path("data/cards/brain_mri.yaml").write_text(yaml.safe_dump(CARD))
    brain(Path("raw/Brain"))
    project(brain_mri=BMAD)
    prepared()
    Path("raw/Brain/train/good/img/a_2.png").unlink()
    Path("raw/Brain/test/Ungood/label/f_1.png").unlink()
    Path("raw/Brain/test/Ungood/img/f_2.png").unlink()
    for path in sorted(Path("raw/Brain/valid").rglob("*.png")):
        path.unlink()
    found = bad(project(brain_mri=BMAD))
    assert found == [
        "train normal: found 2, expected 3 by the card: 1 missing",
        "valid: no image at all",
        "valid total: found 0, expected 2 by the card: 2 missing",
        "test abnormal: found 1, expected 2 by the card: 1 missing",
        "test/Ungood/img/f_1.png: abnormal_without_mask: found no mask of this name, expected a mask for every abnormal "
        "image; add test/Ungood/label/f_1.png",
        "test/Ungood/label/f_2.png: mask_without_image: found a mask alone, expected an image of the same name; masks "
        "belong to the image of the same name: add the image, or remove the mask",
        *(
            f"{name}: was there when the domain was prepared"
            for name in (
                "test/Ungood/img/f_2.png",
                "train/good/img/a_2.png",
                "valid/Ungood/img/d_1.png",
                "valid/good/img/c_1.png",
            )
        ),
    ]


def test_more_than_the_card_says_is_no_fault(project: Callable[..., Findings]) -> None:
    counts = {"train": {"normal": 2}}
    card = {**CARD, "sources": {"bmad": {**CARD["sources"]["bmad"], "counts": counts, "total": 9}}}  # type: ignore[index]
    Path("data/cards/brain_mri.yaml").write_text(yaml.safe_dump(card))
    brain(Path("raw/Brain"))
    found = project(brain_mri=BMAD)
    assert ("note", "train normal: found 3, expected 2 by the card: 1 too many") in found
    assert bad(found) == ["all images: found 8, expected 9 by the card: 1 missing"]


def test_many_files_that_are_gone_are_counted(project: Callable[..., Findings]) -> None:
    brain(Path("raw/Brain"))
    for number in range(25):
        save(Path(f"raw/Brain/train/good/img/z_{number}.png"), np.full((32, 40), number + 1, np.uint8))
    project(brain_mri=BMAD)
    prepared()
    for number in range(25):
        Path(f"raw/Brain/train/good/img/z_{number}.png").unlink()
    found = bad(project(brain_mri=BMAD))
    assert len(found) == 21
    assert found[0] == "train/good/img/z_0.png: was there when the domain was prepared"
    assert found[20] == "5 more files that were there when the domain was prepared"


def test_a_root_that_is_not_there_says_how_to_get_the_data(
    project: Callable[..., Findings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("data/cards/brain_mri.yaml").write_text(yaml.safe_dump(CARD))
    [line] = bad(project(brain_mri=BMAD))
    hint = "put the data there or change domains.brain_mri.root. Ask BMAD. Or run `anomed fetch brain_mri`"
    assert line == f"raw/Brain does not exist: {hint}"
    monkeypatch.setitem(sys.modules, "torch", None)  # not installed: nothing slow is imported
    assert doctor(Path("params.yaml")) == 2
    assert "run `anomed fetch brain_mri`" in " ".join(capsys.readouterr().out.split())


def test_a_root_without_the_set_is_named(project: Callable[..., Findings]) -> None:
    Path("raw/Brain").mkdir(parents=True)
    [line] = bad(project(brain_mri=BMAD))
    assert "raw/Brain" in line


def test_a_damaged_card_of_a_prepared_domain_is_named(project: Callable[..., Findings]) -> None:
    brain(Path("raw/Brain"))
    project(brain_mri=BMAD)
    prepared()
    card = Path("data/prepared/brain_mri/card.json")
    records.write_json(card, {**records.read_json(card), "source": "embedded"})
    [line] = bad(project(brain_mri=BMAD))
    assert line.startswith("data/prepared/brain_mri/card.json: damaged or edited")


def test_volumes_are_counted_as_volumes(project: Callable[..., Findings]) -> None:
    """The card's counts are of images: only its total is of volumes."""
    entry = {"licence": "L", "citation": "C", "obtain": "O", "counts": {"train": {"normal": 900}}, "total": 5}
    Path("data/cards/heads.yaml").write_text(yaml.safe_dump({**CARD, "sources": {"volumes": entry}}))
    for number in range(4):
        for kind in ("flair", "lesion") if number > 1 else ("flair",):
            path = Path(f"raw/sub-{number}_{kind}.nii.gz")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"not read")
    Path("raw/subjects.csv").write_text(
        "subject,split,label\nsub-0,train,normal\nsub-1,test,normal\nsub-2,test,abnormal\nsub-3,valid,abnormal\n"
    )
    block = {
        "source": "volumes", "root": "raw", "image": "{subject}_flair.nii.gz", "lesion": "{subject}_lesion.nii.gz",
        "subjects": "subjects.csv", "preprocess": "head",
    }  # fmt: skip
    found = project(heads=block)
    assert ("ok", "train: 1 normal volumes") in found
    assert ("ok", "test: 1 normal + 1 abnormal volumes") in found
    assert bad(found) == ["all volumes: found 4, expected 5 by the card: 1 missing"]


def test_a_fault_of_params_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AnomedError, match="not found; run this in the project's folder"):
        doctor_data(tmp_path / "params.yaml")


BUILDERS = {"retina_resc": "resc", "histopathology": "histology"}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "quirks"])
def laid_out(request: pytest.FixtureRequest, lay_out: Callable[..., Path]) -> Path:
    """Two sets and NOVA, as the releases lie on a disk."""
    return lay_out(*BUILDERS.values(), "nova", quirks=request.param)


@contextlib.contextmanager
def without(path: Path) -> Iterator[str]:
    """Takes a file away for a while; gives its name."""
    kept = path.read_bytes()
    path.unlink()
    try:
        yield path.name
    finally:
        path.write_bytes(kept)


def test_real_images_in_the_layouts_of_the_releases(laid_out: Path, project: Callable[..., Findings]) -> None:
    """A complete copy is clean (no card here states counts); of an incomplete one, just what is missing is named."""
    blocks = {name: {"source": "bmad", "root": str(laid_out / "bmad")} for name in BUILDERS}
    assert bad(project(**blocks)) == []
    resc = laid_out / "bmad/Retina_RESC/test/Ungood"
    images, masks = sorted(resc.rglob("img/*.png")), sorted({*resc.rglob("*.png")} - {*resc.rglob("img/*.png")})
    with without(masks[0]) as name:
        [line] = bad(project(**blocks))
        assert line.startswith(f"test/Ungood/img/{name}: abnormal_without_mask")
    with without(images[1]) as name:
        [line] = bad(project(**blocks))
        assert re.match(rf"test/Ungood/(label|anomaly_mask)/{name}: mask_without_image", line)


def test_real_nova_without_one_picture(laid_out: Path, project: Callable[..., Findings]) -> None:
    block = {"source": "nova", "root": str(laid_out / "nova")}
    assert bad(project(nova=block)) == []
    with without(laid_out / "nova/images/case0000_001.png") as name:
        [line] = bad(project(nova=block))
        assert name in line


def test_a_picture_that_the_source_names_itself_is_named_once(laid_out: Path, project: Callable[..., Findings]) -> None:
    block = {"source": "nova", "root": str(laid_out / "nova")}
    project(nova=block)
    prepared("nova")
    assert bad(project(nova=block)) == []
    with without(laid_out / "nova/images/case0000_001.png") as name:
        [line] = bad(project(nova=block))
        assert name in line


def test_a_pathology_that_one_split_lacks_is_a_note(project: Callable[..., Findings]) -> None:
    for place in ("train/normal/a", "valid/normal/b", "valid/abnormal/c", "test/normal/d", "test/abnormal/e"):
        save(Path(f"raw/{place}.png"), np.zeros((8, 8), np.uint8))
    lines = ["image,split,label,pathology"]
    for name, kind in (
        ("train/normal/a", ""),
        ("valid/normal/b", ""),
        ("valid/abnormal/c", "DME"),
        ("test/normal/d", ""),
    ):
        split, label, _ = name.split("/")
        lines.append(f"{name}.png,{split},{label},{kind}")
    table = Path("raw/t.csv")
    table.write_text("\n".join([*lines, "test/abnormal/e.png,test,abnormal,CNV"]) + "\n")
    found = project(clinic={"source": "folder", "root": "raw", "table": "t.csv"})
    assert ("note", "test: nothing of DME, which valid has") in found
    assert ("note", "valid: nothing of CNV, which test has") in found
    table.write_text("\n".join([*lines, "test/abnormal/e.png,test,abnormal,DME"]) + "\n")
    assert not any(
        "nothing of" in text for _, text in project(clinic={"source": "folder", "root": "raw", "table": "t.csv"})
    )


def test_a_domain_that_reads_nothing_lacks_nothing(project: Callable[..., Findings]) -> None:
    assert project(chest_xray={"source": "embedded"}) == [("ok", "nothing is read, so nothing can be missing")]
