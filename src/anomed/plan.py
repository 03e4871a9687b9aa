"""params → the list of runs, and what each job depends on; the only module the Snakefile imports."""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from anomed import cards, importing, plugins, records, sources
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.params import Params, read

PREPARED = Path("data/prepared")
WORK = Path("work")
CARDS = Path("data/cards")
SHARDS = 2  # of a domain of volumes, unless its block says otherwise
__all__ = ["MADE", "TABLES", "Plan", "Run", "read"]
MADE = ("data/prepared", "models", "runs", "scores", "results")  # what DVC records, with .snakemake/metadata
TABLES = (
    "scores.csv", "table.csv", "table.md", "table.tex", "breakdowns.csv", "statistics.json", "performance.csv",
)  # fmt: skip


class Run(NamedTuple):
    """One line of the plan: a system on a domain with a seed."""

    domain: str
    system: str
    seed: int

    def path(self, folder: str, suffix: str = "") -> str:
        """`<folder>/<domain>/<system>/<seed><suffix>`, relative to the Snakefile."""
        return f"{folder}/{self.domain}/{self.system}/{self.seed}{suffix}"


class Plan:
    """What a params.yaml asks for. Paths are relative to the folder that holds the Snakefile.

    Every `..._params` is canonical JSON of exactly what a job's result depends on; Snakemake re-runs the job when it
    changes. Raises AnomedError on any fault in the configuration or a root that does not exist.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.params = Params(config)
        self.domains = self.params.run.domains
        self.systems = self.params.run.systems
        self.lacking: list[str] = []  # what stops a run and not a look at the plan: see `check`

    def check(self) -> None:
        """Raises AnomedError for what makes the plan itself wrong, such as a root that does not exist; what is merely
        not there yet (weights, the files of an empty root) is listed in `lacking`."""
        for domain in self.domains:
            self.prepare_params(domain)  # of a domain of volumes: the files of its chain as well
            block = self.params.domains[domain]
            cards.described(self.card_name(domain), block.source, block.release == "official", CARDS)
            self._check_colour(domain)
            if domain in self.volumetric and os.path.exists(self.root(domain) or "."):  # noqa: PTH110
                self._check_scans(domain)
        for domain in self.domains:
            _check_runs("run.domains", domain, [self.absent(domain, system) for system in self.systems])
        for system in self.systems:
            self._weight_hashes(system)
            _check_runs("run.systems", system, [self.absent(domain, system) for domain in self.domains])

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the order of the lists in `run:`."""
        return [Run(d, s, k) for d in self.domains for s in self.systems for k in self.seeds(d, s)]

    @cache  # noqa: B019  one plan per process
    def seeds(self, domain: str, system: str) -> list[int]:
        """The seeds of a pair: the first alone where nothing is random, those that were imported; none where the pair
        does not run, see `absent`."""
        if self.absent(domain, system):
            return []
        if system in self.params.imported:
            return sorted(self._brought(domain, system))
        seeds = self.params.run.seeds
        drawn = self.params.domains[self.trained_on(domain)].train_limit is not None  # other seed, other subjects
        return seeds[:1] if self.params.methods[system].deterministic and not drawn else seeds

    def absent(self, domain: str, system: str) -> str:
        """Why a system does not run on a domain; empty when it does."""
        if system in self.params.imported:
            return "" if self._brought(domain, system) else "not imported"
        trained_on, reads = self.trained_on(domain), self.params.methods[system].reads
        for name in dict.fromkeys((trained_on, domain)):
            if unknown := [fact for fact in reads if fact not in self.source(name).offers]:
                return f"not applicable: the {unknown[0]} of the images of {name} is not known"
        if self.source(trained_on).trains:
            return ""
        if trained_on != domain:
            return f"not applicable: domains.{domain}.train_domain is {trained_on}, which has no train images either"
        return f"not applicable: no train images, and domains.{domain}.train_domain is not set"

    def trained_on(self, domain: str) -> str:
        """The domain whose models are used."""
        return self.params.domains[domain].train_domain or domain

    def train_data(self, domain: str) -> str:
        """The prepared domain whose models are used, where it is another one; else empty."""
        other = self.params.domains[domain].train_domain
        return (PREPARED / other).as_posix() if other else ""

    def model(self, run: Any) -> str:
        """Folder of the model that a run (anything with domain, system and seed) uses."""
        return Run(self.trained_on(run.domain), run.system, run.seed).path("models")

    @property
    def models(self) -> list[str]:
        """The cards of all models that the runs use."""
        fitted = (run for run in self.runs if run.system not in self.params.imported)
        return list(dict.fromkeys(f"{self.model(run)}/run.json" for run in fitted))

    def terms(self) -> str:
        """What users of restricted data must know, as lines to print before anything is done; empty without any."""
        texts = (cards.terms(self.card_name(name), self.params.domains[name].source, CARDS) for name in self.domains)
        return "".join(dict.fromkeys(texts))

    @cache  # noqa: B019
    def _brought(self, domain: str, system: str) -> dict[int, importing.Origin]:
        return importing.brought(domain, system)

    @cache  # noqa: B019  one plan per process
    def source(self, domain: str) -> Source:
        """The domain's source object: one, so that what lies at its root is listed once."""
        block = self.params.domains[domain]
        cls = plugins.load("domains", block.source)
        options = {k: v for k, v in self.params.domain_blocks[domain].items() if k in cls.Options.model_fields}
        root = self.root(domain)
        return cls(domain, cls.Options(**options), Path(root) if root else None, WORK)

    def card_name(self, domain: str) -> str:
        """The name of the domain's card: that of the set that its source reads, where that is not the domain's key."""
        return str(self.params.domain_blocks[domain].get("set") or domain)

    def root(self, domain: str) -> str:
        """Where the domain's raw data lie, `~` expanded; empty when its source needs none."""
        root = self.params.domains[domain].root
        return os.path.expanduser(root) if root else ""  # noqa: PTH111  leaves an unknown ~user as it is

    @property
    def volumetric(self) -> list[str]:
        """The domains whose source gives volumes: rules `spatial` and `intensity` prepare them, not `images`."""
        return [name for name in self.domains if self.params.domains[name].preprocess]

    def shards(self, domain: str) -> list[str]:
        """Names of the shards of a domain of volumes: how many changes no result."""
        number = self.params.domains[domain].shards or SHARDS
        return [f"{index}-of-{number}" for index in range(number)]

    @cache  # noqa: B019  one plan per process
    def prepare_params(self, domain: str) -> str:
        """All that a prepared domain is made from."""
        return records.canonical(self._prepare(domain))

    @cache  # noqa: B019
    def spatial_params(self, domain: str) -> str:
        """What the volumes of a domain are made from: grey levels and slices do not move a voxel."""
        block = {
            key: value for key, value in self._prepare(domain).items() if key not in ("size", "release", "preprocess")
        }
        return records.canonical({**block, "spatial": self.params.domain_blocks[domain]["preprocess"]["spatial"]})

    @cache  # noqa: B019
    def _prepare(self, domain: str) -> dict[str, Any]:
        block = {**self.params.domain_blocks[domain], "fingerprint": self._fingerprint(domain)}
        if domain in self.volumetric:
            block["files"] = {name: records.digest_file(path) for name, path in self.chain_files(domain).items()}
        return block

    def _check_colour(self, domain: str) -> None:
        """A model takes grey images or colour images, not both. Raises AnomedError before one is fitted in vain."""
        other, kinds = self.trained_on(domain), {False: "grey", True: "colour"}
        if self.source(domain).colour != self.source(other).colour:
            found = ", ".join(f"{name} has {kinds[self.source(name).colour]} images" for name in (other, domain))
            raise AnomedError(f"domains.{domain}.train_domain: a model needs images of one kind: {found}; name another")

    def _check_scans(self, domain: str) -> None:
        """Raises AnomedError for what would stop a domain only after all of its volumes were processed."""
        scans = self.source(domain).scans()
        for split in ("train", "test"):
            if split not in {scan.split for scan in scans}:
                raise AnomedError(f"domains.{domain}: found no volume in {split}, of {len(scans)} without problems")
        wrong = [scan.subject_id for scan in scans if scan.split == "train" and scan.abnormal]
        if wrong and self.params.domain_blocks[domain]["preprocess"]["slices"]["normal"] == "subjects":
            raise AnomedError(
                f"domains.{domain}: {len(wrong)} abnormal subjects in train ({', '.join(wrong[:5])}); move them to "
                "valid or test, or take tumour-free slices of patients (`slices: {normal: slices}`)"
            )

    def chain_files(self, domain: str) -> dict[str, Path]:
        """The files outside the project that a domain's chain reads. Raises AnomedError when one is missing."""
        return self.params.chains[str(self.params.domains[domain].preprocess)].files()

    def chain_paths(self, domain: str) -> str:
        """The same as JSON for the command line."""
        return records.canonical({name: str(path) for name, path in self.chain_files(domain).items()})

    def _fingerprint(self, domain: str) -> str:
        """Identity of the raw data; once prepared, they may be gone (a clone with pulled results needs no raw data)."""
        root = self.root(domain)
        if not root or os.path.exists(root):  # noqa: PTH110  never raises
            try:
                if self.is_empty(domain):
                    self.lacking.append(f"domains.{domain}.root: {root} is an empty folder; {self.obtain(domain)}")
                    return ""
                return self.source(domain).fingerprint()
            except (AnomedError, OSError) as error:
                where = "" if str(error).startswith(f"domains.{domain}") else f"domains.{domain}: "
                raise AnomedError(f"{where}{error}") from None
        card = PREPARED / domain / "card.json"
        if card.exists():
            made = dict(records.read_card(card, "parameters")["parameters"])
            fingerprint, _ = made.pop("fingerprint", ""), made.pop("files", None)
            if made == self.params.domain_blocks[domain]:
                print(f"warning: domains.{domain}: {root} not found; going on with what is prepared", file=sys.stderr)
                return str(fingerprint)
        raise AnomedError(f"domains.{domain}.root: {root} not found; {self.obtain(domain)}")

    def is_empty(self, domain: str) -> bool:
        """Whether the domain's root is a folder with nothing in it."""
        root = self.root(domain)
        return os.path.isdir(root) and not os.listdir(root)  # noqa: PTH112, PTH208  "" is no folder

    def obtain(self, domain: str) -> str:
        """How the raw data of a domain can be had."""
        name, source = self.card_name(domain), self.params.domains[domain].source
        text = f"put the data there or change domains.{domain}.root"
        card = cards.load(name, CARDS)
        entry = card.sources.get(source) if card else None
        if entry is None:
            return text
        fetch = f" Or run `anomed fetch {name}`" if entry.downloads and "anomed fetch" not in entry.obtain else ""
        return f"{text}. {entry.obtain}{fetch}"

    @cache  # noqa: B019
    def fit_params(self, domain: str, system: str) -> str:
        return records.canonical(self._fit(domain, system))

    def _fit(self, domain: str, system: str) -> dict[str, Any]:
        """What decides the predictions of a system on a domain, beside the images and the seed."""
        if system in self.params.imported:
            # Of every seed: a clone, which has the runs alone, sees by it which of them belong together.
            brought = {str(seed): origin.digest for seed, origin in self._brought(domain, system).items()}
            return {"method": {"implementation": "imported", "predictions": brought}, "files": {}}
        limit = self.params.domains[self.trained_on(domain)].train_limit
        limited = {} if limit is None else {"train_limit": limit}
        return {"method": self.params.method_blocks[system], "files": self._weight_hashes(system), **limited}

    @cache  # noqa: B019
    def _weight_hashes(self, system: str) -> dict[str, str]:
        return {name: self._weights_hash(system, name, path) for name, path in self.weights(system).items()}

    def _weights_hash(self, system: str, name: str, path: Path) -> str:
        """Of a weight file; where it is gone, as in a clone with pulled results, what the models made with it say."""
        if path.is_file():
            return records.digest_file(path)
        for card in sorted(Path("models").glob(f"*/{system}/*/{records.RUN_CARD}")):
            made = records.read_card(card, "parameters")["parameters"]
            if made["method"] == self.params.method_blocks[system] and name in made["files"]:
                return str(made["files"][name])
        self.lacking.append(
            f"methods.{system}: weights {name!r} not found at {path}; run `anomed fetch weights` (with an overlay: "
            "`--config params.yaml OVERLAY`), or put the file there"
        )
        return ""

    def weights(self, system: str) -> dict[str, Path]:
        """The files outside the project that a system reads, by name; they may be missing."""
        if system in self.params.imported:
            return {}
        try:
            return self.params.methods[system].files(self.params.settings[system])
        except AnomedError as error:
            raise AnomedError(f"methods.{system}: {error}") from None

    @cache  # noqa: B019
    def score_params(self, domain: str, system: str) -> str:
        return records.canonical({**self._fit(domain, system), "metrics": self.params.metrics})

    def table_params(self) -> str:
        """The plan as the table and the report need it: small, whatever the number of runs."""
        runs = {
            domain: {
                system: {
                    "seeds": self.seeds(domain, system),
                    "hash": records.digest(self.score_params(domain, system).encode()),
                    "absent": self.absent(domain, system),
                }
                for system in self.systems
            }
            for domain in self.domains
        }
        marks = {system: mark for system in self.systems if (mark := self._mark(system))}
        notes = {domain: note for domain in self.domains if (note := self._note(domain))}
        apart = [system for system in marks if system not in self.params.imported]
        kept = {system: epoch for system in self.systems if (epoch := self._selection(system))}
        plan = {"domains": self.domains, "systems": self.systems, "marks": marks, "notes": notes, "apart": apart}
        return json.dumps({**plan, "selection": kept, "runs": runs})  # unsorted: order is the table's order

    def _note(self, domain: str) -> str:
        """What readers of the table must know of a domain's models; empty where they are its own, of all images."""
        source = self.trained_on(domain)
        limit = self.params.domains[source].train_limit
        few = "" if limit is None else f"fitted on {limit} train subject{'s'[: limit > 1]}, drawn anew by each seed"
        return ", ".join(filter(None, [f"those of {source}" if source != domain else "", few]))

    def _mark(self, system: str) -> str:
        """What readers of the table must know of a row; empty for a system that was run here."""
        if system not in self.params.imported:
            return self.params.methods[system].mark(self.params.settings[system])
        origins = {o.origin for domain in self.domains for o in self._brought(domain, system).values()}
        return f"imported, not run here: {'; '.join(sorted(origins))}"

    def _selection(self, system: str) -> str:
        """Which epoch a system keeps, in words; empty where none is chosen or nobody here knows."""
        if system in self.params.imported:
            return ""
        return self.params.methods[system].selection(self.params.settings[system])

    def upstream(self) -> str:
        """Hash of all that decides the files that the table is made from: parameters, raw data, cards, code.

        Snakemake does not make a missing file again while what was made from it is there. After a job failed its
        outputs are gone, and only this tells the next run that the table is of another state.
        """
        domains = {name: [self.prepare_params(name), self.card(name)] for name in self.domains}
        systems = {f"{d}/{s}": [self.score_params(d, s), self.seeds(d, s)] for d in self.domains for s in self.systems}
        steps = {name: ("spatial", "intensity") if name in self.volumetric else ("images",) for name in self.domains}
        files = {file for name, commands in steps.items() for step in commands for file in self.code(step, domain=name)}
        for name in self.systems:
            mine = ("adopt",) if name in self.params.imported else ("fit", "predict")
            files |= {file for step in mine for file in self.code(step, system=name)}
        code = {file: records.digest_file(sources.PROJECT / file) for file in {*files, *self.code("score")}}
        return records.digest({"domains": domains, "systems": systems, "code": code})

    def torch_threads(self, system: str) -> int:
        """CPU threads of a job, from the method's own parameters: never from --cores, which would change bytes."""
        return int(self.params.method_blocks[system].get("torch_threads", 1))

    def gpu(self, system: str) -> int:
        """GPUs that a job of the system asks for; follows from params, never from probing the submitting host."""
        return int(self.params.methods[system].gpu and self.params.run.device == "cuda")

    def memory_mb(self, domain: str, system: str) -> int:
        size = self.params.domains[domain].size
        return self.params.methods[system].needs_mb(self.params.settings[system], size)

    def code(self, command: str, *, domain: str = "", system: str = "") -> list[str]:
        """Project files that the job imports: an edit of one re-runs it."""
        names = []
        if domain:
            names.append(f"anomed.domains.{self.params.domains[domain].source.partition('.')[0]}")
        if system and system not in self.params.imported:
            implementation = self.params.method_blocks[system]["implementation"]
            names.append(f"anomed.methods.{implementation.partition('.')[0]}")
        return sources.of(command, *names)

    def card(self, domain: str) -> str:
        """What the domain's card says that its prepared images carry or are held against; empty when it has none."""
        card, entry = cards.described(self.card_name(domain), self.params.domains[domain].source, False, CARDS)
        kept = entry.model_dump(include={"licence", "counts", "known_problems"}) if entry else {}
        return records.canonical({"title": card.title, **kept}) if card else ""

    def sweep(self) -> None:
        """Remove what killed jobs left half-written; only while no job runs."""
        for folder in MADE:
            records.sweep(Path(folder))


def _check_runs(key: str, name: str, absent: list[str]) -> None:
    """Raise AnomedError when every pair of a domain or system has a reason not to run."""
    if all(absent):
        raise AnomedError(f"{key}: nothing to run for {name!r}: {'; '.join(dict.fromkeys(absent))}")
