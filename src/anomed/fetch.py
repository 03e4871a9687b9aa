"""The fetch command: raw data that cards list and weights that systems read; nothing else in the project downloads."""

from pathlib import Path

from anomed import backbones, cards, params
from anomed.download import Item, download
from anomed.errors import AnomedError
from anomed.plan import CARDS, Plan

RAW = Path("data/raw")


def fetch(what: str, to: Path | None, config: Path) -> None:
    """Download what is missing of `what`: a domain, whose card lists the files, or "weights", those that the systems
    of `config` read. to: a folder other than data/raw/<source> or data/weights.

    What an earlier call left unfinished goes on; what is complete is not asked for again. Raises AnomedError when there
    is nothing to download from, the disk is too small, the server fails or a file is not the published one.
    """
    if what == "weights":
        _fetch_weights(to or backbones.FETCHED, config)
    else:
        _fetch_domain(what, to)


def _fetch_domain(domain: str, to: Path | None) -> None:
    card = cards.load(domain, CARDS)
    if card is None:
        known = ", ".join(sorted(path.stem for path in CARDS.glob("*.yaml"))) or f"none: there is no card in {CARDS}"
        raise AnomedError(f"{domain}: nothing is known to fetch; expected `weights` or a domain with a card: {known}")
    source = next((name for name, entry in card.sources.items() if entry.downloads), None)
    if source is None:
        ways = "\n".join(f"  {name}: {entry.obtain}" for name, entry in card.sources.items())
        raise AnomedError(f"{domain}: no open download with a published hash is known; get the data yourself:\n{ways}")
    print(cards.terms(domain, source, CARDS), end="")
    folder, entry = to or RAW / source, card.sources[source]
    items = [Item(file.url, folder / file.name, file.sha256, file.bytes) for file in entry.downloads]
    for item in items:
        download(item)
    root = items[0].target if len(items) == 1 and items[0].target.suffix == ".zip" else folder
    release = ", release: official" if entry.counts else ""
    print(f"For params.yaml:\n\ndomains:\n  {domain}: {{source: {source}, root: {root}{release}}}")


def _fetch_weights(folder: Path, config: Path) -> None:
    plan = Plan(params.read(config))
    names = sorted({name for system in plan.systems for name in plan.weights(system)})
    fetched = [name for name in names if name in backbones.BACKBONES and backbones.BACKBONES[name].url]
    if not fetched:
        read = f"only {', '.join(names)}, which packages carry" if names else "no weights"
        print(f"nothing to fetch: the systems of {config} read {read}")
        return
    print("Weights of torchvision, trained on ImageNet, whose terms allow non-commercial research and education alone.")
    for name in fetched:
        weights = backbones.BACKBONES[name]
        download(Item(weights.url, folder / weights.file, weights.sha256))
