"""Vectorized world generation of Crafter: the same worlds, much faster.

The original generator computes simplex noise cell by cell, which takes seconds without
a compiler. Here each noise field is computed for the whole map, and only the cells that
use a random number are visited one by one, in the original order, so that the random
generator ends in the same state.

OpenSimplex noise in three dimensions sums the contributions of lattice points around a
position. Which points contribute depends on the part of the lattice cell that contains
the position: a tetrahedron at the origin, one at the opposite corner, or the octahedron
between them. Each part uses its own corners and two extra points, which depend on the
two corners closest to the position (`a` and `b` below). `POINTS` lists the lattice
points of all 27 cases. Corners are encoded as bits (1 for x, 2 for y, 4 for z).
"""

from __future__ import annotations

from typing import Any

import numpy as np

SKEW, UNSKEW, NORM = -1 / 6, 1 / 3, 103.0
"""Constants of OpenSimplex: to and from lattice coordinates, and scale of the noise."""
AXES = (1, 2, 4)
"""Corners next to the origin, as bits."""
PAIRS = (3, 5, 6)
"""Corners with two coordinates of 1, as bits."""
Point = tuple[int, ...]


def _corner(bits: int, on: int = 1, off: int = 0) -> Point:
    """Return the coordinates of a corner: `on` where its bit is set, else `off`."""
    return tuple(on if bits & axis else off for axis in AXES)


def _shifted(bits: int, axis: int, by: int) -> Point:
    """Return a corner moved along one axis."""
    pairs = zip(_corner(bits), _corner(axis, by), strict=True)
    return tuple(a + b for a, b in pairs)


def _case_table() -> tuple[dict[tuple[str, int], int], np.ndarray]:
    """Return the index of each case by name, and the lattice points of each case.

    Near corners are next to the origin, far corners next to the opposite corner. A case
    is named after its kind and a corner:

    - `origin`, `far corner`: in a tetrahedron; the origin, or the opposite corner, is
      one of the two closest corners, and the corner in the name is the other one.
    - `near edge`, `far edge`: in a tetrahedron; `a` and `b` are near, or far, corners.
    - `both near`, `both far`: the same in the octahedron.
    - `mixed PAIR`: in the octahedron; PAIR is the far corner, and the near corner is in
      the name.

    In the second and third kind, the name has the bits `a | b` (near) or `a & b` (far).
    """
    near = [_corner(bits) for bits in (0, *AXES)]
    far = [_corner(bits) for bits in (*PAIRS, 7)]
    between = [_corner(bits) for bits in (*AXES, *PAIRS)]
    cases: dict[tuple[str, int], list[Point]] = {}
    for axis in AXES:
        others = [other for other in AXES if other != axis]
        cases["origin", axis] = near + [_shifted(axis, each, -1) for each in others]
        cases["far edge", axis] = [*far, _corner(axis), _corner(axis, 2)]
        cases["both far", axis] = [*between, _corner(7), _corner(axis, 2)]
    for pair in PAIRS:
        own = [axis for axis in AXES if axis & pair]
        cases["near edge", pair] = [*near, _corner(pair), _corner(pair, 1, -1)]
        cases["far corner", pair] = far + [_shifted(pair, each, 1) for each in own]
        cases["both near", pair] = [*between, _corner(0), _corner(pair, 1, -1)]
        for axis in AXES:
            extra = [_corner(pair, 1, -1), _corner(axis, 2)]
            cases[f"mixed {pair}", axis] = between + extra
    padding = (9, 9, 9)  # too far away to contribute
    points = [(*each, *[padding] * (8 - len(each))) for each in cases.values()]
    return {name: i for i, name in enumerate(cases)}, np.array(points)


CASES, POINTS = _case_table()
UNSKEWED_POINTS = POINTS + POINTS.sum(-1, keepdims=True) * UNSKEW


def _lookup(*names: str) -> np.ndarray:
    """Return a table per name that maps the bits of a corner to the case index."""
    table = np.full((len(names), 8), -1)
    for (name, bits), index in CASES.items():
        if name in names:
            table[names.index(name), bits] = index
    return table


ORIGIN, NEAR_EDGE, FAR_CORNER, FAR_EDGE, BOTH_NEAR, BOTH_FAR = _lookup(
    "origin", "near edge", "far corner", "far edge", "both near", "both far"
)
MIXED = np.full((8, 8), -1)
MIXED[list(PAIRS)] = _lookup(*(f"mixed {pair}" for pair in PAIRS))


