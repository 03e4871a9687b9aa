"""Simplex noise in two dimensions: smooth random pictures of a known scale, by layers from coarse to fine."""

import math

import numpy as np

SKEW, UNSKEW = (math.sqrt(3) - 1) / 2, (3 - math.sqrt(3)) / 6
REACH = 0.5  # square of the distance from a corner at which its part fades out: the height of a triangle
TURNS = np.cos(np.arange(256) * np.pi / 8), np.sin(np.arange(256) * np.pi / 8)  # 16 directions, 16 times over
# Mean square over all positions of the sum of a point's parts (REACH - d^2)^4 (direction . offset), when directions
# are drawn alike all round the circle: sqrt(3) corners per unit of area times the integral of one part's square.
MEAN_SQUARE = math.sqrt(3) * math.pi / 2 * REACH**10 / 90


def simplex(x: np.ndarray, y: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """Simplex noise (Perlin, "Noise hardware", 2001) at points (...), one picture for each table: float64 (N, ...).

    x, y: any real numbers; triangles have sides of 0.82. tables: permutations of 0 to 255, uint8 (N, 256); they draw
    among 16 directions at each corner, and repeat every 256 cells. Continuous, of mean 0 and mean square 1 over all
    positions and tables; within -1.86 and 1.86.
    """
    shift = (x + y) * SKEW
    i, j = np.floor(x + shift), np.floor(y + shift)
    left, up = x - i + (i + j) * UNSKEW, y - j + (i + j) * UNSKEW  # offset from the cell's first corner
    lower = (left > up).astype(np.float64)
    total = np.zeros((len(tables), *np.shape(x)))
    for right, down in ((0.0, 0.0), (lower, 1 - lower), (1.0, 1.0)):  # corners of the triangle that holds the point
        turn = (right + down) * UNSKEW
        across, along = left - right + turn, up - down + turn
        weight = np.maximum(REACH - across**2 - along**2, 0) ** 4 / math.sqrt(MEAN_SQUARE)
        column, row = ((cell % 256).astype(np.uint8) for cell in (i + right, j + down))
        for noise, table in zip(total, tables, strict=True):
            drawn = table[column + table[row]]  # bytes wrap round
            noise += TURNS[0][drawn] * (weight * across) + TURNS[1][drawn] * (weight * along)
    return total


def fractal(
    count: int, side: int, rng: np.random.Generator, frequency: float, octaves: int, persistence: float
) -> np.ndarray:
    """`count` pictures of layered simplex noise, float32 (count, side, side), of mean 0 and mean square 1 over draws.

    frequency: pixels to a unit of the coarsest layer; each further one of `octaves` has half as many, and
    `persistence` times the amplitude. A layer with less than one pixel to a unit is left out, unless it is the first:
    sampled so coarsely it would be white noise. The layers lie at random offsets, else their zeros would coincide.
    """
    rows, columns = np.mgrid[:side, :side].astype(np.float64)
    total, power = np.zeros((count, side, side)), 0.0
    for octave in range(octaves):
        unit, amplitude = frequency / 2**octave, persistence**octave
        if octave and unit < 1:
            break
        tables = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (count, 1)), axis=1)
        x, y = rng.uniform(0, 256, 2)
        total += amplitude * simplex(columns / unit + x, rows / unit + y, tables)
        power += amplitude**2
    return (total / math.sqrt(power)).astype(np.float32)
