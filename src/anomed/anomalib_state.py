"""What a fitted model of anomalib has learned, as arrays, and back."""

from typing import Any

import numpy as np

from anomed.errors import AnomedError

HALF = ":bfloat16"  # after the name of a tensor whose numbers numpy does not know: its bits are stored


def arrays(network: Any) -> dict[str, np.ndarray]:
    """Every tensor of the network by the library's name, memory banks included."""
    import torch

    found = {}
    for name, tensor in network.state_dict().items():
        plain = tensor.detach().cpu()
        half = plain.dtype == torch.bfloat16
        found[name + HALF * half] = np.array((plain.view(torch.int16) if half else plain).numpy(), order="C")
    return found


def fill(name: str, network: Any, state: dict[str, np.ndarray]) -> None:
    """Put `state` into a network built with the same arguments. Buffers, whose size comes with the data (memory banks),
    are taken as they are; a parameter of another shape, or a tensor too many or too few, raises AnomedError."""
    import torch

    given = {}
    for key, array in state.items():
        tensor = torch.from_numpy(np.array(array))
        given[key.removesuffix(HALF)] = tensor.view(torch.bfloat16) if key.endswith(HALF) else tensor
    expected = network.state_dict()
    if odd := sorted(expected.keys() ^ given.keys()):
        raise AnomedError(
            f"anomalib.{name}: the state has {'no' if odd[0] in expected else 'an unknown'} tensor {odd[0]!r}; it was "
            "made with other arguments or another version of the library: fit again"
        )
    parameters = dict(network.named_parameters())
    for key, tensor in given.items():
        if expected[key].ndim == 0 and tensor.numel() == 1:
            given[key] = tensor = tensor.reshape(())  # a file of arrays may have made it one-dimensional
        if key not in parameters:
            owner, _, attribute = key.rpartition(".")
            network.get_submodule(owner)._buffers[attribute] = tensor.clone()
    try:
        network.load_state_dict(given, strict=True)
    except RuntimeError as error:
        raise AnomedError(f"anomalib.{name}: {' '.join(str(error).split())[:300]}; fit again") from None
    if name == "WinClip":
        network.k_shot = len(given["_patch_embeddings"])  # which the library keeps beside its tensors


def settle(network: Any) -> None:
    """Lay out memory banks as a restored network has them: products of other layouts differ in the last bits."""
    for module in network.modules():
        for key, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[key] = tensor.contiguous()


def check(name: str, network: Any) -> None:
    """Raise AnomedError when what was learned cannot score: no number, or a model that the library did not make."""
    import torch

    if name == "Dfkde" and network.classifier.kde_model.dataset.numel() == 0:
        needed = network.classifier.n_pca_components
        raise AnomedError(f"anomalib.Dfkde: fewer train images than n_pca_components = {needed}; lower it")
    for key, tensor in network.state_dict().items():
        if torch.isnan(tensor).any():
            raise AnomedError(
                f"anomalib.{name}: {key} is not a number after training; it diverged, or the train images are all "
                "alike: look at them, or lower the learning rate or the image size"
            )
    if name == "EfficientAd":
        for low, high in (("qa_st", "qb_st"), ("qa_ae", "qb_ae")):
            if not network.quantiles[high] > network.quantiles[low]:
                raise AnomedError(f"anomalib.EfficientAd: {low} and {high} of the train images' maps are equal")
