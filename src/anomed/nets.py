"""Networks that are built from a seed and stored as arrays.

Light at import: torch loads when one is built.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from anomed import backbones
from anomed.errors import AnomedError

if TYPE_CHECKING:
    from torch import nn

INPUT = "input"


def configure(params: Any, device: str) -> None:
    """See backbones.configure; of operations that have no deterministic form on a GPU, torch warns there."""
    import torch

    backbones.configure(params.torch_threads)
    torch.use_deterministic_algorithms(True, warn_only=device == "cuda")


@contextlib.contextmanager
def kept_random(device: str) -> Iterator[None]:
    """Afterwards torch's random numbers are the caller's again."""
    import torch

    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []):
        yield


def entropy(purpose: str, *place: int) -> np.random.SeedSequence:
    """Where the random numbers of one purpose at one place of a training come from; no two share a stream."""
    return np.random.SeedSequence([*place, *purpose.encode()])


def seed(entropy: np.random.SeedSequence) -> None:
    """Torch's next random numbers come from `entropy`."""
    import torch

    torch.manual_seed(int(entropy.generate_state(1, np.uint64)[0]))


def built(detector: Any, make: "Callable[[], dict[str, nn.Module]]") -> "nn.ModuleDict":
    """The networks that `make` gives, drawn from the detector's seed, in evaluation mode, on its device."""
    from torch import nn

    configure(detector.params, detector.device)
    with kept_random(detector.device):
        seed(entropy("networks", detector.seed))
        made = nn.ModuleDict(make())
    return made.to(detector.device).eval()


def arrays(networks: "nn.Module", *form: int) -> dict[str, np.ndarray]:
    """All tensors of trained networks by name, for `Detector.state`, and as "input" the numbers they are built from."""
    found = {key: value.cpu().numpy() for key, value in networks.state_dict().items()}
    return found | {INPUT: np.array(form)} if form else found


def fill(networks: "nn.Module", state: Mapping[str, np.ndarray]) -> None:
    """Put arrays that `arrays` gave, every one, back into networks of the same shape. Raises AnomedError for others."""
    import torch

    tensors = {key: torch.from_numpy(np.asarray(value).copy()) for key, value in state.items() if key != INPUT}
    try:
        networks.load_state_dict(tensors)
    except RuntimeError as error:
        raise AnomedError(f"the model is of another network: {' '.join(str(error).split())[:300]}; fit again") from None
