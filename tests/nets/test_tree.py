"""Functions on nested tuples, NamedTuples and dicts of tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from reverie.nets.tree import tree_leaves, tree_map


class State(NamedTuple):
    deter: torch.Tensor
    stoch: torch.Tensor


TREE = {"state": State(torch.zeros(2), torch.ones(3)), "pair": (torch.full((1,), 5.0),)}


def test_map_keeps_the_structure():
    doubled = tree_map(lambda x: 2 * x, TREE)
    assert isinstance(doubled["state"], State)
    assert doubled["state"].stoch.tolist() == [2, 2, 2]
    assert doubled["pair"][0].tolist() == [10]


def test_map_combines_the_same_leaves_of_several_trees():
    total = tree_map(torch.add, TREE, TREE)
    assert total["state"].stoch.tolist() == [2, 2, 2]
    assert total["pair"][0].tolist() == [10]


def test_leaves_are_all_tensors_in_order():
    shapes = [tuple(x.shape) for x in tree_leaves({**TREE, "name": "not a tensor"})]
    assert shapes == [(2,), (3,), (1,)]
