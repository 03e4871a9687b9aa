"""Domain source `camelyon16`: patches of lymph node slides, cut before or cut here at listed coordinates."""

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from anomed import archive, images, plugins, records
from anomed.domains import camelyon16_slide
from anomed.domains.division import Shares, divide
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels, image_id

SIZE = 256
LISTS = {  # BMAD's coordinate files -> split, label
    "train_good": ("train", 0),
    "valid_good": ("valid", 0),
    "valid_bad": ("valid", 1),
    "test_good": ("test", 0),
    "test_bad": ("test", 1),
}
CLASSES = {"normal": 0, "tumor": 1}
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp")  # what patches may have been saved as; PNG alone is read
_PATCH = re.compile(
    r"(?P<slide>[A-Za-z0-9_-]*[A-Za-z0-9])[_,-](?P<x>[0-9]{1,9})[_,-](?P<y>[0-9]{1,9})\.png", re.IGNORECASE
)
_LINE = re.compile(r"(?P<slide>[A-Za-z0-9_-]+)\s*,\s*(?P<x>[0-9]{1,9})\s*,\s*(?P<y>[0-9]{1,9})")


@dataclass(frozen=True, order=True)
class Spot:
    """A place on a slide, in pixels of its full resolution, as a coordinate file or a patch's name gives it."""

    slide: str
    x: int
    y: int

    def __str__(self) -> str:
        return f"{self.slide}_{self.x}_{self.y}"


