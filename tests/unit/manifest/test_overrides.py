"""Overrides by `--set KEY=VALUE`."""

from __future__ import annotations

import pytest

from launcher.core.errors import InputError, ManifestError
from launcher.manifest import load_manifest
from launcher.manifest.overrides import apply_overrides, list_overridden_keys, parse_value
from tests.conftest import WriteManifest

WANDB_MODE = "training.config.wandb.mode"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("true", True),
        ("null", None),
        ("neo4j", "neo4j"),
        ('["q_proj"]', ["q_proj"]),
        ("", ""),
        ("NaN", "NaN"),
    ],
)
def test_values_are_parsed_as_json_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_override_changes_the_manifest(write_manifest: WriteManifest) -> None:
    file = write_manifest()
    overrides = ["training.config.learning_rate=1e-5", "base_models.0.quantization=int4", "base_models[0].revision=abc"]
    manifest = load_manifest(file, overrides).manifest
    assert manifest.training.config.learning_rate == 1e-5
    assert manifest.base.quantization == "int4"
    assert manifest.base.revision == "abc"


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("training.config.max_steps=5", {"training.config.max_steps"}),
        (" training.config.max_steps =null", {"training.config.max_steps"}),
        ('training.config={"rank": 4, "wandb": {"mode": "offline"}}', {"training.config.rank", WANDB_MODE}),
        ("training.config.wandb={}", {"training.config.wandb"}),
        ('training.config.target_modules=["q_proj"]', {"training.config.target_modules"}),
        ("base_models[0].revision=abc", {"base_models.0.revision"}),
        ("base_model.revision=abc", {"base_models.0.revision"}),
        ("adapters.0.r=4", {"base_models.0.adapters.0.r"}),
    ],
)
def test_overridden_keys_of_an_override(override: str, keys: set[str]) -> None:
    assert list_overridden_keys([override]) == keys


def test_loaded_manifest_lists_overridden_keys(write_manifest: WriteManifest) -> None:
    file = write_manifest()
    assert load_manifest(file).overridden_keys == frozenset()
    overridden_keys = load_manifest(file, ["training.config.rank=8", "name=expert-x"]).overridden_keys
    assert overridden_keys == {"training.config.rank", "name"}


def test_overrides_do_not_change_their_input() -> None:
    tree = {"training": {"config": {"rank": 16}}}
    assert apply_overrides(tree, ["training.config.rank=8"]) == {"training": {"config": {"rank": 8}}}  # type: ignore[arg-type]
    assert tree == {"training": {"config": {"rank": 16}}}


def test_misspelled_override_is_refused_like_a_misspelled_key(write_manifest: WriteManifest) -> None:
    with pytest.raises(ManifestError, match=r"training.config.learnig_rate: unknown key; did you mean learning_rate\?"):
        load_manifest(write_manifest(), ["training.config.learnig_rate=1e-4"])


