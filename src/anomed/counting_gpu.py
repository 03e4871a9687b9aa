"""A map's codes on another grid, computed by torch: the same numbers as `counting.on_grid` on every device."""

import numpy as np

from anomed.images import placed
from anomed.mapcodes import TOP, Codec


class Regrid:
    """Callable: uint16 codes h x w, height, width to codes on that grid, an int32 tensor on `device`.

    Decoding and coding are look-ups in tables that the CPU made, and the interpolation is the same float32
    multiplications and additions in the same order, one kernel each, so that no device fuses them.
    """

    def __init__(self, codec: Codec, device: str):
        import torch

        self.device = device
        self.values = torch.from_numpy(codec.decode(np.arange(TOP + 1))).to(device)
        self.bounds = torch.from_numpy(codec.bounds).to(device)

    def __call__(self, codes: np.ndarray, height: int, width: int):  # type: ignore[no-untyped-def]
        import torch

        on_device = torch.from_numpy(codes.astype(np.int32)).to(self.device)
        if codes.shape == (height, width):
            return on_device
        scores = self.values[on_device.long()]
        for axis, size in ((1, width), (0, height)):
            if scores.shape[axis] != size:
                places = placed(codes.shape[axis], size)
                lower, upper, weight = (torch.from_numpy(part).to(self.device) for part in places)
                start = scores.index_select(axis, lower)
                step = scores.index_select(axis, upper) - start
                scores = start + step * weight.unsqueeze(1 - axis)
        return torch.bucketize(scores, self.bounds, out_int32=True, right=True)
