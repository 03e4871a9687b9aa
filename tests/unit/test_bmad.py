"""The bmad source on small trees: every layout in which the sets are found, and every fault it names."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT

from anomed import cards, images, plugins, records
from anomed.domains import bmad_layout
from anomed.domains.bmad import Bmad
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case

IMAGES = {
    "train/good/00001_60": None,
    "train/good/00001_61": None,
    "train/good/00002_60": None,
    "valid/good/00003_70": None,
    "valid/Ungood/00004_60": 59,
    "test/good/00005_99": None,
    "test/Ungood/00006_60": 255,
    "test/Ungood/00006_68": 122,
}
ORGAN = (slice(2, 13), slice(3, 23))
BOX = (slice(3, 7), slice(10, 21))


def pixels(image_id: str) -> np.ndarray:
    """Uint8 16 x 24, another image for every id: an organ amid a background of one level, not black."""
    image = np.full((16, 24), 7, np.uint8)
    image[ORGAN] = np.random.default_rng(list(image_id.encode())).integers(8, 256, (11, 20), dtype=np.uint8)
    image[5, 8] = 7  # inside the organ, as dark as the background
    return image


def encode(array: np.ndarray, mode: str) -> bytes:
    if mode == "bone":
        colour = images.bone_colours()[array]
        array = np.concatenate([colour, np.full((*array.shape, 1), 255, np.uint8)], axis=2)
    elif mode == "rgb":
        array = np.repeat(array[..., None], 3, axis=2)
    return images.encode_png(array)


def place(image_id: str, mask: bool, style: str) -> str:
    """Where a file of `image_id` lies in one of the layouts."""
    split, label, stem = image_id.split("/")
    name = f"{stem}.png"
    if style == "readme":
        return f"{split}/{label}/{'anomaly_mask' if mask else 'img'}/{name}"
    if style == "label":
        return f"{split}/{label}/{'label' if mask else 'img'}/{name}"
    if style == "quirks":
        folder = "anomaly_mask/" if mask else "" if split == "train" else "img/"
        return f"{split.replace('valid', 'val')}/{label.lower()}/{folder}{name}"
    if style == "flat":
        return f"{split}/{label}/{'label/' if mask else ''}{name}"
    if style == "liver":  # order of img/label and good/Ungood swapped
        return f"train/good/{name}" if split == "train" else f"{split}/{'label' if mask else 'img'}/{label}/{name}"
    inner = split.replace("valid", "val")  # RESC: Val/val/good, Val/val_label/Ungood
    return f"{inner.capitalize()}/{inner}{'_label' if mask else ''}/{label}/{name}"


def tree(root: Path, style: str = "label", mode: str = "grey", good_masks: bool = False) -> Path:
    """A set of `IMAGES` under root; returns root."""
    for image_id, level in IMAGES.items():
        files = {place(image_id, False, style): pixels(image_id)}
        if level or (good_masks and not image_id.startswith("train")):
            mask = np.zeros((16, 24), np.uint8)
            mask[BOX] = level or 0
            files[place(image_id, True, style)] = mask
        for name, array in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(encode(array, mode))
    return root


@pytest.fixture(autouse=True)
def _scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources remember hashes below `work`, here a folder of the test."""
    monkeypatch.chdir(tmp_path_factory.mktemp("scratch"))


def source(root: Path | None, domain: str = "brain_mri", **options: str) -> Bmad:
    return Bmad(domain, Bmad.Options(**options), root, Path("work"))


def check(bmad: Bmad) -> list[Case]:
    """All of IMAGES were read as they were made."""
    cases = bmad.cases()
    assert [str(problem) for problem in bmad.problems] == []
    assert sorted(case.image_id for case in cases) == sorted(IMAGES)
    for case in cases:
        read = case.load()
        level = IMAGES[case.image_id]
        np.testing.assert_array_equal(read.image, pixels(case.image_id))
        assert case.split == case.image_id.split("/")[0]
        assert case.label == int(level is not None)
        assert case.subject_id == case.image_id.split("/")[2][:5]
        if level:
            expected = np.zeros((16, 24), bool)
            expected[BOX] = True
            assert read.mask is not None
            np.testing.assert_array_equal(read.mask, expected)
        else:
            assert read.mask is None or not read.mask.any()
        organ = np.zeros((16, 24), bool)
        organ[ORGAN] = True
        assert read.foreground is not None
        np.testing.assert_array_equal(read.foreground, organ)
    return cases


