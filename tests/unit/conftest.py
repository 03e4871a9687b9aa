"""A small finished benchmark on disk, made through the real writers, for the tests of tables and reports."""

import copy
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import predictions, records, stats
from anomed.manifest import Case, Pixels, Prepared, Writer
from anomed.report import html, table

DOMAIN = "brain_mri"
NATIVE = (40, 56)
METRICS = {
    "image_auroc": (
        "Image AUROC",
        "image",
        "higher",
        "Chance that an abnormal image outscores a normal one.",
        "A 1982",
    ),
    "pixel_ap": ("Pixel AP", "pixel", "higher", "Average precision over all pixels.", "B & C <2010>, 3:4-5"),
    "pixel_ap_foreground": ("Pixel AP", "foreground", "higher", "The same in the organ.", "B & C <2010>, 3:4-5"),
    "miss": ("Missed", "image", "lower", "Share of missed lesions.", "this test"),
}
COUNTS = {
    "image": {"normal": 5, "abnormal": 9},
    "pixel": {"normal": 30_820, "abnormal": 540, "regions": 9, "excluded": 0},
    "foreground": {"normal": 12_000, "abnormal": 540, "regions": 9, "excluded": 0},
}
RISING = np.linspace(-0.1, 0.1, 1000)  # replicates minus value, unless a test gives others: pairs differ by a constant
SEEDS = {"random": [0, 1, 2], "deep_svdd": [0], "label": [0, 1]}
REASON = "no anomaly maps: the method does not localise"
NO_TRUTH = "the domain has no pixel truth"


