"""Configs are built from layers and flags; unknown names and bad values are errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from reverie import config as configs
from reverie.cli.explain import explain, explain_groups
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


def from_layers(*layers: dict) -> Tree:
    return configs.resolve(Tree, [(f"layer {i}", x) for i, x in enumerate(layers)])


def from_flags(text: str) -> Tree:
    layer = configs.flag_layer(Tree, configs.parse_flags(text.split()), Tree())
    return configs.resolve(Tree, [("the flags", layer)])


def test_later_layers_override_earlier_ones_and_the_defaults():
    tree = from_layers({"seed": 1, "enc.units": 3}, {"enc": {"units": 4, "rate": 1}})
    assert (tree.seed, tree.enc.units, tree.enc.rate) == (1, 4, 1.0)
    assert tree.dec == Net(units=8)
    assert isinstance(tree.enc.rate, float)


def test_pattern_sets_every_setting_it_fully_matches():
    tree = from_layers({r".*\.units": 5})
    assert (tree.enc.units, tree.dec.units) == (5, 5)
    tree = from_layers({r"(enc|dec)": {"rate": 0.5}})
    assert (tree.enc.rate, tree.dec.rate) == (0.5, 0.5)


def test_dict_fields_accept_only_their_default_keys():
    assert from_layers({"scales.rew": 3}).scales == {"rew": 3.0, "con": 2.0}
    with pytest.raises(ConfigError, match=r"scales\.rew"):
        from_layers({"scales.reww": 3})


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
def test_flags_are_cast_to_the_type_of_the_field(text, key, value):
    result = configs.flatten(from_flags(text))[key]
    assert result == value
    assert type(result) is type(value)


def test_dashes_in_flags_are_underscores():
    @dataclass(frozen=True)
    class Run:
        train_ratio: float = 1.0

    layer = configs.flag_layer(Run, [("train-ratio", "32")], Run())
    assert configs.resolve(Run, [("flags", layer)]).train_ratio == 32


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"sead": 1}, "'seed'"),
        ({"units": 1}, r"'enc\.units'"),
        ({"enc.unit": 1}, r"'enc\.units'"),
        ({"seed": "many"}, r"whole number, not 'many' \(from layer 0\)"),
        ({"seed": 1.5}, "whole number"),
        ({"seed": True}, "whole number"),
        ({"debug": 1}, "True or False"),
        ({"debug": "yes"}, "True or False"),
        ({"enc.rate": "fast"}, "number"),
        ({"enc.size": [1, 2, 3]}, "2 whole numbers"),
        ({"enc.act": "tanh"}, "one of silu, relu"),
        ({"name": ["a", "b"]}, "a string"),
        ({"seed": None}, "whole number"),
        ({"enc": 3}, "group of settings"),
        ({r".*\.unit": 3}, "matches no setting"),
        ({r"*units": 3}, "not a regular expression"),
        ({"enc.rate": 10**400}, "number"),
        ({"seed": "x" * 1_000_000}, "whole number, not 'x{199} "),
        ({"x" * 1_000_000: 3}, "There is no setting 'x{199} "),
        ({"x." * 500_000 + "units": 3}, r"Did you mean 'enc\.units'"),
    ],
)
def test_misfits_are_refused_with_a_suggestion_or_the_type(layer, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_layers(layer)
    assert "Fix:" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_numbers_that_yaml_reads_as_strings_are_cast(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5e6\nenc: {rate: 1e-4}\n")
    tree = from_layers(configs.read_config_file(path))
    assert (tree.seed, tree.enc.rate) == (5_000_000, 1e-4)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\tx: 1"])
def test_errors_name_the_broken_file(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        configs.read_config_file(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        configs.read_config_file(tmp_path / "missing.json")


def test_dumped_config_resolves_to_the_same_config():
    import yaml

    tree = from_layers(
        {"enc.mults": [7], "scales.con": 0.5, "limit": 3, "enc.rate": 1e-20}
    )
    assert from_layers(yaml.safe_load(configs.dump(tree))) == tree


def test_differences_are_by_setting_name():
    assert configs.differences(Tree(), from_layers({"enc.units": 1})) == {
        "enc.units": (1024, 1)
    }


def test_flags_without_a_value_and_unexpected_words_are_refused():
    with pytest.raises(ConfigError, match="needs a value"):
        from_flags("--seed")
    with pytest.raises(ConfigError, match="'word'"):
        from_flags("word --seed 1")
    with pytest.raises(ConfigError, match="not a list"):
        from_flags("--seed+ 1")


@dataclass(frozen=True)
class Pool:
    workers: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError("the pool needs workers >= 0")


@dataclass(frozen=True)
class Outer:
    pool: Pool = field(default_factory=Pool)


@dataclass(frozen=True)
class Sized:
    size: tuple[int, int] = (0, 0)
    scales: tuple[float, ...] = ()
    count: int | None = None


@pytest.mark.parametrize(
    ("name", "value", "message", "fix"),
    [
        ("size", "64", "2 whole numbers", "--size 64 64"),
        ("size", "large", "2 whole numbers", "--size 0 0"),
        ("size", ["1", "2", "3"], "2 whole numbers", "--size 0 0"),
        ("scales", "x", "a list of numbers", "--scales 1.0"),
        ("count", "1.5", "a whole number or None", "--count 1"),
    ],
)
def test_the_fix_of_a_wrong_value_can_be_typed(name, value, message, fix):
    with pytest.raises(ConfigError, match=message) as error:
        configs.resolve(Sized, [("flags", {name: value})])
    assert str(error.value).endswith(f"\n  Fix: {fix}")
    _, *words = fix.split()
    configs.resolve(Sized, [("flags", {name: words if len(words) > 1 else words[0]})])


def test_value_errors_of_dataclasses_become_config_errors():
    with pytest.raises(ConfigError, match="pool: the pool needs workers >= 0"):
        configs.resolve(Outer, [("flags", {"pool.workers": -1})])


@dataclass(frozen=True)
class Documented:
    rate: float = 0.5
    """Learning rate,
    per update."""
    mode: Literal["a", "b"] = "a"
    pool: Pool = field(default_factory=Pool)
    """Workers."""


def test_explain_shows_type_default_and_docstring():
    assert explain(Documented, "rate") == (
        "  --rate float  (default: 0.5)\n      Learning rate, per update."
    )
    assert explain(Documented, "mode") == "  --mode {a,b}  (default: a)"
    assert explain(Documented, "pool").startswith("  --pool.workers int")
    groups = explain_groups(Documented)
    assert "--pool.*       Workers." in groups
    assert "pool.workers" not in groups
    with pytest.raises(ConfigError, match=r"Did you mean 'pool\.workers'"):
        explain(Documented, "pool.worker")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.json", '{"a": ' * 100_000),
        ("deep.yaml", "a: " + "[" * 100_000),
        ("merge.yaml", "a: &a {<<: *a}"),
        ("tag.yaml", "a: !!bool 3"),
        ("code.yaml", "a: !!python/object/apply:os.getcwd []"),
        ("large.yaml", "a: " + "x" * (1 << 21)),
    ],
)
def test_hostile_config_files_are_errors(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        configs.read_config_file(tmp_path / name)


def test_a_preset_given_as_a_file_is_named():
    with pytest.raises(ConfigError, match=r"Fix: --configs debug"):
        configs.read_config_file(Path("debug"))
