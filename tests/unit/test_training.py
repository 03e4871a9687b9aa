"""The training loop: what a batch depends on, going on after a kill, choice among epochs, what is refused."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny_domain
import torch
from learnable import tissue
from sklearn.metrics import roc_auc_score
from torch import nn

from anomed import detect, feed, nets, training
from anomed.detect import Labelled
from anomed.errors import AnomedError
from anomed.methods.autoencoder import Autoencoder
from anomed.progress import Progress

IMAGES = tissue(11, 0, side=16)


class Killed(BaseException):
    """Stands for a kill."""


class Toy:
    """Two phases of linear networks: "first" has two losses, "second" learns from what the first left as a buffer."""

    device = "cpu"

    def __init__(self, kill_at: tuple[int, int] = (-1, -1), **keys: Any):
        self.params = training.Params(**({"epochs": 3, "batch_size": 4, "learning_rate": 0.01} | keys))
        self.seed, self.progress, self.kill_at = 5, Progress(), kill_at
        self.seen: list[tuple[int, np.ndarray]] = []
        self.rates: list[float] = []
        self.labelled: Any = None
        self.finished = 0

    def labels(self, params: Any) -> str:
        return {"valid": "valid", "test_oracle": "test"}[params.selection]

    def fit(self, images: np.ndarray = IMAGES, **phase: Any) -> "Toy":
        def networks() -> dict[str, nn.Module]:
            memory = nn.Module()
            memory.register_buffer("mean", torch.zeros(1))
            return {"a": nn.Linear(256, 1), "b": nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 1)), "memory": memory}

        self.networks = nets.built(self, networks)
        training.run(self, images, {"first": lambda: self._first(**phase), "second": self._second}, self._finish)
        return self

    def _finish(self) -> None:
        self.finished += 1

    def _values(self, images: np.ndarray) -> torch.Tensor:
        return feed.pixels(images, 1, 16, "cpu").flatten(1)

    def _watch(self, phase: int, images: np.ndarray, at: training.Step) -> None:
        if self.kill_at == (phase, at.number):
            raise Killed
        self.seen.append((phase, images))

    def _adam(self, name: str) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.networks[name].parameters(), lr=self.params.learning_rate)

    def _first(self, **phase: Any) -> training.Phase:
        optimisers = {"a": self._adam("a"), "b": self._adam("b")}

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            self._watch(0, images, at)
            self.rates.append(optimisers["a"].param_groups[0]["lr"])
            values = self._values(images)
            yield "a", (self.networks["a"](values) + self.networks["b"](values) - at.rng.normal()).square().mean()
            if at.number % 2:
                yield "b", (self.networks["b"](values) - 3 + self.networks["a"](values)).square().mean()

        rate = phase.pop("rate", lambda epoch: 0.5**epoch)
        return training.Phase([self.networks["a"], self.networks["b"]], optimisers, step, rate=rate, **phase)

    def _second(self) -> training.Phase:
        with torch.no_grad():
            self.networks["memory"].get_buffer("mean").fill_(float(self.networks["a"].get_parameter("weight").sum()))

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            self._watch(1, images, at)
            yield (
                "a",
                (self.networks["a"](self._values(images)) - self.networks["memory"].get_buffer("mean")).square().mean(),
            )

        return training.Phase([self.networks["a"]], {"a": self._adam("a")}, step, epochs=2)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        assert not any(network.training for network in self.networks.modules())
        yield self.networks["a"](self._values(images)).detach().numpy()[:, 0], None


def content(toy: Any) -> bytes:
    return b"".join(key.encode() + value.tobytes() for key, value in sorted(nets.arrays(toy.networks).items()))


@pytest.fixture(scope="module")
def undisturbed() -> Toy:
    return Toy().fit()


# What a batch depends on -------------------------------------------------------------------------------------------


def test_every_epoch_shows_every_image_once_in_another_order(undisturbed: Toy) -> None:
    first = [images for phase, images in undisturbed.seen if phase == 0]
    assert [len(images) for images in first] == [4, 4, 3] * 3
    epochs = [np.concatenate(first[3 * k : 3 * k + 3]) for k in range(3)]
    wanted = sorted(image.tobytes() for image in IMAGES)
    assert all(sorted(image.tobytes() for image in epoch) == wanted for epoch in epochs)
    assert epochs[0].tobytes() != epochs[1].tobytes()


@pytest.mark.parametrize(
    ("count", "batch_size", "sizes"),
    [(9, 4, [4, 5]), (8, 4, [4, 4]), (10, 4, [4, 4, 2]), (1, 4, [2]), (3, 8, [3]), (5, 4, [5]), (2, 1, [2, 2])],
)
def test_no_batch_holds_one_image(count: int, batch_size: int, sizes: list[int]) -> None:
    """A single one left over joins the last batch; alone it stands twice: batch normalisation needs two."""
    toy = Toy(epochs=1, batch_size=batch_size).fit(IMAGES[:count])
    assert [len(images) for phase, images in toy.seen if phase == 0] == sizes


def test_seed_decides_and_the_caller_s_random_numbers_neither_matter_nor_move(undisturbed: Toy) -> None:
    torch.manual_seed(123)
    expected = torch.get_rng_state()
    again = Toy().fit()
    assert content(again) == content(undisturbed)
    assert torch.equal(torch.get_rng_state(), expected)
    other = Toy()
    other.seed = 6
    assert content(other.fit()) != content(undisturbed)


def test_a_loss_moves_the_networks_of_its_name_alone() -> None:
    """Each loss of the toy depends on both networks."""
    toy = Toy(epochs=1, max_steps=1).fit()  # one batch: the loss "a" alone
    assert all(value.grad is None for value in toy.networks["b"].parameters())
    assert all(value.grad is not None for value in toy.networks["a"].parameters())


def test_rates_follow_the_epoch(undisturbed: Toy) -> None:
    assert undisturbed.rates == [0.01] * 3 + [0.005] * 3 + [0.0025] * 3


def test_max_steps_ends_a_phase_early() -> None:
    toy = Toy(max_steps=4).fit()
    assert [phase for phase, _ in toy.seen] == [0] * 4 + [1] * 4
    assert [row["epoch"] for row in toy.progress.rows] == [1, 2, 1, 2]


def test_gradients_are_clipped() -> None:
    def watched(**keys: Any) -> float:
        toy = Toy(epochs=1, max_steps=1, **keys)
        toy.fit(IMAGES)
        return float(
            torch.cat([torch.as_tensor(value.grad).flatten() for value in toy.networks["a"].parameters()]).norm()
        )

    norms = [watched(), watched(clip_norm=0.001)]
    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(0.001, rel=1e-3)


def test_history_tells_the_mean_of_every_loss(undisturbed: Toy) -> None:
    rows = undisturbed.progress.rows
    assert [(row["phase"], row["epoch"]) for row in rows] == [("first", k) for k in (1, 2, 3)] + [
        ("second", k) for k in (1, 2)
    ]
    assert all(np.isfinite(row["a"]) for row in rows)
    assert "b" not in rows[-1]
    assert rows[1]["rate"] == 0.5
    facts = undisturbed.progress.facts
    assert facts == {"parameters": 514, "precision": "float32", "selection": "fixed"}
    assert undisturbed.finished == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_scaled_repeated_and_resized(channels: int) -> None:
    images = np.zeros((2, 8, 8) if channels == 1 else (2, 8, 8, 3), np.uint8)
    images[:, 4:] = 255
    values = feed.pixels(images, 3, 8, "cpu")
    assert values.shape == (2, 3, 8, 8)
    assert values.dtype == torch.float32
    assert set(values.unique().tolist()) == {0.0, 1.0}
    small = feed.pixels(images, channels, 4, "cpu")
    assert small.shape == (2, channels, 4, 4)
    assert small[0, 0, 0, 0] == small.min() == 0
    assert small[0, 0, -1, 0] == small.max() == 1


def test_batches_are_filled_up() -> None:
    found = list(feed.batches(IMAGES, 4))
    assert [(len(images), count) for images, count in found] == [(4, 4), (4, 4), (4, 3)]
    assert not found[-1][0][3].any()


def test_pages_of_a_file_are_given_back(tmp_path: Path) -> None:
    """Reading a memory-mapped file leaves its pages resident; after `forget` they are not."""
    np.save(tmp_path / "images.npy", np.ones((64, 256, 256), np.uint8))
    images = np.load(tmp_path / "images.npy", mmap_mode="r")

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        part = text[text.index("images.npy") :]
        return int(part[part.index("Rss:") + 4 :].split()[0])

    total = int(images.sum())
    assert resident() > 3000
    feed.forget(images[:32])
    assert resident() < 100
    assert int(images.sum()) == total
    del images
    gc.collect()
    assert hasattr(mmap, "MADV_DONTNEED")


# After a kill -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kill_at", [(0, 1), (0, 3), (0, 5), (0, 8), (1, 0), (1, 1), (1, 5)])
def test_a_killed_training_goes_on_to_the_same_bytes(
    kill_at: tuple[int, int], undisturbed: Toy, tmp_path: Path
) -> None:
    path = tmp_path / "toy.pt"
    toy = Toy(kill_at)
    toy.progress = Progress(path, "key", every=0)
    with pytest.raises(Killed):
        toy.fit()
    again = Toy()
    again.progress = Progress(path, "key", every=0)
    again.fit()
    assert len(toy.seen) + len(again.seen) == len(undisturbed.seen), "no batch twice"
    assert content(again) == content(undisturbed)
    assert again.progress.rows == undisturbed.progress.rows
    assert again.progress.facts["resumed"] == 1
    assert 0 < again.progress.earlier < again.progress.seconds


def test_two_kills_are_counted(tmp_path: Path, undisturbed: Toy) -> None:
    for kill_at in [(0, 2), (1, 1), (-1, -1)]:
        toy = Toy(kill_at)
        toy.progress = Progress(tmp_path / "toy.pt", "key", every=0)
        if kill_at[0] >= 0:
            with pytest.raises(Killed):
                toy.fit()
        else:
            toy.fit()
    assert toy.progress.facts["resumed"] == 2
    assert content(toy) == content(undisturbed)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The checkpoint of a toy that was killed."""
    toy = Toy((0, 4))
    toy.progress = Progress(tmp_path / "toy.pt", "key", every=0)
    with pytest.raises(Killed):
        toy.fit()
    return tmp_path / "toy.pt"