@pytest.mark.parametrize("style", ["readme", "label", "quirks", "flat", "liver", "resc"])
@pytest.mark.parametrize("mode", ["grey", "rgb", "bone"])
def test_layouts(tmp_path: Path, style: str, mode: str) -> None:
    check(source(tree(tmp_path / "Brain", style, mode)))


def test_masks_of_normals_are_read(tmp_path: Path) -> None:
    cases = check(source(tree(tmp_path, good_masks=True)))
    masks = {case.image_id: case.load().mask for case in cases if case.split != "train"}
    assert all(mask is not None for mask in masks.values())


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "Brain",
        "Brain_AD",
        "brain-ad",
        "bmad/Brain",
        "Brain_AD/BraTS2021_slice",
        "download/bmad/Brain_AD/Brain",
        "x",
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_root_is_set_or_bundle_folder_or_zip(tmp_path: Path, inside: str, packed: bool) -> None:
    tree(tmp_path / "root" / inside)
    if "rain" in inside:
        other = tmp_path / "root" / Path(inside).parent / "Liver"
        if len(Path(inside).parts) < 4 and "BraTS" not in inside:
            tree(other)
    root = tmp_path / "root"
    if packed:
        root = Path(shutil.make_archive(str(tmp_path / "some"), "zip", root))
    cases = check(source(root))
    assert all(case.source_file.split("/")[0] in ("train", "valid", "test") for case in cases)


def test_liver_inside_a_folder_train(tmp_path: Path) -> None:
    tree(tmp_path / "Liver/Train/hist_DIY", "liver")
    cases = source(tmp_path, "liver_ct").cases()
    assert sorted(case.image_id for case in cases) == sorted(IMAGES)
    assert {case.subject_id for case in cases if case.split == "train"} == {"BTCV-1", "BTCV-2"}
    assert {case.subject_id for case in cases if case.split == "test"} == {"LiTS-5", "LiTS-6"}


def test_a_folder_of_zips(tmp_path: Path) -> None:
    for name in ("Brain_AD", "Liver_AD"):
        shutil.make_archive(str(tmp_path / "downloads" / name), "zip", tree(tmp_path / name))
    check(source(tmp_path / "downloads"))
    shutil.copy(tmp_path / "downloads/Brain_AD.zip", tmp_path / "downloads/Brain.zip")
    with pytest.raises(AnomedError, match=r"holds the set brain_mri twice \(Brain\.zip, Brain_AD\.zip\); remove one"):
        source(tmp_path / "downloads").cases()


def test_the_wrong_set_is_named(tmp_path: Path) -> None:
    tree(tmp_path / "Liver_AD")
    with pytest.raises(AnomedError, match="this is the BMAD set liver_ct, expected brain_mri; set `root` to that set"):
        source(tmp_path / "Liver_AD").cases()
    tree(tmp_path / "Chest")
    with pytest.raises(AnomedError, match="no BMAD set brain_mri found; expected a folder brain or brats2021_slice"):
        source(tmp_path).cases()


def test_two_folders_of_one_set(tmp_path: Path) -> None:
    tree(tmp_path / "Brain")
    tree(tmp_path / "Brain_AD")
    with pytest.raises(AnomedError, match=r"holds the set brain_mri twice \(Brain, Brain_AD\)"):
        source(tmp_path).cases()


def test_missing_root(tmp_path: Path) -> None:
    with pytest.raises(
        AnomedError, match=r"nowhere: not found; domains\.brain_mri\.root must point to BMAD's brain_mri"
    ):
        source(tmp_path / "nowhere").cases()
    with pytest.raises(AnomedError, match=r"domains\.brain_mri\.root: missing"):
        source(None).fingerprint()


def test_a_domain_of_another_name_says_its_set(tmp_path: Path) -> None:
    check(source(tree(tmp_path), "my_brain", set="brain_mri"))
    with pytest.raises(
        AnomedError, match=r"domains\.my_brain\.set: found None, expected the BMAD set to read: one of brain"
    ):
        source(tmp_path, "my_brain")
    with pytest.raises(AnomedError, match=r"domains\.brain_mri\.set: found 'brian', expected"):
        source(tmp_path, "brain_mri", set="brian")


