"""`reverie bench`: measure the speed of a config or of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reverie import config as configs
from reverie.cli.arguments import parse_arguments, path_errors, to_config
from reverie.cli.explain import explain


def bench(words: list[str]) -> int:
    """Measure the speed of updates or of environments on this machine."""
    from reverie.bench import update
    from reverie.bench.envs import bench_envs
    from reverie.bench.scaling import bench_scaling

    with path_errors():
        if words[:1] == ["envs"]:
            bench_envs(*parse_bench_envs_arguments(words[1:]))
            return 0
        options, resolve = parse_bench_arguments(words)
        if options.vary:
            bench_scaling(resolve, options)
        elif options.compare:
            update.bench_speedup(resolve([], {}), options)
        else:
            update.bench_config(resolve([], {}), options)
    return 0


def parse_bench_arguments(words: list[str]) -> tuple[Any, Callable[..., Any]]:
    """The options, and a function that adds blocks and settings to the config."""
    from reverie.bench.update import BenchFlags
    from reverie.run.used_settings import check_used, resolve_with_suggestions

    names = {"--compare": "--bench.compare"}
    arguments = parse_arguments([names.get(word, word) for word in words])
    options = arguments.take_options(BenchFlags).bench

    def resolve(
        blocks: list[str], settings: dict[str, Any], base: Sequence[str] = ()
    ) -> Any:
        all_blocks = [*base, *arguments.blocks, *blocks]
        flags = [*settings.items(), *arguments.flags]
        config = resolve_with_suggestions("bench", all_blocks, arguments.files, flags)
        check_used(config, "bench", arguments.flags)
        return config

    return options, resolve


def parse_bench_envs_arguments(words: list[str]) -> tuple[Any, Any]:
    """The options, and the settings of the environments."""
    from reverie.bench.envs import EnvBenchConfig

    arguments = parse_arguments(words)
    options = arguments.take_options(EnvBenchConfig)
    flags = [flag for flag in arguments.flags if flag[0].startswith("env.")]
    config = to_config(arguments._replace(flags=flags))
    arguments.flags[:] = [flag for flag in arguments.flags if flag not in flags]
    known = configs.settings_of(EnvBenchConfig)
    arguments.refuse_other_flags("reverie bench envs", [*known, "env.*"])
    return options, config.env


def bench_help(words: list[str]) -> str:
    from reverie.bench.envs import EnvBenchConfig
    from reverie.bench.update import BenchFlags

    schema = EnvBenchConfig if "envs" in words else BenchFlags
    return f"Options\n{explain(schema)}"
