"""accelerate itself reads every YAML, as `accelerate launch` would, and arrives at what we meant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.core.run_paths import RunPaths
from launcher.plan.model import Plan
from launcher.render import Rendezvous, render, render_command
from launcher.render.accelerate import make_single_process_environment
from launcher.render.presets import make_presets, preset_path, render_presets
from launcher.render.spec import make_launch_spec

launch = pytest.importorskip("accelerate.commands.launch")
accelerate_utils = pytest.importorskip("accelerate.utils.launch")
distributed_run = pytest.importorskip("torch.distributed.run")
MakePlan = Callable[..., Plan]
ReadLaunch = Callable[..., tuple[str, argparse.Namespace, dict[str, str]]]
PRESETS = {preset.name: preset for preset in make_presets()}


@pytest.fixture
def read_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ReadLaunch:
    """`accelerate launch` up to where it starts processes: which launcher, its arguments, the environment."""
    monkeypatch.chdir(tmp_path)  # torch makes its log folder as soon as it reads its arguments
    seen: dict[str, Any] = {}
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(launch, name, lambda args, name=name: seen.update(name=name, args=args))
    for name in ("OMP_NUM_THREADS", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)

    def read(config_file: Path, *flags: str) -> tuple[str, argparse.Namespace, dict[str, str]]:
        parser = launch.launch_command_parser()
        launch.launch_command(parser.parse_args(["--config_file", str(config_file), *flags, "train.py"]))
        return seen["name"], seen["args"], prepare_environment(seen["name"], seen["args"])

    return read


def prepare_environment(name: str, args: argparse.Namespace) -> dict[str, str]:
    if name == "multi_gpu_launcher":
        return dict(accelerate_utils.prepare_multi_gpu_env(args))
    prepare = {
        "simple_launcher": accelerate_utils.prepare_simple_launcher_cmd_env,
        "deepspeed_launcher": accelerate_utils.prepare_deepspeed_cmd_env,
    }[name]
    command, environment = prepare(args)
    args.prepared_command = command
    return dict(environment)


def write_config(folder: Path, text: str) -> Path:
    path = folder / "accelerate.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def launcher_of(strategy: str) -> str:
    if strategy.startswith("zero"):
        return "deepspeed_launcher"
    return "simple_launcher" if strategy == "single" else "multi_gpu_launcher"


def address_flags(nodes: int) -> list[str]:
    if nodes == 1:
        return ["--main_process_port", "0"]
    return ["--main_process_ip", "10.0.0.1", "--main_process_port", "29511", "--machine_rank", "1"]


def test_accelerate_reads_a_plan_as_it_was_meant(
    plan: Plan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    config = write_config(tmp_path, render(plan, paths)["accelerate.yaml"])
    name, args, environment = read_launch(config, *address_flags(plan.hardware.nodes))
    assert name == launcher_of(plan.strategy)
    assert args.num_processes == plan.hardware.num_ranks
    assert args.num_machines == plan.hardware.nodes
    assert args.use_cpu == (plan.hardware.gpu is None)
    if name != "simple_launcher":
        assert int(args.nproc_per_node) * plan.hardware.nodes == plan.hardware.num_ranks
    else:
        added = {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "KMP_"))}
        assert make_single_process_environment(make_launch_spec(plan)) == added
    expected = "no" if plan.strategy.startswith("zero") else plan.precision.mixed_precision
    assert environment["ACCELERATE_MIXED_PRECISION"] == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_accelerate_reads_every_preset(name: str, project_root: Path, read_launch: ReadLaunch) -> None:
    preset = PRESETS[name]
    flags = address_flags(preset.nodes)
    launcher, args, environment = read_launch(project_root / preset_path(preset), *flags)
    assert launcher == launcher_of(preset.strategy)
    assert args.num_processes == max(1, preset.gpus) * preset.nodes
    if preset.deepspeed_file is not None:
        assert environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == preset.deepspeed_file
        assert (project_root / preset.deepspeed_file).is_file()
    else:
        assert environment["ACCELERATE_MIXED_PRECISION"] == ("bf16" if preset.gpus else "no")


def test_a_cpu_plan_trains_on_the_cpu(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    plan = make_plan(interconnect=None, gpus=0, dtype="fp32")
    _, _, environment = read_launch(write_config(tmp_path, render(plan, paths)["accelerate.yaml"]))
    assert environment["ACCELERATE_USE_CPU"] == "True"


def test_fsdp_settings_reach_the_environment(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = render(make_plan(strategy="fsdp2", gpus=4, model_type="llama"), paths)["accelerate.yaml"]
    _, _, environment = read_launch(write_config(tmp_path, text), "--main_process_port", "0")
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
        "FSDP_VERSION": "2",
    }
    assert {name: environment[name] for name in expected} == expected
    plugin = make_fsdp_plugin(environment, monkeypatch)
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, False)
    assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"


def test_hsdp_sizes_reach_the_environment(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    text = render(make_plan(strategy="hsdp", gpus=8, nodes=2), paths)["accelerate.yaml"]
    _, _, environment = read_launch(write_config(tmp_path, text), *address_flags(2))
    assert environment["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    sizes = {name: size for name, size in environment.items() if name.startswith("PARALLELISM_CONFIG_")}
    assert {name for name, size in sizes.items() if name.endswith("_SIZE") and size != "1"} == {
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    }
    assert (sizes["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], sizes["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == ("2", "8")


def make_fsdp_plugin(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in environment.items():
        if name.startswith("FSDP_"):
            monkeypatch.setenv(name, value)
    return accelerate_dataclasses().FullyShardedDataParallelPlugin()


def accelerate_dataclasses() -> Any:
    return pytest.importorskip("accelerate.utils.dataclasses")


def test_an_unknown_base_wraps_by_its_own_list(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    text = render(make_plan(strategy="fsdp2", gpus=2, model_type="never_heard_of"), paths)["accelerate.yaml"]
    _, _, environment = read_launch(write_config(tmp_path, text), "--main_process_port", "0")
    assert "FSDP_TRANSFORMER_CLS_TO_WRAP" not in environment
    assert environment["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"


def find_unread_keys(config: dict[str, Any]) -> set[str]:
    """Return nested keys that `accelerate launch` copies onto its arguments and never reads."""
    known = {action.dest for action in launch.launch_command_parser()._actions}
    nested = [section for section in config.values() if isinstance(section, dict)]
    return {key for section in nested for key in section} - known


def test_every_nested_key_is_one_that_accelerate_reads(plan: Plan, paths: RunPaths) -> None:
    assert find_unread_keys(yaml.safe_load(render(plan, paths)["accelerate.yaml"])) == set()


def test_every_nested_key_of_a_preset_is_one_that_accelerate_reads() -> None:
    for path, text in render_presets().items():
        if path.endswith(".yaml"):
            assert find_unread_keys(yaml.safe_load(text)) == set(), path


def test_a_nested_typo_would_be_found() -> None:
    assert find_unread_keys({"fsdp_config": {"fsdp_reshard_after_foward": True}}) == {"fsdp_reshard_after_foward"}


OTHER_VALUES = {True: False, False: True, 2: 1, "TRANSFORMER_BASED_WRAP": "NO_WRAP"}
FSDP_KEYS = sorted(yaml.safe_load(render_presets()["accelerate_configs/fsdp2_2gpu.yaml"])["fsdp_config"])


@pytest.mark.parametrize("key", [*FSDP_KEYS, "fsdp_transformer_layer_cls_to_wrap"])
def test_every_fsdp_key_has_an_effect(
    key: str, make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    text = render(make_plan(strategy="fsdp2", gpus=2), paths)["accelerate.yaml"]
    _, _, before = read_launch(write_config(tmp_path, text), "--main_process_port", "0")
    config = yaml.safe_load(text)
    config["fsdp_config"][key] = OTHER_VALUES.get(config["fsdp_config"][key], "SomethingElse")
    _, _, after = read_launch(write_config(tmp_path, yaml.safe_dump(config)), "--main_process_port", "0")
    assert before != after


def test_nodes_are_reached_without_ssh(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    text = render(make_plan(strategy="zero3", gpus=8, nodes=2), paths)["accelerate.yaml"]
    _, args, environment = read_launch(write_config(tmp_path, text), *address_flags(2))
    assert args.prepared_command is None  # with pdsh it is a `deepspeed` command
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "true"


def make_deepspeed_plugin(
    texts: dict[str, str],
    tmp_path: Path,
    read_launch: ReadLaunch,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str] | None = None,
) -> Any:
    """What accelerate makes of our two files inside a worker."""
    pytest.importorskip("deepspeed")
    (tmp_path / "deepspeed.json").write_text(texts["deepspeed.json"], encoding="utf-8")
    config = yaml.safe_load(texts["accelerate.yaml"])
    config["deepspeed_config"]["deepspeed_config_file"] = str(tmp_path / "deepspeed.json")
    config.update(change or {})
    path = write_config(tmp_path, yaml.safe_dump(config))
    _, _, environment = read_launch(path, *address_flags(config["num_machines"]))
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = accelerate_dataclasses().DeepSpeedPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    return plugin


def test_accelerate_takes_the_deepspeed_file_as_the_owner(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(strategy="zero3", gpus=2, offload="optimizer_and_parameters", max_grad_norm=0.3, accumulation=7)
    texts = render(plan, paths)
    plugin = make_deepspeed_plugin(texts, tmp_path, read_launch, monkeypatch)
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (3, 7, 0.3)
    assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("cpu", "cpu")
    assert (plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (True, True)
    # accelerate prints nothing of its own, and adds the section of the precision that is off
    expected = json.loads(texts["deepspeed.json"]) | {"fp16": {"enabled": False}, "steps_per_print": float("inf")}
    assert plugin.deepspeed_config == expected


def test_accelerate_refuses_a_second_owner(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = render(make_plan(strategy="zero2", gpus=2), paths)
    with pytest.raises(ValueError, match="mixed_precision"):
        make_deepspeed_plugin(texts, tmp_path, read_launch, monkeypatch, change={"mixed_precision": "bf16"})


def read_torch_config(argv: tuple[str, ...], config_file: Path, read_launch: ReadLaunch) -> Any:
    """The rendered flags, through accelerate, to torch's elastic agent."""
    flags = list(argv[argv.index("--config_file") + 2 : argv.index("launcher/train.py")])
    _, args, _ = read_launch(config_file, *flags)
    parser = distributed_run.get_args_parser()
    filtered = accelerate_utils._filter_args(args, parser, ["--training_script", "train.py"])
    filtered.training_script, filtered.training_script_args = "train.py", []
    return distributed_run.config_from_args(filtered)[0]


