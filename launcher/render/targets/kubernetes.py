"""Manifests of Kubernetes: a TrainJob of Kubeflow Trainer v2, a JobSet, or an indexed Job with a headless Service.

Every form starts one pod per node. After a preemption or exit code 75, the nodes start again and resume.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from launcher.core.errors import ExitCode
from launcher.core.run_paths import RunPaths
from launcher.hardware.gpu_catalogue import list_product_names
from launcher.plan.model import Plan
from launcher.render.job import JobOptions, decide_time_limit
from launcher.render.targets.node import (
    ENVIRONMENT,
    PORT,
    SHM_GIB,
    STOP_SECONDS,
    VOLUME,
    Platform,
    make_name,
    render_script,
    render_yaml,
)

Document = dict[str, object]

FILES = "/etc/launcher"
SECRET = "expert-launcher"
USER_ID = 10001  # the image's user
MAX_RESTARTS = 5  # after a failure; preemptions are not counted
_CONTAINER = "node"  # Kubeflow Trainer finds the container and its job by this name
_PREEMPTED = (f".*exit code {int(ExitCode.PREEMPTED)} matching.*", ".*condition DisruptionTarget matching.*")
# Repeating these does not help. Wrong input is not among those of a plain Job: its pods start one by one, and one that
# is too early finds the run still in use.
_FINAL = (ExitCode.BUG, ExitCode.WRONG_INPUT, ExitCode.DOES_NOT_FIT, ExitCode.WRONG_TOPOLOGY)


def render_kubernetes(plan: Plan, paths: RunPaths, options: JobOptions, files: Mapping[str, str]) -> str:
    """Return the manifests of a plan, with the run's files as a ConfigMap."""
    name = make_name(paths.run_id)
    documents = [_make_object("v1", "ConfigMap", name, data=dict(sorted(files.items())))]
    make = {"trainjob": _make_train_job, "jobset": _make_job_set, "job": _make_job}[options.workload]
    documents += make(plan, paths, options, name)
    return render_yaml(plan, documents, shlex.join(make_submit_command(paths)))


def make_submit_command(paths: RunPaths) -> list[str]:
    """Return the command that submits the manifests."""
    return ["kubectl", "apply", "--filename", str(paths.kubernetes)]


def _make_train_job(plan: Plan, paths: RunPaths, options: JobOptions, name: str) -> list[Document]:
    """Return a TrainingRuntime and its TrainJob. The cluster's own runtimes cannot resume a preempted training run."""
    platform = _make_platform(rank="$PET_NODE_RANK", head="$PET_MASTER_ADDR", port="$PET_MASTER_PORT")
    seconds = decide_time_limit(plan, options)
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime_spec = {
        "mlPolicy": {"numNodes": plan.hardware.nodes, "torch": {}},
        "template": {"spec": _make_job_set_spec(_make_job_spec(plan, paths, options, platform, name, None), labels)},
    }
    runtime = _make_object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", name, spec=runtime_spec)
    runtime["metadata"] = {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}}
    spec = {
        "activeDeadlineSeconds": seconds,
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name},
        "trainer": {"numNodes": plan.hardware.nodes, "numProcPerNode": max(1, plan.hardware.gpus_per_node)},
    }
    return [runtime, _make_object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, spec=spec)]


def _make_job_set(plan: Plan, paths: RunPaths, options: JobOptions, name: str) -> list[Document]:
    platform = _make_platform(head=f"{name}-{_CONTAINER}-0-0.{name}")
    job = _make_job_spec(plan, paths, options, platform, name, decide_time_limit(plan, options))
    return [_make_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=_make_job_set_spec(job))]


def _make_job(plan: Plan, paths: RunPaths, options: JobOptions, name: str) -> list[Document]:
    """Return an indexed Job, whose pods are restarted one by one, and the Service that gives them host names."""
    platform = _make_platform(head=f"{name}-0.{name}")
    job = _make_job_spec(plan, paths, options, platform, name, decide_time_limit(plan, options), subdomain=name)
    job["backoffLimit"] = MAX_RESTARTS * plan.hardware.nodes
    job["podFailurePolicy"] = {"rules": _make_rules("Ignore", [code for code in _FINAL if code != 2])}
    service_spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return [
        _make_object("v1", "Service", name, spec=service_spec),
        _make_object("batch/v1", "Job", name, spec=job),
    ]


