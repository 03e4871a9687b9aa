"""Regions of a mask by flood fill: what tests hold labelling against."""

import numpy as np


def regions(mask: np.ndarray) -> list[list[tuple[int, int]]]:
    """8-connected regions, the places (row, column) of each."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while left:
        edge, region = [left.pop()], []
        while edge:
            y, x = edge.pop()
            region.append((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        found.append(region)
    return found
