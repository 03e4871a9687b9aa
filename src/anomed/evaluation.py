"""Every metric of one run's test images: exact values, values of parts of them, and replicates over subjects."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from anomed import bootstrap, stats
from anomed.bootstrap import ImageGroups, PixelGroups
from anomed.counting import Counter, Histograms, merge
from anomed.metrics.counts import Counts, NotComputable, of_images
from anomed.metrics.curves import best_cut
from anomed.metrics.declare import Level, Metric
from anomed.metrics.ranking import metrics

SIZES = ("small", "medium", "large")  # thirds of the abnormal images by lesion area
Key = tuple[str, str]  # kind of part ("pathology", "lesion_size", "subject", "" for all) and its name
Options = Mapping[str, Any]


@dataclass
class Part:
    """Some abnormal test images against all normal ones.

    n: number of the abnormal ones. counts: numbers of items per level. values: of metrics by name, None where `reasons`
    says why.
    """

    n: int
    counts: dict[Level, dict[str, int]] = field(default_factory=dict)
    values: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass
class Evaluation:
    """parts: by kind and name, ("", "") first. exact: counts of all test images per level. replicates: float64 (R,) of
    each metric that has a value. unit: what was resampled, "subject", or "image" where subjects are unknown; units: how
    many. binning: largest difference between a pixel metric on the bins of the bootstrap and the exact one, None where
    there is no pixel metric.
    """

    parts: dict[Key, Part]
    exact: dict[Level, Counts]
    replicates: dict[str, np.ndarray]
    unit: str
    units: int
    binning: float | None = None


@dataclass(frozen=True)
class _Counted:
    """One level: exact counts of each part, and what replicates are made from."""

    exact: dict[Key, Counts]
    groups: ImageGroups | PixelGroups


def evaluate(table: pd.DataFrame, counter: Counter | None, options: Options, repeats: int) -> Evaluation:
    """Metrics of one run.

    table: the valid and test rows of a manifest with columns score, map_row, and area, the number of lesion pixels
    (missing: pixel truth unknown). counter: counts pixels; None: no pixel metric is computed. options: of metrics.
    repeats: number of replicates. Parts by subject, of the subjects with abnormal images, are there when one of them
    has several; their pixel metrics are those of the bins of the bootstrap.
    """
    valid, test = table[table.split == "valid"], _classed(table[table.split == "test"])
    clusters = test.groupby(["subject_id", "label"], sort=True)
    test["cluster"] = clusters.ngroup()
    sizes = clusters.size().reset_index(name="images")
    owner, subjects = pd.factorize(sizes.subject_id)
    unit = "image" if (test.subject_id == test.image_id).all() else "subject"

    levels: dict[Level, _Counted] = {"image": _images(valid, test)}
    if counter is not None:
        levels |= _pixels(valid, test, counter, len(sizes))
    parts = {key: Part(int((test.label[rows] == 1).sum())) for key, rows in _parts(test)}
    found = Evaluation(parts, {level: one.exact["", ""] for level, one in levels.items()}, {}, unit, len(subjects))
    bad = sizes[sizes.label == 1]
    if unit == "subject" and (bad.images > 1).any():
        parts |= {("subject", row.subject_id): Part(row.images) for row in bad.itertuples()}
    for level, counted in levels.items():
        for key, counts in counted.exact.items():
            _evaluate(parts[key], level, counts, options)
        known = [metric for metric in metrics(level) if parts["", ""].values[metric.name] is not None]
        drawn = (weights[:, owner] for weights in stats.draws(len(subjects), repeats))
        found.replicates |= bootstrap.replicates(known, counted.groups.counts, drawn, options)
        _by_subject(parts, level, known, sizes, counted.groups, options)
        if level != "image":
            binned = bootstrap.replicates(known, counted.groups.counts, [np.ones((1, len(sizes)))], options)
            off = [abs(float(binned[metric.name][0]) - (parts["", ""].values[metric.name] or 0)) for metric in known]
            found.binning = max([found.binning or 0.0, *off])
    return found


def _classed(test: pd.DataFrame) -> pd.DataFrame:
    """With the column lesion_size; empty where there is none or it is unknown, like the pathology of normal images."""
    test = test.assign(pathology=test.pathology.where(test.label == 1, ""), lesion_size="")
    known = test[(test.label == 1) & test.area.notna()]
    if len(known):
        areas = known.area.astype(int)
        third = np.searchsorted(np.quantile(areas, (1 / 3, 2 / 3), method="inverted_cdf"), areas)
        for place in np.unique(third):
            inside = areas[third == place]
            test.loc[inside.index, "lesion_size"] = f"{SIZES[place]}: {inside.min()} to {inside.max()} pixels"
    return test


def _parts(test: pd.DataFrame) -> Iterator[tuple[Key, pd.Series]]:
    """Which test images, all normal ones among them, belong to each part."""
    yield ("", ""), pd.Series(True, test.index)
    sizes = {name.partition(":")[0]: name for name in set(test.lesion_size) - {""}}
    kinds = {"pathology": sorted(set(test.pathology) - {""}), "lesion_size": [sizes[s] for s in SIZES if s in sizes]}
    for by, names in kinds.items():
        for name in names:
            yield (by, name), (test[by] == name) | (test.label == 0)


def _images(valid: pd.DataFrame, test: pd.DataFrame) -> _Counted:
    threshold, uncut = None, ""
    try:
        place = best_cut(of_images(valid.score, valid.label))
        threshold = float(np.unique(valid.score)[place])
    except NotComputable as reason:
        uncut = _no_cut(reason)
    exact = {}
    for key, rows in _parts(test):
        exact[key] = replace(of_images(test.score[rows], test.label[rows], threshold), uncut=uncut)
    groups = ImageGroups(test.score.to_numpy(), test.label.to_numpy(), test.cluster.to_numpy(), threshold)
    return _Counted(exact, groups)


def _pixels(valid: pd.DataFrame, test: pd.DataFrame, counter: Counter, clusters: int) -> dict[Level, _Counted]:
    """Two passes over the maps: exact counts of the parts, whose quantiles then make the bins of the second."""
    found: dict[Level, _Counted] = {}
    judged, known = valid[valid.area.notna()], test[test.area.notna()]
    exact: dict[Key, Histograms] = {key: counter.empty() for key, _ in _parts(test)}
    normal = counter.empty()
    for (label, pathology, size), rows in known.groupby(["label", "pathology", "lesion_size"]):
        cell = counter.count(rows)
        if not label:
            normal = cell
        else:
            for key in (("", ""), ("pathology", pathology), ("lesion_size", size)):
                if key in exact:
                    merge(exact[key], cell)
    for histograms in exact.values():
        merge(histograms, normal)
    chosen = counter.count(judged)
    cuts: dict[Level, tuple[int | None, str]] = {}
    for level, histogram in chosen.items():
        try:
            cuts[level] = best_cut(histogram.counts()), ""
        except NotComputable as reason:
            cuts[level] = None, _no_cut(reason)
    groups = {level: PixelGroups(exact["", ""][level], cuts[level][0], clusters) for level in cuts}
    for cluster, rows in known.groupby("cluster"):
        for level, histogram in counter.count(rows).items():
            groups[level].add(int(cluster), histogram)
    for level, (cut, uncut) in cuts.items():
        counts = {key: replace(one[level].counts(cut), uncut=uncut) for key, one in exact.items()}
        found[level] = _Counted(counts, groups[level])
    return found


def _no_cut(reason: NotComputable) -> str:
    return f"valid chooses no threshold: {reason}"


def _evaluate(part: Part, level: Level, counts: Counts, options: Options) -> None:
    part.counts[level] = {name: int(number) for name, number in counts.sizes().items()}
    for metric in metrics(level):
        part.values[metric.name], reason = metric.evaluate(counts, options)
        if reason:
            part.reasons[metric.name] = reason


def _by_subject(
    parts: dict[Key, Part],
    level: Level,
    known: list[Metric],
    sizes: pd.DataFrame,
    groups: ImageGroups | PixelGroups,
    options: Options,
) -> None:
    """Fill the parts by subject: the abnormal images of each, with the normal ones of all."""
    subjects = [key for key in parts if key[0] == "subject"]
    places = np.flatnonzero(sizes.label == 1)
    for start in range(0, len(subjects), stats.CHUNK):
        part = slice(start, start + stats.CHUNK)
        weights = np.repeat((sizes.label == 0).to_numpy(np.float64)[None], len(places[part]), axis=0)
        weights[np.arange(len(weights)), places[part]] = 1
        numbers = groups.counts(weights).sizes()
        values = bootstrap.replicates(known, groups.counts, [weights], options)
        for row, key in enumerate(subjects[part]):
            parts[key].counts[level] = {name: int(number[row]) for name, number in numbers.items()}
            for metric in known:
                value = float(values[metric.name][row])
                parts[key].values[metric.name] = None if np.isnan(value) else value
                if np.isnan(value):
                    parts[key].reasons[metric.name] = f"no abnormal {groups.item} with known truth"