def test_a_checkpoint_of_something_else_is_named_and_not_used(
    stopped: Path, undisturbed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Toy()
    again.progress = Progress(stopped, "other", every=0)
    again.fit()
    assert f"{stopped}: a checkpoint of other parameters" in capsys.readouterr().err
    assert len(again.seen) == len(undisturbed.seen)
    assert content(again) == content(undisturbed)


def flipped(data: bytes) -> bytes:
    """With one bit of the largest tensor changed."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:3000], flipped, lambda data: b"cos\nsystem\n(S'touch /tmp/x'\ntR.", lambda data: b""]
)
def test_what_is_no_checkpoint_is_refused_and_left(damage: Any, stopped: Path) -> None:
    damaged = damage(stopped.read_bytes())
    stopped.write_bytes(damaged)
    again = Toy()
    again.progress = Progress(stopped, "key", every=0)
    with pytest.raises(AnomedError, match=rf"{stopped}: no checkpoint of a training, or a damaged one; delete it"):
        again.fit()
    assert again.seen == []
    assert stopped.read_bytes() == damaged


@pytest.mark.parametrize("kind", ["tensor", "folder"])
def test_other_things_are_no_checkpoint(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
    else:
        torch.save(torch.zeros(3), path)
    toy = Toy()
    toy.progress = Progress(path, "key")
    with pytest.raises(AnomedError, match="no checkpoint of a training"):
        toy.fit()
    assert path.exists()


def test_a_method_that_trains_nothing_leaves_the_file_alone(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "data", {("train", 0): 2, ("test", 0): 2, ("test", 1): 2})
    (tmp_path / "thesis.txt").write_text("mine")
    parameters: dict[str, Any] = {"method": {"implementation": "controls.random"}, "files": {}}
    detect.fit("chance", parameters, 0, tmp_path / "data", tmp_path / "model", "cpu", tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    with pytest.raises(AnomedError, match="inside the model's folder"):
        detect.fit("chance", parameters, 0, tmp_path / "data", tmp_path / "m", "cpu", tmp_path / "m/state.safetensors")


def test_a_full_disk_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:747] . open file failed")

    monkeypatch.setattr(torch, "save", full)
    toy = Toy()
    toy.progress = Progress(tmp_path / "toy.pt", "key", every=0)
    with pytest.raises(AnomedError, match=r"toy\.pt: the checkpoint could not be written .*; make room"):
        toy.fit()


PARAMETERS: dict[str, Any] = {
    "method": {"implementation": "deep_svdd", "pretrain_epochs": 12, "epochs": 8, "batch_size": 2},
    "files": {},
}


def test_a_fit_that_is_killed_goes_on_to_the_same_files(tmp_path: Path) -> None:
    """With kill -9, as a cluster or the kernel does it, in the command that a user runs."""
    tiny_domain.domain(tmp_path / "data", {("train", 0): 9, ("valid", 0): 2, ("test", 0): 3, ("test", 1): 3})
    command = [
        sys.executable, "-m", "anomed.cli", "fit", "svdd", "--params", detect.records.canonical(PARAMETERS), "--seed", "3",
        "--data", str(tmp_path / "data"), "--out", str(tmp_path / "model"), "--device", "cpu",
        "--checkpoint", str(tmp_path / "work/svdd.pt"), "--checkpoint-seconds", "0.3",
    ]  # fmt: skip
    job = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    stop = time.monotonic() + 120
    while not (tmp_path / "work/svdd.pt").exists() and time.monotonic() < stop:
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert (tmp_path / "work/svdd.pt").exists()
    assert not (tmp_path / "model").exists()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    detect.fit("svdd", PARAMETERS, 3, tmp_path / "data", tmp_path / "whole", "cpu")
    for name in (detect.STATE, detect.HISTORY):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    card = detect.records.read_card(tmp_path / "model/run.json")
    assert card["training"]["resumed"] == 1
    assert "resumed" not in detect.records.read_card(tmp_path / "whole/run.json")["training"]
    assert not list((tmp_path / "work").iterdir()), "a checkpoint is removed when the model is written"
    history = pd.read_csv(tmp_path / "model" / detect.HISTORY)
    assert history.phase.tolist() == ["autoencoder"] * 12 + ["sphere"] * 8
    assert history.epoch.tolist() == [*range(1, 13), *range(1, 9)]
    losses = history.reconstruction.dropna()
    assert losses.iloc[-1] < losses.iloc[0]


# Choice among epochs ------------------------------------------------------------------------------------------------


def choosing(selection: str, labels: list[int]) -> Toy:
    toy = Toy(selection=selection)
    toy.labelled = Labelled(IMAGES[: len(labels)], np.array(labels), lambda index: None)
    return toy


@pytest.mark.parametrize("selection", ["valid", "test_oracle"])
def test_the_best_epoch_of_the_last_phase_is_kept(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, kept = choosing(selection, [0, 1, 0, 1]), []
    values = iter([0.75, 0.5])

    def rated(scores: Any, labels: Any) -> float:
        kept.append(content(toy))
        return next(values)

    monkeypatch.setattr(training, "auroc", rated)
    toy.fit()
    assert [row.get("selection_auroc") for row in toy.progress.rows] == [None] * 3 + [0.75, 0.5]
    assert content(toy) == kept[0]
    assert kept[0] != kept[1]
    assert toy.finished == 3, "before each look and at the end"


def test_auroc_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 9, 40).astype(float), rng.integers(0, 2, 40)
    assert training.auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_looks_are_at_most_twenty_and_end_with_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = Autoencoder(Autoencoder.Params(channels=[4], epochs=45, batch_size=16, selection="valid"), 0)
    detector.labelled = Labelled(IMAGES[:4], np.array([0, 1, 0, 1]), lambda index: None)
    detector.fit(IMAGES)
    assert detector.progress
    looked = [row["epoch"] for row in detector.progress.rows if "selection_auroc" in row]
    assert len(looked) == 20
    assert looked[-1] == 45
    best = max(row["selection_auroc"] for row in detector.progress.rows if "selection_auroc" in row)
    scores = np.concatenate([scores for scores, _ in detector.score(IMAGES[:4])])
    assert best == np.mean(scores[[1, 3]][:, None] > scores[[0, 2]])


def test_a_choice_survives_a_kill(tmp_path: Path) -> None:
    whole = choosing("valid", [0, 1, 1, 0]).fit()
    for kill_at in [(1, 4), (-1, -1)]:
        toy = choosing("valid", [0, 1, 1, 0])
        toy.kill_at, toy.progress = kill_at, Progress(tmp_path / "toy.pt", "key", every=0)
        if kill_at[0] >= 0:
            with pytest.raises(Killed):
                toy.fit()
        else:
            toy.fit()
    assert content(toy) == content(whole)
    assert toy.progress.rows == whole.progress.rows


@pytest.mark.parametrize(("labels", "found"), [([0, 0], "normal"), ([1, 1], "abnormal")])
def test_labels_of_one_kind_choose_nothing(labels: list[int], found: str) -> None:
    with pytest.raises(AnomedError, match=f"selection: valid: all 2 valid images are {found}"):
        choosing("valid", labels).fit()


def test_rows_say_what_chose_their_epoch() -> None:
    params = {key: Autoencoder.Params(selection=key) for key in ("fixed", "valid", "test_oracle")}
    assert {key: Autoencoder.labels(value) for key, value in params.items()} == {
        "fixed": "", "valid": "valid", "test_oracle": "test",
    }  # fmt: skip
    assert [Autoencoder.selection(value) for value in params.values()] == ["last", "best on valid", "best on test"]
    assert [bool(Autoencoder.mark(value)) for value in params.values()] == [False, False, True]


def test_fit_shows_the_labelled_images_of_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tiny_domain.domain(
        tmp_path / "data", {("train", 0): 4, ("valid", 0): 2, ("valid", 1): 1, ("test", 0): 3, ("test", 1): 2}
    )
    seen: dict[str, Any] = {}

    def watched(detector: Any, *_: Any) -> None:
        seen[detector.params.selection] = getattr(detector, "labelled", None)

    monkeypatch.setattr(training, "run", watched)
    for selection in ("fixed", "valid", "test_oracle"):
        block = {**PARAMETERS["method"], "selection": selection}
        detect.fit("svdd", {**PARAMETERS, "method": block}, 0, tmp_path / "data", tmp_path / selection, "cpu")
    assert seen["fixed"] is None
    for selection, split in (("valid", "valid"), ("test_oracle", "test")):
        table = prepared.table[prepared.table.split == split]
        found = seen[selection]
        assert found.labels.tolist() == table.label.tolist()
        assert np.array_equal(found.images, prepared.images[table.row.to_numpy()])
        abnormal = table.label.tolist().index(1)
        mask = found.mask(abnormal)
        assert mask is not None
        assert mask.any()


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_training() -> None:
    with pytest.raises(
        AnomedError, match=r"first: the loss 'a' in epoch \d of 9 is (inf|nan); lower the learning rate"
    ):
        Toy(epochs=9, learning_rate=1e25).fit(rate=lambda epoch: 1.0)


def test_a_last_step_into_nowhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of that batch was finite: it was computed before the step."""
    toy = Toy(epochs=1, max_steps=1)
    adam = toy._adam

    def spoiling(name: str) -> torch.optim.Optimizer:
        made = adam(name)
        bias = toy.networks["a"].get_parameter("bias")

        def spoil(*_: Any) -> None:
            bias.data.fill_(torch.nan)

        made.register_step_post_hook(spoil)
        return made

    monkeypatch.setattr(toy, "_adam", spoiling)
    with pytest.raises(AnomedError, match=r"first: tensor 'a\.bias' is no longer finite; lower the learning rate"):
        toy.fit()


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_checkpoint_of_another_precision_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that starts on a GPU with bfloat16 may go on where there is none."""
    toy = Toy((1, 1))
    toy.progress = Progress(tmp_path / "toy.pt", "key", every=0)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training, "_mixed", lambda params, device: True)
        toy.fit()
    again = Toy()
    again.progress = Progress(tmp_path / "toy.pt", "key", every=0)
    assert content(again.fit()) == content(undisturbed)
    assert "training starts anew" in capsys.readouterr().err


def test_streams_of_random_numbers_are_apart() -> None:
    places: dict[str, list[tuple[int, ...]]] = {
        "order": [(0, 0, 1), (0, 1, 0), (1, 0, 0)], "batch": [(0, 0, 1), (0, 0, 0)], "phase": [(0, 0)], "networks": [(0,)],
    }  # fmt: skip
    drawn = [
        nets.entropy(purpose, *place).generate_state(2).tobytes() for purpose in places for place in places[purpose]
    ]
    assert len(set(drawn)) == len(drawn) == 7


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: not enough memory: you tried"),
        MemoryError(),
    ],
)
def test_memory_that_does_not_suffice_is_explained(error: Exception) -> None:
    with pytest.raises(AnomedError, match=r"memory.*: lower batch_size or image_size"), detect.memory_advice():
        raise error


def test_other_errors_are_not_memory() -> None:
    with pytest.raises(RuntimeError, match="else"), detect.memory_advice():
        raise RuntimeError("else")


def test_a_state_of_another_network_is_refused() -> None:
    detector = Autoencoder(Autoencoder.Params(channels=[8, 4]), 0)
    detector._build(1, 16)
    state = detector.state()
    other = Autoencoder(Autoencoder.Params(channels=[8, 5]), 0)
    with pytest.raises(AnomedError, match=r"the model is of another network: .*; fit again"):
        other.restore(state)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Toy().fit()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["first: epoch 3 of 3", "second: epoch 2 of 2"]
    assert " a 0." in lines[0] or " a " in lines[0]
