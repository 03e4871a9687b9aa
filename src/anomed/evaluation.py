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
from anomed.metrics.curves import best_threshold
from anomed.metrics.declare import Level
from anomed.metrics.ranking import metrics

SIZES = ("small", "medium", "large")  # thirds of the abnormal images by lesion area
Key = tuple[str, str]  # kind of part ("pathology", "lesion_size", "subject", "" for all) and its name
Cut = tuple[Any, str]  # score or code from which on valid calls an item abnormal, or None and the reason
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


def evaluate(table: pd.DataFrame, counter: Counter | None, options: Options, repeats: int) -> Evaluation:
    """Metrics of one run.

    table: the valid and test rows of a manifest with columns score (missing in all: the system gives none), map_row,
    and area, the number of lesion pixels (missing: pixel truth unknown). counter: counts pixels; None: no pixel metric
    is computed. options: of metrics. repeats: number of replicates. Parts by subject are there where one has several
    abnormal images.
    """
    valid, test = table[table.split == "valid"], _classed(table[table.split == "test"])
    clusters = test.groupby(["subject_id", "label"], sort=True)
    test["cluster"] = clusters.ngroup()
    owner, subjects = pd.factorize(clusters.size().reset_index().subject_id)
    unit = "image" if (test.subject_id == test.image_id).all() else "subject"
    members = dict(_parts(test))
    parts = {key: Part(int((test.label[rows] == 1).sum())) for key, rows in members.items()}
    found = Evaluation(parts, {}, {}, unit, len(subjects))

    levels: dict[Level, ImageGroups | PixelGroups] = {}
    if table.score.notna().all():
        levels["image"] = _images(found, valid, test, members, options)
    else:
        for part in parts.values():
            part.values |= dict.fromkeys(metric.name for metric in metrics("image"))
            part.reasons |= dict.fromkeys(part.values, "the system gives no image scores")
    if counter is not None:
        levels |= _pixels(found, valid, test, counter, options)
    for level, groups in levels.items():
        whole = parts["", ""].values
        known = [metric for metric in metrics(level) if whole[metric.name] is not None]
        drawn = (weights[:, owner] for weights in stats.draws(len(subjects), repeats))
        found.replicates |= bootstrap.replicates(known, groups.counts, drawn, options)
        if level != "image":
            binned = bootstrap.replicates(known, groups.counts, [np.ones((1, len(owner)))], options)
            off = [abs(float(binned[metric.name][0]) - (whole[metric.name] or 0)) for metric in known]
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
    """Which test images, all normal ones among them, belong to each part; subjects only where one has several abnormal
    images."""
    yield ("", ""), pd.Series(True, test.index)
    bad = test[test.label == 1]
    sizes = {name.partition(":")[0]: name for name in set(bad.lesion_size) - {""}}
    kinds = {"pathology": sorted(set(bad.pathology) - {""}), "lesion_size": [sizes[s] for s in SIZES if s in sizes]}
    for by, names in kinds.items():
        for name in names:
            yield (by, name), (test[by] == name) | (test.label == 0)
    if bad.subject_id.duplicated().any():
        for name in sorted(set(bad.subject_id)):
            yield ("subject", name), ((test.subject_id == name) & (test.label == 1)) | (test.label == 0)


def _images(
    found: Evaluation, valid: pd.DataFrame, test: pd.DataFrame, members: dict[Key, pd.Series], options: Options
) -> ImageGroups:
    """Fill in the values of level "image"."""
    threshold, uncut = _chosen(of_images(valid.score, valid.label))
    for key, rows in members.items():
        counts = replace(of_images(test.score[rows], test.label[rows], threshold), uncut=uncut)
        _fill(found, key, "image", counts, options)
    return ImageGroups(test.score.to_numpy(), test.label.to_numpy(), test.cluster.to_numpy(), threshold)


def _pixels(
    found: Evaluation, valid: pd.DataFrame, test: pd.DataFrame, counter: Counter, options: Options
) -> dict[Level, PixelGroups]:
    """Fill in the values of pixel levels. Two passes over the maps: exact counts of parts, whose quantiles then make
    the bins of the second, which also gives the parts by subject. One part at a time is held."""
    judged, known = valid[valid.area.notna()], test[test.area.notna()]
    cuts = {level: _chosen(histogram.counts()) for level, histogram in counter.count(judged).items()}
    normal = counter.count(known[known.label == 0])

    def fill(key: Key, abnormal: Histograms) -> None:
        for level, (threshold, uncut) in cuts.items() if key in found.parts else ():
            abnormal[level].merge(normal[level])
            _fill(found, key, level, replace(abnormal[level].counts(threshold), uncut=uncut), options)

    whole, sizes = counter.empty(), {size: counter.empty() for size in set(test.lesion_size)}
    for pathology, images in test[test.label == 1].groupby("pathology"):
        own = counter.empty()
        for size, rows in images[images.area.notna()].groupby("lesion_size"):
            cell = counter.count(rows)
            merge(own, cell)
            merge(sizes[size], cell)
        merge(whole, own)
        fill(("pathology", str(pathology)), own)
    for size, histograms in sizes.items():
        fill(("lesion_size", size), histograms)
    fill(("", ""), whole)

    clusters = int(test.cluster.max()) + 1
    groups = {level: PixelGroups(whole[level], threshold, clusters) for level, (threshold, _) in cuts.items()}
    for cluster, images in test.groupby("cluster"):
        histograms = counter.count(images[images.area.notna()])
        for level, histogram in histograms.items():
            groups[level].add(int(cluster), histogram)
        if images.label.iloc[0]:
            fill(("subject", images.subject_id.iloc[0]), histograms)
    return groups


def _chosen(counts: Counts) -> Cut:
    """The threshold with the best Dice on valid."""
    try:
        return best_threshold(counts), ""
    except NotComputable as reason:
        return None, f"valid chooses no threshold: {reason}"


def _fill(found: Evaluation, key: Key, level: Level, counts: Counts, options: Options) -> None:
    """Every metric of a level, of one part."""
    part = found.parts[key]
    part.counts[level] = {name: int(number) for name, number in counts.sizes().items()}
    for metric in metrics(level):
        part.values[metric.name], reason = metric.evaluate(counts, options)
        if reason:
            part.reasons[metric.name] = reason
    if key == ("", ""):
        found.exact[level] = counts
