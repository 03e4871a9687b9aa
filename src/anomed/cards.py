"""Domain cards: what `data/cards/<domain>.yaml` says about a domain's sources, licences and counts."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
import yaml

from anomed.errors import AnomedError
from anomed.settings import Settings

Split = Literal["train", "valid", "test"]


class Counts(Settings):
    """Images of one split: normal and abnormal, or their total where only that is published."""

    normal: int | None = None
    abnormal: int | None = None
    total: int | None = None


class Download(Settings):
    """A file that anyone may fetch, with the hash that was published for it; bytes: its size, where that is known."""

    name: Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    url: Annotated[str, pydantic.StringConstraints(pattern=r"^https?://")]
    sha256: Annotated[str, pydantic.StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    bytes: int | None = None


class Entry(Settings):
    """One source of a domain.

    restricted: whether users must accept `terms`. counts: images of a complete release; total: its images over all
    splits, or volumes where the source gives volumes. known_problems: problem code -> exact count that an official
    release really has. faults: what is known to be wrong with the release, in prose.
    """

    licence: str
    citation: str
    obtain: str
    restricted: bool = False
    terms: str = ""
    counts: dict[Split, Counts] = pydantic.Field(default_factory=dict)
    total: int | None = None
    known_problems: dict[str, int] = pydantic.Field(default_factory=dict)
    faults: list[str] = pydantic.Field(default_factory=list)
    downloads: list[Download] = pydantic.Field(default_factory=list)

    @pydantic.model_validator(mode="after")
    def _restricted_has_terms(self) -> "Entry":
        if self.restricted != bool(self.terms):
            raise ValueError("a restricted source states its terms, an unrestricted one has none")
        return self


class Card(Settings):
    """A domain card. description: one sentence. sources: by the name of the domain source (`bmad`, `embedded`, ...)."""

    title: str
    description: str
    sources: dict[str, Entry]


def load(domain: str, folder: Path) -> Card | None:
    """The card of a domain, or None when it has none (a user's own domain). Raises AnomedError naming file and key."""
    path = folder / f"{domain}.yaml"
    try:
        return Card.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AnomedError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise AnomedError(f"{path}: {key}: {first['msg']}, found {first['input']!r}") from None


def described(domain: str, source: str, official: bool, folder: Path) -> tuple[Card | None, Entry | None]:
    """The card of a domain and what it says of a source, if anything. Raises AnomedError when an official release lacks
    it."""
    card = load(domain, folder)
    entry = card.sources.get(source) if card else None
    if official and entry is None:
        raise AnomedError(f"domains.{domain}: release is official, but data/cards/{domain}.yaml does not describe it")
    return card, entry


def terms(domain: str, source: str, folder: Path) -> str:
    """Lines to print before restricted data are downloaded or used; empty where nothing has to be accepted.

    A domain of another name than the cards have is described by the only card that knows its source, if there is one.
    """
    card = load(domain, folder)
    if card is None:
        others = [other for path in sorted(folder.glob("*.yaml")) if (other := load(path.stem, folder))]
        known = [other for other in others if source in other.sources]
        card = known[0] if len(known) == 1 else None
    entry = card.sources.get(source) if card else None
    if card is None or entry is None or not entry.restricted:
        return ""
    lines = [f"{domain}: {card.title} (source {source}) is restricted; by using it you accept its terms"]
    lines += [f"  terms: {entry.terms}", f"  licence: {entry.licence}", f"  cite: {entry.citation}"]
    return "\n".join(lines) + "\n"


def check_counts(entry: Entry, found: dict[str, dict[str, int]], domain: str) -> None:
    """Raise AnomedError unless the counts of a prepared domain (see `manifest.count`) are those of its card.

    Only what the card states is compared; a card without counts describes no official release and is refused.
    """
    if not entry.counts:
        raise AnomedError(f"domains.{domain}: release is official, but the card states no counts; leave `release` out")
    wrong = []
    for split, stated in entry.counts.items():
        have = {**found[split], "total": sum(found[split].values())}
        for name, expected in stated.model_dump(exclude_none=True).items():
            if have[name] != expected:
                wrong.append(f"{split} {name}: found {have[name]}, expected {expected}")
    if wrong:
        raise AnomedError(
            f"domains.{domain}: not the official release ({'; '.join(wrong)}); complete it, or leave `release` out"
        )
