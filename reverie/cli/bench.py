"""`reverie bench`: how fast a config, or an environment, is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.paths import naming_paths
from reverie.cli.settings import Settings, read_settings, to_config


def bench(arguments: list[str]) -> int:
    with naming_paths():
        if arguments[:1] == ["envs"]:
            return _bench_envs(arguments[1:])
        return _bench(arguments)


def _bench(arguments: list[str]) -> int:
    from reverie.bench import update as loop

    options, resolve = bench_request(arguments)
    if options.vary:
        from reverie.bench.scaling import growth

        growth(resolve, options)
    elif options.compare:
        loop.compare(resolve([], {}), options)
    else:
        loop.bench(resolve([], {}), options)
    return 0


def bench_request(arguments: list[str]) -> tuple[Any, Callable[..., Any]]:
    """What to measure, and the config for it with more blocks and settings on top."""
    from reverie.bench.update import BenchFlags

    settings = read_settings(arguments)
    own = [("bench.compare", settings.take("compare", "false") or "true")]
    own += [pair for pair in settings.flags if pair[0].startswith("bench.")]
    flags = [pair for pair in settings.flags if pair not in own]
    layer = configs.flag_layer(BenchFlags, own, BenchFlags())
    options = configs.resolve(BenchFlags, [("the flags", layer)]).bench

    def resolve(blocks: list[str], more: dict[str, Any]) -> Any:
        names = [*settings.names, *blocks]
        whole = Settings([], names, settings.files, [*more.items(), *flags])
        return to_config(whole)

    return options, resolve


def _bench_envs(arguments: list[str]) -> int:
    from reverie.bench.envs import bench_envs

    bench_envs(*bench_envs_request(arguments))
    return 0


def bench_envs_request(arguments: list[str]) -> tuple[Any, Any]:
    """What to measure, and the settings of environments."""
    from reverie.bench.envs import EnvBenchConfig

    settings = read_settings(arguments)
    mine = set(EnvBenchConfig.__dataclass_fields__)
    own = [(n, v) for n, v in settings.flags if n.replace("-", "_") in mine]
    more = [pair for pair in settings.flags if pair not in own]
    for flag, _ in more:
        if not flag.startswith("env."):
            raise UserError(
                f"`reverie bench envs` has no option --{flag}."
                f"{configs.suggest(flag, mine)}\n  Fix: choose from "
                f"{', '.join('--' + name for name in sorted(mine))} and --env.*"
            )
    layer = configs.flag_layer(EnvBenchConfig, own, EnvBenchConfig())
    options = configs.resolve(EnvBenchConfig, [("the flags", layer)])
    return options, to_config(settings._replace(flags=more)).env
