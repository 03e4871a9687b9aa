"""Raw scores and maps of anomalib's models: what they compute before they exponentiate, squash or normalise.

Everything is taken from one pass of the library's own network: the functions below only read what its parts gave.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

Result = tuple["torch.Tensor", "torch.Tensor | None"]  # scores (B,), maps (B, h, w)


class Seen(NamedTuple):
    """What a part of a network was given and gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def score(name: str, network: Any, batch: "torch.Tensor") -> Result:
    """Scores, float (B,), and maps, float (B, h, w) or None, of a pre-processed batch (B, 3, s, s), higher is more
    anomalous; network: the library's torch model in evaluation mode."""
    import torch

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's choices, which nobody here can change
        scores, maps = RAW.get(name, as_given)(network, batch)
    return scores.reshape(-1), None if maps is None else maps.reshape(-1, *maps.shape[-2:])


def as_given(network: Any, batch: "torch.Tensor") -> Result:
    """What the library's network gives: distances, errors or logits that nothing has squashed."""
    found = network(batch)
    return found.pred_score, found.anomaly_map


def _run(network: Any, batch: "torch.Tensor", *parts: str) -> tuple[Any, list[Seen]]:
    """The network's result and what its named parts took and gave on the way (of several calls, the last)."""
    seen: dict[str, Seen] = {}

    def keep(part: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen[part] = Seen(args, kwargs, output)

        return hook

    hooks = [network.get_submodule(part).register_forward_hook(keep(part), with_kwargs=True) for part in parts]
    try:
        found = network(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found, [seen[part] for part in parts]


def _resized(maps: "torch.Tensor", size: Any, align_corners: bool = False) -> "torch.Tensor":
    import torch.nn.functional as F

    return F.interpolate(maps, size=tuple(size), mode="bilinear", align_corners=align_corners)


def _highest(maps: "torch.Tensor") -> Result:
    """The library's usual image score, the highest pixel, of raw maps."""
    return maps.amax(dim=(-2, -1)), maps


def cfa(network: Any, batch: "torch.Tensor") -> Result:
    """The library takes the root of a squared distance that rounding may leave below zero: NaN there, 0 here."""
    _, (given,) = _run(network, batch, "anomaly_map_generator")
    arguments = given.kwargs | {"distance": given.kwargs["distance"].clamp_min(0)}
    return _highest(network.anomaly_map_generator(**arguments))


def cflow(network: Any, batch: "torch.Tensor") -> Result:
    """Sum over layers of the negative log-likelihood per dimension; the library sums exp(log p - maximum of the batch)
    and takes that from the batch's highest sum."""
    import torch

    _, (given,) = _run(network, batch, "anomaly_map_generator")
    levels = zip(*(given.kwargs[key] for key in ("distribution", "height", "width")), strict=True)
    size = batch.shape[-2:]
    maps = [_resized(-p.reshape(-1, 1, h, w), size, align_corners=True) for p, h, w in levels]
    return _highest(torch.stack(maps).sum(dim=0))


def flow(network: Any, batch: "torch.Tensor") -> Result:
    """Mean over scales of half the mean square of the latent variables, which is the negative log-likelihood up to a
    constant; the library takes the mean of its negative exponential."""
    import torch

    _, (given,) = _run(network, batch, "anomaly_map_generator")
    latent = given.args[0] if isinstance(given.args[0], list | tuple) else [given.args[0]]
    size = network.anomaly_map_generator.input_size
    levels = [_resized(0.5 * (z**2).mean(dim=1, keepdim=True), size) for z in latent]
    return _highest(torch.stack(levels).mean(dim=0))


def patchflow(network: Any, batch: "torch.Tensor") -> Result:
    """As `flow`; of an input that is cropped inside, the border repeats the nearest value, where the library has -1."""
    import torch.nn.functional as F

    scores, maps = flow(network, batch)
    assert maps is not None
    missing = [whole - part for whole, part in zip(batch.shape[-2:], maps.shape[-2:], strict=True)]
    (top, left), (bottom, right) = [gap // 2 for gap in missing], [gap - gap // 2 for gap in missing]
    return scores, F.pad(maps, (left, right, top, bottom), mode="replicate")


def csflow(network: Any, batch: "torch.Tensor") -> Result:
    """Logarithm of the library's map, the product over scales of the mean square of the latent variables: as a product
    it runs out of range. The image score is the library's."""
    import torch

    found, (given,) = _run(network, batch, "anomaly_map_generator")
    size = network.anomaly_map_generator.input_dims[1:]
    tiny = torch.finfo(torch.float32).tiny
    levels = [_resized((z**2).mean(dim=1, keepdim=True), size).clamp_min(tiny).log() for z in given.args[0]]
    return found.pred_score, torch.stack(levels).sum(dim=0)


def dfkde(network: Any, batch: "torch.Tensor") -> Result:
    """Negative log-density of the kernel estimate, summed in logarithms; the library adds up densities, which float32
    ends at 1e-45, and passes the logarithm through a logistic function."""
    import math

    import torch

    classifier = network.classifier
    kernels = classifier.kde_model
    features = classifier.pca_model.transform(network.get_features(batch))
    features, _ = classifier.pre_process(features, classifier.max_length)
    features = features @ kernels.bw_transform
    squares = (kernels.dataset[None] - features[:, None]).square().sum(dim=2)
    points, dimensions = kernels.dataset.shape
    norm = torch.diag(kernels.bw_transform).log().sum() - dimensions / 2 * math.log(2 * math.pi)
    return -(torch.logsumexp(-squares / 2, dim=1) - math.log(points) + norm), None


def draem(network: Any, batch: "torch.Tensor") -> Result:
    """Difference of the two logits, that is the logit of the library's probability."""
    _, (logits,) = _run(network, batch, "discriminative_subnetwork")
    return _highest(logits.output[:, 1] - logits.output[:, 0])


def dsr(network: Any, batch: "torch.Tensor") -> Result:
    """Differences of logits; the image score is the highest mean of 21 x 21 of them, as the library's of
    probabilities."""
    import torch.nn.functional as F

    _, (coarse, fine) = _run(network, batch, "anomaly_detection_module", "upsampling_module")
    first, second = (part.output[:, 1:] - part.output[:, :1] for part in (coarse, fine))
    return F.avg_pool2d(first, 21, stride=1, padding=10).amax(dim=(-2, -1)), second


def glass(network: Any, batch: "torch.Tensor") -> Result:
    """Logits of the discriminator, before the library's sigmoid."""
    _, (tail,) = _run(network, batch, "discriminator.tail.0")
    logits = tail.output.reshape(len(batch), -1)
    side = round(logits.shape[1] ** 0.5)
    maps = network.anomaly_segmentor.convert_to_segmentation(logits.reshape(-1, side, side))
    return logits.amax(dim=1), maps


def supersimplenet(network: Any, batch: "torch.Tensor") -> Result:
    """Logits of both heads, before the library's sigmoid."""
    _, (heads, maps) = _run(network, batch, "segdec", "anomaly_map_generator")
    return heads.output[1], maps.output


def anomalyvfm(network: Any, batch: "torch.Tensor") -> Result:
    """Logits of both heads, before the library's sigmoid; maps are averaged and enlarged as the library does."""
    _, (head, decoder) = _run(network, batch, "predictor", "decoder")
    return head.output, _resized(network.mean_kernel(decoder.output[0]), batch.shape[-2:])


def anomaly_dino(network: Any, batch: "torch.Tensor") -> Result:
    """The library's own; its masking draws random numbers, so every image starts from the same ones, alone."""
    import torch

    if not network.masking:
        return as_given(network, batch)
    saved = np.random.get_state()  # noqa: NPY002  scikit-learn draws from it
    results = []
    for image in batch.split(1):
        np.random.seed(0)  # noqa: NPY002
        results.append(network(image))
    np.random.set_state(saved)  # noqa: NPY002
    return torch.cat([found.pred_score for found in results]), torch.cat([found.anomaly_map for found in results])


RAW: dict[str, Callable[[Any, "torch.Tensor"], Result]] = {
    "AnomalyDINO": anomaly_dino,
    "AnomalyVFM": anomalyvfm,
    "Cfa": cfa,
    "Cflow": cflow,
    "Csflow": csflow,
    "Dfkde": dfkde,
    "Draem": draem,
    "Dsr": dsr,
    "Fastflow": flow,
    "Glass": glass,
    "Patchflow": patchflow,
    "Supersimplenet": supersimplenet,
    "Uflow": flow,
}
