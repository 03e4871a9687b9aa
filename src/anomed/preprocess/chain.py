"""A chain of `preprocess:` in params.yaml: the steps that turn a domain's volumes into images."""

from pathlib import Path
from typing import Any

from pydantic import Field

from anomed.preprocess import intensity_steps, spatial_steps, steps
from anomed.preprocess.slices import Slices
from anomed.preprocess.steps import Entry
from anomed.settings import Settings, check


class Block(Settings):
    """spatial: steps that mask and move voxels. intensity: steps to grey levels. slices: what is cut."""

    spatial: list[Entry] = Field(default_factory=list)
    intensity: list[Entry] = Field(min_length=1)
    slices: dict[str, Any]


class Chain:
    """A checked chain. Raises AnomedError naming the key of every fault. where: the chain's key, for messages."""

    def __init__(self, block: Any, where: str):
        raw = check(Block, block, where)
        self.spatial = steps.parse(raw.spatial, spatial_steps.STEPS, f"{where}.spatial")
        self.intensity = steps.parse(raw.intensity, intensity_steps.STEPS, f"{where}.intensity")
        self.slices = check(Slices, raw.slices, f"{where}.slices")
        spatial_steps.check_order(self.spatial, f"{where}.spatial")
        intensity_steps.check_order([name for name, _ in self.intensity], f"{where}.intensity")
        self._where = where

    def files(self) -> dict[str, Path]:
        """The files outside the project that its steps read, by name. Raises AnomedError when one is missing."""
        return spatial_steps.files(self.spatial, f"{self._where}.spatial")

    def canonical(self) -> dict[str, Any]:
        """Every option written out, paths left out."""
        return {
            "spatial": steps.dump(spatial_steps.anonymous(self.spatial)),
            "intensity": steps.dump(self.intensity),
            "slices": self.slices.model_dump(),
        }