class Simplex:
    """OpenSimplex noise of one seed, for arrays of positions."""

    def __init__(self, seed: int):
        from opensimplex import OpenSimplex
        from opensimplex.constants import GRADIENTS3

        self._library = noise = OpenSimplex(seed=seed)
        self._perm = np.asarray(noise._perm)
        self._gradients = np.asarray(GRADIENTS3, np.float64).reshape(-1, 3)
        self._gradient_of = np.asarray(noise._perm_grad_index3) // 3

    def __call__(self, x: np.ndarray, y: np.ndarray, z: float) -> np.ndarray:
        position = np.stack(np.broadcast_arrays(x, y, float(z)), -1)
        skewed = position + position.sum(-1, keepdims=True) * SKEW
        cell = np.floor(skewed)
        case = _case(skewed - cell)
        origin = cell + cell.sum(-1, keepdims=True) * UNSKEW
        points = UNSKEWED_POINTS[case]
        offset = (position - origin)[..., None, :] - points  # (..., 8, 3)
        weight = np.maximum(2 - np.einsum("...i,...i", offset, offset), 0) ** 4
        lattice = cell.astype(np.int64)[..., None, :] + POINTS[case]
        index = self._perm[lattice[..., 0] & 255]
        index = self._perm[(index + lattice[..., 1]) & 255]
        index = self._gradient_of[(index + lattice[..., 2]) & 255]
        slope = np.einsum("...i,...i", self._gradients[index], offset)
        noise: np.ndarray = (weight * slope).sum(-1) / NORM
        # The library sums in another order, which changes the last bits. They matter
        # only where the noise is close to zero, because its sign is used.
        for index in map(tuple, np.argwhere(np.abs(noise) < 1e-9)):
            noise[index] = self._library.noise3(*position[index].tolist())
        return noise


def _case(inside: np.ndarray) -> np.ndarray:
    """Return the index of the case for positions in [0, 1) within a lattice cell."""
    total = inside.sum(-1)
    between = _between(inside)
    return np.where(
        total <= 1, _near(inside), np.where(total >= 2, _far(inside), between)
    )


def _near(inside: np.ndarray) -> np.ndarray:
    """Return the cases for positions in the tetrahedron at the origin."""
    x, y, z = np.moveaxis(inside, -1, 0)
    z_replaces_b, z_replaces_a = (x >= y) & (z > y), (x < y) & (z > x)
    a, a_score = np.where(z_replaces_a, 4, 1), np.where(z_replaces_a, z, x)
    b, b_score = np.where(z_replaces_b, 4, 2), np.where(z_replaces_b, z, y)
    origin_score = 1 - inside.sum(-1)
    closest = np.where(b_score > a_score, b, a)
    at_origin = (origin_score > a_score) | (origin_score > b_score)
    cases: np.ndarray = np.where(at_origin, ORIGIN[closest], NEAR_EDGE[a | b])
    return cases


def _far(inside: np.ndarray) -> np.ndarray:
    """Return the cases for positions in the tetrahedron at the opposite corner."""
    x, y, z = np.moveaxis(inside, -1, 0)
    z_replaces_b, z_replaces_a = (x <= y) & (z < y), (x > y) & (z < x)
    a, a_score = np.where(z_replaces_a, 3, 6), np.where(z_replaces_a, z, x)
    b, b_score = np.where(z_replaces_b, 3, 5), np.where(z_replaces_b, z, y)
    corner_score = 3 - inside.sum(-1)
    closest = np.where(b_score < a_score, b, a)
    at_corner = (corner_score < a_score) | (corner_score < b_score)
    cases: np.ndarray = np.where(at_corner, FAR_CORNER[closest], FAR_EDGE[a & b])
    return cases


def _between(inside: np.ndarray) -> np.ndarray:
    """Return the cases for positions in the octahedron."""
    x, y, z = np.moveaxis(inside, -1, 0)
    sums = (x + y, x + z, y + z)
    scores = [np.abs(each - 1) for each in sums]
    is_far = [each > 1 for each in sums]
    points = [
        np.where(far, pair, 7 - pair) for far, pair in zip(is_far, PAIRS, strict=True)
    ]
    replace_a = (scores[0] <= scores[1]) & (scores[0] < scores[2])
    replace_b = (scores[0] > scores[1]) & (scores[1] < scores[2])
    a = np.where(replace_a, points[2], points[0])
    b = np.where(replace_b, points[2], points[1])
    a_far = np.where(replace_a, is_far[2], is_far[0])
    b_far = np.where(replace_b, is_far[2], is_far[1])
    mixed = np.where(a_far, MIXED[a, b], MIXED[b, a])
    same = np.where(a_far, BOTH_FAR[a & b], BOTH_NEAR[a | b])
    return np.where(a_far == b_far, same, mixed)


