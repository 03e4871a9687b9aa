"""How the six released BMAD sets are named and laid out: what the path of a file says, without opening it."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from anomed import archive
from anomed.archive import View
from anomed.errors import AnomedError

LAYOUT = "{train,valid,test}/{good,Ungood}/[img/]*.png, masks in {valid,test}/Ungood/{label or anomaly_mask}/"


@dataclass(frozen=True)
class Released:
    """One released set. folders: its names in the bundle, in single downloads and inside those, as `_key` gives them.

    name: pattern of a file stem with the groups `case` (the patient), `kind` (the pathology) and `slice` (its number in
    the volume), where the set's naming tells them; a stem that does not match has no known subject. foreground: all but
    the organ was masked out to one level, from which the organ is found again.
    """

    folders: tuple[str, ...]
    name: str = r"(?!)"
    colour: bool = False
    masks: bool = False
    foreground: bool = False


SETS = {
    # <BraTS case>_<slice>; case numbers have five digits, slices up to three
    "brain_mri": Released(
        ("brain", "brats2021_slice"), r"(?P<case>.+)_(?P<slice>[0-9]{1,3})", masks=True, foreground=True
    ),
    # LiTS (valid, test): <volume>_<slice>; BTCV (train): img_<volume>_<slice>_hist; any other <case>_<slice>
    "liver_ct": Released(
        ("liver", "hist_diy"),
        r"(?:(?:img|liver|volume)[-_])?(?P<case>.+?)_(?P<slice>[0-9]+)(?:_(?:segmentation_)?(?:diy_)?hist)?",
        masks=True,
        foreground=True,
    ),
    "retina_resc": Released(("retina_resc", "resc"), masks=True),
    # Kermany: <class>-<patient>-<number>
    "retina_oct2017": Released(
        ("retina_oct2017", "oct2017"), r"(?P<kind>CNV|DME|DRUSEN|NORMAL)[-_](?:(?P<case>[0-9]+)-[0-9]+|.+)"
    ),
    # RSNA: <class>-<patient, a UUID>, one film each; NIH: <class>-<patient, 8 digits>_<follow-up>
    "chest_xray": Released(
        ("chest", "chest_rsna", "rsna"),
        r"(?P<kind>Lung_Opacity|No-Not-Normal|Normal)[-_]"
        r"(?:(?P<case>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9]{8}(?=_[0-9]{3}$)).*|.+)",
    ),
    # Camelyon16: <slide>_<position>; one slide is one patient
    "histopathology": Released(
        ("histopathology", "camelyon16_256", "camelyon16"),
        r"(?P<case>(?:normal|tumor|test)_[0-9]{3})[-_,].+",
        colour=True,
    ),
}
KINDS = ("CNV", "DME", "DRUSEN", "Lung_Opacity", "No-Not-Normal")
_IMAGE_LIKE = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".webp",
    ".dcm",
    ".nii",
    ".nii.gz",
    ".mha",
)
_SPLITS = {"train": "train", "val": "valid", "valid": "valid", "test": "test"}
_CLASSES = {"good": "good", "ungood": "Ungood"}


@dataclass(frozen=True)
class Place:
    split: str
    label: str
    mask: bool


@functools.lru_cache(maxsize=1000)
def place(folder: str) -> Place | None:
    """What the folders above a file say; None unless they name exactly one split and one class and nothing unknown."""
    splits, labels, mask = set(), set(), False
    for part in folder.lower().split("/"):
        compound = re.fullmatch(r"(train|val|valid|test)(_labels?|_img)?", part)
        if compound:
            splits.add(_SPLITS[compound[1]])
            mask |= "label" in (compound[2] or "")
        elif part in _CLASSES:
            labels.add(_CLASSES[part])
        elif part in ("label", "labels", "anomaly_mask"):
            mask = True
        elif part != "img":
            return None
    return Place(splits.pop(), labels.pop(), mask) if len(splits) == 1 and len(labels) == 1 else None


def is_stray(name: str) -> bool:
    """Whether a file is no image: what systems leave beside images (Thumbs.db, ._x.png, __MACOSX), texts and tables."""
    parts = name.lower().split("/")
    return any(part.startswith(".") or part == "__macosx" for part in parts) or not parts[-1].endswith(_IMAGE_LIKE)


def naming(name: str, split: str, stem: str) -> tuple[str, str]:
    """Subject and pathology that a file stem tells, "" where it does not."""
    match = re.fullmatch(SETS[name].name, stem, re.IGNORECASE)
    groups = match.groupdict() if match else {}
    subject = groups.get("case") or ""
    if name == "liver_ct" and subject.isdecimal():
        # The two cohorts number their volumes independently: train holds BTCV alone, valid and test LiTS.
        subject = f"{'BTCV' if split == 'train' else 'LiTS'}-{int(subject)}"
    kind = (groups.get("kind") or "").lower()
    return subject, next((known for known in KINDS if known.lower() == kind), "")


def numbers_slices(name: str) -> bool:
    """Whether the file stems of a set say which slice of its volume an image is."""
    return "slice" in re.compile(SETS[name].name).groupindex


def slice_number(name: str, stem: str) -> int | None:
    """The number of the slice in its volume, as the release counts, that a file stem tells; None where it does not."""
    match = re.fullmatch(SETS[name].name, stem, re.IGNORECASE)
    number = match.groupdict().get("slice") if match else None
    return None if number is None else int(number)


def _key(folder: str) -> str:
    """A folder name as users have it (`Brain`, `Brain_AD`, `Chest-AD`) without case, dashes and the ending."""
    return folder.lower().replace("-", "_").removesuffix(".zip").removesuffix("_ad")


def locate(tree: View, name: str) -> tuple[View, str]:
    """The view and folder whose children are the splits of set `name`. Raises AnomedError when it is not found."""
    owner = {key: set_name for set_name, released in SETS.items() for key in released.folders}
    at = ""
    for _ in range(6):  # bundle / one leading folder / set / Liver's Train / inner folder
        inner = [folder for folder in tree.folders(at) if not folder.startswith(".") and folder != "__MACOSX"]
        ours = [folder for folder in inner if owner.get(_key(folder)) == name]
        zips = [path for path in _zips(tree, at) if owner.get(_key(path.name)) == name]
        if len(ours) > 1 or (not ours and len(zips) > 1):
            raise AnomedError(
                f"{tree.root}: holds the set {name} twice ({', '.join(ours or [path.name for path in zips])}); "
                "remove one, or set `root` to the right one"
            )
        bundle = [] if inner else _zips(tree, at)
        if not ours and (zips or len(bundle) == 1):
            return locate(archive.view((zips or bundle)[0]), name)
        lone = inner[0] if len(inner) == 1 else ""
        wraps = lone and any(owner.get(_key(f)) == name for f in tree.folders(_join(at, lone)))
        if not ours and not wraps and any(folder.lower() in _SPLITS for folder in inner):
            other = owner.get(_key(at.rpartition("/")[2] or tree.root.name), name)
            if other != name:
                raise AnomedError(f"{tree.root}: this is the BMAD set {other}, expected {name}; set `root` to that set")
            return tree, at
        if not ours and not lone:
            break
        at = _join(at, ours[0] if ours else lone)
    raise AnomedError(
        f"{tree.root}: no BMAD set {name} found; expected a folder {' or '.join(SETS[name].folders)} (or with _AD at "
        f"the end), or the set's own folder with {LAYOUT}"
    )


def _zips(tree: View, at: str) -> list[Path]:
    """The zips directly in a folder on disk: the sets are also handed out as one zip each."""
    return sorted((tree.root / at).glob("*.zip")) if isinstance(tree, archive.Folder) else []


def _join(at: str, folder: str) -> str:
    return f"{at}/{folder}" if at else folder
