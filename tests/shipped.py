"""Parameters for tests that need some: those of the shipped params.yaml, whatever a user made of that file since."""

import copy
from typing import Any

_PARAMS: dict[str, Any] = {
    "run": {
        "domains": ["brain_mri"],
        "systems": ["random", "constant", "intensity", "patchcore"],
        "seeds": [0, 1, 2],
        "device": "auto",
    },
    "domains": {"brain_mri": {"source": "embedded", "preprocess": "head"}},
    "preprocess": {
        "head": {
            "spatial": ["skull_strip", "bias_field", {"register": {"spacing": 2}}],
            "intensity": [{"z_score": {"window": [-3, 5]}}],
            "slices": {"start": 0, "stop": 42, "step": 6, "min_lesion_mm2": 40},
        }
    },
    "methods": {
        "random": {"implementation": "controls.random"},
        "constant": {"implementation": "controls.constant"},
        "intensity": {"quantile": 0.99},
        "patchcore": {"coreset_ratio": 0.1, "n_neighbors": 9},
    },
    "metrics": {"aupro_limit": 0.3},
}


def params() -> dict[str, Any]:
    """A copy that a test may change."""
    return copy.deepcopy(_PARAMS)