def test_it_is_registered_and_knows_its_sets() -> None:
    assert plugins.load("domains", "bmad") is Bmad
    made = {name: source(None, name) for name in bmad_layout.SETS}
    assert [name for name, bmad in made.items() if bmad.has_masks] == ["brain_mri", "liver_ct", "retina_resc"]
    assert [name for name, bmad in made.items() if bmad.has_foreground] == ["brain_mri", "liver_ct"]
    assert [name for name, bmad in made.items() if bmad.colour] == ["histopathology"]


@pytest.mark.parametrize("name", ["retina_resc", "chest_xray", "histopathology"])
def test_a_set_that_shows_more_than_an_organ_has_no_foreground(tmp_path: Path, name: str) -> None:
    cases = source(tree(tmp_path), name).cases()
    assert [case.load().foreground for case in cases] == [None] * len(IMAGES)


def test_stray_files_are_counted(tmp_path: Path) -> None:
    root = tree(tmp_path / "d")
    strays = [
        "test/good/img/Thumbs.db",
        ".DS_Store",
        "test/good/img/._00005_99.png",
        "notes.txt",
        "train/good/desktop.ini",
    ]
    strays += ["__MACOSX/test/good/img/00005_99.png", ".cache/x.png", "meta.json"]
    for name in strays:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"\0")
    bmad = source(root)
    check(bmad)
    assert bmad.ignored == len(strays)
    bmad.cases()
    assert bmad.ignored == len(strays)


def broken(change: Callable[[Path], object], tmp_path: Path, domain: str = "brain_mri") -> list[dict[str, str]]:
    """The problems of a good tree after `change`."""
    root = tree(tmp_path)
    change(root)
    bmad = source(root, domain)
    bmad.cases()
    return [problem.row for problem in bmad.problems]


def copy(name: str, to: str) -> Callable[[Path], object]:
    def run(root: Path) -> object:
        (root / to).parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(root / name, root / to)

    return run


IMAGE, MASK = "test/Ungood/img/00006_60.png", "test/Ungood/label/00006_60.png"


@pytest.mark.parametrize(
    ("change", "case", "code", "found", "hint"),
    [
        (
            copy(MASK, "test/Ungood/label/0.png"),
            "test/Ungood/label/0.png",
            "mask_without_image",
            "a mask alone",
            "same name",
        ),
        (
            lambda root: (root / MASK).unlink(),
            IMAGE,
            "abnormal_without_mask",
            "no mask of this name",
            "add test/Ungood/label/00006_60.png",
        ),
        (
            copy(MASK, "test/Ungood/anomaly_mask/00006_60.png"),
            IMAGE,
            "two_masks",
            "anomaly_mask/00006_60.png and",
            "keep",
        ),
        (
            copy(IMAGE, "test/bad/1.png"),
            "test/bad/1.png",
            "unrecognised_file",
            "folder 'test/bad'",
            "{train,valid,test}",
        ),
        (copy(IMAGE, "1.png"), "1.png", "unrecognised_file", "folder ''", "move or remove the file"),
        (
            copy(IMAGE, "test/valid/good/1.png"),
            "test/valid/good/1.png",
            "unrecognised_file",
            "folder",
            "move or remove",
        ),
        (copy(IMAGE, "test/good/img/1.JPG"), "test/good/img/1.JPG", "not_a_png", "a JPG file", "convert it"),
        (copy(IMAGE, "test/good/img/1.dcm"), "test/good/img/1.dcm", "not_a_png", "a dcm file", "convert it"),
    ],
)
def test_scan_problems(
    tmp_path: Path, change: Callable[[Path], object], case: str, code: str, found: str, hint: str
) -> None:
    (row,) = broken(change, tmp_path)
    assert (row["case"], row["code"]) == (case, code)
    assert found in row["found"]
    assert hint in row["hint"]


