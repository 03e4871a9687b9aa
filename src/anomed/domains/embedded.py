"""The embedded domains: images synthesised on the user's machine, so that the benchmark runs without any download."""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from anomed import plugins, records, volumes
from anomed.domains.source import Files, Scan, Source
from anomed.errors import AnomedError
from anomed.manifest import Case, Pixels
from anomed.phantoms import atlas, brain, chest, histology, liver, nova, oct


@dataclass(frozen=True)
class Phantom:
    """How a domain is made.

    subjects: their usual number. cohort: who they are: heads or bodies (subject, split, kind), or pictures. make: one
    of them out of a seed: volumes by name, or a painted picture. image, organ: names of two of the volumes (the third
    is `lesion`); empty for pictures. template: made from nilearn's maps. views: pictures say how they were taken.
    """

    subjects: int
    cohort: Callable[[int], list[Any]]
    make: Callable[[int, Any], Any]
    image: str = ""
    organ: str = ""
    masks: bool = False
    colour: bool = False
    trains: bool = True
    template: bool = False
    views: bool = False


def _scans_of_retinas(domain: str, masks: bool) -> Phantom:
    cohort, paint = functools.partial(oct.cohort, domain), functools.partial(oct.paint, domain)
    return Phantom(oct.SUBJECTS[domain], cohort, paint, masks=masks)


DOMAINS = {
    "brain_mri": Phantom(brain.SUBJECTS, brain.cohort, brain.make, "flair", "brain", masks=True, template=True),
    "liver_ct": Phantom(liver.SUBJECTS, liver.cohort, liver.make, "ct", "liver", masks=True),
    "retina_resc": _scans_of_retinas("retina_resc", masks=True),
    "retina_oct2017": _scans_of_retinas("retina_oct2017", masks=False),
    "chest_xray": Phantom(chest.SUBJECTS, chest.cohort, chest.paint, views=True),
    "histopathology": Phantom(histology.SUBJECTS, histology.cohort, histology.paint, colour=True),
    "nova": Phantom(nova.SUBJECTS, nova.cohort, nova.paint, trains=False, template=True),
}


@plugins.register("domains", "embedded")
class Embedded(Source):
    """Synthetic images of each of the seven domains, some hundred of each; nothing is read.

    brain_mri and liver_ct are volumes (heads out of nilearn's MNI152 maps; abdomens in HU), written to
    `<work>/embedded/<domain>/` as a hospital's folder, with the organ and, where there is one, the lesion beside it;
    they go through the chain that the domain's block names. The others are pictures. As in the real sets, these two and
    retina_resc have masks, chest_xray and nova boxes; nova is evaluation only, with captions, histories and diagnoses.

    About half the images are for training, all normal; valid and test hold other subjects, normal and abnormal.
    `pathology` is the kind of lesion.
    """

    needs_root = False
    note = "embedded data, not the released data; reproduces no published number"

    class Options(Source.Options):
        """set: which domain to make; needed when the domain's key is not one of their names. seed: another seed gives
        another cohort. subjects: their number, at least 10 to fill every split; None: as many as give some hundred
        images.
        """

        set: str | None = None
        seed: int = Field(default=0, ge=0)
        subjects: int | None = Field(default=None, ge=10, le=999)

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        name = options.set or domain
        if name not in DOMAINS:
            raise AnomedError(
                f"domains.{domain}.set: found {options.set!r}, expected the embedded domain to make: one of "
                f"{', '.join(DOMAINS)}"
            )
        self.phantom = DOMAINS[name]

    @property
    def volumetric(self) -> bool:
        return bool(self.phantom.image)

    @property
    def has_masks(self) -> bool:
        return self.phantom.masks

    @property
    def colour(self) -> bool:
        return self.phantom.colour

    @property
    def trains(self) -> bool:
        return self.phantom.trains

    @property
    def offers(self) -> frozenset[str]:
        """Slice numbers of volumes; of films how they were taken."""
        return super().offers | ({"view"} if self.phantom.views else set())

    def fingerprint(self) -> str:
        """Hash of the template maps in the environment, where they are used; all else is a parameter of the block."""
        if not self.phantom.template:
            return ""
        return records.digest({name: records.digest_file(path) for name, path in atlas.template_files().items()})

    def _cohort(self) -> list[Any]:
        return self.phantom.cohort(self.options.subjects or self.phantom.subjects)

    def cases(self) -> list[Case]:
        """All pictures, painted (up to half a second each) and kept: boxes and texts come from what is drawn."""
        return [self._case(picture) for picture in self._cohort()]

    def _case(self, picture: Any) -> Case:
        painted = self.phantom.make(self.options.seed, picture)
        pixels = Pixels(painted.image, painted.mask, hashlib.sha256(painted.image.tobytes()).hexdigest())
        abnormal = picture.kind != "normal"
        return Case(
            image_id=picture.image_id,
            subject_id=picture.subject_id,
            split=picture.split,
            label=int(abnormal),
            source_file=f"{picture.image_id}.png",
            load=lambda: pixels,
            boxes=painted.boxes,
            pathology=picture.kind if abnormal else "",
            clinical=painted.clinical,
        )

    def scans(self) -> list[Scan]:
        """The cohort; a volume is synthesised when it is fetched (about half a second)."""
        return [
            Scan(
                subject_id=member.subject,
                split=member.split,
                source_file=f"{member.subject}_{self.phantom.image}.nii.gz",
                fetch=functools.partial(self._fetch, member),
                abnormal=member.kind != "normal",
                pathology=member.kind if member.kind != "normal" else "",
            )
            for member in self._cohort()
        ]

    def _fetch(self, member: Any) -> Files:
        made, affine = self.phantom.make(self.options.seed, member)
        paths = {}
        for name, data in made.items():
            paths[name] = self.work / "embedded" / self.domain / f"{member.subject}_{name}.nii.gz"
            if name == "lesion" and member.kind == "normal":
                paths.pop(name).unlink(missing_ok=True)
                continue
            volumes.write(paths[name], data, affine)
        return Files(paths[self.phantom.image], paths.get("lesion"), paths[self.phantom.organ])
