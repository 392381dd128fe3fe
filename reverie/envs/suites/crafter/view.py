"""Fast rendering of Crafter, with the same pixels as the original.

The original draws the map cell by cell and blends each creature in every frame, which
takes most of the time of a step. Here the map is one lookup in a table of tiles, a
creature on its material is a tile that is blended once and cached, and the inventory is
redrawn only when it has changed. Lighting, noise and the sleep effect use the original
code, with the same random numbers.

One method of the game logic is replaced as well: `Player.distance` computes with Python
integers, which is faster than NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

OUTSIDE = 127
"""Gray value of cells outside of the world."""


def use_fast_rendering(game: Any) -> None:
    """Replace the renderers of a game by faster ones.

    The semantic map, which Reverie does not use, is no longer computed.
    """
    from crafter import engine, objects

    class LocalView(engine.LocalView):  # type: ignore
        def __call__(self, player: Any, unit: np.ndarray) -> Any:
            self._center = np.array(player.pos)
            canvas = tiles.draw(self._world, self._center - self._offset, self._grid)
            canvas = self._light(canvas, self._world.daylight)
            return self._sleep(canvas) if player.sleeping else canvas

    class ItemView(engine.ItemView):  # type: ignore
        cached: tuple[list[Any], np.ndarray] | None = None

        def __call__(self, inventory: Mapping[str, int], unit: np.ndarray) -> Any:
            items = list(inventory.items())
            if self.cached is None or self.cached[0] != items:
                self.cached = items, super().__call__(inventory, unit)
            return self.cached[1]

    class Player(objects.Player):  # type: ignore
        def distance(self, target: Any) -> Any:
            (x, y), (target_x, target_y) = self.pos, getattr(target, "pos", target)
            return abs(target_x - x) + abs(target_y - y)

    tiles = Tiles(game._world._mat_names, game._textures, game._size // game._view)
    game._local_view.__class__ = LocalView
    game._item_view.__class__ = ItemView
    game._sem_view = lambda: None
    game.player = Player  # class of the player that `reset` creates


class Tiles:
    """Images of one cell: materials, and objects on materials."""

    def __init__(self, names: Mapping[int, str | None], textures: Any, unit: Any):
        """`names` are the materials; `unit` is the size of a cell in pixels."""
        self._unit = np.array(unit)
        self._textures = textures
        tiles = [textures.get(names[i], unit)[..., :3] for i in range(len(names))]
        tiles.append(np.full_like(tiles[0], OUTSIDE))
        self._materials = np.stack(tiles)
        self._objects: dict[tuple[str, int], np.ndarray] = {}

    def draw(self, world: Any, corner: np.ndarray, grid: np.ndarray) -> np.ndarray:
        """Draw the part of a world that starts at `corner` and has `grid` cells."""
        (x, y), (columns, rows) = corner.tolist(), grid.tolist()
        window = np.s_[max(0, x) : x + columns, max(0, y) : y + rows]
        materials = np.full((columns, rows), len(self._materials) - 1)
        inside = world._mat_map[window]
        left, top = max(0, -x), max(0, -y)
        materials[left : left + inside.shape[0], top : top + inside.shape[1]] = inside
        cells = self._materials[materials]  # (columns, rows, *unit, 3)
        objects = world._obj_map[window]
        for i, j in np.argwhere(objects).tolist():
            texture = world._objects[objects[i, j]].texture
            cells[left + i, top + j] = self._object_tile(texture, int(inside[i, j]))
        width, height = (grid * self._unit).tolist()
        return cells.swapaxes(1, 2).reshape(width, height, 3)

    def _object_tile(self, texture: str, material: int) -> np.ndarray:
        """Return an object on a material, blended by the original code."""
        from crafter import engine

        key = (texture, material)
        if key not in self._objects:
            tile = self._materials[material].copy()
            engine._draw_alpha(tile, (0, 0), self._textures.get(texture, self._unit))
            self._objects[key] = tile
        return self._objects[key]