def _make_job_set_spec(job: Document, labels: Mapping[str, str] | None = None) -> Document:
    """Return the spec of a JobSet that restarts all nodes if one fails: nodes can connect only at the start."""
    rules = [
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": list(_PREEMPTED),
        },
        {
            "name": "final",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
        },
    ]
    return {
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "restartStrategy": "BlockingRecreate", "rules": rules},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {
                "name": _CONTAINER,
                "replicas": 1,
                "template": {"metadata": {"labels": labels} if labels else None, "spec": job},
            }
        ],
    }


def _make_job_spec(
    plan: Plan,
    paths: RunPaths,
    options: JobOptions,
    platform: Platform,
    name: str,
    seconds: int | None,
    *,
    subdomain: str | None = None,
) -> Document:
    return {
        "completionMode": "Indexed",
        "completions": plan.hardware.nodes,
        "parallelism": plan.hardware.nodes,
        "backoffLimit": 0,
        "activeDeadlineSeconds": seconds,
        "podFailurePolicy": {"rules": _make_rules("FailJob", _FINAL)},
        "template": {
            "metadata": {"labels": {"launcher/run": name}},
            "spec": _make_pod(plan, paths, options, platform, name, subdomain),
        },
    }


def _make_rules(on_preemption: str, final: Sequence[int]) -> list[Document]:
    def on_exit(action: str, codes: Sequence[int]) -> Document:
        values = sorted(map(int, codes))
        return {
            "action": action,
            "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": values},
        }

    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return [
        on_exit(on_preemption, [ExitCode.PREEMPTED]),
        {"action": on_preemption, "onPodConditions": disrupted},
        on_exit("FailJob", final),
    ]


def _make_pod(
    plan: Plan, paths: RunPaths, options: JobOptions, platform: Platform, name: str, subdomain: str | None
) -> Document:
    mounts = {"volume": VOLUME, "files": FILES, "shm": "/dev/shm"}
    container = {
        "name": _CONTAINER,
        "image": options.image,
        "command": ["bash", "-c"],
        "args": [render_script(plan, paths, options, platform) + "\n"],
        "env": [
            *({"name": key, "value": value} for key, value in ENVIRONMENT.items()),
            *({"name": key, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}} for key in options.secrets),
        ],
        "resources": _make_resources(plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in mounts.items()],
    }
    return {
        "restartPolicy": "Never",
        "subdomain": subdomain,
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "affinity": _make_affinity(plan),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "fsGroup": USER_ID},
        "containers": [container],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": options.volume}},
            {"name": "files", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{SHM_GIB}Gi"}},
        ],
    }


def _make_resources(plan: Plan) -> Document | None:
    hardware = plan.hardware
    cores = None if hardware.is_host_assumed else str(hardware.cpu_cores_per_node)
    gpus = None if hardware.gpu is None else {"nvidia.com/gpu": str(hardware.gpus_per_node)}
    return {"requests": {"cpu": cores} if cores else None, "limits": gpus}


def _make_affinity(plan: Plan) -> Document | None:
    """Require nodes with this GPU, by the label of NVIDIA's GPU feature discovery."""
    if plan.hardware.gpu is None:
        return None
    names = list(list_product_names(plan.hardware.gpu))
    terms = [{"matchExpressions": [{"key": "nvidia.com/gpu.product", "operator": "In", "values": names}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _make_platform(rank: str = "$JOB_COMPLETION_INDEX", *, head: str, port: str = str(PORT)) -> Platform:
    return Platform(rank=rank, head=head, port=port, project=VOLUME, files=FILES)


def _make_object(version: str, kind: str, name: str, **content: object) -> Document:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}
