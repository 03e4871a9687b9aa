"""The one loop that trains the networks of all native methods: seeded, resumable to the byte, bounded in memory.

Light at import: torch loads when something is trained.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from anomed import feed, nets
from anomed.errors import AnomedError
from anomed.progress import Progress
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

CHECKS = 20  # times at most that labelled images choose among epochs, evenly spread
LINES = 30.0  # seconds between lines of progress
Losses = Iterator["tuple[str, torch.Tensor]"]


class Params(Settings):
    """The keys common to every method that is trained by this loop.

    epochs: passes over the train images. max_steps: batches, if they come first. batch_size: images in one batch, of
    training as of scoring. learning_rate: of the optimiser. clip_norm: largest norm of a network's gradient; null for
    no clipping. precision: "mixed" computes forward passes in bfloat16 on a GPU that has it (float32 on a CPU).
    selection: which epoch is kept: "fixed" the last; "valid" the one with the best image AUROC on the labelled valid
    images; "test_oracle" on the test images, which is no result. image_size: side of the network's input; null: the
    domain's. torch_threads: CPU threads.
    """

    epochs: int = Field(default=100, ge=1)
    max_steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1, le=1024)
    learning_rate: float = Field(default=1e-3, gt=0)
    clip_norm: float | None = Field(default=None, gt=0)
    precision: Literal["mixed", "float32"] = "mixed"
    selection: Literal["fixed", "valid", "test_oracle"] = "fixed"
    image_size: int | None = Field(default=None, ge=16, le=2048)
    torch_threads: int = Field(default=1, ge=1, le=1024)


class Step(NamedTuple):
    """Which batch of a phase this is: number from 0 of `steps`, and random numbers of its own for work outside torch
    (those of torch are seeded as well)."""

    number: int
    steps: int
    rng: np.random.Generator


@dataclass
class Phase:
    """One stage of a training.

    networks: what is in training mode meanwhile. optimisers: by the name of the loss that moves them. step: yields for
    a batch of images, uint8 (B, S, S (, 3)), pairs of a name and a loss; each loss is one step of the optimiser of its
    name, and moves no other parameter. epochs, max_steps: its length; by default that of the parameters. rate: factor
    of the learning rates at an epoch, from 0.
    """

    networks: "list[nn.Module]"
    optimisers: "dict[str, torch.optim.Optimizer]"
    step: Callable[[np.ndarray, Step], Losses]
    epochs: int | None = None
    max_steps: int | None = None
    rate: Callable[[int], float] = lambda epoch: 1.0


@dataclass
class _Position:
    """Where a training stands: all that a checkpoint needs beside networks and optimisers."""

    phase: int = 0
    step: int = 0
    sums: "dict[str, Any]" = field(default_factory=dict)  # of losses in the epoch so far: float64, on the device
    counts: dict[str, int] = field(default_factory=dict)
    best: float = -1.0
    chosen: "dict[str, torch.Tensor] | None" = None  # the networks of the best epoch


def steps_of(params: Params, batches: int, epochs: int | None = None, max_steps: int | None = None) -> int:
    """Batches in all, where one pass has so many: of a phase with these lengths, else with those of the parameters."""
    return min((epochs or params.epochs) * batches, max_steps or params.max_steps or sys.maxsize)


def run(
    detector: Any,
    images: np.ndarray,
    phases: Mapping[str, Callable[[], Phase]],
    finish: Callable[[], None] = lambda: None,
) -> None:
    """Train `detector.networks`, an nn.ModuleDict of all that is trained or stored, on images, uint8 (N, S, S (, 3)).

    phases: what makes each stage, called when its turn comes: what it computes from the networks must be stored in
    them (as buffers), for after a kill the stage is made again and the networks are then filled from the checkpoint.
    finish: computes what the method needs to score, stored in the networks too; called after training, and before each
    choice among epochs, which `selection` makes in the last phase.

    The random numbers of a batch follow from the seed, the phase and the batch's number alone. So a training that was
    killed and goes on gives the same bytes as one that was not, and none depends on what ran before. Deterministic
    algorithms are demanded on the CPU and asked for on the GPU, where some have none. Images are read when needed.
    Raises AnomedError when a loss is not finite.
    """
    import torch

    params, device = detector.params, detector.device
    nets.configure(params, device)
    progress = detector.progress = detector.progress or Progress()
    progress.key += " mixed" if _mixed(params, device) else ""  # that depends on the GPU at hand
    labelled = _labelled(detector)
    saved = progress.load()
    position = _Position(**saved["position"]) if saved else _Position()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with nets.kept_random(device):
        for number, (name, make) in enumerate(phases.items()):
            if number < position.phase:
                continue
            if number > position.phase:
                position.phase, position.step = number, 0
            chooses = labelled if number == len(phases) - 1 else None
            nets.seed(nets.entropy("phase", detector.seed, number))
            loop = _Loop(detector, images, name, make(), position, chooses, finish)
            if saved:
                loop.fill(saved)
                saved = None
            loop.run()
            _check_networks(name, detector)
        detector.networks.eval()
        if position.chosen:
            detector.networks.load_state_dict(position.chosen)
        finish()
    progress.facts |= {
        "parameters": sum(value.numel() for value in detector.networks.parameters() if value.requires_grad),
        "precision": "bfloat16" if _mixed(params, device) else "float32",
        "selection": params.selection,
    }
    if device == "cuda":
        progress.facts["peak_gpu_memory_mb"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)


@dataclass
class _Loop:
    """One phase from where it stands to its end."""

    detector: Any
    images: np.ndarray
    name: str
    phase: Phase
    position: _Position
    labelled: Any  # images that choose among epochs, or None
    finish: Callable[[], None]

    def __post_init__(self) -> None:
        params, phase = self.detector.params, self.phase
        self.progress = self.detector.progress
        self.batches = feed.batches_of(len(self.images), params.batch_size)
        self.steps = steps_of(params, self.batches, phase.epochs, phase.max_steps)
        self.epochs = -(-self.steps // self.batches)
        self.rates = {key: [group["lr"] for group in made.param_groups] for key, made in phase.optimisers.items()}
        self.checks = {round(part * self.epochs / CHECKS) for part in range(1, CHECKS + 1)} - {0}
        self.order, self.ordered = np.empty(0, np.int64), -1

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: networks and optimisers as they were; the rates of the phase stay its own."""
        self.detector.networks.load_state_dict(saved["networks"])
        for key, optimiser in self.phase.optimisers.items():
            optimiser.load_state_dict(saved["optimisers"][key])

    def run(self) -> None:
        position, said = self.position, time.monotonic()
        self._train(True)
        while position.step < self.steps:
            epoch = position.step // self.batches
            self._set_rates(epoch)
            for key, loss in self._descend():
                position.sums[key] = position.sums.get(key, 0.0) + loss
                position.counts[key] = position.counts.get(key, 0) + 1
            position.step += 1
            ends = position.step % self.batches == 0 or position.step == self.steps
            due = self.progress.due()
            if ends or due:
                self._check_finite(epoch)
            if ends:
                self._close(epoch)
                if time.monotonic() - said >= LINES or position.step == self.steps:
                    self._say(epoch)
                    said = time.monotonic()
            if due:
                self.progress.save(self._state())
        self._train(False)

    def _train(self, on: bool) -> None:
        self.detector.networks.eval()
        for network in self.phase.networks:
            network.train(on)

    def _set_rates(self, epoch: int) -> None:
        factor = self.phase.rate(epoch)
        for key, optimiser in self.phase.optimisers.items():
            for group, rate in zip(optimiser.param_groups, self.rates[key], strict=True):
                group["lr"] = rate * factor

    def _batch(self) -> np.ndarray:
        """The images of the next batch, copied out of the file."""
        epoch, at = divmod(self.position.step, self.batches)
        if self.ordered != epoch:
            rng = np.random.default_rng(nets.entropy("order", self.detector.seed, self.position.phase, epoch))
            self.order, self.ordered = rng.permutation(len(self.images)), epoch
        rows = self.order[feed.span(len(self.order), self.detector.params.batch_size, at)]
        batch = feed.taken(self.images, np.sort(rows))
        return np.concatenate([batch, batch]) if len(batch) == 1 else batch  # batch normalisation needs two

    def _descend(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """The steps of all optimisers on one batch; gives each loss, detached, in float64."""
        import torch

        params, device = self.detector.params, self.detector.device
        entropy = nets.entropy("batch", self.detector.seed, self.position.phase, self.position.step)
        nets.seed(entropy)
        at = Step(self.position.step, self.steps, np.random.default_rng(entropy))
        losses = self.phase.step(self._batch(), at)
        while True:
            with torch.autocast("cuda", torch.bfloat16, enabled=_mixed(params, device)):
                key, loss = next(losses, ("", None))
            if loss is None:
                return
            optimiser = self.phase.optimisers[key]
            moved = [value for group in optimiser.param_groups for value in group["params"] if value.requires_grad]
            optimiser.zero_grad()
            loss.backward(inputs=moved)
            if params.clip_norm:
                torch.nn.utils.clip_grad_norm_(moved, params.clip_norm)
            optimiser.step()
            yield key, loss.detach().double()

    def _check_finite(self, epoch: int) -> None:
        for key, value in self.position.sums.items():
            if not np.isfinite(value := float(value)):
                what = f"{self.name}: the loss {key!r} in epoch {epoch + 1} of {self.epochs} is {value}"
                raise AnomedError(f"{what}; {_calmer(self.detector)}")

    def _close(self, epoch: int) -> None:
        """The end of an epoch: a row of the history, and where labels choose, a look at them."""
        position = self.position
        means = {key: float(position.sums[key]) / position.counts[key] for key in sorted(position.sums)}
        row = {"phase": self.name, "epoch": epoch + 1, "rate": self.phase.rate(epoch), **means}
        position.sums, position.counts = {}, {}
        if self.labelled is not None and epoch + 1 in self.checks:
            row["selection_auroc"] = value = self._auroc()
            if value > position.best:
                position.best, position.chosen = value, _copied(self.detector.networks)
        self.progress.rows.append(row)

    def _auroc(self) -> float:
        """Image AUROC of the labelled images as the networks stand."""
        _check_networks(self.name, self.detector)
        self._train(False)
        self.finish()
        scores = np.concatenate([scores for scores, _ in self.detector.score(self.labelled.images)])
        self._train(True)
        return auroc(scores, self.labelled.labels)

    def _say(self, epoch: int) -> None:
        row = self.progress.rows[-1]
        values = ", ".join(f"{key} {row[key]:.4g}" for key in row if key not in ("phase", "epoch", "rate"))
        spent = self.progress.seconds
        print(f"{self.name}: epoch {epoch + 1} of {self.epochs}, {values}, {spent:.0f} s", file=sys.stderr, flush=True)

    def _state(self) -> dict[str, Any]:
        optimisers = {key: made.state_dict() for key, made in self.phase.optimisers.items()}
        networks = self.detector.networks.state_dict()
        sums = {key: float(value) for key, value in self.position.sums.items()}
        return {"position": {**vars(self.position), "sums": sums}, "networks": networks, "optimisers": optimisers}


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Chance that an abnormal image (label 1) scores above a normal one, ties counting half; both occur. Not taken from
    the metrics: an edit of those would train every network again."""
    normal, abnormal = np.sort(scores[labels == 0]), scores[labels == 1]
    places = np.searchsorted(normal, abnormal, "left") + np.searchsorted(normal, abnormal, "right")
    return float(places.mean() / (2 * len(normal)))


def _check_networks(name: str, detector: Any) -> None:
    """Raise AnomedError when a step has led to numbers that are none: losses tell of it a batch later."""
    for key, value in detector.networks.state_dict().items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise AnomedError(f"{name}: tensor {key!r} is no longer finite; {_calmer(detector)}")


def _calmer(detector: Any) -> str:
    """What may help against a training that diverges."""
    mixed = ", or precision: float32" if _mixed(detector.params, detector.device) else ""
    return f"lower the learning rate of this phase, or set clip_norm{mixed}"


def _labelled(detector: Any) -> Any:
    """The labelled images that choose among epochs; None where none do."""
    if detector.params.selection == "fixed":
        return None
    labelled = detector.labelled
    kinds = set(labelled.labels.tolist())
    if kinds != {0, 1}:
        split, found = detector.labels(detector.params), "normal" if kinds == {0} else "abnormal"
        raise AnomedError(
            f"selection: {detector.params.selection}: all {len(labelled.labels)} {split} images are {found}, so no "
            "AUROC can choose among epochs; use selection: fixed"
        )
    return labelled


def _mixed(params: Any, device: str) -> bool:
    """Whether forward passes run in bfloat16."""
    import torch

    wanted = params.precision == "mixed" and device == "cuda"
    return bool(wanted and torch.cuda.is_bf16_supported(including_emulation=False))


def _copied(networks: "nn.Module") -> "dict[str, torch.Tensor]":
    return {key: value.detach().to("cpu", copy=True) for key, value in networks.state_dict().items()}
