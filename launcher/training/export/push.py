"""Upload an exported folder to the Hugging Face Hub. The token comes from HF_TOKEN or a login; it is not printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from launcher.core.errors import InputError, LauncherError, RunFailedError, escape, first_line
from launcher.core.run_files import check_regular_files
from launcher.core.units import MIB

# What exports contain: other files that a user put into the folder are not uploaded.
_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "Modelfile", "README.md", "*.jinja"),
    *("config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_LOGIN = "set HF_TOKEN to a token with write access (https://huggingface.co/settings/tokens), or run `hf auth login`"


def check_repo(repo: str) -> None:
    """Raise InputError unless a name is OWNER/NAME."""
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith((".git", ".", "-")):
        raise InputError(
            f"--push {repo!r}: not the name of a repository", hint="for example: --push my-name/shop-expert"
        )


def check_access() -> None:
    """Raise InputError if there is no token, before anything is exported."""
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise InputError("--push needs the network, and HF_HUB_OFFLINE forbids it", hint="unset it, or use --dry-run")
    if not get_token():
        raise InputError("--push needs a token of the Hugging Face Hub", hint=_LOGIN)


def list_uploads(folder: Path) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that are uploaded; links are refused."""
    check_regular_files(folder)
    files = [file for file in sorted(folder.iterdir()) if any(fnmatch(file.name, pattern) for pattern in _PATTERNS)]
    links = [file.name for file in files if file.is_symlink()]
    if links:
        raise InputError(f"{folder} contains links, which are not uploaded: {', '.join(links)}", hint="export again")
    return [(file.name, file.stat().st_size) for file in files if file.is_file()]


def describe_uploads(folder: Path, repo: str, *, is_public: bool) -> str:
    """Return what --push uploads, one file per line."""
    uploads = list_uploads(folder)
    total = _format_size(sum(size for _, size in uploads))
    lines = [f"{repo} ({'public' if is_public else 'private'}): {len(uploads)} files, {total}"]
    return "\n".join((*lines, *(f"  {name}  {_format_size(size)}" for name, size in uploads)))


def push(folder: Path, repo: str, *, is_public: bool, message: str, report: Callable[[str], None]) -> str:
    """Upload and return the address of the repository; raises InputError or RunFailedError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    names = [name for name, _ in list_uploads(folder)]
    api = HfApi(library_name="expert-launcher")
    try:
        created = api.create_repo(repo, private=not is_public, exist_ok=True)
        if not is_public and not api.model_info(created.repo_id).private:
            raise InputError(
                f"--push {repo}: the repository exists and is public",
                hint="add --public to upload to it, or name another repository",
            )
        report(f"uploading {len(names)} files to {created.repo_id}")
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, allow_patterns=names, commit_message=message)
    except HfHubHTTPError as error:
        raise _explain(error.response.status_code, repo, error) from None
    except LauncherError:
        raise
    except Exception as error:  # the hub's client raises whatever its network layer raises
        raise RunFailedError(
            f"--push {repo}: the hub cannot be reached: {escape(first_line(error))}",
            hint=f"{folder} is complete: the same command uploads it later",
        ) from None
    return str(created)


def _explain(status: int, repo: str, error: Exception) -> InputError | RunFailedError:
    if status == 401:
        return InputError(f"--push {repo}: the hub does not accept the token (HTTP 401)", hint=_LOGIN)
    if status == 403:
        owner = repo.partition("/")[0]
        return InputError(
            f"--push {repo}: the token may not write there (HTTP 403)",
            hint=f"use a token with write access to repositories of {owner}",
        )
    text = f"--push {repo}: the hub answered with HTTP {status}: {escape(first_line(error))}"
    return RunFailedError(text, hint="try again later" if status >= 500 or status == 429 else "")


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB"
