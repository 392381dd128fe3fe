"""Crafter's picture, drawn at once: the same pixels as the stock one, for less.

The stock view draws the ground cell by cell and blends every creature anew, which is
most of what a step costs. Here the ground is one lookup in a table of tiles, a creature
on its ground is a tile that was blended once, and the inventory is drawn when it has
changed. Light, noise and sleep are left to the stock code, which draws its random
numbers as before. So is everything that happens, but for the distance to every
creature of the world, which is counted without arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

BEYOND = 127
"""What the stock view shows beyond the edge of the world."""


def quicken(game: Any) -> None:
    """Let a game draw itself our way, and leave out the map that nobody looks at."""
    from crafter import engine, objects

    class LocalView(engine.LocalView):  # type: ignore
        def __call__(self, player: Any, unit: np.ndarray) -> Any:
            self._center = np.array(player.pos)
            canvas = tiles.draw(self._world, self._center - self._offset, self._grid)
            canvas = self._light(canvas, self._world.daylight)
            return self._sleep(canvas) if player.sleeping else canvas

    class ItemView(engine.ItemView):  # type: ignore
        drawn: tuple[list[Any], np.ndarray] | None = None

        def __call__(self, inventory: Mapping[str, int], unit: np.ndarray) -> Any:
            held = list(inventory.items())
            if self.drawn is None or self.drawn[0] != held:
                self.drawn = held, super().__call__(inventory, unit)
            return self.drawn[1]

    class Player(objects.Player):  # type: ignore
        def distance(self, target: Any) -> Any:
            (x, y), (far_x, far_y) = self.pos, getattr(target, "pos", target)
            return abs(far_x - x) + abs(far_y - y)

    tiles = Tiles(game._world._mat_names, game._textures, game._size // game._view)
    game._local_view.__class__ = LocalView
    game._item_view.__class__ = ItemView
    game._sem_view = lambda: None
    game.player = Player


class Tiles:
    """The ground and what stands on it, as small pictures of one size."""

    def __init__(self, names: Mapping[int, str | None], textures: Any, unit: Any):
        self._unit = np.array(unit)
        self._textures = textures
        ground = [textures.get(names[i], unit)[..., :3] for i in range(len(names))]
        ground.append(np.full_like(ground[0], BEYOND))
        self._ground = np.stack(ground)
        self._standing: dict[tuple[str, int], np.ndarray] = {}

    def draw(self, world: Any, corner: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """The cells of a world from a corner on, as one picture."""
        (x, y), (columns, rows) = corner.tolist(), grid.tolist()
        window = np.s_[max(0, x) : x + columns, max(0, y) : y + rows]
        ground = np.full((columns, rows), len(self._ground) - 1)
        inside = world._mat_map[window]
        left, top = max(0, -x), max(0, -y)
        ground[left : left + inside.shape[0], top : top + inside.shape[1]] = inside
        cells = self._ground[ground]  # (columns, rows, *unit, 3)
        objects = world._obj_map[window]
        for i, j in np.argwhere(objects).tolist():
            texture = world._objects[objects[i, j]].texture
            cells[left + i, top + j] = self._stands(texture, int(inside[i, j]))
        width, height = (grid * self._unit).tolist()
        return cells.swapaxes(1, 2).reshape(width, height, 3)

    def _stands(self, texture: str, ground: int) -> np.ndarray:
        """Something on its ground, blended by the stock code."""
        from crafter import engine

        key = (texture, ground)
        if key not in self._standing:
            tile = self._ground[ground].copy()
            engine._draw_alpha(tile, (0, 0), self._textures.get(texture, self._unit))
            self._standing[key] = tile
        return self._standing[key]