def test_a_static_rendezvous_reaches_the_agent(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch
) -> None:
    plan = make_plan(strategy="fsdp2", gpus=8, nodes=2)
    where = Rendezvous(host="node-a", port=29511, join_timeout_seconds=120)
    argv = render_command(plan, paths, rendezvous=where, machine_rank=1).argv
    config = read_torch_config(argv, write_config(tmp_path, render(plan, paths)["accelerate.yaml"]), read_launch)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_restarts) == ("static", "node-a:29511", 0)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert config.rdzv_configs == {"rank": 1, "timeout": "120"}


def test_an_elastic_rendezvous_reaches_the_agent(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, read_launch: ReadLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(strategy="ddp", gpus=2, nodes=3)
    where = Rendezvous(host="node-a", port=29511, backend="c10d", max_restarts=3, is_host=False)
    command = render_command(plan, paths, rendezvous=where, machine_rank=2)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    path = write_config(tmp_path, render(plan, paths)["accelerate.yaml"])
    config = read_torch_config(command.argv, path, read_launch)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.max_restarts) == ("c10d", "node-a:29511", 3)
    assert config.rdzv_configs | {"join_timeout": "300", "is_host": "0"} == config.rdzv_configs
    assert config.run_id == "neo4j-0001"


def test_logs_of_every_rank_are_kept_and_shown(
    make_plan: MakePlan, tmp_path: Path, paths: RunPaths, run_dir: str, read_launch: ReadLaunch
) -> None:
    plan = make_plan(strategy="zero2", gpus=2)
    argv = render_command(plan, paths).argv
    config = read_torch_config(argv, write_config(tmp_path, render(plan, paths)["accelerate.yaml"]), read_launch)
    assert config.logs_specs._tee == distributed_run.Std.ALL
    assert config.logs_specs._root_log_dir == f"{run_dir}/logs"