def generate_world(world: Any, player: Any) -> None:
    """Fill a Crafter world, identically to the original generator."""
    simplex = Simplex(world.random.randint(0, 2**31 - 1))
    tunnels = _place_materials(world, player, simplex)
    _place_creatures(world, player, tunnels)


def _place_materials(world: Any, player: Any, simplex: Simplex) -> np.ndarray:
    """Fill the map with materials, and return a mask of the tunnels.

    All numbers are those of the original generator.
    """
    x, y = np.meshgrid(*(np.arange(n, dtype=float) for n in world.area), indexing="ij")

    def noise(z: int, size: float) -> np.ndarray:
        return simplex(x / size, y / size, z)

    def above(
        limit: float,
        where: np.ndarray,
        z: int,
        size: float,
        scale: tuple[float, float] = (1, 1),
    ) -> np.ndarray:
        """Return a mask of the cells in `where` whose noise exceeds a limit."""
        result = np.zeros(where.shape, bool)
        positions = x[where] * scale[0] / size, y[where] * scale[1] / size
        result[where] = simplex(*positions, z) > limit
        return result

    distance = np.sqrt((x - player.pos[0]) ** 2 + (y - player.pos[1]) ** 2)
    start = 1 / (1 + np.exp(-(4 - distance + 2 * noise(8, 3))))
    water = noise(3, 15) + 0.15 * noise(3, 5) + 0.1 - 2 * start
    mountain = (noise(0, 15) + 0.3 * noise(0, 5)) / 1.3 - (4 * start + 0.3 * water)
    start_area = start > 0.5
    rock = ~start_area & (mountain > 0.15)
    caves = above(0.15, rock & (mountain > 0.3), 6, 7)
    solid = rock & ~caves
    tunnels: np.ndarray = above(0.4, solid, 7, 3, (2, 0.2))
    tunnels |= above(0.4, solid, 7, 3, (0.2, 2))
    ore = solid & ~tunnels
    lava = above(0.35, ore & (mountain > 0.3), 6, 5)
    coal, iron = above(0, ore, 1, 8), above(0.4, ore, 2, 6)
    land = ~start_area & ~rock
    sand = above(-0.2, land & (water > 0.25) & (water <= 0.35), 4, 9)
    wood = above(0, land & ~sand & (water <= 0.3), 5, 7)

    ids = world._mat_ids
    map_ = np.full(world.area, ids["grass"], np.uint8)
    map_[land & (water > 0.3)] = ids["water"]
    map_[sand] = ids["sand"]
    map_[caves | tunnels] = ids["path"]
    map_[ore] = np.where(lava, ids["lava"], ids["stone"])[ore]
    uniform = world.random.uniform
    for cell in map(tuple, np.argwhere(ore | wood)):
        if wood[cell]:
            if uniform() > 0.8:
                map_[cell] = ids["tree"]
        elif coal[cell] and uniform() > 0.85:
            map_[cell] = ids["coal"]
        elif iron[cell] and uniform() > 0.75:
            map_[cell] = ids["iron"]
        elif mountain[cell] > 0.18 and uniform() > 0.994:
            map_[cell] = ids["diamond"]
    world._mat_map[:] = map_
    return tunnels


def _place_creatures(world: Any, player: Any, tunnels: np.ndarray) -> None:
    """Add cows, zombies and skeletons with the original distances and probabilities."""
    from crafter import constants, objects

    ids = world._mat_ids
    map_ = world._mat_map
    walkable = np.isin(map_, [ids[name] for name in constants.walkable])
    xs, ys = np.indices(world.area)
    distance = np.sqrt((xs - player.pos[0]) ** 2 + (ys - player.pos[1]) ** 2)
    grass = (map_ == ids["grass"]) & (distance > 3)
    in_tunnel = (map_ == ids["path"]) & tunnels
    far = distance > 10
    uniform = world.random.uniform
    for cell in map(tuple, np.argwhere(walkable & (grass | in_tunnel | far))):
        position = (int(cell[0]), int(cell[1]))
        if grass[cell] and uniform() > 0.985:
            world.add(objects.Cow(world, position))
        elif far[cell] and uniform() > 0.993:
            world.add(objects.Zombie(world, position, player))
        elif in_tunnel[cell] and uniform() > 0.95:
            world.add(objects.Skeleton(world, position, player))
