"""`reverie bench`: measure the speed of a config or of environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors, parse_arguments, to_config
from reverie.cli.explain import explain
from reverie.distributed.launch import find_launch


def bench(argv: list[str]) -> int:
    """Measure the speed of updates or of environments on this machine."""
    launch = find_launch()
    if launch.rank:  # this process only executes the functions that rank 0 sends
        from reverie.run.ranks import run_follower

        run_follower()
        return 0
    from reverie.bench import update
    from reverie.bench.devices import bench_process_group
    from reverie.bench.end_to_end import bench_end_to_end
    from reverie.bench.envs import bench_envs
    from reverie.bench.scaling import bench_scaling

    with explain_path_errors():
        if argv[:1] == ["envs"]:
            bench_envs(*parse_bench_envs_arguments(argv[1:]))
            return 0
        options, resolve = parse_bench_arguments(argv)
        _check_options(options)
        if launch.world_size > 1 or resolve([], {}).devices > 1:
            return _bench_devices(resolve([], {}), options, launch.world_size, argv)
        if options.end_to_end:
            bench_end_to_end(resolve([], {}), options)
        elif options.vary:
            bench_scaling(resolve, options)
        elif options.compare:
            update.bench_speedup(resolve([], {}), options)
        elif options.process_group:
            bench_process_group(resolve([], {}), options)
        else:
            update.bench_config(resolve([], {}), options)
    return 0


def _bench_devices(config: Any, options: Any, world_size: int, argv: list[str]) -> int:
    """Measure updates on several devices; start a process per device if needed."""
    if options.vary or options.compare or options.end_to_end or options.process_group:
        raise UserError(
            "--bench.vary, --compare, --end-to-end and --bench.process_group measure "
            "on a single device.\n"
            "  Fix: use --devices 1, or remove these options."
        )
    if world_size == 1:
        from reverie.run.launcher import run_processes
        from reverie.run.ranks import check_processes

        check_processes(config)
        return run_processes(config.devices, ["bench", *argv])
    from reverie.bench.devices import bench_devices
    from reverie.run.ranks import run_on_ranks

    run_on_ranks(lambda: bench_devices(config, options))
    return 0


def parse_bench_arguments(argv: list[str]) -> tuple[Any, Callable[..., Any]]:
    """Return the options, and a function that returns the config to measure.

    The function takes presets and settings to add to those of the command line.
    """
    from reverie.bench.update import BenchFlags
    from reverie.run.unused_by_command import BENCH_UPDATES
    from reverie.run.used_settings import check_flags_used, resolve_for_command

    aliases = {"--compare": "--bench.compare", "--end-to-end": "--bench.end_to_end"}
    arguments = parse_arguments([aliases.get(word, word) for word in argv])
    options = arguments.take_options(BenchFlags).bench

    def resolve(
        presets: list[str], settings: dict[str, Any], base: Sequence[str] = ()
    ) -> Any:
        """Return the config; `base` presets come first, flags override `settings`."""
        all_presets = [*base, *arguments.presets, *presets]
        flags = [*settings.items(), *arguments.flags]
        files = arguments.files
        config = resolve_for_command("bench", all_presets, files, flags, check=False)
        unused = () if options.end_to_end else BENCH_UPDATES
        check_flags_used(config, "bench", arguments.flags, unused)
        return config

    return options, resolve


def _check_options(options: Any) -> None:
    """Raise if an option has no effect together with the others."""
    from reverie.bench.update import BenchConfig

    names = {"updates": "without --end-to-end"}
    if options.end_to_end:
        names = dict.fromkeys(("repeats", "seconds", "steps"), "with --end-to-end")
    if not options.vary:
        names["jobs"] = "without --bench.vary"
    default = BenchConfig()
    for name, reason in names.items():
        if getattr(options, name) != getattr(default, name):
            raise UserError(
                f"--bench.{name} has no effect {reason}.\n  Fix: remove it."
            )


def parse_bench_envs_arguments(argv: list[str]) -> tuple[Any, Any]:
    """Return the options, and the settings of the environments."""
    from reverie.bench.envs import EnvBenchConfig

    arguments = parse_arguments(argv)
    options = arguments.take_options(EnvBenchConfig)
    flags = [flag for flag in arguments.flags if flag[0].startswith("env.")]
    config = to_config(arguments._replace(flags=flags))
    arguments.flags[:] = [flag for flag in arguments.flags if flag not in flags]
    known = configs.settings_of(EnvBenchConfig)
    arguments.refuse_other_flags("reverie bench envs", [*known, "env.*"])
    return options, config.env


def bench_help(argv: list[str]) -> str:
    """Return the options of `reverie bench` or `reverie bench envs`."""
    from reverie.bench.envs import EnvBenchConfig
    from reverie.bench.update import BenchFlags

    schema = EnvBenchConfig if "envs" in argv else BenchFlags
    return f"Options\n{explain(schema)}"
