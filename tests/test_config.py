"""The mechanism of settings, on a small tree of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from reverie import config as configs
from reverie.config import ConfigError


@dataclass(frozen=True)
class Net:
    units: int = 1024
    rate: float = 4e-5
    mults: tuple[int, ...] = (2, 3)
    size: tuple[int, int] = (64, 64)
    act: Literal["silu", "relu"] = "silu"


@dataclass(frozen=True)
class Tree:
    seed: int = 0
    debug: bool = False
    name: str = "x"
    limit: int | None = None
    enc: Net = field(default_factory=Net)
    dec: Net = field(default_factory=lambda: Net(units=8))
    scales: dict[str, float] = field(default_factory=lambda: {"rew": 1.0, "con": 2.0})


def lay(*layers: dict) -> Tree:
    return configs.resolve(Tree, [(f"layer {i}", x) for i, x in enumerate(layers)])


def flags(text: str) -> Tree:
    layer = configs.flag_layer(Tree, configs.parse_flags(text.split()), Tree())
    return configs.resolve(Tree, [("the flags", layer)])


def test_later_layers_win_and_the_rest_keeps_its_default():
    tree = lay({"seed": 1, "enc.units": 3}, {"enc": {"units": 4, "rate": 1}})
    assert (tree.seed, tree.enc.units, tree.enc.rate) == (1, 4, 1.0)
    assert tree.dec == Net(units=8)
    assert isinstance(tree.enc.rate, float)


def test_a_pattern_sets_every_leaf_it_matches_in_full():
    tree = lay({r".*\.units": 5})
    assert (tree.enc.units, tree.dec.units) == (5, 5)
    tree = lay({r"(enc|dec)": {"rate": 0.5}})
    assert (tree.enc.rate, tree.dec.rate) == (0.5, 0.5)


def test_dict_fields_are_set_by_key_and_take_no_new_ones():
    assert lay({"scales.rew": 3}).scales == {"rew": 3.0, "con": 2.0}
    with pytest.raises(ConfigError, match=r"scales\.rew"):
        lay({"scales.reww": 3})


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("--seed 1e6", "seed", 1_000_000),
        ("--seed=-3", "seed", -3),
        ("--seed -3", "seed", -3),
        ("--enc.rate 1e-3", "enc.rate", 1e-3),
        ("--debug", "debug", True),
        ("--debug False", "debug", False),
        ("--enc.mults 1 2 3", "enc.mults", (1, 2, 3)),
        ("--enc.mults 1,2,3", "enc.mults", (1, 2, 3)),
        ("--enc.mults 4", "enc.mults", (4,)),
        ("--enc.mults+ 4 5", "enc.mults", (2, 3, 4, 5)),
        ("--enc.size 84,96", "enc.size", (84, 96)),
        ("--enc.act relu", "enc.act", "relu"),
        ("--limit 5", "limit", 5),
        ("--limit None", "limit", None),
        ("--name 007", "name", "007"),
    ],
)
def test_flags_are_read_as_their_fields_type(text, key, value):
    found = configs.flat(flags(text))[key]
    assert found == value
    assert type(found) is type(value)


def test_dashes_stand_for_underscores():
    @dataclass(frozen=True)
    class Run:
        train_ratio: float = 1.0

    layer = configs.flag_layer(Run, [("train-ratio", "32")], Run())
    assert configs.resolve(Run, [("flags", layer)]).train_ratio == 32


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"sead": 1}, "'seed'"),
        ({"units": 1}, r"'enc\.units'"),
        ({"enc.unit": 1}, r"'enc\.units'"),
        ({"seed": "many"}, "whole number.*layer 0 says 'many'"),
        ({"seed": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"debug": 1}, "True or False"),
        ({"debug": "yes"}, "True or False"),
        ({"enc.rate": "fast"}, "number"),
        ({"enc.size": [1, 2, 3]}, "list"),
        ({"enc.act": "tanh"}, "one of silu, relu"),
        ({"name": ["a", "b"]}, "a word"),
        ({"seed": None}, "whole number"),
        ({"enc": 3}, "group of settings"),
        ({r".*\.unit": 3}, "matches no setting"),
        ({r"*units": 3}, "not a regular expression"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_name_or_type(layer, says):
    with pytest.raises(ConfigError, match=says) as caught:
        lay(layer)
    assert "Fix:" in str(caught.value)


def test_yaml_numbers_that_yaml_reads_as_text_still_fit(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5e6\nenc: {rate: 1e-4}\n")
    tree = lay(configs.read(path))
    assert (tree.seed, tree.enc.rate) == (5_000_000, 1e-4)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\tx: 1"])
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        configs.read(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        configs.read(tmp_path / "missing.json")


def test_what_is_dumped_resolves_to_the_same_tree():
    import yaml

    tree = lay({"enc.mults": [7], "scales.con": 0.5, "limit": 3, "enc.rate": 1e-20})
    assert lay(yaml.safe_load(configs.dump(tree))) == tree


def test_differences_name_the_leaves():
    assert configs.differences(Tree(), lay({"enc.units": 1})) == {
        "enc.units": (1024, 1)
    }


def test_flags_without_a_value_and_stray_words_are_refused():
    with pytest.raises(ConfigError, match="needs a value"):
        flags("--seed")
    with pytest.raises(ConfigError, match="'stray'"):
        flags("stray --seed 1")
    with pytest.raises(ConfigError, match="no list"):
        flags("--seed+ 1")


@dataclass(frozen=True)
class Pool:
    workers: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError("the pool needs workers >= 0")


@dataclass(frozen=True)
class Outer:
    pool: Pool = field(default_factory=Pool)


def test_what_a_dataclass_refuses_by_itself_becomes_one_sentence():
    with pytest.raises(ConfigError, match="pool: the pool needs workers >= 0"):
        configs.resolve(Outer, [("flags", {"pool.workers": -1})])