def test_all_scan_problems_are_listed_at_once(tmp_path: Path) -> None:
    def change(root: Path) -> None:
        (root / MASK).unlink()
        copy(IMAGE, "1.png")(root)
        copy(IMAGE, "test/good/img/2.tif")(root)
        copy("valid/Ungood/label/00004_60.png", "valid/Ungood/label/3.png")(root)

    codes = sorted(row["code"] for row in broken(change, tmp_path))
    assert codes == ["abnormal_without_mask", "mask_without_image", "not_a_png", "unrecognised_file"]


def test_same_stem_twice_gives_the_same_id_twice(tmp_path: Path) -> None:
    root = tree(tmp_path)
    copy(IMAGE, "test/Ungood/00006_60.PNG")(root)
    bmad = source(root)
    ids = [case.image_id for case in bmad.cases()]
    assert ids.count("test/Ungood/00006_60") == 2  # prepare lists both as duplicate_id
    assert not bmad.problems


def test_abnormal_train_images_keep_split_and_label(tmp_path: Path) -> None:
    root = tree(tmp_path)
    copy(IMAGE, "train/Ungood/00006_60.png")(root)
    bmad = source(root)
    (bad,) = [case for case in bmad.cases() if case.split == "train" and case.label]
    assert bad.image_id == "train/Ungood/00006_60"  # prepare refuses it as abnormal_in_train
    assert not bmad.problems


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (IMAGE, encode(pixels("x"), "grey")[:-30], "truncated_png"),
        (IMAGE, images.encode_png(np.zeros((4, 4), np.uint16)), "bit_depth: found 16-bit grey"),
        (MASK, b"\xff\xd8\xff", "not_a_png: found a JPEG"),
        (IMAGE, images.encode_png(np.full((4, 4, 3), (200, 3, 3), np.uint8)), "not_grey"),
    ],
)
def test_unreadable_pixels_name_the_file(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    root = tree(tmp_path)
    (root / name).write_bytes(data)
    cases = {case.image_id: case for case in source(root).cases()}
    with pytest.raises(CaseProblem, match=f"^{name}: {message}"):
        cases["test/Ungood/00006_60"].load()
    cases["test/Ungood/00006_68"].load()


def test_a_damaged_zip_member_is_one_problem(tmp_path: Path) -> None:
    tree(tmp_path / "d")
    path = tmp_path / "d.zip"
    with zipfile.ZipFile(path, "w") as file:
        for image in sorted((tmp_path / "d").rglob("*.png")):
            file.write(image, image.relative_to(tmp_path / "d").as_posix())
    data = bytearray(path.read_bytes())
    data[data.index((tmp_path / "d" / IMAGE).read_bytes()) + 50] ^= 1
    path.write_bytes(data)
    cases = {case.image_id: case for case in source(path).cases()}
    with pytest.raises(CaseProblem, match=f"^{IMAGE}: unreadable_file: found a file that cannot be read .* is damaged"):
        cases["test/Ungood/00006_60"].load()
    cases["test/Ungood/00006_68"].load()


def test_an_unsafe_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Brain_AD.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("train/good/1.png", encode(pixels("x"), "grey"))
        file.writestr("../1.png", b"")
    with pytest.raises(AnomedError, match=r"Brain_AD\.zip: member '\.\./1\.png' leads out of the archive with '\.\.'"):
        source(path).cases()


def test_nothing_understood(tmp_path: Path) -> None:
    copy_of = tree(tmp_path / "d")
    shutil.rmtree(copy_of / "train")
    for split in ("valid", "test"):
        for label in ("good", "Ungood"):
            (copy_of / split / label).rename(copy_of / split / f"class_{label}")
    with pytest.raises(AnomedError, match="no image of brain_mri among 8 files, 8 of them not understood; expected"):
        source(copy_of).cases()


def test_source_file_and_hash(tmp_path: Path) -> None:
    tree(tmp_path / "bmad/Brain", "quirks")
    (case,) = [case for case in source(tmp_path).cases() if case.image_id == "valid/Ungood/00004_60"]
    assert case.source_file == "val/ungood/img/00004_60.png"
    assert case.load().sha256 == records.digest_file(tmp_path / "bmad/Brain/val/ungood/img/00004_60.png")


def test_masks_in_a_set_without_pixel_truth_are_ignored(tmp_path: Path) -> None:
    bmad = source(tree(tmp_path), "chest_xray")
    assert [case.load().mask for case in bmad.cases()] == [None] * len(IMAGES)
    assert (bmad.problems, bmad.ignored) == ([], 3)


def test_cases_reads_no_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"{self} was read"))
    bmad = source(root)
    assert len(bmad.cases()) == len(IMAGES)
    assert bmad.fingerprint()


