"""params → the list of runs, and what each job depends on; the only module the Snakefile imports."""

import json
import os
import sys
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from anomed import cards, plugins, records, sources
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

    def check(self) -> None:
        """Raises AnomedError when raw data or weights that a listed run needs are missing."""
        for domain in self.domains:
            self.prepare_params(domain)  # of a domain of volumes: the files of its chain as well
            block = self.params.domains[domain]
            cards.described(domain, block.source, block.release == "official", CARDS)
            if domain in self.volumetric and os.path.exists(self.root(domain) or "."):  # noqa: PTH110
                self._check_scans(domain)
        for system in self.systems:
            self.fit_params(system)

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the order of the lists in `run:`."""
        return [Run(d, s, k) for d in self.domains for s in self.systems for k in self.seeds(s)]

    def seeds(self, system: str) -> list[int]:
        """The seeds of a system: the first alone when its method has no randomness."""
        seeds = self.params.run.seeds
        return seeds[:1] if self.params.methods[system].deterministic else seeds

    @cache  # noqa: B019  one plan per process
    def source(self, domain: str) -> Source:
        """The domain's source object: one, so that what lies at its root is listed once."""
        block = self.params.domains[domain]
        cls = plugins.load("domains", block.source)
        options = {k: v for k, v in self.params.domain_blocks[domain].items() if k in cls.Options.model_fields}
        root = self.root(domain)
        return cls(domain, cls.Options(**options), Path(root) if root else None, WORK)

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
        try:
            return self.source(domain).fingerprint()
        except (AnomedError, OSError) as error:
            card = PREPARED / domain / "card.json"
            if not os.path.exists(self.root(domain)) and card.exists():  # noqa: PTH110  never raises
                made = dict(records.read_card(card, "parameters")["parameters"])
                fingerprint, _ = made.pop("fingerprint", ""), made.pop("files", None)
                if made == self.params.domain_blocks[domain]:
                    print(f"warning: domains.{domain}: {error}; going on with what is prepared", file=sys.stderr)
                    return str(fingerprint)
            where = "" if str(error).startswith(f"domains.{domain}") else f"domains.{domain}: "
            raise AnomedError(f"{where}{error}") from None

    @cache  # noqa: B019
    def fit_params(self, system: str) -> str:
        return records.canonical(self._fit(system))

    def _fit(self, system: str) -> dict[str, Any]:
        files = {name: _weights_hash(system, name, path) for name, path in self.weights(system).items()}
        return {"method": self.params.method_blocks[system], "files": files}

    def weights(self, system: str) -> dict[str, Path]:
        """The files outside the project that a system reads, by name; they may be missing."""
        method, block = self.params.methods[system], self.params.method_blocks[system]
        return method.files(method.Params(**{key: value for key, value in block.items() if key != "implementation"}))

    @cache  # noqa: B019
    def score_params(self, system: str) -> str:
        return records.canonical({**self._fit(system), "metrics": self.params.metrics})

    def table_params(self) -> str:
        """The plan as the table and the report need it: small, whatever the number of runs."""
        systems = {
            name: {"seeds": self.seeds(name), "hash": records.digest(self.score_params(name).encode())}
            for name in self.systems
        }
        return json.dumps({"domains": self.domains, "systems": systems})  # unsorted: order is the table's order

    def upstream(self) -> str:
        """Hash of all that decides the files that the table is made from: parameters, raw data, cards, code.

        Snakemake does not make a missing file again while what was made from it is there. After a job failed its
        outputs are gone, and only this tells the next run that the table is of another state.
        """
        domains = {name: [self.prepare_params(name), self.card(name)] for name in self.domains}
        systems = {name: self.score_params(name) for name in self.systems}
        steps = {name: ("spatial", "intensity") if name in self.volumetric else ("images",) for name in self.domains}
        files = {file for name, commands in steps.items() for step in commands for file in self.code(step, domain=name)}
        files |= {file for name in self.systems for step in ("fit", "predict") for file in self.code(step, system=name)}
        code = {file: records.digest_file(sources.PROJECT / file) for file in {*files, *self.code("score")}}
        return records.digest({"domains": domains, "systems": systems, "code": code})

    def torch_threads(self, system: str) -> int:
        """CPU threads of a job, from the method's own parameters: never from --cores, which would change bytes."""
        return int(self.params.method_blocks[system].get("torch_threads", 1))

    def gpu(self, system: str) -> int:
        """GPUs that a job of the system asks for; follows from params, never from probing the submitting host."""
        return int(self.params.methods[system].gpu and self.params.run.device == "cuda")

    def memory_mb(self, system: str) -> int:
        return int(self.params.methods[system].memory_mb)

    def code(self, command: str, *, domain: str = "", system: str = "") -> list[str]:
        """Project files that the job imports: an edit of one re-runs it."""
        names = []
        if domain:
            names.append(f"anomed.domains.{self.params.domains[domain].source.partition('.')[0]}")
        if system:
            implementation = self.params.method_blocks[system]["implementation"]
            names.append(f"anomed.methods.{implementation.partition('.')[0]}")
        return sources.of(command, *names)

    def card(self, domain: str) -> str:
        """What the domain's card says, as canonical JSON without its comments; empty when it has none."""
        card = cards.load(domain, CARDS)
        return records.canonical(card.model_dump()) if card else ""

    def sweep(self) -> None:
        """Remove what killed jobs left half-written; only while no job runs."""
        for folder in MADE:
            records.sweep(Path(folder))


def _weights_hash(system: str, name: str, path: Path) -> str:
    if not path.exists():
        raise AnomedError(
            f"methods.{system}: weights {name!r} not found at {path}; put the file there or run `anomed doctor`"
        )
    return records.digest_file(path)