def test_override_in_wrong_section_suggests_the_path(write_manifest: WriteManifest) -> None:
    with pytest.raises(ManifestError, match=r"rank: unknown key; did you mean training.config.rank\?"):
        load_manifest(write_manifest(), ["rank=4"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.config.rank", "not KEY=VALUE"),
        ("=4", "not KEY=VALUE"),
        ("base_models.7.name=x", "the list base_models has 1 entries; count from 0"),
        ("base_models.first.name=x", "base_models is a list"),
        ("base_models.name=x", "hint: write base_models.0.name"),
        ("base_models.-1.name=x", "hint: write base_models.0.name"),
        ("base_models.².name=x", "base_models is a list"),
        ("base_model.name=x", "hint: write base_models.0.name"),
        (".=1", "not a path of keys"),
        ("training..config.rank=3", "not a path of keys"),
        ("training.config.rank.=3", "not a path of keys"),
        ("base_models[0=3", "not a path of keys"),
        ("name=" + "[" * 600 + "]" * 600, "nested too deeply"),
        ("name=" + "[" * 100_000, "nested too deeply"),
        ("a." * 600 + "b=1", "nested too deeply"),
        ("name.first=x", "has no keys, because its value is not an object"),
    ],
)
def test_invalid_override_is_refused(write_manifest: WriteManifest, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_manifest(write_manifest(), [override])


SCHEMA_1 = {"schema_version": "1.0", "base_model": {"name": "Qwen3-0.6B"}, "adapters": [{"type": "lora", "r": 8}]}


@pytest.mark.parametrize("base", ["base_model", "base_models.0", "base_models[0]"])
def test_schema_1_accepts_both_forms_of_a_path(write_manifest: WriteManifest, base: str) -> None:
    file = write_manifest(SCHEMA_1, ("base_models",))
    assert load_manifest(file, [f"{base}.quantization=int4"]).manifest.base.quantization == "int4"


@pytest.mark.parametrize("adapter", ["adapters.0", "base_models.0.adapters.0"])
def test_schema_1_accepts_both_forms_of_adapter_paths(write_manifest: WriteManifest, adapter: str) -> None:
    file = write_manifest(SCHEMA_1, ("base_models",))
    assert load_manifest(file, [f"{adapter}.r=4"]).manifest.base.adapters[0].r == 4


FULL = "training.config.adapter_type=full"
RATE = "training.config.learning_rate"


def test_full_fine_tuning_by_one_flag(write_manifest: WriteManifest) -> None:
    file = write_manifest()
    loaded = load_manifest(file, [FULL])
    config = loaded.manifest.training.config
    assert (config.adapter_type, config.rank, config.target_modules, config.learning_rate) == ("full", None, (), 2e-5)
    ignored, rate = loaded.notes
    assert ignored == "adapter_type full: rank, alpha, target_modules of the manifest do not apply and are ignored"
    assert "learning_rate 2e-05 instead of the manifest's 0.0002: full fine-tuning needs about a tenth" in rate
    chosen = load_manifest(file, [FULL, f"{RATE}=1e-5"])
    assert chosen.manifest.training.config.learning_rate == 1e-5
    assert chosen.notes == (ignored,)
    assert load_manifest(file, ["training.config.adapter_type=lora"]).notes == ()


def test_keys_of_full_fine_tuning_do_not_apply_to_an_adapter(write_manifest: WriteManifest) -> None:
    full: dict[str, object] = {
        "adapter_type": "full",
        "rank": None,
        "alpha": None,
        "target_modules": [],
        "bf16_stochastic_round": True,
    }
    file = write_manifest({f"training.config.{key}": value for key, value in full.items()})
    lora = ("adapter_type=lora", "rank=8", "alpha=16", "target_modules=all-linear")
    loaded = load_manifest(file, [f"training.config.{override}" for override in lora])
    assert loaded.manifest.training.config.bf16_stochastic_round is None
    assert loaded.notes == ("adapter_type lora: bf16_stochastic_round of the manifest do not apply and are ignored",)


def test_keys_of_another_adapter_in_flags_are_errors(write_manifest: WriteManifest) -> None:
    with pytest.raises(ManifestError, match=r"--set on .*: 1 problem") as caught:
        load_manifest(write_manifest(), [FULL, "training.config.rank=8"])
    assert "training.config.rank: not applicable to adapter_type full; remove it" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["training.config.max_grad_norm", "training.config.wandb", "training.dataset.field_mapping", "evaluation"]
)
def test_null_removes_an_optional_key(write_manifest: WriteManifest, key: str) -> None:
    file = write_manifest({key: {} if key in ("evaluation", "training.config.wandb") else None})
    assert load_manifest(file, [f"{key}=null"]).manifest is not None


def test_null_removes_lists_and_entries_of_old_manifests(write_manifest: WriteManifest) -> None:
    file = write_manifest({"training.config.adapter_type": "full"})
    nulls = [f"training.config.{key}=null" for key in ("rank", "alpha", "target_modules")]
    assert load_manifest(file, nulls).manifest.training.config.target_modules == ()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (f"{RATE}=null", f"{RATE}: missing"),
        ("training.dataset=null", "training.dataset: missing"),
        ("training.config.lerning_rate=null", "training.config.lerning_rate: unknown key; did you mean learning_rate?"),
        ("base_models.0.name=null", "base_models[0].name: missing"),
        ("training.config.rank=x", 'training.config.rank: must be a whole number, not "x"'),
    ],
)
def test_error_in_a_flag_blames_the_flag(write_manifest: WriteManifest, override: str, problem: str) -> None:
    file = write_manifest()
    with pytest.raises(ManifestError) as caught:
        load_manifest(file, [override])
    assert str(caught.value).startswith(f"--set on {file}: 1 problem\n  {problem}")
    broken = write_manifest({"training.config.rank": "y"})
    with pytest.raises(ManifestError) as caught:
        load_manifest(broken, ["training.config.alpha=z"])
    assert str(caught.value).startswith(f"{broken} with --set: 2 problems")


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["training.config.rank=8"], "rank 8 with the manifest's alpha 32: the scale alpha / rank is 4 instead of 2; "),
        (["training.config.rank=8", "training.config.use_rslora=true"], "the scale alpha / sqrt(rank) is 11.3137 ins"),
        (["training.config.rank=8", "training.config.alpha=16"], ""),
        (["training.config.rank=16"], ""),
    ],
)
def test_rank_by_flag_says_what_happens_to_the_scale(
    write_manifest: WriteManifest, overrides: list[str], note: str
) -> None:
    notes = load_manifest(write_manifest(), overrides).notes
    assert note in notes[0] if note else notes == ()


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("target_modules=q_proj,v_proj", '["q_proj", "v_proj"]'),
        ("wandb.tags=[a, b]", '["a", "b"]'),
        ("report_to=none", "[]"),
    ],
)
def test_text_instead_of_a_list_shows_how_to_write_the_list(
    write_manifest: WriteManifest, override: str, written: str
) -> None:
    path = write_manifest()
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, [f"training.config.{override}"])
    corrected = f"training.config.{override.partition('=')[0]}={written}"
    assert caught.value.hint == f"write the list as JSON: --set '{corrected}'"
    load_manifest(path, [corrected])