def test_fingerprint(tmp_path: Path) -> None:
    first = source(tree(tmp_path / "a/Brain")).fingerprint()
    assert source(tree(tmp_path / "b/bundle/Brain").parent).fingerprint() == first
    (tmp_path / "a/Brain/Thumbs.db").write_bytes(b"stray")
    tree(tmp_path / "a/Liver")
    assert source(tmp_path / "a").fingerprint() == first
    with (tmp_path / "a/Brain" / IMAGE).open("ab") as file:
        file.write(b"x")
    assert source(tmp_path / "a").fingerprint() != first
    (tmp_path / "b/bundle/Brain" / IMAGE).rename(tmp_path / "b/bundle/Brain/test/Ungood/img/00006_61.png")
    assert source(tmp_path / "b").fingerprint() != first


def test_fingerprint_of_a_zip_sees_content_of_equal_size(tmp_path: Path) -> None:
    prints = set()
    for content in (b"a", b"b"):
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
            file.writestr("train/good/1.png", content)
        prints.add(source(tmp_path / "x.zip").fingerprint())
    assert len(prints) == 2


UUID = "0004cfab-14fd-4e49-80ba-63a80b6bddd6"


@pytest.mark.parametrize(
    ("name", "split", "stem", "expected"),
    [
        ("brain_mri", "test", "00753_60", ("00753", "")),
        ("brain_mri", "test", "TCGA-DU-7294_038", ("TCGA-DU-7294", "")),
        ("brain_mri", "test", "BraTS2021_00753", ("", "")),
        ("brain_mri", "test", "slice", ("", "")),
        ("liver_ct", "test", "17_203", ("LiTS-17", "")),
        ("liver_ct", "train", "17_203", ("BTCV-17", "")),
        ("liver_ct", "train", "img_0017_203_hist", ("BTCV-17", "")),
        ("liver_ct", "valid", "liver_9_41_segmentation_DIY_hist", ("LiTS-9", "")),
        ("liver_ct", "test", "ABD_032_98", ("ABD_032", "")),
        ("liver_ct", "test", "hepaticvessel_04", ("hepaticvessel", "")),
        ("liver_ct", "test", "medsam_demo", ("", "")),
        ("retina_resc", "test", "amd_0004", ("", "")),
        ("retina_oct2017", "test", "CNV-1016042-1", ("1016042", "CNV")),
        ("retina_oct2017", "test", "NORMAL-12494-2", ("12494", "")),
        ("retina_oct2017", "test", "drusen_b17", ("", "DRUSEN")),
        ("chest_xray", "test", f"Normal-{UUID}", (UUID, "")),
        ("chest_xray", "test", f"Lung_Opacity_{UUID}", (UUID, "Lung_Opacity")),
        ("chest_xray", "test", f"No-Not-Normal_{UUID}", (UUID, "No-Not-Normal")),
        ("chest_xray", "test", "Lung_Opacity-00010773_020", ("00010773", "Lung_Opacity")),
        ("chest_xray", "test", "Normal-12", ("", "")),
        ("histopathology", "test", "test_113_43712_51904", ("test_113", "")),
        ("histopathology", "test", "normal_j3", ("", "")),
    ],
)
def test_what_file_names_tell(name: str, split: str, stem: str, expected: tuple[str, str]) -> None:
    assert bmad_layout.naming(name, split, stem) == expected


