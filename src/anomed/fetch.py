"""The fetch command: raw data that cards list and weights that systems read; nothing else in the project downloads."""

from pathlib import Path

from anomed import cards, params, records, weights
from anomed.download import Item, download
from anomed.errors import AnomedError
from anomed.plan import CARDS, Plan

RAW = Path("data/raw")


def fetch(what: str, to: Path | None, *config: Path) -> None:
    """Download what is missing of `what`: a domain, whose card lists the files, or "weights", those that the systems
    of `config` (params.yaml and overlays) read. to: a folder other than data/raw/<source> or data/weights.

    What an earlier call left unfinished goes on; what is complete is not asked for again. Raises AnomedError when there
    is nothing to download from, the disk is too small, the server fails or a file is not the published one.
    """
    if what == "weights":
        _fetch_weights(to or weights.FETCHED, config)
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


def _fetch_weights(folder: Path, config: tuple[Path, ...]) -> None:
    """Download what is missing; a file that cannot be had does not keep the others from coming."""
    plan = Plan(params.combined(config))
    names = sorted({name for system in plan.systems for name in plan.weights(system)})
    found = dict.fromkeys(item for name in names if (item := weights.find(name)) and item.url)
    if not found:
        read = f"only {', '.join(names)}, none of which is downloaded" if names else "no weights"
        print(f"nothing to fetch: the systems of {' + '.join(map(str, config))} read {read}")
        return
    missing = [item for item in found if not _lies(item, folder)]
    for terms in dict.fromkeys(item.terms for item in missing if item.terms):
        print(f"terms: {terms}")
    failures = []
    for item in missing:
        target = folder / item.file
        try:
            download(Item(item.url, target, item.sha256))
        except AnomedError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise  # the user meant all of it
            failures.append(str(error))
            continue
        if not item.sha256:
            print(f"{target}: no hash of it is published; found sha256 {records.digest_file(target)}")
    if failures:
        raise AnomedError("\n".join(failures))


def _lies(item: weights.Weights, folder: Path) -> bool:
    """Whether a file need not be fetched into `folder`; says where it lies, and raises AnomedError for a wrong one."""
    path = folder / item.file
    if not path.is_file() and folder == weights.FETCHED:
        path = item.path()  # where another library that fetched it keeps it
    if not path.is_file():
        return False
    print(f"{item.check(path)}: {item.name}, sha256 {records.digest_file(path)}")
    return True
