"""Checks of job files by the projects that read them: run by a Python that has these packages (see test_schemas.py).

Usage: python validators.py FILE..., in the folder to which the paths in the files are relative. Prints a JSON object:
for each file null, or the first error. A package that is not installed is an error that starts with "missing".
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

KUBEFLOW = {
    "TrainJob": "trainer_v1alpha1_train_job.TrainerV1alpha1TrainJob",
    "TrainingRuntime": "trainer_v1alpha1_training_runtime.TrainerV1alpha1TrainingRuntime",
    "JobSet": "jobset_v1alpha2_job_set.JobsetV1alpha2JobSet",
}


def check_skypilot(path: Path) -> None:
    """SkyPilot's schema and parser; from_yaml also resolves local paths and names of GPUs."""
    import sky
    from sky.utils import common_utils, schemas

    task = yaml.safe_load(path.read_text())
    common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
    common_utils.validate_schema(task["resources"], close(schemas.get_resources_schema()), "resources: ")
    secrets = dict.fromkeys(task.get("secrets", {}), "from the environment")
    sky.Task.from_yaml_config(task, secrets_overrides=list(secrets.items()))


def check_dstack(path: Path) -> None:
    from dstack._internal.core.models.configurations import parse_run_configuration

    parse_run_configuration(yaml.safe_load(path.read_text()))


def check_kubernetes(path: Path) -> None:
    """Kubeflow's and JobSet's types, closed because their models accept any key, and Kubernetes' own schemas."""
    import jsonschema
    import kubernetes_validate

    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] in KUBEFLOW:
            jsonschema.validate(document, load_schema(document["kind"]))
        else:
            kubernetes_validate.validate(document, "1.33", strict=True)


@cache
def load_schema(kind: str) -> Any:
    module, _, name = KUBEFLOW[kind].partition(".")
    model = getattr(import_module(f"kubeflow_trainer_api.models.{module}"), name)
    schema = model.model_json_schema(by_alias=True)
    for name in schema["$defs"]:
        if name.endswith(("Quantity", "IntOrString")):  # Go types with a text form, which the generator did not know
            schema["$defs"][name] = {"type": ["string", "integer"]}
    return close(schema)


def close(schema: Any) -> Any:
    """Forbid keys that a schema does not name, in every object whose keys it names."""
    if isinstance(schema, list):
        return [close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and "$ref" not in closed["properties"]:
        closed["additionalProperties"] = False
    return closed


def find_error(path: Path) -> str | None:
    check = {"skypilot.yaml": check_skypilot, "train.dstack.yml": check_dstack, "kubernetes.yaml": check_kubernetes}
    try:
        check[path.name](path)
    except ModuleNotFoundError as error:
        return f"missing: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:2000]
    return None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ.update(HOME=home, SKYPILOT_DISABLE_USAGE_COLLECTION="1")
        print(json.dumps({name: find_error(Path(name)) for name in sys.argv[1:]}))