@pytest.mark.parametrize(
    ("name", "stem", "expected"),
    [
        ("brain_mri", "00753_60", 60),
        ("brain_mri", "TCGA-DU-7294_038", 38),
        ("brain_mri", "00753_6012", None),
        ("brain_mri", "slice", None),
        ("liver_ct", "17_203", 203),
        ("liver_ct", "img_0017_203_hist", 203),
        ("liver_ct", "liver_9_41_segmentation_DIY_hist", 41),
        ("liver_ct", "medsam_demo", None),
        ("retina_resc", "amd_0004", None),
        ("retina_oct2017", "CNV-1016042-1", None),
        ("chest_xray", "Lung_Opacity-00010773_020", None),
        ("histopathology", "test_113_43712_51904", None),
    ],
)
def test_slice_numbers_that_file_names_tell(tmp_path: Path, name: str, stem: str, expected: int | None) -> None:
    assert bmad_layout.slice_number(name, stem) == expected
    assert source(tmp_path, name).offers == ({"slice"} if name in ("brain_mri", "liver_ct") else set())


def test_a_case_has_the_number_of_its_slice(tmp_path: Path) -> None:
    for name in ("train/good/00001_60.png", "test/good/00002_7.png", "test/good/odd.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encode(pixels("train/good/00001_60"), "grey"))
    told = {case.image_id: dict(case.clinical) for case in source(tmp_path).cases()}
    assert told == {
        "train/good/00001_60": {"slice": 60},
        "test/good/00002_7": {"slice": 7},
        "test/good/odd": {},
    }


def test_an_unknown_subject_is_the_image_itself(tmp_path: Path) -> None:
    cases = source(tree(tmp_path), "retina_resc").cases()
    assert all(case.subject_id == case.image_id for case in cases)


def test_pathology_is_for_abnormal_images_only(tmp_path: Path) -> None:
    for name in ("test/good/NORMAL-1-1.png", "test/Ungood/DME-2-1.png", "test/good/DME-3-1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"never read")
    found = {case.image_id: case.pathology for case in source(tmp_path, "retina_oct2017").cases()}
    assert found == {"test/good/NORMAL-1-1": "", "test/Ungood/DME-2-1": "DME", "test/good/DME-3-1": ""}


PUBLISHED = {  # total, train, valid, test: facts of the BMAD paper's data set table
    "brain_mri": (11298, 7500, 83, 3715),
    "liver_ct": (3201, 1542, 166, 1493),
    "retina_resc": (6217, 4297, 115, 1805),
    "retina_oct2017": (27315, 26315, 32, 968),
    "chest_xray": (26684, 8000, 1490, 17194),
    "histopathology": (7321, 5088, 236, 1997),
}


@pytest.mark.parametrize("domain", PUBLISHED)
def test_cards_state_the_published_counts(domain: str) -> None:
    card = cards.load(domain, ROOT / "data/cards")
    assert card is not None
    entry = card.sources["bmad"]
    totals = [
        split.total if split.total is not None else (split.normal or 0) + (split.abnormal or 0)
        for split in (entry.counts["train"], entry.counts["valid"], entry.counts["test"])
    ]
    assert (sum(totals), *totals) == PUBLISHED[domain]
    assert "arXiv 2306.11876" in entry.citation
    assert entry.licence
    assert entry.obtain
    assert set(bmad_layout.SETS) == set(PUBLISHED)


def test_counts_of_an_official_release() -> None:
    card = cards.load("chest_xray", ROOT / "data/cards")
    assert card is not None
    right = {
        "train": {"normal": 8000, "abnormal": 0},
        "valid": {"normal": 70, "abnormal": 1420},
        "test": {"normal": 781, "abnormal": 16413},
    }
    cards.check_counts(card.sources["bmad"], right, "chest_xray")
    wrong = {**right, "train": {"normal": 7999, "abnormal": 0}, "test": {"normal": 781, "abnormal": 16412}}
    with pytest.raises(AnomedError) as error:
        cards.check_counts(card.sources["bmad"], wrong, "chest_xray")
    assert "train normal: found 7999, expected 8000; test total: found 17193, expected 17194" in str(error.value)


def test_faulty_cards(tmp_path: Path) -> None:
    assert cards.load("mine", tmp_path) is None
    (tmp_path / "mine.yaml").write_text("title: x\ndescription: y\nsources: {}\nlicense: z\n")
    with pytest.raises(AnomedError, match=r"mine\.yaml: license: Extra inputs are not permitted, found 'z'"):
        cards.load("mine", tmp_path)
    (tmp_path / "mine.yaml").write_text("title: [\n")
    with pytest.raises(AnomedError, match=r"mine\.yaml: not valid YAML"):
        cards.load("mine", tmp_path)