@dataclass
class Survey:
    """What lies at root: the cases, what is wrong, and the files that the cases are made from."""

    cases: list[Case] = field(default_factory=list)
    problems: list[CaseProblem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def problem(self, case: str, code: str, found: str, expected: str, hint: str) -> None:
        self.problems.append(CaseProblem(case, code, found, expected, hint))


@plugins.register("domains", "camelyon16")
class Camelyon16(Source):
    """Patches of 256 x 256 pixels at level 0 (40x) of Camelyon16's slides; the subject is the slide (one a patient).

    With BMAD's coordinate files `coords/{train_good,valid_good,valid_bad,test_good,test_bad}.txt` (lines `slide,x,y`),
    which say split and label, `root` also holds, in any folders, either patches `<slide>_<x>_<y>.png` or the slides
    `<slide>.tif`; where there is a patch, slides are ignored. Slides are read in place, so not from a zip.

    Without coordinate files, patches lie in folders `normal` and `tumor`. Their slides are divided: to train go only
    slides named `normal_...`, with normal patches; all others go to valid and test.

    BMAD's instructions cut with `patch_gen.py`, which is the name of the cutter of NCRF (Li and Ping, MIDL 2018); that
    one takes x, y as the centre, hence the default of `anchor`. BMAD does not carry the script itself.
    """

    note = "patches from the user's slides or folders, not the released data"

    class Options(Source.Options):
        """anchor: which pixel of a patch x, y is when slides are cut. split, seed: how to divide slides without
        coordinate files.
        """

        anchor: Literal["centre", "corner"] = "centre"
        split: Shares = Field(default_factory=Shares)
        seed: int = 0

    @property
    def colour(self) -> bool:
        return True

    @property
    def has_masks(self) -> bool:
        return False

    def fingerprint(self) -> str:
        """Digest of the names and contents of the coordinate files and of the patches or listed slides.

        The first call reads the listed slides whole, as any change in them must be noticed.
        """
        entries = [self.entries[name] for name in sorted(self._survey.used)]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def cases(self) -> list[Case]:
        """Every patch that is listed, or lies in a class folder, and is there. Reads no pixels.

        Raises AnomedError for a missing coordinate file, slides in a zip, libraries that are not installed, and when
        there is nothing to read.
        """
        self.problems = list(self._survey.problems)
        self.ignored = len(self.entries) - len(self._survey.used)
        return list(self._survey.cases)

    @functools.cached_property
    def _survey(self) -> Survey:
        survey = Survey()
        coordinates = self._coordinates()
        patches = self._patches(survey)
        if not patches and not coordinates:
            raise AnomedError(
                f"{self.root}: neither coordinate files nor patches among {len(self.entries)} files; expected BMAD's "
                "coords/*.txt beside patches or slides, or patches <slide>_<x>_<y>.png in folders `normal` and `tumor`"
            )
        if not coordinates:
            self._use_folders(survey, patches)
            return survey
        listed = self._listed(survey, coordinates)
        if patches:
            self._use_patches(survey, patches, listed)
        else:
            self._use_slides(survey, listed)
        return survey

    def _coordinates(self) -> dict[str, str]:
        """The coordinate files by name without .txt: all five or none."""
        found: dict[str, str] = {}
        for path in self.entries:
            folder, _, name = f"/{path}".rpartition("/")
            stem = name.removesuffix(".txt")
            if folder.endswith("/coords") and name != stem and stem in LISTS:
                if stem in found:
                    raise AnomedError(
                        f"{self.root}: {found[stem]} and {path}: expected one file of this name; keep one"
                    )
                found[stem] = path
        if found and (missing := LISTS.keys() - found.keys()):
            names = ", ".join(f"coords/{stem}.txt" for stem in LISTS if stem in missing)
            raise AnomedError(f"{self.root}: {names}: not found; expected all {len(LISTS)} of BMAD's coordinate files")
        return found

    def _listed(self, survey: Survey, coordinates: dict[str, str]) -> dict[Spot, tuple[str, int]]:
        """Split and label of every listed place."""
        listed: dict[Spot, tuple[str, int]] = {}
        first: dict[Spot, str] = {}
        for stem, place in LISTS.items():
            survey.used.add(coordinates[stem])
            text = self.tree.read(coordinates[stem]).decode("utf-8-sig", "replace")
            if not text.strip():
                survey.problem(coordinates[stem], "empty_list", "no line", "a line a patch", "copy the file again")
            for number, line in enumerate(map(str.strip, text.split("\n")), 1):
                where = f"{coordinates[stem]}, line {number}"
                match = _LINE.fullmatch(line)
                if match is None:
                    if line:
                        survey.problem(where, "malformed_line", repr(line[:80]), "slide,x,y", "correct the line")
                elif (other := first.setdefault(_spot(match), where)) != where:
                    hint = "remove one of the two lines"
                    survey.problem(where, "listed_twice", f"{line}, as in {other}", "every place once", hint)
                else:
                    listed[_spot(match)] = place
        _check_slides(survey, {spot: label for spot, (_, label) in listed.items()})
        return listed

    def _patches(self, survey: Survey) -> dict[Spot, str]:
        """The patches at root by place. Where there is one, any other picture is a problem, unless it is hidden."""
        patches: dict[Spot, str] = {}
        names = {path: path.rpartition("/")[2] for path in self.entries}
        small = {path: name for path, name in names.items() if name.lower().endswith(_PICTURES) and name[0] != "."}
        matches = {path: _PATCH.fullmatch(name) for path, name in small.items()}
        for path, match in matches.items() if any(matches.values()) else ():
            survey.used.add(path)
            if match is None:
                expected, hint = "<slide>_<x>_<y>.png", "rename or convert it, or move it away"
                survey.problem(path, "unrecognised_file", small[path], expected, hint)
            elif (first := patches.setdefault(_spot(match), path)) != path:
                hint = "keep one of the two"
                survey.problem(path, "duplicate_patch", f"the place of {first} as well", "every place once", hint)
        return patches

    def _use_patches(self, survey: Survey, patches: dict[Spot, str], listed: dict[Spot, tuple[str, int]]) -> None:
        for spot in sorted(listed.keys() - patches.keys()):
            hint = "add the patch, or remove its line"
            survey.problem(str(spot), "missing_patch", "no such file", f"{spot}.png", hint)
        for spot in sorted(patches.keys() - listed.keys()):
            hint = "add a line for it, or move the patch away"
            expected = "a line in one of the coordinate files"
            survey.problem(patches[spot], "patch_not_listed", "no line", expected, hint)
        for spot in sorted(listed.keys() & patches.keys()):
            survey.cases.append(self._patch_case(spot, *listed[spot], patches[spot]))

    def _use_slides(self, survey: Survey, listed: dict[Spot, tuple[str, int]]) -> None:
        slides = defaultdict(list)
        for path in self.entries:
            name = path.rpartition("/")[2]
            if name.lower().endswith(".tif") and not name.startswith("."):
                slides[name[:-4]].append(path)
        if not slides:
            raise AnomedError(
                f"{self.root}: coordinate files, but neither a patch nor a slide among {len(self.entries)} files; "
                "expected <slide>_<x>_<y>.png or <slide>.tif"
            )
        if not isinstance(self.tree, archive.Folder):
            raise AnomedError(f"{self.root}: a zip; slides are read in place: unpack it and set `root` to the folder")
        camelyon16_slide.require()
        for slide in sorted({spot.slide for spot in listed}):
            if len(paths := slides.get(slide, [])) != 1:
                code, found = ("duplicate_slide", " and ".join(paths)) if paths else ("missing_slide", "no such file")
                hint = "keep one of them" if paths else "add the slide, or remove its lines"
                survey.problem(slide, code, found, f"one {slide}.tif", hint)
            survey.used.update(paths)
        for spot, (split, label) in sorted(listed.items()):
            if len(paths := slides.get(spot.slide, [])) == 1:
                load = functools.partial(self._cut, paths[0], spot)
                survey.cases.append(_case(spot, split, label, paths[0], load))

    def _use_folders(self, survey: Survey, patches: dict[Spot, str]) -> None:
        labels: dict[Spot, int] = {}
        for spot, path in sorted(patches.items()):
            folder = path.rpartition("/")[0].rpartition("/")[2]
            if folder.lower() in CLASSES:
                labels[spot] = CLASSES[folder.lower()]
            else:
                found, hint = f"folder {folder!r}", "move the patch, or add BMAD's coordinate files under coords/"
                expected = "a folder `normal` or `tumor`"
                survey.problem(path, "unrecognised_folder", found, expected, hint)
        _check_slides(survey, labels)
        others = {spot.slide for spot, label in labels.items() if label or not _from_normal(spot)}
        normal = {spot.slide for spot in labels} - others
        where = f"{self.where}.split"
        advice = "add BMAD's coordinate files"
        splits = divide(normal, others, self.options.split, self.options.seed, where, advice, survey.problems)
        survey.cases += [
            self._patch_case(spot, splits[spot.slide], label, patches[spot]) for spot, label in labels.items()
        ]

    def _patch_case(self, spot: Spot, split: str, label: int, path: str) -> Case:
        return _case(spot, split, label, path, functools.partial(self._read, path))

    def _read(self, path: str) -> Pixels:
        data = self.tree.take(path, "a whole PNG")
        image = images.read_png(data, path, colour=True)
        if image.shape[:2] != (SIZE, SIZE):
            found, hint = f"{image.shape[0]} x {image.shape[1]} pixels", "cut the patch again"
            raise CaseProblem(path, "patch_size", found, f"{SIZE} x {SIZE}", hint)
        return Pixels(image, None, hashlib.sha256(data).hexdigest())

    def _cut(self, path: str, spot: Spot) -> Pixels:
        shift = SIZE // 2 if self.options.anchor == "centre" else 0
        file = Path(self.tree.root, path)
        image, digest = camelyon16_slide.cut(file, path, spot.x - shift, spot.y - shift, SIZE)
        return Pixels(image, None, digest)


def _spot(match: re.Match[str]) -> Spot:
    return Spot(match["slide"], int(match["x"]), int(match["y"]))


def _case(spot: Spot, split: str, label: int, path: str, load: Callable[[], Pixels]) -> Case:
    name = image_id(split, label, str(spot))
    return Case(name, spot.slide, split, label, path, load, pathology="metastasis" if label else "")


def _from_normal(spot: Spot) -> bool:
    """Whether the slide is one of Camelyon16's normal training slides, going by its name."""
    return spot.slide.lower().startswith("normal")


def _check_slides(survey: Survey, labels: dict[Spot, int]) -> None:
    """A slide named normal has no metastasis, and no slide has two names: it would be two, in two splits."""
    names: dict[str, str] = {}
    for slide in sorted({spot.slide for spot in labels}):
        if (other := names.setdefault(slide.lower(), slide)) != slide:
            hint = "write its name in one way"
            survey.problem(slide, "two_names", f"{other} as well", "one name of a slide, with the same capitals", hint)
    for spot, label in sorted(labels.items()):
        if label and _from_normal(spot):
            hint = "correct the label or the slide's name"
            survey.problem(str(spot), "tumour_in_normal_slide", "an abnormal patch", "normal patches only", hint)