@dataclass
class Benchmark:
    """Folders of a finished benchmark, and its plan. `seeds` and `localises` describe the systems."""

    root: Path
    pathologies: list[str] = field(default_factory=lambda: ["tumour", "infarct", ""])
    prefix: str = "test/Ungood/"
    seeds: dict[str, list[int]] = field(
        default_factory=lambda: {"random": [0, 1, 2], "deep_svdd": [0], "label": [0, 1]}
    )
    localises: dict[str, bool] = field(default_factory=lambda: {"label": False})
    masks: bool = True
    unit: str = "points"  # of all metrics; a fraction has another interval
    unknown: tuple[int, ...] = ()  # numbers of abnormal images without pixel truth
    official: bool = False
    domains: list[str] = field(default_factory=lambda: [DOMAIN])
    bootstrap: dict[str, Any] = field(
        default_factory=lambda: {"replicates": 1000, "confidence": 0.95, "unit": "subject", "units": 12}
    )

    def __post_init__(self) -> None:
        for folder in ("prepared", "scores", "runs", "models", "results"):
            setattr(self, folder, self.root / folder)

    prepared: Path = field(init=False)
    scores: Path = field(init=False)
    runs: Path = field(init=False)
    models: Path = field(init=False)
    results: Path = field(init=False)

    @property
    def plan(self) -> dict[str, Any]:
        pairs = {s: {"seeds": k, "hash": records.digest(s), "absent": ""} for s, k in self.seeds.items()}
        runs = {domain: copy.deepcopy(pairs) for domain in self.domains}
        return {
            "domains": self.domains,
            "systems": list(pairs),
            "marks": {},
            "notes": {},
            "apart": [],
            "selection": {},
            "runs": runs,
        }

    def make(self) -> "Benchmark":
        for domain in self.domains:
            self.prepare(domain)
            for system, seeds in self.seeds.items():
                for seed in seeds:
                    self.run(domain, system, seed)
                    self.score(
                        domain, system, seed, {"image_auroc": 0.25 + 0.25 * seed, "pixel_ap": 0.125, "miss": 0.5}
                    )
        return self

    def prepare(self, domain: str) -> None:
        generator = np.random.default_rng(3)
        counts = {("train", 0): 4, ("valid", 0): 2, ("valid", 1): 2, ("test", 0): 5, ("test", 1): 9}
        folder = self.prepared / domain
        folder.mkdir(parents=True)
        writer = Writer(folder, 32, False, self.masks, sum(counts.values()))
        for (split, label), count in counts.items():
            for number in range(count):
                mask = np.zeros(NATIVE, bool)
                mask[10 + number : 16 + number, 20:30] = bool(label)
                image = np.clip(generator.normal(90, 10, NATIVE) + 90 * mask, 0, 255).astype(np.uint8)
                prefix = self.prefix if label else f"{split}/good/"
                name = f"{prefix if split == 'test' else split + '/'}{label}{number:02d}"
                kind = self.pathologies[number % len(self.pathologies)] if label else ""
                case = Case(name, name, split, label, f"{name}.png", lambda: Pixels(image, mask, ""), pathology=kind)  # noqa: B023
                writer.add(case, Pixels(image, None if label and number in self.unknown else mask, "0" * 64))
        note = "the released data" if self.official else "embedded synthetic data, not the released data"
        known = {"duplicate_across_splits": 2} if self.official else {}
        writer.close(
            {
                "domain": domain,
                "title": "Brain",
                "source": "x",
                "official": self.official,
                "note": note,
                "parameters": {},
                "problems": known,
            }
        )

    def run(self, domain: str, system: str, seed: int) -> None:
        prepared = Prepared(self.prepared / domain)
        localises = self.localises.get(system, True)
        facts = {"domain": domain, "system": system, "seed": seed, "data_hash": prepared.hash, "device": "cpu"}
        parameters = {"method": {"implementation": system, "threshold": 0.5}, "files": {}}
        for folder in (self.models, self.runs):
            path = folder / domain / system / str(seed)
            path.mkdir(parents=True)
            with records.RunCard(**facts, parameters=parameters) as card:
                if folder is self.runs:
                    batches = self._batches(prepared, system, seed, localises)
                    card.facts["maps"] = predictions.write(path, prepared, batches, localises)
            card.warnings = [f"UserWarning: <b>{system}</b> warns"] if system == "random" else []
            card.write(path)

    def _batches(
        self, prepared: Prepared, system: str, seed: int, localises: bool
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        generator = np.random.default_rng([seed, *system.encode()])
        for row in prepared.evaluated().row:
            image = prepared.images[row].astype(np.float32)
            noise = generator.uniform(0, 1, image.shape).astype(np.float32)
            values = noise if system == "random" else image * 10 + noise
            yield values.mean(keepdims=True)[0].astype(np.float64), values[None] if localises else None

    def score(
        self,
        domain: str,
        system: str,
        seed: int,
        values: dict[str, float | str | None],
        replicates: dict[str, np.ndarray] | None = None,
        breakdowns: Sequence[dict[str, Any]] = (),
        **counts: int,
    ) -> Path:
        """Write a score file and its replicates; a text instead of a value is the reason why there is none.

        replicates: of a metric, minus its value; RISING where not given. counts: of pixel metrics.
        """
        path = self.scores / domain / system / f"{seed}.json"
        if not self.localises.get(system, True) and "pixel_ap" in values:
            values = {**values, "pixel_ap": REASON}
        if not self.masks and "pixel_ap" in values:
            values = {**values, "pixel_ap": NO_TRUTH}
        found = []
        arrays: dict[str, Any] = {"image_roc_fpr": np.linspace(0, 1, 5)}
        outcome: dict[str, Any]
        for name, value in values.items():
            facts = dict(zip(("label", "level", "direction", "definition", "source"), METRICS[name], strict=True))
            if isinstance(value, str) or value is None:
                outcome = {"value": None, "reason": value, "low": None, "high": None, "interval_reason": value}
            else:
                own = (value + (replicates or {}).get(name, RISING)).astype(np.float32)
                low, high, reason = stats.interval(own, self.bootstrap["units"])
                outcome = {"value": value, "reason": None, "low": low, "high": high, "interval_reason": reason}
                arrays[f"replicates_{name}"] = own
            held = COUNTS[facts["level"]] | (counts if facts["level"] == "pixel" else {})
            counted = {"n": 14, "counts": held}
            names = {"metric": name, "definition_id": f"{name}.v1", "unit": self.unit, "version": 1}
            found.append({**names, **outcome, **counted, **facts})
        hashes = {"manifest_hash": Prepared(self.prepared / domain).hash, "parameter_hash": records.digest(system)}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path.with_suffix(".npz"), allow_pickle=False, **arrays)
        binning = None if "pixel_ap" not in values else 1e-6 * (seed + 1)  # may differ from run to run
        drawn = {
            "bootstrap": {**self.bootstrap, "binning": binning},
            "curves": records.digest_file(path.with_suffix(".npz")),
        }
        file = {"domain": domain, "system": system, "seed": seed, **hashes, **drawn, "records": found}
        records.write_card(path, {**file, "breakdowns": list(breakdowns)})
        return path

    def table(self) -> None:
        table.build(self.plan, self.prepared, self.scores, self.runs, self.models, self.results)

    def report(self) -> str:
        """Build both, and return the page."""
        self.table()
        return self.page()

    def page(self) -> str:
        out = self.results / "report.html"
        html.build(self.plan, self.prepared, self.runs, self.models, self.results, out)
        return out.read_text("utf-8")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    """The default benchmark with its tables and its page; tests only read it."""
    made = Benchmark(tmp_path_factory.mktemp("benchmark")).make()
    made.report()
    return made


@pytest.fixture
def copied(finished: Benchmark, tmp_path: Path) -> Benchmark:
    """The default benchmark without its tables, for tests that change it."""
    shutil.copytree(finished.root, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "results")
    return Benchmark(tmp_path)


@pytest.fixture
def benchmark(tmp_path: Path) -> Benchmark:
    """A benchmark that is yet to be made."""
    return Benchmark(tmp_path)
